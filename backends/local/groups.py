"""From a batch to address ranges, one group for each pair of segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_pd.backends.base import batch_addresses
from sglang_pd.backends.local.copy import I64, Ranges
from sglang_pd.backends.sides import Side
from sglang_pd.protocol.batch import WriteBatch


@dataclass(frozen=True)
class HostGroups:
    """Descriptors of a checked batch between host segments. Nothing here is the batch's own array.

    src, dst: int64 addresses of shape [descriptors]. length: int64 bytes. pair: int64, both segments of each.
    """

    src: I64
    dst: I64
    length: I64
    pair: I64
    own: Side
    peer: Side

    @classmethod
    def of(cls, batch: WriteBatch, own: Side, peer: Side) -> HostGroups:
        """Copies everything: who wrote may reuse the batch's arrays at once, and the copier takes its time."""
        src, dst = (addresses.view(np.int64) for addresses in batch_addresses(batch, own.base, peer.base))
        pair = batch.src.segment[batch.src_region].astype(np.int64) * len(peer.devices)
        pair += batch.dst.segment[batch.dst_region]
        return cls(src, dst, batch.length.astype(np.int64), pair, own, peer)

    def split(self) -> list[Ranges]:
        """The ranges of each pair of segments."""
        src, dst, length, pair = self.src, self.dst, self.length, self.pair
        first = int(pair[0])
        if bool((pair == first).all()):
            return [Ranges(src, dst, length, *self._spans(first))]
        groups = []
        for number in np.unique(pair).tolist():
            rows = pair == number
            groups.append(Ranges(src[rows], dst[rows], length[rows], *self._spans(number)))
        return groups

    def _spans(self, pair: int) -> tuple[tuple[int, int], tuple[int, int]]:
        own, peer = divmod(pair, len(self.peer.devices))
        return self.own.span(own), self.peer.span(peer)
