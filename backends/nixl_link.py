"""The conversation with one peer's agent, driven by the backend's thread: posted, in flight, lost and proven."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.library_process import Watch
from sglang_pd.backends.nixl_blob import AgentBlob
from sglang_pd.backends.nixl_library import Agent, Handle, log
from sglang_pd.backends.nixl_memory import use_device
from sglang_pd.backends.nixl_options import NixlOptions
from sglang_pd.backends.nixl_transfer import NixlTransfer, Piece, Work
from sglang_pd.protocol.errors import PdError, TransferError

PIECES_IN_FLIGHT = 4
"""Pieces posted to one peer and not finished. A few keep an asynchronous transport busy; more only delay others."""
HINT_S = 0.025
"""Seconds between two hints to a peer that bytes are on their way to it."""
HINT = b"PD-NIXL hint"
BEAT_S = 2.0
"""Seconds between two signs of life on a quiet link: what fails to send them tells that the peer is gone."""
BEAT = b"PD-NIXL beat"


class Link:
    """One peer's agent. Only `lost` and `open` are read by other threads."""

    def __init__(self, blob: AgentBlob, options: NixlOptions, news: Callable[[], None]) -> None:
        self.name = blob.agent
        self.blob = blob
        self.watch = Watch(blob.process)
        self.lost: PdError | None = None
        self.open: set[NixlTransfer] = set()
        self.users = 0
        self.added = False
        self._options = options
        self._news = news
        self._posting: deque[Work] = deque()
        self._flying: list[Work] = []
        self._unproven: list[Work] = []
        self._hinted = 0.0

    # What the thread asks to know how soon to come back

    def waiting(self) -> bool:
        """Whether there is something to post or to ask for."""
        return bool(self._posting or self._flying)

    def urgent(self) -> bool:
        """Whether any of that is still within its deadline."""
        pending = TransferState.PENDING
        return any(w.transfer.poll_state() is pending for works in (self._posting, self._flying) for w in works)

    def in_flight(self) -> int:
        """Pieces posted and not finished."""
        return sum(len(work.handles) for work in self._flying)

    def idle(self) -> bool:
        """Nothing posted, nothing to post, nothing to prove."""
        return not (self._posting or self._flying or self._unproven)

    def submit(self, work: Work) -> None:
        """Take a transfer on."""
        self._posting.append(work)

    # One turn

    def step(self, agent: Agent | None, now: float) -> bool:
        """Post at most one piece, ask for all that are in flight. True if anything moved."""
        moved = bool(self._posting) and self._post_one(agent)
        if self._flying and agent is not None:
            moved |= self._check(agent)
            if self.lost is None and now - self._hinted > HINT_S and self.in_flight() and self.urgent():
                self.hint(agent, HINT, now)
        if self.lost is None and now - self._hinted > BEAT_S and agent is not None:
            self.hint(agent, BEAT, now)
        if self._unproven:
            moved |= self.prove()
        return moved

    def hint(self, agent: Agent, message: bytes, now: float) -> None:
        """Wake the peer's thread. That it fails is how a lost peer is often noticed first."""
        self._hinted = now
        try:
            agent.notify(self.name, message)
        except TransferError as error:
            if error.code == "peer_lost":
                self.lose(error)
            else:
                log.warning("%s", error)

    def _post_one(self, agent: Agent | None) -> bool:
        for _ in range(len(self._posting)):
            work = self._posting[0]
            if work.failed is None:
                work.failed = self._refusal(work)
            if work.failed is None and not self._ready(work):
                self._posting.rotate(-1)
                continue
            if work.failed is None and self.in_flight() >= PIECES_IN_FLIGHT:
                return False
            piece = self._next(work) if work.failed is None and agent is not None else None
            if piece is not None and agent is not None:
                self._post(agent, work, piece)
                # Looking ahead tells at once whether that was the last.
                if work.failed is not None or self._peek(work):
                    return True
            self._posting.popleft()
            work.complete = work.failed is None
            self._exhaust(work)
            return True
        return False

    def _exhaust(self, work: Work) -> None:
        work.exhausted = True
        work.addresses = work.pieces = work.upcoming = work.after = None
        self._finish(work)

    def _refusal(self, work: Work) -> PdError | None:
        """Why no more of this transfer may be handed to the transport."""
        if self.lost is not None:
            return self.lost
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
                where=f"write to peer {self.name}",
                backend="nixl",
            )
        work.after = None
        return True

    def _next(self, work: Work) -> Piece | None:
        if not self._peek(work):
            return None
        piece, work.upcoming = work.upcoming, None
        return piece

    def _peek(self, work: Work) -> bool:
        if work.upcoming is None:
            if work.pieces is None and work.addresses is not None:
                work.pieces = work.addresses.pieces(self._options)
            work.upcoming = next(work.pieces, None) if work.pieces is not None else None
        return work.upcoming is not None

    def _post(self, agent: Agent, work: Work, piece: Piece) -> None:
        if piece.kinds[0] == "cuda":
            use_device(piece.source_device)
        try:
            handle = agent.prepare(piece.rows, piece.kinds, self.name)
        except TransferError as error:
            # Never posted, so this piece cannot land.
            work.failed = error
            if error.code == "peer_lost":
                self.lose(error)
            return
        if not work.handed:
            work.handed = True
            self._flying.append(work)
        work.handles.append(handle)
        agent.post(handle, self.name)
        if handle.finished:
            self._take(agent, work, handle)

    def _check(self, agent: Agent) -> bool:
        moved = False
        for work in list(self._flying):
            for handle in list(work.handles):
                agent.check(handle, self.name)
                if handle.finished:
                    self._take(agent, work, handle)
                    moved = True
            if work.transfer.poll_state() is TransferState.PENDING and work.transfer.expired():
                self._news()
            self._finish(work)
        return moved

    def _take(self, agent: Agent, work: Work, handle: Handle) -> None:
        """One handle has come to its end."""
        work.handles.remove(handle)
        agent.release(handle)
        if handle.failed is None:
            return
        work.broken = True
        if work.failed is None:
            work.failed = handle.failed
        if handle.failed.code == "peer_lost":
            self.lose(handle.failed)
        self._settle(work, TransferState.UNKNOWN)

    def _finish(self, work: Work) -> None:
        """Decide a transfer of which nothing is posted any more and nothing will be."""
        if not work.exhausted or work.handles:
            return
        if work in self._flying:
            self._flying.remove(work)
        if work.broken:
            self._unproven.append(work)
            self._settle(work, TransferState.UNKNOWN)
        else:
            self._settle(work, TransferState.DONE if work.complete else TransferState.FAILED)

    def _settle(self, work: Work, state: TransferState) -> None:
        if work.transfer.settle(state, work.failed):
            self._news()
        if state is not TransferState.UNKNOWN:
            self.open.discard(work.transfer)

    # The end of a peer

    def lose(self, error: PdError) -> None:
        """The peer is gone for good. What was handed to the transport is UNKNOWN until proven."""
        if self.lost is None:
            self.lost = TransferError(
                "the peer is gone",
                code="peer_lost",
                where=f"peer {self.name}",
                actual=error.message,
                hint="Connect to its next incarnation.",
                backend="nixl",
            )
            self._news()
        for work in self._flying:
            if work.failed is None:
                work.failed = self.lost
            if not work.exhausted or work.handles:
                self._settle(work, TransferState.UNKNOWN)

    def died(self) -> None:
        """The kernel says that the peer's process has exited."""
        self.lose(TransferError("its process has exited", code="peer_lost", backend="nixl"))

    def prove(self) -> bool:
        """UNKNOWN becomes FAILED where the peer's process, and with it the memory written to, is gone.

        Holds for host memory on both sides, of transfers whose every handle the library has ended.
        """
        if not any(work.host_only for work in self._unproven) or not self.watch.gone():
            return False
        proven = [work for work in self._unproven if work.host_only]
        self._unproven = [work for work in self._unproven if not work.host_only]
        for work in proven:
            self._settle(work, TransferState.FAILED)
        return True

    def abandon(self, error: PdError) -> list[Handle]:
        """Our own agent is about to close: nothing more is posted. Returns the unfinished handles, given up."""
        self.lose(error)
        handles: list[Handle] = []
        for work in self._flying:
            handles += work.handles
            work.broken |= bool(work.handles)
            work.handles = []
        for work in [*self._posting, *self._flying]:
            work.failed = work.failed or self.lost
            if not work.exhausted or work in self._flying:
                self._exhaust(work)
        self._posting.clear()
        return handles

    def attach(self, agent: Agent) -> None:
        """Make the peer known to the library and start wiring up. Raises `TransferError` (`peer_lost`)."""
        try:
            agent.add_peer(self.blob.metadata, self.name)
        except TransferError as error:
            raise TransferError(
                "nobody answers where the peer said it would be",
                code="peer_lost",
                where=f"connect, peer {self.name}",
                actual=error.message,
                backend="nixl",
            ) from None
        self.added = True

    def detach(self, agent: Agent) -> None:
        """Forget the peer in the library. Only when nothing is in flight."""
        if self.added:
            self.added = False
            try:
                agent.remove_peer(self.name)
            except TransferError as error:
                self.lose(error)
