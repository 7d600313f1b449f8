"""The conversation with one peer's agent, driven under the engine's lock: wired up, woken, lost and forgotten."""

from __future__ import annotations

from collections.abc import Callable

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.library.link import Ends, LibraryLink, Work
from sglang_pd.backends.library.process import Watch
from sglang_pd.backends.nixl.blob import AgentBlob
from sglang_pd.backends.nixl.library import Agent, Handle, log
from sglang_pd.backends.nixl.memory import use_device
from sglang_pd.backends.nixl.pieces import Piece
from sglang_pd.backends.shortage import check_descriptors
from sglang_pd.protocol.errors import PdError, TransferError

PIECES_IN_FLIGHT = 4
"""Pieces posted to one peer and not finished. A few keep an asynchronous transport busy; more only delay others."""
DIRECT_POSTS = 4
"""Posts in one turn to a peer whose pieces are small (`pieces.DIRECT_BYTES`): a turn moves as much as to any other."""
HINT_S = 0.025
"""Seconds between two hints to a peer that bytes are on their way to it."""
HINT = b"PD-NIXL hint"
BEAT_S = 2.0
"""Seconds between two signs of life on a quiet link: what fails to send them tells that the peer is gone."""
BEAT = b"PD-NIXL beat"

NixlWork = Work[Piece, Handle]


class Link(LibraryLink[Piece, Handle]):
    """One peer's agent. Only `lost` and `open` are read without the engine's lock."""

    def __init__(self, blob: AgentBlob, news: Callable[[], None], *, direct: bool = False) -> None:
        """`direct`: every byte is copied by this process's own system calls, made in the engine's thread."""
        super().__init__(Ends("nixl", blob.agent, Watch(blob.process), PIECES_IN_FLIGHT, news), set())
        self.name = blob.agent
        self.blob = blob
        self.direct = direct
        self.lost: PdError | None = None
        self.users = 0
        self.added = self.reached = False
        """Whether the library knows the peer; whether a write to it has ended well."""
        self._agent: Agent | None = None
        self._hinted = 0.0

    # What the thread asks to know how soon to come back

    def waiting(self) -> bool:
        """Whether there is something to post or to ask for."""
        return bool(self._queue or self._flying)

    def urgent(self) -> bool:
        """Whether any of that is still within its deadline."""
        pending = TransferState.PENDING
        return any(w.transfer.decided() is pending for works in (self._queue, self._flying) for w in works)

    def idle(self) -> bool:
        """Nothing posted, nothing to post, nothing to prove."""
        return not (self._queue or self._flying or self._unproven)

    def submit(self, work: NixlWork) -> None:
        """Take a transfer on."""
        self._queue.append(work)

    # One turn

    def step(self, agent: Agent | None, now: float) -> bool:
        """Post a piece (`DIRECT_POSTS` small ones), ask for all that are in flight. True if anything moved."""
        self._agent = agent
        moved = False
        for _ in range(DIRECT_POSTS if self.direct else 1):
            if not (self._queue and self.post_one()):
                break
            moved = True
        if self._flying and agent is not None:
            moved |= self.check()
            if self.lost is None and now - self._hinted > HINT_S and self._in_flight and self.urgent():
                self.hint(agent, HINT, now)
        if self.lost is None and now - self._hinted > BEAT_S and agent is not None:
            self.hint(agent, BEAT, now)
        return self.prove() or moved

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

    def _refusal(self) -> PdError | None:
        if self.lost is None and self.watch.gone():
            # Over CMA the library writes to a process number, which another process may have from now on.
            self.died()
        if self.lost is None and self._agent is None:
            return TransferError("the library's agent is gone", code="transfer_failed", where=self.name, backend="nixl")
        return self.lost

    def _post(self, work: NixlWork, piece: Piece) -> Handle | None:
        agent = self._agent
        if agent is None:
            work.failed = self._refusal()
            return None
        if piece.kinds[0] == "cuda":
            use_device(piece.source_device)
        try:
            handle = agent.prepare(piece.rows, piece.kinds, self.name)
        except TransferError as error:
            # Never posted, so this piece cannot land.
            work.failed = error
            if error.code == "peer_lost":
                self.lose(error)
            return None
        agent.post(handle, self.name)
        return handle

    def _ask(self, call: Handle) -> None:
        if self._agent is not None and not call.finished:
            self._agent.check(call, self.name)

    def _outcome(self, call: Handle) -> PdError | None:
        if self._agent is not None:
            self._agent.release(call)
        self.reached |= call.failed is None
        return call.failed

    def _fault(self, error: PdError) -> None:
        if error.code == "peer_lost":
            self.lose(error)

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
            if not work.exhausted or work.calls:
                self._settle(work, TransferState.UNKNOWN)

    def died(self) -> None:
        """The kernel says that the peer's process has exited."""
        self.lose(TransferError("its process has exited", code="peer_lost", backend="nixl"))

    def abandon(self, error: PdError) -> list[Handle]:
        """Our own agent is about to close: nothing more is posted. Returns the unfinished handles, given up."""
        self.lose(error)
        return self.give_up(self.lost or error)

    def closed(self) -> None:
        """See `LibraryLink`. Where it takes a read of the source to write, nothing more can land then."""
        for transfer in self._broken if self.direct else ():
            if transfer.settle(TransferState.FAILED):
                self._news()
            self.open.discard(transfer)
        super().closed()

    def attach(self, agent: Agent) -> None:
        """Make the peer known to the library and start wiring up.

        Raises `TransferError` (`peer_lost`), or `BackendUnavailable` where this process has no descriptor left.
        """
        try:
            agent.add_peer(self.blob.metadata, self.name)
        except TransferError as error:
            check_descriptors(f"connect, peer {self.name}")
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
            else:
                self.closed()
