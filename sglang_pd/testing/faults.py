"""A backend that injects faults into another, for tests of engines and workers.

Everything it does is allowed by the contract in `sglang_pd.backends.base`: a worker that is right must survive it.
Writes are numbered from 1, over all peers; the first fault of the plan that applies to a write's number decides what
becomes of it.

    backend = FaultyBackend(create_backend("local", epoch=7), [Fault(kind="late", at=3, seconds=0.5)])

From a configuration: backend name `faulty` once `install()` was called, with options `inner`, `inner_options`,
`faults`, `seed`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from sglang_pd.backends.base import (
    DEFAULT_DEADLINE_S,
    Backend,
    Capabilities,
    Connecting,
    Peer,
    Segment,
    Transfer,
    TransferState,
    batch_rows,
)
from sglang_pd.backends.registry import create_backend, register_backend
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.errors import ConfigError, PdError, TransferError

TICK_S = 0.001
"""How often `progress` is wanted while a fault waits for its time, in seconds."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault, and the writes it strikes.

    kind:
        drop        the batch is never posted: PENDING until its deadline, then UNKNOWN for ever (nothing lands).
        delay       the batch is posted `seconds` later, and PENDING until then.
        partial     only `fraction` of the descriptors is posted; then the transfer is FAILED.
        late        UNKNOWN at once; the batch is posted `seconds` later all the same, and then follows it.
        fail        FAILED at once, nothing moves.
        hold_fence  the write is untouched, but `fence` of its peer and `revoke` stay False for `seconds`, or until
                    `FaultyBackend.release_fences` where `seconds` is 0.
    at, every: strikes write number `at`, and every `every`-th after it where `every` is not 0.
    probability: share of the writes so chosen that are struck, drawn from the plan's seed.
    """

    kind: Literal["drop", "delay", "partial", "late", "fail", "hold_fence"]
    at: int = 1
    every: int = 0
    probability: float = 1.0
    seconds: float = 0.0
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if self.at < 1 or self.every < 0 or self.seconds < 0 or not 0 <= self.fraction <= 1:
            raise ValueError("at >= 1, every >= 0, seconds >= 0 and 0 <= fraction <= 1 are wanted")

    def chooses(self, number: int) -> bool:
        """True for the writes that `at` and `every` name."""
        if self.every:
            return number >= self.at and (number - self.at) % self.every == 0
        return number == self.at


class WrappedBackend(Backend):
    """Passes every call to another backend; the base of wrappers."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """The inner backend's."""
        return self.inner.capabilities

    @property
    def epoch(self) -> int:
        """The inner backend's."""
        return self.inner.epoch

    def allocate(self, nbytes: int, device: str = "cpu") -> Segment:
        """The inner backend's."""
        return self.inner.allocate(nbytes, device)

    def adopt(self, segment: Segment) -> Segment:
        """The inner backend's."""
        return self.inner.adopt(segment)

    def register(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """The inner backend's."""
        return self.inner.register(segments)

    def describe(self) -> bytes:
        """The inner backend's."""
        return self.inner.describe()

    def connect(self, blob: bytes, epoch: int) -> Peer:
        """The inner backend's peer, unwrapped."""
        return self.inner.connect(blob, epoch)

    def start_connect(self, blob: bytes, epoch: int) -> Connecting:
        """The inner backend's."""
        return self.inner.start_connect(blob, epoch)

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        """The inner backend's."""
        return self.inner.write(peer, batch, after=after, deadline_s=deadline_s)

    def fence(self, peer: Peer) -> bool:
        """The inner backend's."""
        return self.inner.fence(peer)

    def revoke(self, epoch: int) -> bool:
        """The inner backend's."""
        return self.inner.revoke(epoch)

    def admit(self, epoch: int, blob: bytes) -> None:
        """The inner backend's."""
        self.inner.admit(epoch, blob)

    def progress(self) -> None:
        """The inner backend's."""
        self.inner.progress()

    @property
    def progress_interval_s(self) -> float | None:
        """The inner backend's."""
        return self.inner.progress_interval_s

    @property
    def engines_replaced(self) -> int:
        """The inner backend's."""
        return self.inner.engines_replaced

    def wakeup_fd(self) -> int | None:
        """The inner backend's."""
        return self.inner.wakeup_fd()

    def disconnect(self, peer: Peer) -> None:
        """The inner backend's."""
        self.inner.disconnect(peer)

    def close(self) -> None:
        """The inner backend's."""
        self.inner.close()


class FaultyTransfer(Transfer):
    """A transfer under a fault. `post`, if any, is what starts the real one at `due`."""

    def __init__(self, peer: Peer, nbytes: int, state: TransferState, error: PdError | None) -> None:
        self.nbytes = nbytes
        self.peer = peer
        self.due: float | None = None
        self.post: Callable[[], Transfer] | None = None
        self.ends_as: PdError | None = None
        self.deadline: float | None = None
        self._clock: Callable[[], float] = time.monotonic
        self._state = state
        self._error = error
        self._real: Transfer | None = None

    def at(self, clock: Callable[[], float], due: float, post: Callable[[], Transfer]) -> FaultyTransfer:
        """Post at `due`."""
        self._clock, self.due, self.post = clock, due, post
        return self

    def until(self, clock: Callable[[], float], deadline: float) -> FaultyTransfer:
        """Be UNKNOWN from `deadline` on."""
        self._clock, self.deadline = clock, deadline
        return self

    def step(self) -> None:
        """Let what is due happen."""
        now = self._clock()
        if self.post is not None and self.due is not None and now >= self.due:
            post, self.post = self.post, None
            try:
                self._real = post()
            except PdError as error:
                self._state, self._error = TransferState.FAILED, error
        if self.deadline is not None and now >= self.deadline and self._state is TransferState.PENDING:
            self._state = TransferState.UNKNOWN
            self._error = TransferError("the transfer passed its deadline", code="transfer_timeout", where="faulty")

    def abandon(self, cause: PdError) -> None:
        """Never post; for `close` and `disconnect`."""
        if self.post is not None:
            self.post = None
            self._state, self._error = TransferState.FAILED, cause

    def cancel(self) -> None:
        """See `Transfer`. What is `late` counts as handed over until it is posted; what was dropped is nowhere."""
        if self._real is not None:
            self._real.cancel()
        elif self._state is TransferState.PENDING:
            self.abandon(TransferError("cancelled before anything was posted", where="faulty"))

    def poll(self) -> TransferState:
        """See `Transfer`."""
        self.step()
        if self._real is not None and self._state in (TransferState.PENDING, TransferState.UNKNOWN):
            state = self._real.poll()
            if state is TransferState.DONE and self.ends_as is not None:
                self._state, self._error = TransferState.FAILED, self.ends_as
            elif state is not TransferState.PENDING:
                self._state, self._error = state, self._real.error
        return self._state

    @property
    def error(self) -> PdError | None:
        """See `Transfer`."""
        return None if self._state is TransferState.DONE else self._error

    @property
    def source_free(self) -> bool:
        """See `Transfer`: what was posted says it itself, and nothing else lets go of the source before its end.

        Not even what was dropped, though nobody reads it: a transport that says it leaves the proof to the destination,
        and here the writer's fence is still to come.
        """
        return self.quiesced or (self.post is None and self._real is not None and self._real.source_free)

    @property
    def may_land(self) -> bool:
        """True while bytes of it can still land: it waits for its time, or the real transfer is not quiesced."""
        self.step()
        return self.post is not None or (self._real is not None and not self._real.quiesced)


class SlowConnecting(Connecting):
    """A connection that is not said to be there before `due`."""

    def __init__(self, inner: Connecting, clock: Callable[[], float], due: float) -> None:
        self._inner, self._clock, self._due = inner, clock, due

    def poll(self) -> Peer | None:
        """See `Connecting`."""
        return self._inner.poll() if self._clock() >= self._due else None

    def cancel(self) -> None:
        """See `Connecting`."""
        self._inner.cancel()


class FaultyBackend(WrappedBackend):
    """Another backend, with faults.

    faults: the plan. connect_s: seconds that every connection takes. seed: of the draws for `Fault.probability`. clock:
    monotonic seconds, for tests with a fake one. writes: how many writes were asked for. struck: (number of the write,
    kind of the fault), in order.
    """

    def __init__(
        self,
        inner: Backend,
        faults: Sequence[Fault],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        connect_s: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self._connect_s = connect_s
        self._faults = tuple(faults)
        self._draw = random.Random(seed)
        self._clock = clock
        self._open: list[FaultyTransfer] = []
        self._held: list[tuple[Peer, float]] = []
        self.writes = 0
        self.struck: list[tuple[int, str]] = []

    def start_connect(self, blob: bytes, epoch: int) -> Connecting:
        """See `Backend`."""
        inner = self.inner.start_connect(blob, epoch)
        return SlowConnecting(inner, self._clock, self._clock() + self._connect_s) if self._connect_s else inner

    def connect(self, blob: bytes, epoch: int) -> Peer:
        """See `Backend`."""
        return self.start_connect(blob, epoch).wait()

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        """See `Backend`; the plan decides."""
        self.writes += 1
        fault = self._choose(self.writes)
        if fault is None or len(batch) == 0:
            return self.inner.write(peer, batch, after=after, deadline_s=deadline_s)
        self.struck.append((self.writes, fault.kind))
        if fault.kind == "hold_fence":
            self._held.append((peer, self._clock() + fault.seconds if fault.seconds else float("inf")))
            return self.inner.write(peer, batch, after=after, deadline_s=deadline_s)
        transfer = self._strike(fault, peer, batch, after, deadline_s)
        self._open.append(transfer)
        return transfer

    def fence(self, peer: Peer) -> bool:
        """See `Backend`: False while a fault holds bytes back, or holds the fence."""
        self._step()
        held = any(of is peer for of, _ in self._held)
        waiting = any(one.may_land for one in self._open if one.peer is peer)
        return self.inner.fence(peer) and not held and not waiting

    def revoke(self, epoch: int) -> bool:
        """See `Backend`: False while any fence is held."""
        self._step()
        return self.inner.revoke(epoch) and not self._held

    def release_fences(self) -> None:
        """End every `hold_fence`."""
        self._held.clear()

    def progress(self) -> None:
        """See `Backend`."""
        self._step()
        self.inner.progress()

    @property
    def progress_interval_s(self) -> float | None:
        """See `Backend`: short while a fault waits for its time."""
        inner = self.inner.progress_interval_s
        if not any(one.post is not None for one in self._open) and not self._held:
            return inner
        return TICK_S if inner is None else min(inner, TICK_S)

    def disconnect(self, peer: Peer) -> None:
        """See `Backend`: what waits for its time is dropped."""
        for one in self._open:
            if one.peer is peer:
                one.abandon(TransferError("the peer was disconnected", where="faulty"))
        self.inner.disconnect(peer)

    def close(self) -> None:
        """See `Backend`: what waits for its time is dropped."""
        for one in self._open:
            one.abandon(TransferError("the backend was closed", where="faulty"))
        self.inner.close()

    def _choose(self, number: int) -> Fault | None:
        for fault in self._faults:
            if fault.chooses(number) and (fault.probability >= 1.0 or self._draw.random() < fault.probability):
                return fault
        return None

    def _strike(self, fault: Fault, peer: Peer, batch: WriteBatch, after: Any, deadline_s: float) -> FaultyTransfer:
        now = self._clock()

        def post(what: WriteBatch = batch) -> Transfer:
            return self.inner.write(peer, what, after=after, deadline_s=deadline_s)

        injected = TransferError(f"injected: {fault.kind}", where="faulty", write=self.writes)
        if fault.kind == "fail":
            return FaultyTransfer(peer, batch.total_bytes, TransferState.FAILED, injected)
        if fault.kind == "partial":
            transfer = FaultyTransfer(peer, batch.total_bytes, TransferState.PENDING, None)
            transfer.ends_as = injected
            part = batch_rows(batch, slice(0, int(len(batch) * fault.fraction)))
            return transfer.at(self._clock, now, lambda: post(part))
        if fault.kind == "late":
            unknown = TransferError("injected: late", code="transfer_unknown", where="faulty", write=self.writes)
            transfer = FaultyTransfer(peer, batch.total_bytes, TransferState.UNKNOWN, unknown)
            return transfer.at(self._clock, now + fault.seconds, post)
        transfer = FaultyTransfer(peer, batch.total_bytes, TransferState.PENDING, None).until(
            self._clock, now + deadline_s
        )
        return transfer if fault.kind == "drop" else transfer.at(self._clock, now + fault.seconds, post)

    def _step(self) -> None:
        now = self._clock()
        self._held = [(peer, until) for peer, until in self._held if until > now]
        for one in self._open:
            one.step()
        self._open = [one for one in self._open if one.may_land or not one.quiesced]


class FaultyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the backend named `faulty`."""

    inner: str
    inner_options: dict[str, Any] = {}
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    connect_s: float = 0.0


def create(*, epoch: int, options: Mapping[str, Any]) -> FaultyBackend:
    """Build the inner backend and wrap it. Raises `ConfigError`."""
    try:
        chosen = msgspec.convert(dict(options), FaultyOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where="$.backend.options") from error
    inner = create_backend(chosen.inner, epoch=epoch, options=chosen.inner_options)
    return FaultyBackend(inner, chosen.faults, seed=chosen.seed, connect_s=chosen.connect_s)


def install() -> None:
    """Make `faulty` a backend name."""
    register_backend("faulty", __name__)
