"""The source side's connections: made for each accepted instance, kept while they hold, left once nothing can land.

A library may take seconds to connect (a child process that loads it, a peer that does not answer), and this worker's
other peers must hear from it meanwhile. So nothing here waits: connections are asked after in every `step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sglang_pd.backends.base import Backend, Connecting, Peer
from sglang_pd.protocol.batch import GridBatch
from sglang_pd.protocol.errors import ErrorInfo, PdError, TransferError
from sglang_pd.protocol.manifest import RankId
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.plan import region_numbers
from sglang_pd.worker.ranks.orders import AnyReport, Paired

CONNECT_WITHIN_S = 180.0
"""Longest time in seconds that connecting to an instance may take. Backends that know of a shorter one say so first."""


@dataclass(slots=True)
class Meeting:
    """An accepted destination instance: the pairing, and the backend's peer for each rank that this one writes to."""

    pairing: Pairing
    peers: dict[RankId, Peer]
    fault: bool = False
    kinds: dict[RankId, dict[int, str]] = field(default_factory=dict)
    """By destination rank, the kind of each of its regions."""

    def moved(self, dst: RankId, batch: GridBatch) -> Iterator[tuple[str, int, int]]:
        """Kind, bytes and descriptors of each grid of a batch for one destination rank."""
        if dst not in self.kinds:
            numbers = region_numbers(self.pairing.decode.rank(dst))
            self.kinds[dst] = {number: kind for kind, regions in numbers.items() for number, _ in regions.values()}
        for grid in batch.grids:
            yield self.kinds[dst][int(grid.dst_region[0])], grid.total_bytes, len(grid)


@dataclass(slots=True)
class _Approach:
    """An instance to whose ranks connections are being made. until_s: when that is given up. peers: those that stand.
    made: those among them that were made for this."""

    pairing: Pairing
    until_s: float
    peers: dict[RankId, Peer] = field(default_factory=dict)
    made: list[Peer] = field(default_factory=list)
    connecting: dict[RankId, Connecting] = field(default_factory=dict)

    def advance(self) -> bool:
        """True when every rank is connected. Raises what a connection raises."""
        for rank, connecting in list(self.connecting.items()):
            peer = connecting.poll()
            if peer is not None:
                del self.connecting[rank]
                self.peers[rank] = peer
                self.made.append(peer)
        if self.connecting and time.monotonic() > self.until_s:
            raise TransferError(
                "the backend did not connect in time",
                code="peer_lost",
                where=", ".join(f"rank {rank}" for rank in self.connecting),
                expected=f"within {CONNECT_WITHIN_S:g} s",
            )
        return not self.connecting


class Meetings:
    """Instances by epoch. All methods are called by the rank's control thread.

    met: told when connecting to an instance has ended, well or not, or was given up.
    """

    def __init__(
        self, rank: RankId, backend: Backend, report: Callable[[AnyReport], None], met: Callable[[int], None]
    ) -> None:
        self._rank, self._backend, self._report, self._met = rank, backend, report, met
        self._meetings: dict[int, Meeting] = {}
        self._approaches: dict[int, _Approach] = {}
        self._leaving: list[Peer] = []

    def get(self, peer_epoch: int) -> Meeting | None:
        """The instance, once connected."""
        return self._meetings.get(peer_epoch)

    def approaching(self, peer_epoch: int) -> bool:
        """True while connections to it are being made, for the first time or anew."""
        return peer_epoch in self._approaches

    def pair(self, peer_epoch: int, pairing: Pairing) -> None:
        """Connect to every destination rank that this rank has bytes for; connections that still hold are kept.

        Answered by `Paired`, at once or by a later `step`. Where it fails, the former connections stand.
        """
        self._turn_back(peer_epoch)
        before = self._meetings.get(peer_epoch)
        approach = self._approaches[peer_epoch] = _Approach(pairing, time.monotonic() + CONNECT_WITHIN_S)
        try:
            for dst in pairing.decode.ranks:
                if not pairing.plan(self._rank, dst.rank).moves:
                    continue
                kept = before.peers.get(dst.rank) if before else None
                if before and kept and before.pairing.decode.rank(dst.rank).transport == dst.transport:
                    approach.peers[dst.rank] = kept
                else:
                    connecting = self._backend.start_connect(dst.transport.connect, dst.epoch)
                    approach.connecting[dst.rank] = connecting
        except Exception as error:
            self._fail(peer_epoch, error)
            return
        self._advance(peer_epoch, approach)

    def _advance(self, peer_epoch: int, approach: _Approach) -> None:
        try:
            if not approach.advance():
                return
        except Exception as error:
            self._fail(peer_epoch, error)
            return
        del self._approaches[peer_epoch]
        before = self._meetings.get(peer_epoch)
        if before:
            self._leaving.extend(peer for peer in before.peers.values() if peer not in approach.peers.values())
        self._meetings[peer_epoch] = Meeting(approach.pairing, approach.peers)
        carried = sorted({peer.transport for peer in approach.peers.values()})
        self._report(Paired(peer_epoch=peer_epoch, transport=" ".join(carried)))
        self._met(peer_epoch)

    def _fail(self, peer_epoch: int, error: Exception) -> None:
        self._turn_back(peer_epoch)
        self._report(Paired(peer_epoch=peer_epoch, error=info_of(error)))
        self._met(peer_epoch)

    def _turn_back(self, peer_epoch: int) -> None:
        approach = self._approaches.pop(peer_epoch, None)
        if approach is not None:
            self._leaving.extend(approach.made)
            for connecting in approach.connecting.values():
                connecting.cancel()

    def unpair(self, peer_epoch: int) -> None:
        """Forget an instance, and give up connecting to it."""
        approaching = peer_epoch in self._approaches
        self._turn_back(peer_epoch)
        meeting = self._meetings.pop(peer_epoch, None)
        if meeting:
            self._leaving.extend(meeting.peers.values())
        if approaching:
            self._met(peer_epoch)

    def keep(self, peers: frozenset[int]) -> None:
        """Forget every instance but these."""
        for peer_epoch in {*self._approaches, *self._meetings} - peers:
            self.unpair(peer_epoch)

    def unpair_all(self) -> None:
        """Forget every instance."""
        self.keep(frozenset())

    def step(self, in_flight_to: Callable[[], set[int]]) -> bool:
        """Ask after connections; leave peers that nothing is in flight to (`id` of each that something is).

        True while connections are being made.
        """
        for peer_epoch, approach in list(self._approaches.items()):
            self._advance(peer_epoch, approach)
        if self._leaving:
            flying = in_flight_to()
            for peer in [peer for peer in self._leaving if id(peer) not in flying]:
                self._leaving.remove(peer)
                self._backend.disconnect(peer)
        return bool(self._approaches)


def info_of(error: Exception) -> ErrorInfo:
    """What an exception says, as it travels; `internal` for one that is a defect."""
    if isinstance(error, PdError):
        return error.info()
    return ErrorInfo(code="internal", message=f"{type(error).__name__}: {error}"[:2000])
