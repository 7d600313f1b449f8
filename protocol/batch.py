"""What a plan gives a backend: descriptors as arrays beside two tables of region bases.

A backend knows segments and offsets, never layers or kinds. It turns `(region, offset)` into an address of its own with
one table look-up a descriptor, vectorised: `segment_base[table.segment[region]] + table.base[region] + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.errors import BackendError

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RegionTable:
    """Where each region of one rank lies. All arrays have shape [regions].

    segment: uint32, number of the segment in its owner's segment table.
    base: uint64, bytes from the segment's start to the region's first byte.
    size_bytes: uint64, bytes from `base` that belong to the region, padding between items included.
    """

    segment: U32
    base: U64
    size_bytes: U64

    def __post_init__(self) -> None:
        """Raises `BackendError` (`segment_invalid`) where shapes or dtypes are others."""
        shape = (self.segment.shape[0] if self.segment.ndim else 0,)
        wanted = (
            ("segment", self.segment, np.uint32),
            ("base", self.base, np.uint64),
            ("size_bytes", self.size_bytes, np.uint64),
        )
        for name, array, dtype in wanted:
            if array.shape != shape or array.dtype != dtype:
                raise BackendError(
                    "a region table's arrays differ in shape or dtype",
                    code="segment_invalid",
                    where=f"RegionTable.{name}",
                    expected=f"shape {list(shape)}, {np.dtype(dtype)}",
                    actual=f"shape {list(array.shape)}, {array.dtype}",
                )


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Descriptors as an outer product: one for each pair of an entry (a region interval) and a block (a run of rows).

    src_region, dst_region: uint32 [entries]. src_inner, dst_inner: uint64 [entries], bytes. src_block, dst_block:
    uint64 [blocks], bytes; an offset is inner + block. The length is `block_length` (uint64 [blocks]), or, where
    `entry_length` (uint64 [entries]) is given, that. Order: entry by entry, block by block.
    """

    src_region: U32
    dst_region: U32
    src_inner: U64
    dst_inner: U64
    src_block: U64
    dst_block: U64
    block_length: U64
    entry_length: U64 | None = None

    def __len__(self) -> int:
        return int(self.src_region.shape[0] * self.src_block.shape[0])

    @property
    def total_bytes(self) -> int:
        """Bytes of all descriptors."""
        if self.entry_length is not None:
            return int(self.entry_length.sum(dtype=np.uint64)) * len(self.src_block)
        return int(self.block_length.sum(dtype=np.uint64)) * len(self.src_region)


@dataclass(frozen=True)
class WriteBatch:
    """Descriptors of one write: copy `length[i]` bytes from source to destination, for each i, in no promised order.

    All arrays have shape [descriptors]; `src_region` and `dst_region` are uint32 rows of `src` and `dst`; `src_offset`,
    `dst_offset` (from the region's base) and `length` are uint64 bytes. `length` is never 0. Destination ranges do not
    overlap one another.
    """

    src: RegionTable
    dst: RegionTable
    src_region: U32
    src_offset: U64
    dst_region: U32
    dst_offset: U64
    length: U64

    def __len__(self) -> int:
        return int(self.length.shape[0])

    @property
    def total_bytes(self) -> int:
        """Bytes moved by the whole batch."""
        return int(self.length.sum(dtype=np.uint64)) if len(self) else 0

    def src_addresses(self) -> tuple[U32, U64]:
        """Source segment number (uint32) and byte offset within it (uint64), each of shape [descriptors]."""
        return self.src.segment[self.src_region], self.src.base[self.src_region] + self.src_offset

    def dst_addresses(self) -> tuple[U32, U64]:
        """Destination segment number (uint32) and byte offset within it (uint64), each of shape [descriptors]."""
        return self.dst.segment[self.dst_region], self.dst.base[self.dst_region] + self.dst_offset


class GridBatch(WriteBatch):
    """A batch that a plan gives: grids, from which the arrays are made when they are first asked for.

    A backend that can work on the grids themselves never pays for the arrays; to all others it is any batch.
    """

    def __init__(self, src: RegionTable, dst: RegionTable, grids: tuple[Grid, ...]) -> None:
        object.__setattr__(self, "src", src)
        object.__setattr__(self, "dst", dst)
        object.__setattr__(self, "grids", grids)

    grids: tuple[Grid, ...]

    def __len__(self) -> int:
        return sum(len(grid) for grid in self.grids)

    @property
    def total_bytes(self) -> int:
        """Bytes moved by the whole batch."""
        return sum(grid.total_bytes for grid in self.grids)

    @cached_property
    def arrays(self) -> Descriptors:
        """All descriptors, one by one."""
        return expand(self.grids)

    @property
    def src_region(self) -> U32:
        """See `WriteBatch`."""
        return self.arrays.src_region

    @property
    def src_offset(self) -> U64:
        """See `WriteBatch`."""
        return self.arrays.src_offset

    @property
    def dst_region(self) -> U32:
        """See `WriteBatch`."""
        return self.arrays.dst_region

    @property
    def dst_offset(self) -> U64:
        """See `WriteBatch`."""
        return self.arrays.dst_offset

    @property
    def length(self) -> U64:
        """See `WriteBatch`."""
        return self.arrays.length


