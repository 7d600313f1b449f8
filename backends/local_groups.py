"""From a batch to address ranges, one group for each pair of segments."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from sglang_pd.backends.base import place
from sglang_pd.backends.local_copy import Ranges
from sglang_pd.protocol.batch import U64, WriteBatch, single


@dataclass(frozen=True)
class HostGroups:
    """A checked batch between host segments.

    addresses: source and destination, uint64 of shape [descriptors]. own, peer: base address and length of each
    segment, uint64 of shape [segments].
    """

    batch: WriteBatch
    addresses: tuple[U64, U64]
    own: tuple[U64, U64]
    peer: tuple[U64, U64]

    def split(self) -> list[Ranges]:
        """The ranges of each pair of segments."""
        batch = self.batch
        src, dst = (addresses.view(np.int64) for addresses in self.addresses)
        length = batch.length.view(np.int64)
        count = self.peer[0].shape[0]
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
        own, peer = divmod(pair, self.peer[0].shape[0])
        src, dst = int(self.own[0][own]), int(self.peer[0][peer])
        return (src, src + int(self.own[1][own])), (dst, dst + int(self.peer[1][peer]))


def copy_one(batch: WriteBatch, most_bytes: int, own: tuple[U64, U64], peer: tuple[U64, U64]) -> int:
    """Copy the only descriptor of a batch, in the calling thread: bytes copied.

    0, and nothing is done, where the batch has others, or longer ones than `most_bytes`, or where the descriptor is not
    plainly inside: that is judged by `check_batch`. own, peer: as in `HostGroups`.
    """
    one = single(batch)
    if one is None or one.length > most_bytes:
        return 0
    source = place(batch.src, one.src_region, one.src_offset, one.length, own[1])
    target = place(batch.dst, one.dst_region, one.dst_offset, one.length, peer[1])
    if source is None or target is None:
        return 0
    ctypes.memmove(int(peer[0][target[0]]) + target[1], int(own[0][source[0]]) + source[1], one.length)
    return one.length
