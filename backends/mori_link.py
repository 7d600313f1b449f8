"""The conversation with one peer, in a thread of its own: the library's calls block for seconds when a peer is silent.

A link posts pieces, holds their calls until they end, and says what became of each transfer:

- DONE: every piece was handed over and every one succeeded.
- FAILED: nothing more can land because every piece that was handed over succeeded, and the rest never was.
- UNKNOWN: a call ended with an error, or has not ended by the deadline. The library ends a call at its first error,
  when other blocks of it may still be on their way (its other queue pairs, packets in the network), and names none that
  landed. So an error proves nothing, and no later event does: only the destination's own end would.

After one error the pair of engines never works again. The link is lost, the pair is marked dead in its engine, and a
later `connect` takes another engine with a new key.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.mori_library import Call, EngineHost, log
from sglang_pd.backends.mori_options import MoriOptions
from sglang_pd.backends.mori_transfer import DOOR, GREETING, MoriTransfer, Piece, Work, greeting
from sglang_pd.protocol.errors import BackendError, PdError, TransferError

MAX_QUEUED = 65_536
URGENT_S = 0.001
OVERDUE_S = 0.005
"""How long the thread sleeps at most for a call in flight: within its deadline, past it."""
AWAIT_EVENT_S = 0.0003


@dataclass(frozen=True, slots=True)
class Owner:
    """What a link tells the backend: it takes transfers that are DONE or FAILED out of `open`, and calls `news`."""

    open: set[MoriTransfer]
    news: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Remote:
    """A peer's engine as the library sees it: its key, and unpacked descriptors of it, its door and its segments."""

    epoch: int
    key: str
    engine: Any
    door: Any
    memories: tuple[Any, ...]


