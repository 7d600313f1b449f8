"""A whole worker from its configuration: engine, memory, transport, control plane, engine thread, and who watches them.

It belongs to the process that made it. It never changes the environment: what the transport's library reads must be in
force before (`config.apply_environment`), else it is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from sglang_pd.backends.base import Backend
from sglang_pd.backends.home import Home
from sglang_pd.backends.registry import create_backend
from sglang_pd.config import (
    WorkerConfig,
    backend_settings,
    load_keys,
    missing_environment,
    require_nics,
    topology_of,
)
from sglang_pd.config.network import BackendSettings
from sglang_pd.engines.devices import require_device
from sglang_pd.engines.registry import create_engine
from sglang_pd.memory.allocator import Policy, pool_name
from sglang_pd.observe import AdminServer, Identity, Recorder, Settings
from sglang_pd.protocol.errors import ConfigError, ErrorInfo
from sglang_pd.protocol.room import Limits, Role
from sglang_pd.worker.endpoint import DecodeEndpoint, PrefillEndpoint
from sglang_pd.worker.peers.link import CurveKeys
from sglang_pd.worker.serving.decode_runner import DecodeRunner
from sglang_pd.worker.serving.instances import Planned, plan_instance
from sglang_pd.worker.serving.parts import Memory, Parts, assemble
from sglang_pd.worker.serving.prefill_runner import PrefillRunner
from sglang_pd.worker.serving.runner import Bounds, Runner
from sglang_pd.worker.settings import ControlConfig
from sglang_pd.worker.setup import Network, new_epoch
from sglang_pd.worker.watch import Watch

log = logging.getLogger("sglang_pd.worker")

FENCE_WAIT_S: Final = 10.0
"""After the drain deadline every room has failed; how long the process still waits for the proof that nobody writes."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker that is stopping: why, and until when (monotonic) rooms may end by themselves."""

    reason: str
    deadline_s: float


class WorkerService:
    """One worker. Public methods may be called by any thread."""

    runner: Runner

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str] | None = None) -> None:
        """Build and start everything, or nothing.

        Raises `ConfigError` (the path of the key, or the port that is taken), `BackendUnavailable` naming the library
        that is missing, `BackendError` where memory cannot be had, and what the engine raises.
        """
        config, settings = prepare(config, os.environ if environ is None else environ)
        self.config = config
        self._home = Home("the worker", "worker")
        self.role = Role(config.role)
        self.started_at = time.time()
        self._drain: Drain | None = None
        self._cancelled = False
        self._drain_lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            engine = create_engine(config.engine.name, config.engine.options, config.pools.device)
            self.planned: Planned = plan_instance(config, engine.describe())
            # Of the one rank: by it peers, the router and the records know this incarnation.
            self.epoch = new_epoch()
            self.backend: Backend = create_backend(settings.name, epoch=self.epoch, options=settings.options)
            undo.callback(self.backend.close)
            self.name = _name(config, self.epoch)
            self.recorder = Recorder(
                Identity(self.role, self.name, self.epoch, config.backend.name),
                Settings(stall_s=config.liveness.stall_s, decisions=config.observe.decisions),
            )
            self.parts: Parts = assemble(engine, self.backend, self._memory(), deadline_s=config.liveness.transfer_s)
            self._start(undo)
            undo.pop_all()
        self.recorder.ready()

    def observe(self) -> None:
        """Tell the observer what only shows when somebody looks. Every second or so, and before metrics are read."""
        self.runner.watch.worked(self.runner.tokens_done)
        self.recorder.health()  # turns a stall into its dump
        self.runner.watch.counts(self.endpoint.stats())
        self.runner.call(self.runner.tell_levels)

    def _memory(self) -> Memory:
        pools = self.config.pools
        policy = Policy(
            order=pools.order,
            seed=pools.seed,
            quarantine_bytes=self.config.limits.quarantine_bytes,
            on_over_budget=lambda held: self.drain(f"quarantine: {held} bytes wait for a fence"),
        )
        return Memory(
            capacity=self.planned.budget.capacity,
            policy=policy,
            device=pools.device,
            layout=self.planned.layouts[0],
            poison=pools.poison,
        )

    def _start(self, undo: contextlib.ExitStack) -> None:
        config, watch = self.config, Watch(self.role, self.recorder)
        control = self._control_config()
        network = Network(bind=_bind(config), curve=_curve(config))
        bounds = Bounds(
            max_queue=config.limits.queue_requests,
            max_running=config.limits.max_rooms,
            max_prompt_tokens=config.limits.max_prompt_tokens or 0,
            wait_s=config.liveness.alloc_wait_s,
        )
        self.endpoint: PrefillEndpoint | DecodeEndpoint
        if self.role is Role.PREFILL:
            prefill = self.endpoint = PrefillEndpoint(control, self.parts.setup, network, watch)
            undo.callback(prefill.close)
            self.runner = PrefillRunner(
                self.parts, prefill, chunk_tokens=config.engine.chunk_tokens, bounds=bounds, watch=watch
            )
        else:
            decode = self.endpoint = DecodeEndpoint(control, self.parts.setup, network, watch)
            undo.callback(decode.close)
            self.runner = DecodeRunner(
                self.parts, decode, max_batch=config.engine.max_batch, bounds=bounds, watch=watch
            )  # fmt: skip
        self._admin: AdminServer | None = None
        if config.observe.admin_socket:
            self._admin = AdminServer(config.observe.admin_socket, self.recorder.answer)
            undo.callback(self._admin.close)
        self.runner.start()

    def _control_config(self) -> ControlConfig:
        live = self.config.liveness
        return ControlConfig(
            instance_id=self.name,
            model=self.parts.facts.fingerprint,
            topology=topology_of(self.config),
            max_tokens=self.planned.manifest.max_tokens,
            heartbeat_s=live.heartbeat_s,
            liveness_s=live.liveness_s,
            peer_wait_s=live.liveness_s,
            limits=Limits(
                request_wait_s=live.request_wait_s,
                lease_s=live.lease_s,
                alloc_wait_s=live.alloc_wait_s,
                status_interval_s=live.status_interval_s,
                status_max_s=live.status_max_s,
                fence_alarm_s=live.fence_alarm_s,
                lease_renew_s=live.lease_renew_s,
            ),
            verify=self.config.verify,
        )

    @property
    def most_tokens(self) -> int:
        """Longest prompt and answer together that can ever run here."""
        return self.runner.most_tokens

    @property
    def bootstrap_port(self) -> int:
        """Port that the control plane listens on."""
        return int(self.endpoint.address.rpartition(":")[2])

    # --- health ------------------------------------------------------------------------------------------------------

    @property
    def broken(self) -> str:
        """Why this process cannot serve any more, or empty: a thread of its is gone, or a rank."""
        if not self.runner.alive:
            return "the engine's thread is gone"
        failed = self.endpoint.control.failed
        if failed is not None:
            return failed.message
        return "" if self.endpoint.ready else self.endpoint.control.why_not_ready or "the control thread is gone"

    @property
    def draining(self) -> str:
        """Why the worker takes no new requests, or empty."""
        return self._drain.reason if self._drain is not None else ""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, by name."""
        counts = {
            pool_name(space): {"free": count.free, "held": count.held, "withheld": count.withheld}
            for space, count in self.parts.allocator.counts().items()
        }
        return {
            **self.endpoint.stats(),
            "running": self.runner.running,
            "queued": len(self.runner.queued),
            "tokens_done": self.runner.tokens_done,
            "pools": counts,
        }

    # --- stopping ----------------------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        """Take no new rooms; those that are open have `liveness.drain_s`. Idempotent."""
        with self._drain_lock:
            if self._drain is not None:
                return
            self._drain = Drain(reason, time.monotonic() + self.config.liveness.drain_s)
        rooms, fences = int(self.endpoint.stats()["rooms"]), len(self.parts.allocator.quarantine)
        log.warning("draining: %s; open rooms: %d, leases that wait for a fence: %d", reason, rooms, fences)
        self.runner.draining = True
        self.recorder.draining(reason)
        self.endpoint.drain(self.config.liveness.drain_s)

    @property
    def drained(self) -> bool:
        """True when nothing runs or waits for a fence; what still runs past the drain deadline is ended."""
        drain = self._drain
        if drain is None:
            return False
        if time.monotonic() > drain.deadline_s and not self._cancelled:
            self._cancelled = True
            self.runner.cancel_all(ErrorInfo(code="draining", message="the drain deadline passed"))
        withheld = len(self.parts.allocator.quarantine)
        return self.endpoint.drained and self.runner.idle and not withheld

    @property
    def overdue(self) -> bool:
        """True when a drain has lasted so long that the process should end with fences unproven."""
        return self._drain is not None and time.monotonic() > self._drain.deadline_s + FENCE_WAIT_S

    def close(self) -> None:
        """Stop the threads and the sockets, then the transport. Idempotent. In a fork the threads are the parent's."""
        if self._home.here:
            self.runner.stop()
        self.endpoint.close()
        if self._admin is not None:
            self._admin.close()
        self.backend.close()


