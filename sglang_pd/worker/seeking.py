"""Lost peers against which decode seeks proof that nothing of theirs lands here any more."""

from __future__ import annotations

from sglang_pd.protocol.manifest import RankId


class Seeking:
    """By the epoch of a lost peer: the rooms that wait for the proof, and the own ranks that have it."""

    def __init__(self) -> None:
        self._rooms: dict[int, set[int]] = {}
        self._proven: dict[int, set[RankId]] = {}

    def add(self, peer_epoch: int, room: int) -> bool:
        """A room waits. True for the first with that peer: the ranks have to be asked."""
        rooms = self._rooms.setdefault(peer_epoch, set())
        first = not rooms
        rooms.add(room)
        return first

    def prove(self, peer_epoch: int, rank: RankId) -> list[int]:
        """A rank has the proof; gives the rooms that waited for it."""
        rooms = sorted(self._rooms.get(peer_epoch, ()))
        if rooms:
            self._proven.setdefault(peer_epoch, set()).add(rank)
        return rooms

    def proven(self, peer_epoch: int) -> list[RankId]:
        """Ranks that have it."""
        return sorted(self._proven.get(peer_epoch, ()))

    def open(self, peer_epoch: int) -> bool:
        """Whether a room waits."""
        return peer_epoch in self._rooms

    def open_at(self, rank: RankId) -> list[int]:
        """Peers that the rank has no proof against."""
        return [epoch for epoch in self._rooms if rank not in self._proven.get(epoch, ())]

    def drop(self, room: int) -> None:
        """A room waits no more; with its last one a peer is forgotten."""
        for epoch, rooms in list(self._rooms.items()):
            rooms.discard(room)
            if not rooms:
                del self._rooms[epoch]
                self._proven.pop(epoch, None)
