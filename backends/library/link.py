"""The conversation with one peer: transfers posted piece by piece, their calls held to the end, and what it proves.

- DONE: every piece was handed over and every one succeeded.
- FAILED: nothing more can land, because every piece that was handed over succeeded and the rest never was; or because
  the kernel shows that the peer's process, and with it the memory written to, is gone (host memory on both sides, every
  call ended).
- UNKNOWN: a call ended with an error, or has not ended by the deadline.
"""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.library.process import Watch
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.protocol.errors import PdError, TransferError


class LibraryCall(Protocol):
    """What a library was handed in one call. `failed` says why, once it has `finished` without success."""

    finished: bool
    failed: TransferError | None


Piece = TypeVar("Piece")
Call = TypeVar("Call", bound=LibraryCall)


@dataclass(slots=True, eq=False)
class Work(Generic[Piece, Call]):
    """A transfer on its way through a link.

    pieces: what is still to be handed over; nothing is computed before the first is taken. host_only: neither side is
        device memory. after: the event that the source bytes depend on.
    upcoming: the next piece, looked at. calls: handed over and not finished.
    begun: it was tried to hand some of it over. exhausted: no more will be handed over; complete: because all of it
        was. broken: a call ended without success, or its end cannot be believed. failed: why no more goes.
    """

    transfer: LibraryTransfer
    pieces: Iterator[Piece]
    host_only: bool
    after: Any = None
    upcoming: Piece | None = None
    calls: list[Call] = field(default_factory=list)
    begun: bool = False
    exhausted: bool = False
    complete: bool = False
    broken: bool = False
    failed: PdError | None = None

    def peek(self) -> bool:
        """Whether there is another piece; looks it up. What fails in that fails this transfer alone."""
        if self.upcoming is None and self.failed is None:
            try:
                self.upcoming = next(self.pieces, None)
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
                self.failed = TransferError("a piece could not be prepared", code="internal", actual=words[:500])
        return self.upcoming is not None


@dataclass(frozen=True, slots=True)
class Ends:
    """What a link is between. backend: the backend's name. peer: how errors call the peer.

    watch: of the peer's process. most: calls in flight at a time. news: called when a transfer has news.
    """

    backend: str
    peer: str
    watch: Watch
    most: int
    news: Callable[[], None]