def prepare(config: WorkerConfig, environ: Mapping[str, str]) -> tuple[WorkerConfig, BackendSettings]:
    """What a start refuses before it makes anything, so that `doctor` refuses it too; the configuration and the
    backend as they will be made. Raises as `WorkerService`."""
    _require_one_rank(config)
    require_device(config.pools.device, where="$.pools.device")
    require_nics(config)
    config = on_own_device(config)
    settings = backend_settings(config)
    _require_environment(settings, environ)
    return config, settings


def _require_one_rank(config: WorkerConfig) -> None:
    topology = topology_of(config)
    if topology.pp * topology.tp != 1:
        raise ConfigError(
            "this command runs an instance of one rank; an engine with several embeds the endpoints",
            where="$.topology",
            expected="pp 1, tp 1",
            actual=f"pp {topology.pp}, tp {topology.tp}",
            hint="See sglang_pd.RankEndpoint. `check` and `explain` take any topology.",
        )


def on_own_device(config: WorkerConfig) -> WorkerConfig:
    """`cuda` is the rank's own device, and this process has one rank."""
    if config.pools.device != "cuda":
        return config
    return msgspec.structs.replace(config, pools=msgspec.structs.replace(config.pools, device="cuda:0"))


def _require_environment(settings: BackendSettings, environ: Mapping[str, str]) -> None:
    missing = missing_environment(settings, environ)
    if missing:
        raise ConfigError(
            "the transport's library reads its settings from the environment, and they are not there",
            where="environment",
            expected=" ".join(f"{name}={value}" for name, value in sorted(missing.items())),
            actual=" ".join(f"{name}={environ.get(name, '')}" for name in sorted(missing)),
        )


def _name(config: WorkerConfig, epoch: int) -> str:
    if config.instance_id is None and config.bootstrap_address.port == 0:
        return f"{config.name}-{epoch % 2**32:08x}"  # several workers may ask for any port
    return config.name


def _bind(config: WorkerConfig) -> str:
    address = config.bootstrap_address
    if address.host == "localhost":
        return f"tcp://127.0.0.1:{address.port}"  # ZeroMQ binds to numbers and interfaces only
    return address.zmq()


def _curve(config: WorkerConfig) -> CurveKeys | None:
    keys = load_keys(config.security)
    return CurveKeys(keys.public, keys.secret, keys.allowed, keys.server) if keys is not None else None
