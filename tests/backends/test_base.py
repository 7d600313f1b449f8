"""The bounds check that every backend runs before its library sees a batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pd.backends.base import FEW, batch_addresses, batch_rows, check_batch
from sglang_pd.protocol.batch import Grid, GridBatch, RegionTable, WriteBatch
from sglang_pd.protocol.errors import BackendError

SEGMENTS = np.array([1000, 5000], np.uint64)
TOP = 2**64 - 1


def table(*rows: tuple[int, int, int]) -> RegionTable:
    """(segment, base, size) of each region."""
    columns = np.array(rows, np.uint64).reshape(-1, 3)
    return RegionTable(columns[:, 0].astype(np.uint32), columns[:, 1].copy(), columns[:, 2].copy())


def batch(side: RegionTable, region: list[int], offset: list[int], length: list[int]) -> WriteBatch:
    """A batch that says the same of its source and its destination."""
    regions, offsets = np.array(region, np.uint32), np.array(offset, np.uint64)
    return WriteBatch(side, side, regions, offsets, regions, offsets, np.array(length, np.uint64))


def accepted(one: WriteBatch) -> bool:
    try:
        check_batch(one, SEGMENTS, SEGMENTS, peer="p")
    except BackendError as error:
        assert error.code == "segment_invalid"
        return False
    return True


NUMBERS = st.one_of(st.integers(0, 1100), st.sampled_from([4999, 5000, 5001, TOP, TOP - 1000, 2**63]))
REGION = st.tuples(st.integers(0, 2), NUMBERS, NUMBERS)
ROW = st.tuples(st.integers(0, 3), NUMBERS, NUMBERS)


@settings(max_examples=300, deadline=None)
@given(st.lists(REGION, min_size=1, max_size=3), st.lists(ROW, min_size=1, max_size=4))
def test_few_and_many_agree_with_plain_arithmetic(
    regions: list[tuple[int, int, int]], rows: list[tuple[int, int, int]]
) -> None:
    def inside(row: tuple[int, int, int]) -> bool:
        region, offset, length = row
        if region >= len(regions):
            return False
        segment, base, size = regions[region]
        limit = int(SEGMENTS[segment]) if segment < 2 else -1
        return base + size <= limit and length > 0 and offset + length <= size

    few = batch(table(*regions), *(list(column) for column in zip(*rows, strict=True)))
    many = batch(table(*regions), *(list(column) * FEW for column in zip(*rows, strict=True)))
    assert accepted(few) == accepted(many) == all(inside(row) for row in rows)


ENTRY = st.tuples(st.integers(0, 3), NUMBERS, NUMBERS)
BLOCK = st.tuples(NUMBERS, NUMBERS)


def grid_batch(
    side: RegionTable, entries: list[tuple[int, int, int]], blocks: list[tuple[int, int]], by_entry: bool
) -> GridBatch:
    """A grid that says the same of its source and its destination. entries: region, inner, length."""
    region = np.array([one[0] for one in entries], np.uint32)
    inner, lengths = (np.array([one[at] for one in entries], np.uint64) for at in (1, 2))
    block, length = (np.array([one[at] for one in blocks], np.uint64) for at in (0, 1))
    grid = Grid(region, region, inner, inner, block, block, length, lengths if by_entry else None)
    return GridBatch(side, side, (grid,))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(REGION, min_size=1, max_size=3),
    st.lists(ENTRY, min_size=1, max_size=3),
    st.lists(BLOCK, min_size=1, max_size=3),
    st.booleans(),
)
def test_grids_agree_with_plain_arithmetic_on_each_of_their_descriptors(
    regions: list[tuple[int, int, int]],
    entries: list[tuple[int, int, int]],
    blocks: list[tuple[int, int]],
    by_entry: bool,
) -> None:
    def inside(entry: tuple[int, int, int], block: tuple[int, int]) -> bool:
        region, start, length = entry[0], entry[1] + block[0], entry[2] if by_entry else block[1]
        if region >= len(regions):
            return False
        segment, base, size = regions[region]
        limit = int(SEGMENTS[segment]) if segment < 2 else -1
        return base + size <= limit and length > 0 and start + length <= size

    want = all(inside(entry, block) for entry in entries for block in blocks)
    for times in (1, FEW + 1):
        assert accepted(grid_batch(table(*regions), entries * times, blocks, by_entry)) == want


def test_a_grid_whose_offset_is_negative_does_not_wrap_into_the_region() -> None:
    """Inner -16: with block 100 it is inside, with block 0 it lies before the region."""
    bad = grid_batch(table((0, 64, 500)), [(0, TOP - 15, 8)], [(0, 8), (100, 8)], by_entry=False)
    assert not accepted(bad)


def test_a_grid_of_other_shapes_is_refused() -> None:
    good = grid_batch(table((0, 0, 1000)), [(0, 0, 8)], [(0, 8)], by_entry=True)
    assert accepted(good)
    two = np.array([0, 1], np.uint64)
    for name in ("src_inner", "dst_inner", "entry_length", "dst_block", "block_length"):
        assert not accepted(GridBatch(good.src, good.dst, (replace(good.grids[0], **{name: two}),))), name


@pytest.mark.parametrize("count", [1, 100])
def test_a_row_that_nobody_uses_harms_nobody(count: int) -> None:
    good = batch(table((0, 0, 1000), (7, 0, 10)), [0] * count, [0] * count, [1] * count)
    assert accepted(good)
    src, dst = batch_addresses(good, SEGMENTS, SEGMENTS)
    assert (src == 1000).all() and (dst == 1000).all()


@pytest.mark.parametrize("side", ["source", "destination"])
def test_the_error_names_the_side_and_the_descriptor(side: str) -> None:
    good = batch(table((0, 0, 1000)), [0] * 20, list(range(20)), [1] * 20)
    name = "src_offset" if side == "source" else "dst_offset"
    offset = good.src_offset.copy()
    offset[13] = 1000
    changed = {name: offset}
    with pytest.raises(BackendError, match=f"{side} of peer p, descriptor 13") as caught:
        check_batch(replace(good, **changed), SEGMENTS, SEGMENTS, peer="p")
    assert "1000" in str(caught.value.expected)


def test_arrays_of_other_shape_or_dtype_are_refused() -> None:
    good = batch(table((0, 0, 1000)), [0, 0], [0, 8], [8, 8])
    assert not accepted(replace(good, src_offset=good.src_offset[:1]))
    assert not accepted(replace(good, length=good.length.astype(np.int64)))


@pytest.mark.parametrize("name", ["segment", "base", "size_bytes"])
def test_a_region_table_of_other_shape_or_dtype_is_refused(name: str) -> None:
    """A negative base would lead out of the segment, past every later check."""
    good = table((0, 0, 1000), (0, 1000, 50))
    values = getattr(good, name)
    for wrong in (-values.astype(np.int64), values[:1], values.reshape(1, 2), values.astype(np.float64)):
        with pytest.raises(BackendError, match=f"RegionTable.{name}|RegionTable"):
            replace(good, **{name: wrong})


@pytest.mark.parametrize("name", ["src_inner", "dst_block", "block_length", "entry_length", "src_region"])
def test_a_grid_of_other_dtype_is_refused(name: str) -> None:
    good = grid_batch(table((0, 0, 1000)), [(0, 0, 8)], [(0, 8)], by_entry=True)
    wrong = getattr(good.grids[0], name).astype(np.int64)
    assert not accepted(GridBatch(good.src, good.dst, (replace(good.grids[0], **{name: wrong}),)))


def test_addresses_and_rows() -> None:
    one = batch(table((1, 64, 100), (0, 8, 100)), [0, 1, 0], [1, 2, 3], [4, 5, 6])
    src, dst = batch_addresses(one, np.array([10_000, 20_000], np.uint64), np.array([30_000, 40_000], np.uint64))
    assert src.tolist() == [20_065, 10_010, 20_067]
    assert dst.tolist() == [40_065, 30_010, 40_067]
    part = batch_rows(one, np.array([False, True, True]))
    assert part.length.tolist() == [5, 6] and len(batch_rows(one, slice(0, 0))) == 0