class Descriptor(NamedTuple):
    """One descriptor as plain numbers; fields and units as in `WriteBatch`."""

    src_region: int
    src_offset: int
    dst_region: int
    dst_offset: int
    length: int


def single(batch: WriteBatch) -> Descriptor | None:
    """The only descriptor of a batch, without making arrays; None where there are others, or where the batch is not as
    `WriteBatch` says. Latency is measured with one, and a dozen array operations cost more than its copy.
    """
    if not isinstance(batch, GridBatch):
        src, dst, nbytes = batch.src_offset, batch.dst_offset, batch.length
        if not _ones((batch.src_region, batch.dst_region), (src, dst, nbytes)):
            return None
        return Descriptor(batch.src_region.item(), src.item(), batch.dst_region.item(), dst.item(), nbytes.item())
    if len(batch.grids) != 1:
        return None
    grid = batch.grids[0]
    length = grid.block_length if grid.entry_length is None else grid.entry_length
    offsets = (grid.src_inner, grid.src_block, grid.dst_inner, grid.dst_block, length)
    if not _ones((grid.src_region, grid.dst_region), offsets) or grid.block_length.shape != (1,):
        return None
    return Descriptor(
        grid.src_region.item(),
        grid.src_inner.item() + grid.src_block.item(),
        grid.dst_region.item(),
        grid.dst_inner.item() + grid.dst_block.item(),
        length.item(),
    )


_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)


def _ones(regions: tuple[U32, ...], offsets: tuple[U64, ...]) -> bool:
    """Whether every array has one element, of its dtype."""
    for one in regions:
        if one.dtype is not _U32 or one.shape != (1,):
            return False
    for other in offsets:
        if other.dtype is not _U64 or other.shape != (1,):
            return False
    return True


class Descriptors(NamedTuple):
    """The arrays of a batch, one element a descriptor; dtypes and units as in `WriteBatch`."""

    src_region: U32
    src_offset: U64
    dst_region: U32
    dst_offset: U64
    length: U64


def expand(grids: tuple[Grid, ...]) -> Descriptors:
    """All descriptors of the grids, in order, by broadcasting."""
    total = sum(len(grid) for grid in grids)
    src_region, dst_region = np.empty(total, np.uint32), np.empty(total, np.uint32)
    src_offset, dst_offset, length = (np.empty(total, np.uint64) for _ in range(3))
    at = 0
    for grid in grids:
        shape = (grid.src_region.shape[0], grid.src_block.shape[0])
        part = slice(at, at + len(grid))
        src_region[part].reshape(shape)[:] = grid.src_region[:, None]
        dst_region[part].reshape(shape)[:] = grid.dst_region[:, None]
        np.add(grid.src_inner[:, None], grid.src_block, out=src_offset[part].reshape(shape))
        np.add(grid.dst_inner[:, None], grid.dst_block, out=dst_offset[part].reshape(shape))
        length[part].reshape(shape)[:] = grid.block_length if grid.entry_length is None else grid.entry_length[:, None]
        at = part.stop
    return Descriptors(src_region, src_offset, dst_region, dst_offset, length)


def check_ranges(segment: U32, offset: U64, length: U64, segment_bytes: U64, *, side: str, peer: str) -> None:
    """Refuse descriptors that leave their segment, by arithmetic that cannot wrap.

    `segment_bytes` has shape [segments]: the length of each registered segment. Raises `BackendError` with code
    `segment_invalid` naming the first offending descriptor.
    """
    if not length.shape[0]:
        return
    if int(segment.max()) >= segment_bytes.shape[0]:
        first = int(np.argmax(segment >= segment_bytes.shape[0]))
        raise BackendError(
            "a descriptor names a segment that is not registered",
            code="segment_invalid",
            where=f"{side} of peer {peer}, descriptor {first}",
            expected=f"segment < {segment_bytes.shape[0]}",
            actual=int(segment[first]),
        )
    limit = segment_bytes[segment]
    bad = (length > limit) | (offset > limit - np.minimum(length, limit)) | (length == 0)
    if bad.any():
        first = int(np.argmax(bad))
        raise BackendError(
            "a descriptor is empty or runs past its segment",
            code="segment_invalid",
            where=f"{side} of peer {peer}, descriptor {first}, segment {int(segment[first])}",
            expected=f"0 < length and offset + length <= {int(limit[first])} bytes",
            actual=f"offset {int(offset[first])}, length {int(length[first])} bytes",
        )
