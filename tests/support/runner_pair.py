"""A prefill and a decode runner with the reference engine in this process, over shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.reference_run import DECODE, PREFILL, SOFT, Host, Size

from sglang_pd.backends.registry import create_backend
from sglang_pd.engines.base import Sampling
from sglang_pd.engines.reference import ReferenceEngine
from sglang_pd.memory.allocator import Policy
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.worker.endpoint import DecodeEndpoint, PrefillEndpoint
from sglang_pd.worker.jobs import Failed, Finished, Job, Token, Update
from sglang_pd.worker.serving.decode_runner import DecodeRunner
from sglang_pd.worker.serving.parts import Memory, assemble
from sglang_pd.worker.serving.prefill_runner import PrefillRunner
from sglang_pd.worker.settings import ControlConfig
from sglang_pd.worker.setup import new_epoch

WAIT_S = 20.0


def whole(ids: NDArray[np.int64], steps: int, sampling: Sampling | None = None) -> list[int]:
    """Tokens of the model run whole: the first one and `steps` more."""
    host = Host(SOFT, Size(pages=24, window_pages=20))
    run = host.prefill("r", ids, sampling=sampling)
    host.decode([run], steps)
    return run.tokens


class Owner:
    """A job's owner: what it was told."""

    def __init__(self) -> None:
        self.told: list[Update] = []
        self._ended = threading.Event()

    def __call__(self, update: Update) -> None:
        """See `Sink`."""
        self.told.append(update)
        if isinstance(update, Failed | Finished):
            self._ended.set()

    @property
    def tokens(self) -> list[int]:
        """So far."""
        return [update.token for update in self.told if isinstance(update, Token)]

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something that an update makes true."""
        deadline_s = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < deadline_s, self.told
            time.sleep(0.0005)

    def end(self) -> ErrorInfo | str:
        """How the job ended, once it has: the error, or the reason."""
        assert self._ended.wait(WAIT_S), self.told
        last = next(update for update in self.told if isinstance(update, Failed | Finished))
        return last.error if isinstance(last, Failed) else last.reason


class RunnerPair:
    """Both runners, started; decode knows prefill."""

    def __init__(self, *, chunk_tokens: int = 16) -> None:
        self.backends = [create_backend("local", epoch=new_epoch()) for _ in range(2)]
        self.parts = [
            assemble(ReferenceEngine(SOFT), backend, Memory(capacity=size.capacity(), policy=Policy(order=size.order)))
            for backend, size in zip(self.backends, (PREFILL, DECODE), strict=True)
        ]
        configs = [
            ControlConfig(instance_id=name, model=SOFT.fingerprint, verify="full", liveness_s=60.0)
            for name in ("p", "d")
        ]
        self.prefill_at = PrefillEndpoint(configs[0], self.parts[0].setup)
        self.decode_at = DecodeEndpoint(configs[1], self.parts[1].setup)
        self.prefill = PrefillRunner(self.parts[0], self.prefill_at, chunk_tokens=chunk_tokens)
        self.decode = DecodeRunner(self.parts[1], self.decode_at)
        for runner in (self.prefill, self.decode):
            runner.start()
        self.decode_at.connect(self.prefill_at.address)

    def job(self, room: int, name: str, ids: NDArray[np.int64], **how: Any) -> tuple[Job, Owner]:
        """A job for either side, and its owner."""
        owner = Owner()
        how = {"max_new_tokens": 6, "ignore_eos": True, "address": self.prefill_at.address, **how}
        return Job(room=room, request_id=name, token_ids=ids, sink=owner, **how), owner

    def hand_over(self, room: int, name: str, ids: NDArray[np.int64], **how: Any) -> tuple[Owner, Owner]:
        """Both legs of a room; prefill's and decode's owners."""
        owners = []
        for runner in (self.prefill, self.decode):
            job, owner = self.job(room, name, ids, **how)
            runner.submit(job)
            owners.append(owner)
        return owners[0], owners[1]

    def on_engine(self, runner: PrefillRunner | DecodeRunner, call: Callable[[], Any]) -> None:
        """Run a call on an engine's thread, and wait for it."""
        done = threading.Event()
        runner.call(lambda: (call(), done.set())[1])
        assert done.wait(WAIT_S)

    def closed(self, runner: PrefillRunner | DecodeRunner) -> threading.Event:
        """A gate, at which an engine's thread stands until it is set."""
        gate = threading.Event()
        runner.call(lambda: (gate.wait(WAIT_S), None)[1])
        return gate

    def settled(self, room: int) -> None:
        """Prefill has computed a room's prompt, and what decode's control was asked before has been done."""
        deadline_s = time.monotonic() + WAIT_S
        while not any(e.job.room == room and e.stopped for e in list(self.prefill._jobs.values())):
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        done = threading.Event()
        self.decode_at._loop.submit(done.set)
        assert done.wait(WAIT_S)

    def idle(self) -> None:
        """Wait until nothing is held any more; all memory is accounted for, and no id is."""
        deadline_s = time.monotonic() + WAIT_S
        for runner in (self.prefill, self.decode):
            allocator = runner.parts.allocator
            while not runner.idle or allocator.leases or allocator.quarantine:
                assert time.monotonic() < deadline_s, (runner, allocator.counts())
                time.sleep(0.002)
            self.on_engine(runner, allocator.check_integrity)
            assert not runner._held
            assert not runner.parts.engine._sequences  # type: ignore[attr-defined]

    def close(self) -> None:
        """End both."""
        for runner in (self.prefill, self.decode):
            assert runner.stop()
        for one in (self.prefill_at, self.decode_at, *self.backends):
            one.close()
