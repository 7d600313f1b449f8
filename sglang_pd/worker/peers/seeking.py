"""Lost peers against which decode seeks proof that nothing of theirs lands here any more."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import ClassVar, Final

from sglang_pd.protocol.manifest import InstanceManifest, RankId

MAX_ISSUED: Final = 65_536


class Seeking:
    """By the epoch of a lost peer: the rooms that wait for the proof, the own ranks that have it, and the epochs of the
    peer's ranks.
    """

    def __init__(self) -> None:
        self._settling: dict[int, set[RankId]] = {}
        """Own ranks whose transport may still be in the middle of a proof that is not needed any more."""
        self._rooms: dict[int, set[int]] = {}
        self._proven: dict[int, set[RankId]] = {}
        self._writers: dict[int, frozenset[int]] = {}

    def add(self, peer_epoch: int, room: int) -> bool:
        """A room waits. True for the first with that peer: the ranks have to be asked."""
        rooms = self._rooms.setdefault(peer_epoch, set())
        first = not rooms
        rooms.add(room)
        return first

    def lost(self, peer_epoch: int, manifest: InstanceManifest) -> None:
        """Who wrote as that peer."""
        if peer_epoch in self._rooms:
            self._writers[peer_epoch] = _epochs(manifest)

    def against(self, manifest: InstanceManifest) -> bool:
        """Whether the proof is sought that former writes of one of these ranks land here no more."""
        return any(_epochs(manifest) & writers for writers in self._writers.values())

    def of(self, manifest: InstanceManifest) -> list[int]:
        """Lost peers of just these ranks."""
        return [epoch for epoch, writers in self._writers.items() if writers == _epochs(manifest)]

    def settling_at(self, rank: RankId) -> list[int]:
        """Peers that gave the proof themselves, of which the rank has not answered."""
        return [epoch for epoch, ranks in self._settling.items() if rank in ranks]

    def wrote(self, peer_epoch: int, manifest: InstanceManifest | None) -> bool:
        """Whether an instance may speak for that peer, and has not yet: it has just the ranks that wrote, or, made anew
        in the same process, none of them. None: it does not say which it has; those that wrote, then.
        """
        writers = self._writers.get(peer_epoch, frozenset())
        ranks = _epochs(manifest) if manifest is not None else writers
        return peer_epoch not in self._settling and bool(writers) and (writers == ranks or not writers & ranks)

    def prove(self, peer_epoch: int, rank: RankId) -> list[int]:
        """A rank has the proof; gives the rooms that waited for it."""
        rooms = sorted(self._rooms.get(peer_epoch, ()))
        if rooms:
            self._proven.setdefault(peer_epoch, set()).add(rank)
        return rooms

    def settle(self, peer_epoch: int, ranks: Iterable[RankId]) -> None:
        """The peer itself gives the proof: it is met anew once each of these ranks has `answered`."""
        self._settling[peer_epoch] = set(ranks)

    def answered(self, peer_epoch: int, rank: RankId) -> None:
        """A rank is through with that peer."""
        if (ranks := self._settling.get(peer_epoch)) is not None:
            ranks.discard(rank)
            self._forget(peer_epoch)

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
                self._forget(epoch)

    def _forget(self, peer_epoch: int) -> None:
        if peer_epoch not in self._rooms and not self._settling.get(peer_epoch):
            self._settling.pop(peer_epoch, None)
            self._writers.pop(peer_epoch, None)


class Issued:
    """Epochs under which this side spoke, or offered to, as a prefill: the latest `MAX_ISSUED`."""

    _through: ClassVar[OrderedDict[int, None]] = OrderedDict()
    """Those of former controls of this process that ended when nothing was written any more."""
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._epochs: OrderedDict[int, None] = OrderedDict()

    def leave(self, fenced: Callable[[int], bool]) -> None:
        """This control ends: what it was through with a later one of the process may say."""
        with self._lock:
            self._through.update(dict.fromkeys(epoch for epoch in self._epochs if fenced(epoch)))
            while len(self._through) > MAX_ISSUED:
                self._through.popitem(last=False)

    @classmethod
    def was_through(cls, epoch: int) -> bool:
        """Whether a former control of this process spoke under it, and nothing of that is written any more."""
        with cls._lock:
            return epoch in cls._through

    def add(self, epoch: int) -> None:
        """A conversation begins."""
        self._epochs[epoch] = None
        if len(self._epochs) > MAX_ISSUED:
            self._epochs.popitem(last=False)

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._epochs


def _epochs(manifest: InstanceManifest) -> frozenset[int]:
    return frozenset(rank.epoch for rank in manifest.ranks)
