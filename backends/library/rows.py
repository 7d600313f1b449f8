"""Descriptors on their way to a library: neighbours merged, long ones cut, handed over in bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import batch_addresses
from sglang_pd.protocol.batch import I64, U32, U64, WriteBatch


@dataclass(slots=True)
class Rows:
    """Descriptors of a checked batch, all arrays of shape [rows].

    src, dst: uint64, addresses, or byte offsets in their segments where both sides' bases are 0. length: uint64 bytes.
    src_segment, dst_segment: uint32 segment numbers.
    """

    src: U64
    dst: U64
    length: U64
    src_segment: U32
    dst_segment: U32

    @classmethod
    def of(cls, batch: WriteBatch, own_base: U64, peer_base: U64) -> Rows:
        """Copies everything: the caller may reuse the batch's arrays at once. Bases as for `batch_addresses`."""
        src, dst = batch_addresses(batch, own_base, peer_base)
        segments = batch.src.segment[batch.src_region], batch.dst.segment[batch.dst_region]
        return cls(src, dst, batch.length.copy(), *segments)

    @classmethod
    def single(cls, src: tuple[int, int], dst: tuple[int, int], nbytes: int) -> Rows:
        """One row; `src` and `dst`: address and segment number."""
        wide, narrow = np.uint64, np.uint32
        return cls(
            np.array([src[0]], wide),
            np.array([dst[0]], wide),
            np.array([nbytes], wide),
            np.array([src[1]], narrow),
            np.array([dst[1]], narrow),
        )

    def __len__(self) -> int:
        return int(self.length.shape[0])

    def take(self, rows: I64 | slice, length: U64 | None = None) -> Rows:
        """Some of the rows, by index or slice; with other lengths if given."""
        return Rows(
            self.src[rows],
            self.dst[rows],
            self.length[rows] if length is None else length,
            self.src_segment[rows],
            self.dst_segment[rows],
        )

    def pair_changes(self) -> NDArray[np.bool_]:
        """Whether row i + 1 has another pair of segments than row i; shape [rows - 1]."""
        changes: NDArray[np.bool_] = self.src_segment[:-1] != self.src_segment[1:]
        changes |= self.dst_segment[:-1] != self.dst_segment[1:]
        return changes

    def grouped(self) -> Rows:
        """Rows of one pair of segments stand together, otherwise in their order."""
        if not self.pair_changes().any():
            return self
        pair = self.src_segment.astype(np.uint64) << np.uint64(32) | self.dst_segment
        return self.take(np.argsort(pair, kind="stable"))

    def by_destination(self) -> Rows:
        """Rows by ascending destination, otherwise in their order."""
        if not (self.dst[1:] < self.dst[:-1]).any():
            return self
        return self.take(np.argsort(self.dst, kind="stable"))

    def merged(self) -> Rows:
        """Neighbours that continue each other on both sides, within one segment each, become one row."""
        if len(self) < 2:
            return self
        apart = self.src[:-1] + self.length[:-1] != self.src[1:]
        if apart.all():
            return self
        apart |= self.dst[:-1] + self.length[:-1] != self.dst[1:]
        apart |= self.pair_changes()
        if apart.all():
            return self
        first = np.flatnonzero(np.concatenate(([True], apart)))
        return self.take(first, np.add.reduceat(self.length, first, dtype=np.uint64))

    def cut(self, limit_bytes: int) -> Rows:
        """Rows longer than `limit_bytes` become several."""
        limit = np.uint64(limit_bytes)
        if int(self.length.max()) <= limit_bytes:
            return self
        parts = ((self.length + (limit - np.uint64(1))) // limit).astype(np.int64)
        row = np.repeat(np.arange(parts.shape[0]), parts)
        part = (np.arange(row.shape[0]) - np.repeat(np.cumsum(parts) - parts, parts)).astype(np.uint64)
        skip = part * limit
        taken = self.take(row, np.minimum(self.length[row] - skip, limit))
        taken.src, taken.dst = taken.src + skip, taken.dst + skip
        return taken

    def slices(self, most_rows: int, most_bytes: int, *, one_pair: bool = False) -> Iterator[Rows]:
        """The rows in order, at most so many rows and bytes at a time (a longer row stands alone); `one_pair`: of one
        pair of segments each."""
        total = np.cumsum(self.length)
        ends = [*(np.flatnonzero(self.pair_changes()) + 1).tolist()] if one_pair else []
        start = 0
        for border in [*ends, len(self)]:
            while start < border:
                done = int(total[start - 1]) if start else 0
                end = int(np.searchsorted(total, np.uint64(done + most_bytes), "right"))
                end = min(max(end, start + 1), start + most_rows, border)
                yield self.take(slice(start, end))
                start = end


_NONE = np.zeros(0, np.uint64)
NO_ROWS = Rows(_NONE, _NONE, _NONE, _NONE.astype(np.uint32), _NONE.astype(np.uint32))
