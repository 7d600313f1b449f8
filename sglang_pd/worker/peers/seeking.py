"""Lost peers against which decode seeks proof that nothing of theirs lands here any more."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import Annotated, ClassVar, Final

import msgspec

from sglang_pd.protocol.manifest import InstanceManifest, RankId, Term
from sglang_pd.protocol.manifest_size import MAX_RANKS

MAX_ISSUED: Final = 65_536


class Owed(msgspec.Struct, frozen=True, kw_only=True):
    """A source instance that a control which is gone let write into an own rank's memory, and against which the rank
    has no proof of its own. address: where it was called. writers: its ranks by their epochs, in the terms in which
    they wrote.
    """

    peer_epoch: Annotated[int, msgspec.Meta(ge=0)]
    address: Annotated[str, msgspec.Meta(max_length=512)]
    instance: Annotated[str, msgspec.Meta(max_length=64)]
    writers: Annotated[dict[Annotated[int, msgspec.Meta(ge=0)], Term], msgspec.Meta(max_length=MAX_RANKS)]


class Seeking:
    """By the epoch of a lost peer: who waits for the proof (rooms; own ranks that a former control left with it), the
    own ranks that have it, and the epochs of the peer's ranks, in the terms in which they wrote.
    """

    def __init__(self) -> None:
        self._settling: dict[int, set[RankId]] = {}
        """Own ranks whose transport may still be in the middle of a proof that is not needed any more."""
        self._rooms: dict[int, set[int]] = {}
        self._owed: dict[int, tuple[Owed, set[RankId]]] = {}
        self._proven: dict[int, set[RankId]] = {}
        self._writers: dict[int, dict[int, Term]] = {}
        self._ended: dict[int, set[int]] = {}
        """By lost peer, those of its ranks that were seen to have ended what they wrote as it."""

    def add(self, peer_epoch: int, room: int) -> bool:
        """A room waits. True for the first with that peer: the ranks have to be asked."""
        rooms = self._rooms.setdefault(peer_epoch, set())
        first = not rooms
        rooms.add(room)
        return first

    def lost(self, peer_epoch: int, manifest: InstanceManifest) -> None:
        """Who wrote as that peer."""
        if peer_epoch in self._rooms:
            self._writers[peer_epoch] = {rank.epoch: rank.term for rank in manifest.ranks}

    def owe(self, rank: RankId, owed: Iterable[Owed]) -> None:
        """An own rank came from a former control, whose peers may still write into it: these, and no others more."""
        now = {one.peer_epoch: one for one in owed}
        for epoch in [epoch for epoch in self._owed if epoch not in now]:
            self._pay(epoch, rank)
        for epoch, one in now.items():
            self._owed.setdefault(epoch, (one, set()))[1].add(rank)
            self._writers.setdefault(epoch, dict(one.writers))

    @property
    def owed(self) -> list[Owed]:
        """Those against whom an own rank was left without a proof: until they are gone no room may have its memory."""
        return [one for one, _ in self._owed.values()]

    def _pay(self, peer_epoch: int, rank: RankId) -> None:
        if (owed := self._owed.get(peer_epoch)) is not None:
            owed[1].discard(rank)
            if not owed[1]:
                del self._owed[peer_epoch]
                self._forget(peer_epoch)

    def against(self, manifest: InstanceManifest) -> bool:
        """Whether the proof is sought that former writes of one of these ranks land here no more, and the rank does not
        give it by what it states here.
        """
        terms = {rank.epoch: rank.term for rank in manifest.ranks}
        sought = [(epoch, term) for writers in self._writers.values() for epoch, term in writers.items()]
        return any(epoch in terms and not terms[epoch].ended(term) for epoch, term in sought)

    def of(self, manifest: InstanceManifest) -> list[int]:
        """Lost peers of just these ranks."""
        return [epoch for epoch, writers in self._writers.items() if writers.keys() == _epochs(manifest)]

    def ended_by(self, manifest: InstanceManifest) -> dict[int, tuple[int, ...]]:
        """By lost peer, those of its ranks that have gone over to another control since, and ended their writes before:
        their manifest says so, whoever shows it and when.
        """
        terms = {rank.epoch: rank.term for rank in manifest.ranks}
        found = {
            peer: tuple(epoch for epoch, term in writers.items() if terms.get(epoch, Term()).ended(term))
            for peer, writers in self._writers.items()
        }
        found = {peer: epochs for peer, epochs in found.items() if epochs}
        for peer, epochs in found.items():
            self._ended.setdefault(peer, set()).update(epochs)
        return found

    @property
    def ended(self) -> dict[int, tuple[int, ...]]:
        """All of which `ended_by` ever said so; what a rank that missed it has to be told again."""
        return {peer: tuple(sorted(epochs)) for peer, epochs in self._ended.items()}

    @property
    def sought(self) -> bool:
        """Whether any proof is."""
        return bool(self._rooms or self._owed)

    def settling_at(self, rank: RankId) -> list[int]:
        """Peers that gave the proof themselves, of which the rank has not answered."""
        return [epoch for epoch, ranks in self._settling.items() if rank in ranks]

    def wrote(self, peer_epoch: int, manifest: InstanceManifest | None) -> bool:
        """Whether an instance may speak for that peer, and has not yet: it has just the ranks that wrote, or, made anew
        in the same process, none of them. None: it does not say which it has; those that wrote, then.
        """
        writers = frozenset(self._writers.get(peer_epoch, ()))
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
        self._pay(peer_epoch, rank)
        if (ranks := self._settling.get(peer_epoch)) is not None:
            ranks.discard(rank)
            self._forget(peer_epoch)

    def proven(self, peer_epoch: int) -> list[RankId]:
        """Ranks that have it."""
        return sorted(self._proven.get(peer_epoch, ()))

    def open(self, peer_epoch: int) -> bool:
        """Whether a room waits, or an own rank."""
        return peer_epoch in self._rooms or peer_epoch in self._owed

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
        if not self.open(peer_epoch) and not self._settling.get(peer_epoch):
            self._settling.pop(peer_epoch, None)
            self._writers.pop(peer_epoch, None)
            self._ended.pop(peer_epoch, None)


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

    def fenced(self, lost: Iterable[int], speaking: Container[int], through: Callable[[int], bool]) -> tuple[int, ...]:
        """Of what decode lost, what this side is through with: it went by that epoch, and does no more; no room is left
        (`through`). Of another control's epochs it knows nothing, whose ranks may still write.
        """
        own = {epoch for epoch in lost if epoch in self._epochs and epoch not in speaking}
        return tuple(epoch for epoch in lost if self.was_through(epoch) or (epoch in own and through(epoch)))

    def add(self, epoch: int) -> None:
        """A conversation begins."""
        self._epochs[epoch] = None
        if len(self._epochs) > MAX_ISSUED:
            self._epochs.popitem(last=False)


def _epochs(manifest: InstanceManifest) -> frozenset[int]:
    return frozenset(rank.epoch for rank in manifest.ranks)