class Link:
    """One peer over one engine. Methods under "owner" are for the backend's owner; the rest runs in the thread."""

    def __init__(self, engine: EngineHost, remote: Remote, options: MoriOptions, owner: Owner) -> None:
        self.engine, self.remote = engine, remote
        self._options, self._open, self._news = options, owner.open, owner.news
        self._lost: PdError | None = None
        self._condition = threading.Condition()
        self._queue: deque[Work] = deque()
        self._flying: list[Work] = []
        self._in_flight = 0
        self._stopping: PdError | None = None
        self._give_up_at = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"mori-{remote.key[-8:]}", daemon=True)
        self._thread.start()

    # Owner

    @property
    def lost(self) -> PdError | None:
        """Why nothing more goes to this peer over this link, or None."""
        if self._lost is None and self.engine.condemned is not None:
            self._lose(self.engine.condemned)
        return self._lost

    def submit(self, work: Work) -> None:
        """Take a transfer on. Raises `BackendError` (`queue_full`) when too many wait."""
        if len(self._queue) >= MAX_QUEUED:
            raise BackendError("too many transfers wait", code="queue_full", where="write", actual=MAX_QUEUED)
        with self._condition:
            self._queue.append(work)
            self._condition.notify()

    def stop(self, why: PdError, give_up_at: float = float("inf")) -> None:
        """Hand nothing more over; end the thread when all calls have ended, or at `give_up_at` (monotonic seconds)."""
        with self._condition:
            self._stopping = self._stopping or why
            self._give_up_at = min(self._give_up_at, give_up_at)
            self._condition.notify()

    def join(self, until: float) -> bool:
        """Wait for the thread until `until` (monotonic seconds); False where a call into the library keeps it."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    # Thread

    def _run(self) -> None:
        defects = 0
        while self._await_something():
            try:
                if not self._turn():
                    self._pause()
            except Exception as error:  # the thread must outlive any defect: it holds what the library points to
                defects += 1
                if defects <= 10:
                    log.exception("defect in the thread of peer %s", self.remote.key)
                self._lose(TransferError(f"{type(error).__name__}: {error}", code="internal", where="mori's thread"))
                time.sleep(0.01)
        self._give_up()

    def _await_something(self) -> bool:
        """Sleep while there is nothing to do. False when the thread shall end."""
        with self._condition:
            busy = bool(self._queue or self._flying)
            if self._stopping is not None and (not busy or time.monotonic() > self._give_up_at):
                return False
            if busy:
                return True
            beat_s = self._options.heartbeat_s if self.lost is None else 0
            woken = self._condition.wait_for(lambda: bool(self._queue or self._stopping), beat_s or None)
        if not woken:
            self._queue.append(greeting(self.remote.key, self._options.heartbeat_timeout_s))
        return True

    def _turn(self) -> bool:
        """Post at most one piece, look at all that are in flight. True if anything moved."""
        moved = self._post_one()
        for work in list(self._flying):
            for call in list(work.calls):
                if self.engine.check(call):
                    self._take(work, call)
                    moved = True
            if work.transfer.decided() is TransferState.PENDING and work.transfer.expired():
                self._news()
            if work.descriptors is None and work.transfer.expired():
                self._lose(TransferError("a greeting did not arrive in time", code="peer_lost", backend="mori"))
            self._finish(work)
        return moved

    def _pause(self) -> None:
        for work in self._flying:
            if work.calls:
                overdue = work.transfer.decided() is not TransferState.PENDING
                self.engine.wait(work.calls[0], OVERDUE_S if overdue else URGENT_S)
                return
        time.sleep(AWAIT_EVENT_S)

    def _post_one(self) -> bool:
        for _ in range(len(self._queue)):
            work = self._queue[0]
            if work.failed is None:
                work.failed = self._refusal(work)
            if work.failed is None and not self._ready(work):
                self._queue.rotate(-1)
                continue
            if work.failed is None and self._in_flight >= self._options.calls_in_flight:
                return False
            if work.failed is None and self._post_next(work):
                return True
            self._queue.popleft()
            self._exhaust(work)
            return True
        return False

    def _refusal(self, work: Work) -> PdError | None:
        """Why no more of this transfer may be handed to the library."""
        if self.lost is not None or self._stopping is not None:
            return self.lost or self._stopping
        if work.transfer.expired():
            self._news()
            return work.transfer.error
        return None

    def _ready(self, work: Work) -> bool:
        if work.after is None:
            return True
        try:
            if not work.after.query():
                return False
        except Exception as error:
            work.failed = TransferError(
                f"the event that the source bytes depend on failed: {type(error).__name__}: {error}",
                where=f"write to peer {self.remote.key}",
                backend="mori",
            )
        work.after = None
        return True

    def _post_next(self, work: Work) -> bool:
        """Hand over the next piece. False when that was the last, or it failed."""
        if work.pieces is None:
            work.pieces = iter([GREETING]) if work.descriptors is None else work.descriptors.pieces(self._options)
            work.head = next(work.pieces, None)
        if work.head is not None:
            self._post(work, work.head)
        if work.failed is None:
            # Looked up at once, so that whatever ends the link now finds a transfer that is all handed over complete.
            work.head = next(work.pieces, None)
            work.complete = work.head is None
        return work.failed is None and not work.complete

    def _post(self, work: Work, piece: Piece) -> None:
        local = self.engine.door if piece.src_segment == DOOR else self.engine.memories[piece.src_segment]
        remote = self.remote.door if piece.dst_segment == DOOR else self.remote.memories[piece.dst_segment]
        pair = (self.remote.key, piece.src_segment, piece.dst_segment)
        try:
            call = self.engine.post(local, remote, piece.blocks)
        except TransferError as error:
            # The library raises while it makes contact for a pair of memories, before it posts. For a pair that it
            # knows already the error may have come later; then it still points to a status that no longer exists.
            if pair in self.engine.contacted:
                work.broken = True
                self.engine.condemned = error
            work.failed = error
            self._lose(error, dead=self.engine.contacted_with(self.remote.key))
            return
        self.engine.contacted.add(pair)
        if not work.calls and work not in self._flying:
            self._flying.append(work)
        work.calls.append(call)
        self._in_flight += 1
        if call.finished:
            self._take(work, call)

    def _take(self, work: Work, call: Call) -> None:
        """One call has come to its end."""
        work.calls.remove(call)
        self._in_flight -= 1
        error = call.failed or self.engine.condemned
        if error is None:
            return
        work.broken = True
        work.failed = work.failed or error
        self._lose(error)
        self._settle(work, TransferState.UNKNOWN)

    def _exhaust(self, work: Work) -> None:
        work.exhausted = True
        work.pieces = work.after = work.head = None
        self._finish(work)

    def _finish(self, work: Work) -> None:
        """Decide a transfer of which nothing is in flight any more and nothing will be."""
        if not work.exhausted or work.calls:
            return
        if work in self._flying:
            self._flying.remove(work)
        if work.broken:
            self._settle(work, TransferState.UNKNOWN)
        else:
            self._settle(work, TransferState.DONE if work.complete else TransferState.FAILED)

    def _settle(self, work: Work, state: TransferState) -> None:
        if work.transfer.settle(state, work.failed):
            self._news()
        if state is not TransferState.UNKNOWN:
            self._open.discard(work.transfer)

    def _lose(self, error: PdError, dead: bool = True) -> None:
        """Nothing more goes over this link; the pair of engines is `dead` for good unless they never met."""
        if dead:
            self.engine.dead.add(self.remote.key)
        if self._lost is None:
            self._lost = TransferError(
                "nothing more reaches the peer over this connection",
                code="peer_lost",
                where=f"peer {self.remote.key}",
                actual=error.message,
                hint="Connect again: to its next incarnation, or, if it lives, over a new engine.",
                backend="mori",
            )
            self._news()

    def _give_up(self) -> None:
        """The thread ends. What the library still holds is UNKNOWN; what it never got has failed."""
        for work in [*self._flying, *self._queue]:
            work.failed = work.failed or self._stopping
            work.broken |= bool(work.calls)
            work.calls = []
            self._exhaust(work)
        self._queue.clear()
