"""From a batch to address ranges, one group for each pair of segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_pd.backends.local_copy import Ranges
from sglang_pd.backends.sides import Side
from sglang_pd.protocol.batch import U64, WriteBatch


@dataclass(frozen=True)
class HostGroups:
    """A checked batch between host segments.

    addresses: source and destination, uint64 of shape [descriptors].
    """

    batch: WriteBatch
    addresses: tuple[U64, U64]
    own: Side
    peer: Side

    def split(self) -> list[Ranges]:
        """The ranges of each pair of segments."""
        batch = self.batch
        src, dst = (addresses.view(np.int64) for addresses in self.addresses)
        length = batch.length.view(np.int64)
        count = len(self.peer.devices)
        pair = batch.src.segment[batch.src_region].astype(np.int64) * count + batch.dst.segment[batch.dst_region]
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
