"""A worker process that runs the reference engine over a real backend, for parity with the model run whole.

Run as `python parity_child.py` with a JSON configuration on the first line of standard input, then JSON commands, one a
line; answers, and an `ended` line for each request, leave as JSON lines. It holds several lanes: each an engine, pools,
backend and endpoint of its own. Ends by `os._exit`, since a transport library may crash at interpreter exit.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from support.parity_live import CONFIGS, digest, lease_digests
from support.parity_tamper import TamperingBackend, Target, tampers
from support.reference_run import PAGE, Size, poison
from support.spoil import Scene, spoils

from sglang_pd.backends.registry import create_backend
from sglang_pd.engines.base import PrefillChunk, Request
from sglang_pd.engines.reference import ReferenceEngine
from sglang_pd.memory.allocator import Policy
from sglang_pd.memory.lease import Lease
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.worker.endpoint import DecodeEndpoint, PrefillEndpoint
from sglang_pd.worker.jobs import Failed, Finished, Job, Token, Update
from sglang_pd.worker.serving.decode_runner import DecodeRunner
from sglang_pd.worker.serving.parts import Memory, assemble
from sglang_pd.worker.serving.prefill_runner import PrefillRunner
from sglang_pd.worker.settings import ControlConfig
from sglang_pd.worker.setup import new_epoch
from sglang_pd.worker.wakeups import prefer_latency

_printing = threading.Lock()


def say(line: dict[str, Any]) -> None:
    """Print a line; from any thread."""
    with _printing:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class Watched:
    """One request's updates, gathered on the engine's thread; tells when it ended."""

    def __init__(self, lane: Lane, name: str, room: int, steps: int) -> None:
        self.lane, self.name, self.room, self.steps = lane, name, room, steps
        self.job: Job | None = None
        self.tokens: list[int] = []
        self.logits: list[str] = []
        self.live: list[dict[str, str]] = []

    def sink(self, update: Update) -> None:
        """See `Sink`. Live state is taken before the next step can touch it."""
        if isinstance(update, Token):
            self.tokens.append(update.token)
            if update.logits is not None:
                self.logits.append(digest(update.logits))
            if len(self.tokens) in (1, self.steps + 1):
                lease = self.lane.lease_of(self.name)
                self.live.append(lease_digests(self.lane.parts.pools, lease, update.position))
            return
        line: dict[str, Any] = {"ended": self.name, "tokens": self.tokens, "logits": self.logits, "live": self.live}
        if isinstance(update, Failed):
            line["error"] = {"code": update.error.code, "where": update.error.where, "message": update.error.message}
        elif isinstance(update, Finished):
            line["reason"] = update.reason
        say(line)


class Lane:
    """An engine with its pools, backend and endpoint."""

    def __init__(self, conf: dict[str, Any], name: str, spec: dict[str, Any]) -> None:
        self.prefills = conf["role"] == "prefill"
        size = Size(**spec["size"])
        self.backend = TamperingBackend(
            create_backend(conf["backend"], epoch=new_epoch(), options=conf.get("options", {}))
        )
        memory = Memory(capacity=size.capacity(), policy=Policy(order=size.order, seed=size.seed))
        self.parts = assemble(ReferenceEngine(CONFIGS[spec["mode"]]), self.backend, memory)
        control = ControlConfig(
            instance_id=f"{conf['id']}-{name}",
            model=self.parts.facts.fingerprint,
            verify=spec.get("verify", "full"),
            liveness_s=30.0,  # bytes are judged here; on a busy machine a process may stand still for seconds
        )
        if self.prefills:
            self.endpoint: Any = PrefillEndpoint(control, self.parts.setup)
            self.runner: Any = PrefillRunner(self.parts, self.endpoint)
            engine: Any = self.parts.engine
            self.handoff, engine.handoff = engine.handoff, self.before_handoff
            self.prefill, engine.prefill = engine.prefill, self.before_prefill
        else:
            self.endpoint = DecodeEndpoint(control, self.parts.setup)
            self.runner = DecodeRunner(self.parts, self.endpoint)
        self.decoy: Lease | None = None
        self.faults: dict[str, tuple[str, list[Any]]] = {}
        self.runner.start()

    def on_engine(self, call: Callable[[], Any]) -> Any:
        """Run a call on the engine's thread and give its result."""
        done, answer = threading.Event(), []

        def run() -> None:
            try:
                answer.append(call())
            except Exception as error:
                answer.append(error)
            done.set()

        self.runner.call(run)
        if not done.wait(60):
            raise TimeoutError("the engine's thread does not answer")
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def lease_of(self, name: str) -> Lease:
        """The lease of a running request."""
        found: Lease = next(e.lease for e in self.runner._jobs.values() if e.job.request_id == name)
        return found

    # --- commands ----------------------------------------------------------------------------------------------------

    def do_connect(self, address: str) -> None:
        """Decode: shake hands."""
        self.endpoint.connect(address)

    def do_ready(self, filler: float | None = None) -> dict[str, Any]:
        """Wait until nothing is held, look whether memory is accounted for, and fill the pools with `filler`."""
        held = 1 if self.decoy else 0
        deadline_s = time.monotonic() + 20
        while not self.runner.idle or len(self.parts.allocator.leases) > held or self.parts.allocator.quarantine:
            if time.monotonic() > deadline_s:
                facts = self.parts.allocator.counts(), self.endpoint.stats(), self.endpoint.peers()
                raise TimeoutError(f"not idle after 20 s: {facts}")
            time.sleep(0.001)

        def fill() -> None:
            self.parts.allocator.check_integrity()
            if filler is not None:
                poison(self.parts.pools, filler)

        self.on_engine(fill)
        return {"changed": self.backend.changed}

    def do_run(self, name: str, room: int, ids: list[int], steps: int, **how: Any) -> None:
        """Submit a request. chunk: of prefill, in tokens. address: of prefill. fault: see `before_handoff`."""
        watched = Watched(self, name, room, steps)
        token_ids = np.array(ids, np.int64)
        job = Job(
            room=room, request_id=name, token_ids=token_ids, sink=watched.sink, keep_logits=True,
            address=how.get("address", ""), max_new_tokens=1 if self.prefills else steps + 1, ignore_eos=True,
        )  # fmt: skip
        if how.get("fault"):
            self.faults[name] = (how["fault"][0], how["fault"][1:])
        if self.prefills:
            self.runner._chunk_tokens = how.get("chunk") or len(ids)
        self.runner.submit(job)

    def do_decoy(self, ids: list[int]) -> None:
        """Prefill: another request, computed and held, whose state a defect may send instead."""

        def compute() -> Lease:
            lease = self.parts.allocator.lease(len(ids), window_stop=0)
            self.parts.engine.start(Request("decoy", np.array(ids, np.int64)), lease.tables())
            lease.advance(len(ids))
            self.parts.engine.prefill(PrefillChunk("decoy", 0, len(ids), lease.tables()))
            return lease

        def end() -> None:
            if self.decoy is not None:
                self.parts.engine.release("decoy")
                self.decoy.release()
            self.decoy = compute() if ids else None

        self.on_engine(end)

    def do_cases(self) -> dict[str, Any]:
        """Every fault there is, by stage: where, way, region."""
        pools = self.parts.pools
        return {
            "transport": [[way, list(key)] for way, key, _ in tampers(pools)],
            "source": [[way, list(key)] for way, key, _ in spoils(pools)],
            "lists": [type(space).__name__ + str(n) for n, space in enumerate(self.parts.layout.roots.list_spaces)],
        }

    # --- faults ------------------------------------------------------------------------------------------------------

    def before_handoff(self, request_id: str) -> Any:
        """Stands before the engine's `handoff`: the prompt is computed, its last chunk not yet sent.

        Faults: `transport` WAY KEY, what is asked of the backend; `source` WAY KEY, what lies in prefill's pools;
        `lists` NAME, which indices the endpoint is told.
        """
        stage, rest = self.faults.pop(request_id, ("", []))
        if stage == "transport":
            self._tamper(request_id, rest[0], tuple(rest[1]), self.lease_of(request_id).tokens)
        elif stage == "source":
            self._spoil(request_id, rest[0], tuple(rest[1]))
        return self.handoff(request_id)

    def before_prefill(self, chunk: PrefillChunk) -> Any:
        """Stands before the engine's `prefill`. Fault `early` WAY KEY: as `transport`, in the prompt's first page, and
        from the first chunk on."""
        if chunk.start == 0:
            self.backend.change = None
            if self.faults.get(chunk.request_id, ("",))[0] == "early":
                _, (way, key) = self.faults.pop(chunk.request_id)
                self._tamper(chunk.request_id, way, tuple(key), PAGE)
        return self.prefill(chunk)

    def _tamper(self, request_id: str, way: str, key: tuple[str, int, str], tokens: int) -> None:
        change = next(change for name, at, change in tampers(self.parts.pools) if (name, at) == (way, key))
        lease = self.lease_of(request_id)
        self.backend.change = change(Target(self.parts.pools, key, lease, self._other(), Prompt(tokens)))

    def _spoil(self, request_id: str, way: str, key: tuple[str, int, str]) -> None:
        spoil = next(spoil for name, at, spoil in spoils(self.parts.pools) if (name, at) == (way, key))
        lease, pools = self.lease_of(request_id), self.parts.pools
        spoil(Scene(pools, pools, lease, self._other(), lease, Prompt(lease.tokens)), key)

    def _other(self) -> Lease:
        if self.decoy is None:
            raise ValueError("no decoy is held")
        return self.decoy

    def do_wrong_lists(self, name: str, tokens: int, how: str = "other") -> None:
        """The endpoint is told wrong indices of one list space from now on; of none with an empty name.

        how: `other`, those of the decoy; `reversed`, the right ones in the wrong order.
        """
        spaces = list(self.parts.layout.roots.list_spaces)
        wrong = next((s for n, s in enumerate(spaces) if type(s).__name__ + str(n) == name), None)

        def changed(lists: Any) -> Any:
            if wrong is None or not lists or wrong not in lists:
                return lists
            if how == "other":
                return {**lists, wrong: self._other().lists(Prompt(tokens))[wrong]}
            return {**lists, wrong: wrong.ingest(lists[wrong].lower()[::-1].copy(), consumer="a defect")}

        at, kind = self.endpoint, type(self.endpoint)
        if self.prefills:
            at.request = lambda room, ids, lists, **more: kind.request(at, room, ids, changed(lists), **more)
            at.send = lambda handle, start, stop, lists=None, **more: kind.send(
                at, handle, start, stop, lists=changed(lists), **more
            )
        else:
            at.open = lambda room, to, ids, lists, **more: kind.open(at, room, to, ids, changed(lists), **more)


@cache
def lanes_of(text: str) -> dict[str, Lane]:
    """The lanes of a configuration."""
    conf = json.loads(text)
    return {name: Lane(conf, name, spec) for name, spec in conf["lanes"].items()}


def answer(lanes: dict[str, Lane], order: dict[str, Any]) -> dict[str, Any]:
    """Run one command."""
    arguments = {k: v for k, v in order.items() if k not in ("cmd", "n", "lane")}
    try:
        return getattr(lanes[order["lane"]], f"do_{order['cmd']}")(**arguments) or {}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve until standard input ends."""
    prefer_latency()
    lanes = lanes_of(sys.stdin.readline())
    say({"answer": "start", "addresses": {name: lane.endpoint.address for name, lane in lanes.items()}})
    try:
        for line in sys.stdin:
            order = json.loads(line)
            say({"n": order["n"], **answer(lanes, order)})
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
