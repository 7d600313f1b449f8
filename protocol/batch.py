"""What a plan gives a backend: descriptors as arrays beside two tables of region bases.

A backend knows segments and offsets, never layers or kinds. It turns `(region, offset)` into an address of its own with
one table look-up a descriptor, vectorised: `segment_base[table.segment[region]] + table.base[region] + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
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
