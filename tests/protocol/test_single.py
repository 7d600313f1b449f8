"""A batch of one descriptor as plain numbers: what the arrays say, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_pd.backends.base import check_batch, place
from sglang_pd.protocol.batch import Grid, GridBatch, RegionTable, WriteBatch, single
from sglang_pd.protocol.errors import BackendError

TABLE = RegionTable(np.array([1, 0], np.uint32), np.array([64, 0], np.uint64), np.array([1000, 400], np.uint64))
SEGMENTS = np.array([400, 1064], np.uint64)


def u64(*values: int) -> Any:
    return np.array(values, np.uint64)


def u32(*values: int) -> Any:
    return np.array(values, np.uint32)


def grid(**changes: Any) -> Grid:
    plain = {
        "src_region": u32(1), "dst_region": u32(0), "src_inner": u64(8), "dst_inner": u64(16), "src_block": u64(100),
        "dst_block": u64(200), "block_length": u64(32),
    }  # fmt: skip
    return Grid(**{**plain, **changes})


@pytest.mark.parametrize("changes", [{}, {"entry_length": u64(7)}])
def test_one_descriptor_of_a_grid_is_what_its_arrays_say(changes: dict[str, Any]) -> None:
    batch = GridBatch(TABLE, TABLE, (grid(**changes),))
    arrays = (batch.src_region, batch.src_offset, batch.dst_region, batch.dst_offset, batch.length)
    assert single(batch) == tuple(one.item() for one in arrays)
    plain = WriteBatch(TABLE, TABLE, *arrays)
    assert single(plain) == single(batch)
    assert all(type(value) is int for value in single(batch) or ())


@pytest.mark.parametrize(
    "batch",
    [
        GridBatch(TABLE, TABLE, ()),
        GridBatch(TABLE, TABLE, (grid(), grid())),
        GridBatch(TABLE, TABLE, (grid(src_block=u64(1, 2), dst_block=u64(1, 2), block_length=u64(1, 1)),)),
        GridBatch(TABLE, TABLE, (grid(src_region=u32(0, 1), dst_region=u32(0, 1), src_inner=u64(0, 0)),)),
        GridBatch(TABLE, TABLE, (grid(dst_block=u64(1, 2)),)),
        GridBatch(TABLE, TABLE, (grid(block_length=u64(1, 2), entry_length=u64(7)),)),
        GridBatch(TABLE, TABLE, (grid(entry_length=u64(7, 8)),)),
        GridBatch(TABLE, TABLE, (grid(src_inner=np.array([-8], np.int64)),)),
        WriteBatch(TABLE, TABLE, u32(), u64(), u32(), u64(), u64()),
        WriteBatch(TABLE, TABLE, u32(0, 0), u64(0, 8), u32(0, 0), u64(0, 8), u64(8, 8)),
        WriteBatch(TABLE, TABLE, u32(0), u64(0), u32(0), u64(0, 8), u64(8)),
        WriteBatch(TABLE, TABLE, u64(0), u64(0), u32(0), u64(0), u64(8)),
    ],
)
def test_nothing_else_is_taken_for_one(batch: WriteBatch) -> None:
    assert single(batch) is None


def test_a_sum_that_would_wrap_is_not_inside() -> None:
    one = single(GridBatch(TABLE, TABLE, (grid(src_inner=u64(2**64 - 8), src_block=u64(16)),)))
    assert one is not None and one.src_offset == 2**64 + 8
    assert place(TABLE, one.src_region, one.src_offset, one.length, SEGMENTS) is None


@pytest.mark.parametrize(
    ("row", "start", "nbytes", "inside"),
    [
        (0, 0, 1000, (1, 64)), (0, 999, 1, (1, 1063)), (1, 0, 400, (0, 0)), (0, 0, 1001, None), (0, 1000, 1, None),
        (0, 5, 0, None), (2, 0, 1, None), (1, 399, 2, None),
    ],
)  # fmt: skip
def test_a_place_is_inside_or_there_is_none(row: int, start: int, nbytes: int, inside: tuple[int, int] | None) -> None:
    assert place(TABLE, row, start, nbytes, SEGMENTS) == inside
    batch = WriteBatch(TABLE, TABLE, u32(row), u64(start), u32(0), u64(0), u64(nbytes))
    if inside is None:
        with pytest.raises(BackendError):
            check_batch(batch, SEGMENTS, SEGMENTS, peer="p")
    else:
        check_batch(batch, SEGMENTS, SEGMENTS, peer="p")


def test_no_place_in_a_region_that_leaves_its_segment() -> None:
    assert place(TABLE, 0, 0, 8, u64(400, 1063)) is None and place(TABLE, 0, 0, 8, u64(400)) is None