class LibraryLink(abc.ABC, Generic[Piece, Call]):
    """One peer. Driven by one thread, but for `open`, which others read, and `prove`, which they may call."""

    def __init__(self, ends: Ends, open_transfers: set[LibraryTransfer]) -> None:
        """`open_transfers` loses a transfer when it is DONE or FAILED; several links may share it."""
        self.ends = ends
        self.watch = ends.watch
        self.open = open_transfers
        self._news = ends.news
        self._queue: deque[Work[Piece, Call]] = deque()
        self._flying: list[Work[Piece, Call]] = []
        self._unproven: list[Work[Piece, Call]] = []
        self._proving = threading.Lock()
        self._broken: list[LibraryTransfer] = []
        """Ended without an outcome; the connection that carried them may still hold parts."""
        self._in_flight = 0

    # The library's part

    @abc.abstractmethod
    def _refusal(self) -> PdError | None:
        """Why nothing more may be handed to the library, or None."""

    @abc.abstractmethod
    def _post(self, work: Work[Piece, Call], piece: Piece) -> Call | None:
        """Hand a piece over. None where that was refused, `work.failed` then says why."""

    @abc.abstractmethod
    def _ask(self, call: Call) -> None:
        """Look whether a call has finished; never raises."""

    @abc.abstractmethod
    def _outcome(self, call: Call) -> PdError | None:
        """Take leave of a call that has finished. Why it counts as broken, or None."""

    @abc.abstractmethod
    def _fault(self, error: PdError) -> None:
        """A call was broken; the link may be lost by it."""

    # Posting

    def post_one(self) -> bool:
        """Post at most one piece. True if anything moved."""
        for _ in range(len(self._queue)):
            work = self._queue[0]
            if work.failed is None:
                work.failed = self._why_not(work)
            if work.failed is None and not self._ready(work):
                self._queue.rotate(-1)
                continue
            if work.failed is None and self._in_flight >= self.ends.most:
                return self._drop_cancelled()
            if work.failed is None and self._post_next(work):
                return True
            self._queue.popleft()
            self._exhaust(work)
            return True
        return False

    def _drop_cancelled(self) -> bool:
        """Give up what was cancelled behind a transfer that keeps the library busy. True if anything moved."""
        dropped = [work for work in self._queue if work.transfer.cancelled and not work.begun]
        for work in dropped:
            self._queue.remove(work)
            work.failed = work.transfer.withdrawn()
            self._exhaust(work)
        return bool(dropped)

    def _why_not(self, work: Work[Piece, Call]) -> PdError | None:
        if work.transfer.cancelled and not work.begun:
            return work.transfer.withdrawn()
        error = self._refusal()
        if error is None and work.transfer.expired():
            self._news()
            return work.transfer.error
        return error

    def _ready(self, work: Work[Piece, Call]) -> bool:
        if work.after is None:
            return True
        try:
            if not work.after.query():
                return False
        except Exception as error:
            work.failed = TransferError(
                f"the event that the source bytes depend on failed: {type(error).__name__}: {error}",
                where=f"write to peer {self.ends.peer}",
                backend=self.ends.backend,
            )
        work.after = None
        return True

    def _post_next(self, work: Work[Piece, Call]) -> bool:
        """Hand over the next piece. False when that was the last, or it failed."""
        if work.peek() and work.upcoming is not None:
            piece, work.upcoming, work.begun = work.upcoming, None, True
            call = self._post(work, piece)
            if call is not None:
                if work not in self._flying:
                    self._flying.append(work)
                work.calls.append(call)
                self._in_flight += 1
                if call.finished:
                    self._take(work, call)
        if work.failed is None:
            # Looked up at once, so that whatever ends the link now finds a transfer that is all handed over complete.
            work.complete = not work.peek() and work.failed is None
        return work.failed is None and not work.complete

    # Asking

    def check(self) -> bool:
        """Ask for all calls in flight. True if anything moved."""
        moved = False
        for work in list(self._flying):
            for call in list(work.calls):
                self._ask(call)
                if call.finished:
                    self._take(work, call)
                    moved = True
            if work.transfer.decided() is TransferState.PENDING and work.transfer.expired():
                self._news()
            self._finish(work)
        return moved

    def _take(self, work: Work[Piece, Call], call: Call) -> None:
        """One call has come to its end."""
        work.calls.remove(call)
        self._in_flight -= 1
        error = self._outcome(call)
        if error is not None:
            work.broken = True
            work.failed = work.failed or error
            self._fault(error)
            self._settle(work, TransferState.UNKNOWN)

    # Deciding

    def _exhaust(self, work: Work[Piece, Call]) -> None:
        work.exhausted = True
        work.pieces, work.upcoming, work.after = iter(()), None, None
        self._finish(work)

    def _finish(self, work: Work[Piece, Call]) -> None:
        """Decide a transfer of which nothing is in flight any more and nothing will be."""
        if not work.exhausted or work.calls:
            return
        if work in self._flying:
            self._flying.remove(work)
        if not work.broken:
            self._settle(work, TransferState.DONE if work.complete else TransferState.FAILED)
            return
        self._settle(work, TransferState.UNKNOWN)
        self._broken.append(work.transfer)
        if work.host_only and (self.watch.fd >= 0 or self.watch.known()):
            with self._proving:
                self._unproven.append(work)

    def _settle(self, work: Work[Piece, Call], state: TransferState) -> None:
        if work.transfer.settle(state, work.failed):
            self._news()
        if state is not TransferState.UNKNOWN:
            self.open.discard(work.transfer)

    def prove(self) -> bool:
        """UNKNOWN becomes FAILED where the peer's process, and with it the memory written to, is gone."""
        if not self._unproven or not self.watch.gone():
            return False
        with self._proving:
            proven, self._unproven = self._unproven, []
        for work in proven:
            self._settle(work, TransferState.FAILED)
        return bool(proven)

    def closed(self) -> None:
        """The library has closed the connection to the peer: it reads no source for it any more."""
        for transfer in self._broken:
            transfer.let_go()
        if self._broken:
            self._news()
        self._broken = []

    def give_up(self, error: PdError) -> list[Call]:
        """Nothing more is handed over or asked for. Returns the unfinished calls, which nobody holds any more."""
        calls: list[Call] = []
        for work in dict.fromkeys([*self._flying, *self._queue]):
            calls += work.calls
            work.broken |= bool(work.calls)
            work.calls = []
            work.failed = work.failed or error
            self._exhaust(work)
        self._queue.clear()
        self._in_flight = 0
        return calls
