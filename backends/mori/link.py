"""The conversation with one peer, in a thread of its own: the library's calls block for seconds when a peer is silent.

The library ends a call at its first error, when other blocks of it may still be on their way (its other queue pairs,
packets in the network), and names none that landed. So an error proves nothing: the transfer is UNKNOWN, until the
kernel shows that the peer's process is gone (`library.link`), which it can only on the same host.

After one error the pair of engines never works again. The link is lost, the pair is marked dead in its engine, and a
later `connect` takes another engine with a new key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.home import Home
from sglang_pd.backends.library.link import Ends, LibraryLink, Work
from sglang_pd.backends.library.process import ProcessIdentity, Watch
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.mori.library import Call, EngineHost, log
from sglang_pd.backends.mori.options import MoriOptions
from sglang_pd.backends.mori.pieces import DOOR, GREETING, Piece
from sglang_pd.backends.shortage import start_thread
from sglang_pd.protocol.errors import BackendError, PdError, TransferError

MAX_QUEUED = 65_536
URGENT_S = 0.001
OVERDUE_S = 0.005
"""How long the thread sleeps at most for a call in flight: within its deadline, past it."""
AWAIT_EVENT_S = 0.0003
PROVE_S = 0.05
"""How often the thread looks whether the process of a peer with unproven transfers is gone."""

MoriWork = Work[Piece, Call]


@dataclass(frozen=True, slots=True)
class Owner:
    """What a link tells the backend: it takes transfers that are DONE or FAILED out of `open`, and calls `news`."""

    open: set[LibraryTransfer]
    news: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Remote:
    """A peer's engine as the library sees it: its key, and unpacked descriptors of it, its door and its segments."""

    epoch: int
    key: str
    process: ProcessIdentity
    engine: Any
    door: Any
    memories: tuple[Any, ...]


class Link(LibraryLink[Piece, Call]):
    """One peer over one engine. Methods under "owner" are for the backend's owner; the rest runs in the thread."""

    def __init__(self, engine: EngineHost, remote: Remote, options: MoriOptions, owner: Owner) -> None:
        ends = Ends("mori", remote.key, Watch(remote.process), options.calls_in_flight, owner.news)
        super().__init__(ends, owner.open)
        self.engine, self.remote = engine, remote
        self.home = Home("the link", f"mori, peer {remote.key}")
        self._options = options
        self._lost: PdError | None = None
        self._condition = threading.Condition()
        self._greeting: MoriWork | None = None
        self._stopping: PdError | None = None
        self._give_up_at = float("inf")
        self._thread = start_thread(self._run, f"mori-{remote.key[-8:]}", "mori")

    # Owner

    @property
    def lost(self) -> PdError | None:
        """Why nothing more goes to this peer over this link, or None."""
        if self._lost is None and self.engine.condemned is not None:
            self._lose(self.engine.condemned)
        if self._lost is None and self.watch.gone():
            self._lose(TransferError("its process has exited", code="peer_lost", backend="mori"))
        return self._lost

    def submit(self, work: MoriWork) -> None:
        """Take a transfer on. Raises `BackendError` (`queue_full`) when too many wait."""
        if len(self._queue) >= MAX_QUEUED:
            raise BackendError("too many transfers wait", code="queue_full", where="write", actual=MAX_QUEUED)
        with self._condition:
            self._queue.append(work)
            self._condition.notify()

    def greet(self, within_s: float) -> LibraryTransfer:
        """Write to the peer's door: the first contact, and the heartbeat. The link is lost if that takes longer."""
        transfer = LibraryTransfer("mori", self.remote.key, 8, within_s)
        self._greeting = Work(transfer, iter([GREETING]), host_only=True)
        self.submit(self._greeting)
        return transfer

    def stop(self, why: PdError, give_up_at: float = float("inf")) -> None:
        """Hand nothing more over; end the thread when all calls have ended, or at `give_up_at` (monotonic seconds)."""
        if not self.home.here:
            return  # the thread is the parent's
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
        while True:
            try:
                if not self._await_something():
                    break
                if not self._turn():
                    self._pause()
            except Exception as error:  # the thread must outlive any defect: it holds what the library points to
                defects += 1
                if defects <= 10:
                    log.exception("defect in the thread of peer %s", self.remote.key)
                self._lose(TransferError(f"{type(error).__name__}: {error}", code="internal", where="mori's thread"))
                time.sleep(0.01)
        # What the library still holds is UNKNOWN; what it never got has failed.
        self.give_up(self._stopping or TransferError("the thread ended", code="internal", where="mori's thread"))

    def _await_something(self) -> bool:
        """Sleep while there is nothing to do. False when the thread shall end."""
        with self._condition:
            busy = bool(self._queue or self._flying)
            if self._stopping is not None and (not busy or time.monotonic() > self._give_up_at):
                return False
            if busy:
                return True
            beat_s = self._options.heartbeat_s if self.lost is None else 0
            nap_s = PROVE_S if self._unproven else beat_s
            woken = self._condition.wait_for(lambda: bool(self._queue or self._stopping), nap_s or None)
        if not woken and self.lost is None:
            self.greet(self._options.heartbeat_timeout_s)
        return True

    def _turn(self) -> bool:
        """Post at most one piece, look at all that are in flight. True if anything moved."""
        moved = self.post_one()
        moved |= self.check()
        greeting = self._greeting
        if greeting is not None and not greeting.transfer.final and greeting.transfer.expired():
            self._lose(TransferError("a greeting did not arrive in time", code="peer_lost", backend="mori"))
        return self.prove() or moved

    def _pause(self) -> None:
        for work in self._flying:
            if work.calls:
                overdue = work.transfer.decided() is not TransferState.PENDING
                self.engine.wait(work.calls[0], OVERDUE_S if overdue else URGENT_S)
                return
        if self._queue:
            time.sleep(AWAIT_EVENT_S)

    def _refusal(self) -> PdError | None:
        return self.lost or self._stopping

    def _post(self, work: MoriWork, piece: Piece) -> Call | None:
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
            return None
        self.engine.contacted.add(pair)
        return call

    def _ask(self, call: Call) -> None:
        self.engine.check(call)

    def _outcome(self, call: Call) -> PdError | None:
        return call.failed or self.engine.condemned

    def _fault(self, error: PdError) -> None:
        self._lose(error)

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
