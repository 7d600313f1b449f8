"""Which conversation speaks for a rank: one at a time, since two would write into one memory for two owners' rooms."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from sglang_pd.protocol.errors import RemoteProtocolError
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.worker.peers.conversation import Conversation

MAX_CHANGED: Final = 65_536
"""Ranks of which is kept when their conversation last changed."""


class Speakers:
    """Agreed conversations by the epochs of their peers' ranks."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Conversation] = {}
        self.changes = 0
        """How often a conversation got or gave up its ranks: the time by which `changed` goes."""
        self._changed: OrderedDict[int, int] = OrderedDict()
        self._forgotten = 0
        """The latest change that is not in there any more."""

    def add(self, talk: Conversation) -> None:
        """It was agreed, or goes on with another manifest."""
        ranks = _epochs(talk.manifest) if talk.manifest is not None else []
        self._by_rank.update(dict.fromkeys(ranks, talk))
        self._note(ranks)

    def remove(self, talk: Conversation) -> None:
        """It is over, or about to go on with another manifest."""
        ranks = _epochs(talk.manifest) if talk.manifest is not None else []
        had = [epoch for epoch in ranks if self._by_rank.get(epoch) is talk]
        for epoch in had:
            del self._by_rank[epoch]
        self._note(had)

    def _note(self, ranks: list[int]) -> None:
        self.changes += 1
        for epoch in ranks:
            self._changed[epoch] = self.changes
            self._changed.move_to_end(epoch)
        while len(self._changed) > MAX_CHANGED:
            self._forgotten = self._changed.popitem(last=False)[1]

    def changed(self, manifest: InstanceManifest, since: int) -> bool:
        """Whether one of these ranks got or lost its conversation after that many `changes`."""
        return any(self._changed.get(rank.epoch, self._forgotten) > since for rank in manifest.ranks)

    def same(self, manifest: InstanceManifest) -> Conversation | None:
        """The conversation of exactly these ranks."""
        other = self._by_rank.get(manifest.epoch)
        if other is None or other.manifest is None:
            return None
        return other if _epochs(other.manifest) == _epochs(manifest) else None

    def check(self, talk: Conversation, stated: InstanceManifest, own: InstanceManifest) -> None:
        """Refuse ranks that another conversation than `talk`, or this instance itself, speaks for.

        Raises `RemoteProtocolError` (`peer_duplicate`) naming both.
        """
        ours = _epochs(own)
        for rank in stated.ranks:
            other = self._by_rank.get(rank.epoch)
            if rank.epoch not in ours and (other is None or other is talk):
                continue
            holder = other.instance if other is not None else own.instance_id
            raise RemoteProtocolError(
                "a rank of that manifest speaks in another conversation, which stands",
                code="peer_duplicate",
                where=stated.instance_id,
                expected="ranks of its own",
                actual=f"rank {rank.rank} (epoch {rank.epoch:016x}) of {holder}",
                hint="After a broken connection it comes in once the former conversation is given up.",
                conversation=f"{other.epoch if other is not None else 0:016x}",
            )


def _epochs(manifest: InstanceManifest) -> list[int]:
    return [rank.epoch for rank in manifest.ranks]
