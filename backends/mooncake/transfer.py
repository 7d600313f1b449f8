"""One posted batch, as its owner sees it; and a peer, as it was described and as it was found."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_pd.backends.base import Peer, TransferState
from sglang_pd.backends.library.process import Watch
from sglang_pd.backends.library.rows import NO_ROWS, Rows
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.mooncake.blob import Blob
from sglang_pd.backends.mooncake.chunk import Chunk
from sglang_pd.backends.mooncake.engine import Engine
from sglang_pd.backends.sides import Side
from sglang_pd.protocol.errors import PdError, TransferError


class MooncakeTransfer(LibraryTransfer):
    """Pieces waiting here, in the library, or ended. But for the deadline the pump alone changes it, under its lock.

    pieces: merged when the pump takes the transfer up. cursor: first piece not yet submitted. flights: submissions in
    the library. halted: nothing more of it will be submitted. lost: a submission failed without proof. left: it no
    longer counts as queued. provable: no side is device memory. held_by: engines that a submission of it failed in: the
    library neither cancels nor awaits the rest of it, so that they may read the source until they have ended. through:
    nothing of it is in the library any more, nor will be.
    """

    def __init__(self, peer: MooncakePeer, pieces: Rows, nbytes: int, deadline_s: float, after: Any) -> None:
        super().__init__("mooncake", peer.label, nbytes, deadline_s)
        self.peer = peer
        self.pieces = pieces
        self.merged = False
        self.after = after
        self.cursor = 0
        self.flights = 0
        self.halted = False
        self.lost = False
        self.left = False
        self.provable = False
        self.held_by: set[Outbound] = set()
        self.through = False
        self.assist: Callable[[MooncakeTransfer], None] | None = None
        self.give_up: Callable[[MooncakeTransfer], None] | None = None

    def poll(self) -> TransferState:
        """See `Transfer.poll`. Past its deadline a transfer is never seen PENDING, whether or not the pump has run."""
        if self.forked:
            return super().poll()
        if not self.final and self.assist is not None:
            self.assist(self)
        state = super().poll()
        if state is TransferState.UNKNOWN and self.provable and self.through and self.peer.dead():
            # The memory it went to is gone with the process. Without the first that would prove nothing: the library
            # connects again to whoever listens there next, and writes on.
            self.set_state(TransferState.FAILED)
        return self.decided()

    def cancel(self) -> None:
        """See `Transfer`."""
        if not (self.forked or self.cancelled or self.give_up is None):
            super().cancel()
            self.give_up(self)

    def set_state(self, state: TransferState) -> None:
        """Move on; DONE and FAILED are final and let go of the arrays."""
        self.settle(state)
        if self.final:
            self.pieces = NO_ROWS
            self.after = self.assist = self.give_up = None


@dataclass(slots=True)
class Flight:
    """One submission in the library."""

    transfer: MooncakeTransfer
    chunk: Chunk
    pieces: int
    nbytes: int
    outbound: Outbound


@dataclass(eq=False, slots=True)
class Outbound:
    """An engine that writes, shared by peers.

    sessions: session -> (epoch, generation) it was opened for; the library never asks again who is there.
    holds: connections under way that will use it.
    forgotten: sessions whose peers were disconnected or lost; their sockets stay until the engine ends.
    unproven: transfers of which it may still read the source; it takes no new peers then, and those it has leave it.
    """

    engine: Engine
    sessions: dict[str, tuple[int, int]] = field(default_factory=dict)
    peers: dict[int, MooncakePeer] = field(default_factory=dict)
    flights: int = 0
    holds: int = 0
    forgotten: int = 0
    unproven: list[MooncakeTransfer] = field(default_factory=list)


class MooncakePeer(Peer):
    """One incarnation of a remote backend.

    waiting, flying: its transfers not yet submitted whole, and its submissions, oldest first. posted, resolved,
    through: how many transfers there were, how many came to DONE or FAILED, and of how many the library has nothing any
    more. suspect: a submission failed, and who is there has not been verified since; nothing is submitted meanwhile.
    moving: it is about to write through another engine.
    home: epoch of the backend whose peer it is.
    """

    def __init__(self, number: int, blob: Blob, outbound: Outbound) -> None:
        self.number = number
        self.home = 0
        self.blob = blob
        self.epoch = blob.epoch
        self.transport = blob.transport
        self.side = Side(blob.segments)
        self.segment_bytes = tuple(one.nbytes for one in blob.segments)
        self.outbound = outbound
        self.waiting: deque[MooncakeTransfer] = deque()
        self.flying: deque[Flight] = deque()
        self.outstanding_pieces = 0
        self.outstanding_bytes = 0
        self.posted = 0
        self.resolved = 0
        self.through = 0
        self.suspect = False
        self.moving = False
        self.verify_at = 0.0
        self.verify_pause_s = 0.5
        self.verify_failures = 0
        self.connected = True
        self.watch = Watch(blob.process)
        self._lost: PdError | None = None
        self._lost_lock = threading.Lock()

    @property
    def label(self) -> str:
        """How errors name it."""
        return f"peer {self.epoch:#x} at {self.blob.session}"

    @property
    def lost(self) -> PdError | None:
        """See `Peer.lost`."""
        if self._lost is None and self.dead():
            self.lose(TransferError("the peer's process has ended", code="peer_lost", where=f"mooncake, {self.label}"))
        return self._lost

    @property
    def found_lost(self) -> PdError | None:
        """What `lost` knows already, without asking the kernel."""
        return self._lost

    def lose(self, error: PdError) -> None:
        """Mark it gone, for good; the first reason stays."""
        with self._lost_lock:
            self._lost = self._lost or error

    def dead(self) -> bool:
        """True when this host's kernel says that the peer's process has ended, all threads of it."""
        return self.watch.gone()
