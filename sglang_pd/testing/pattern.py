"""Batches with known outcomes: descriptors drawn from a seed, and the image a destination must show afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.batch import RegionTable, WriteBatch

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

CANARY = 0xC5
"""What a destination holds before a case writes to it."""


@dataclass(frozen=True)
class Ranges:
    """One side of a batch: segment number and byte offset in it, int64 of shape [descriptors]."""

    segment: Ints
    offset: Ints


def region_table(sizes: Sequence[int]) -> RegionTable:
    """Three regions a segment: the whole, and two that overlap it and start off its beginning."""
    rows = []
    for number, size in enumerate(sizes):
        third = size // 3
        rows += [(number, 0, size), (number, third, size - third), (number, 2 * third + 1, size - 2 * third - 1)]
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return RegionTable(table[:, 0].astype(np.uint32), table[:, 1].copy(), table[:, 2].copy())


def make_batch(
    src: Ranges, dst: Ranges, length: Ints, src_sizes: Sequence[int], dst_sizes: Sequence[int]
) -> WriteBatch:
    """A batch over `region_table` of both sides. Each range is named through the last region that starts before it."""
    src_region, src_offset = _locate(src, src_sizes)
    dst_region, dst_offset = _locate(dst, dst_sizes)
    return WriteBatch(
        src=region_table(src_sizes),
        dst=region_table(dst_sizes),
        src_region=src_region,
        src_offset=src_offset,
        dst_region=dst_region,
        dst_offset=dst_offset,
        length=length.astype(np.uint64),
    )


def _locate(side: Ranges, sizes: Sequence[int]) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    base = region_table(sizes).base.astype(np.int64).reshape(-1, 3)[side.segment]
    which = (side.offset[:, None] >= base).sum(axis=1) - 1
    offset = side.offset - base[np.arange(len(which)), which]
    return (side.segment * 3 + which).astype(np.uint32), offset.astype(np.uint64)


def pages(seed: int, count: int, page_bytes: int, src_sizes: Sequence[int], dst_sizes: Sequence[int]) -> WriteBatch:
    """`count` pages of `page_bytes`, drawn without repetition and permuted on both sides."""
    rng = np.random.default_rng(seed)
    src = _draw_pages(rng, count, page_bytes, src_sizes)
    dst = _draw_pages(rng, count, page_bytes, dst_sizes)
    return make_batch(src, dst, np.full(count, page_bytes, np.int64), src_sizes, dst_sizes)


def _draw_pages(rng: np.random.Generator, count: int, page_bytes: int, sizes: Sequence[int]) -> Ranges:
    slots = [size // page_bytes for size in sizes]
    if sum(slots) < count:
        raise ValueError(f"{count} pages of {page_bytes} bytes do not fit in {list(sizes)}")
    chosen = rng.permutation(sum(slots))[:count]
    first = np.concatenate([[0], np.cumsum(slots)])
    segment = np.searchsorted(first, chosen, side="right") - 1
    return Ranges(segment.astype(np.int64), ((chosen - first[segment]) * page_bytes).astype(np.int64))


def fragments(
    seed: int, count: int, src_sizes: Sequence[int], dst_sizes: Sequence[int], align: int = 1, limit: int = 1 << 62
) -> WriteBatch:
    """`count` pieces of mixed length (at most `limit`), at any multiple of `align` bytes on both sides."""
    rng = np.random.default_rng(seed)
    room = max(range(len(dst_sizes)), key=lambda number: dst_sizes[number])
    points = np.sort(rng.permutation(dst_sizes[room] // align - 1)[: 2 * count] + 1) * align
    start, end = points[0::2], points[1::2]
    length = np.minimum(end - start, min(limit, min(src_sizes) - align)) // align * align
    order = rng.permutation(count)
    start, length = start[order], length[order]
    segment = rng.integers(0, len(src_sizes), count)
    room_left = (np.asarray(src_sizes)[segment] - length) // align
    offset = (rng.random(count) * (room_left + 1)).astype(np.int64) * align
    dst = Ranges(np.full(count, room, np.int64), start.astype(np.int64))
    return make_batch(Ranges(segment.astype(np.int64), offset), dst, length.astype(np.int64), src_sizes, dst_sizes)


def random_images(seed: int, sizes: Sequence[int]) -> list[Bytes]:
    """Random content for each segment."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def canary_images(sizes: Sequence[int]) -> list[Bytes]:
    """A destination before anything was written."""
    return [np.full(size, CANARY, np.uint8) for size in sizes]


def apply_batch(batch: WriteBatch, src: Sequence[Bytes], dst: Sequence[Bytes]) -> None:
    """What the batch does, one descriptor after another, to `dst`."""
    src_segment, src_offset = batch.src_addresses()
    dst_segment, dst_offset = batch.dst_addresses()
    columns = (src_segment, src_offset, dst_segment, dst_offset, batch.length)
    for s, i, d, j, n in zip(*(column.tolist() for column in columns), strict=True):
        dst[d][j : j + n] = src[s][i : i + n]


def batch_to_wire(batch: WriteBatch) -> dict[str, bytes]:
    """The batch as named byte strings."""
    arrays: dict[str, NDArray[Any]] = {
        "src_segment": batch.src.segment,
        "src_base": batch.src.base,
        "src_size": batch.src.size_bytes,
        "dst_segment": batch.dst.segment,
        "dst_base": batch.dst.base,
        "dst_size": batch.dst.size_bytes,
        "src_region": batch.src_region,
        "src_offset": batch.src_offset,
        "dst_region": batch.dst_region,
        "dst_offset": batch.dst_offset,
        "length": batch.length,
    }
    return {name: array.tobytes() for name, array in arrays.items()}


def batch_from_wire(wire: dict[str, Any]) -> WriteBatch:
    """The batch that `batch_to_wire` made."""

    def u32(name: str) -> NDArray[np.uint32]:
        return np.frombuffer(wire[name], np.uint32)

    def u64(name: str) -> NDArray[np.uint64]:
        return np.frombuffer(wire[name], np.uint64)

    return WriteBatch(
        src=RegionTable(u32("src_segment"), u64("src_base"), u64("src_size")),
        dst=RegionTable(u32("dst_segment"), u64("dst_base"), u64("dst_size")),
        src_region=u32("src_region"),
        src_offset=u64("src_offset"),
        dst_region=u32("dst_region"),
        dst_offset=u64("dst_offset"),
        length=u64("length"),
    )
