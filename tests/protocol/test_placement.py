"""Placement and election: the worked values, byte for byte, and an oracle over all small cases."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.placement import (
    Interval,
    RowGeometry,
    Shard,
    context_classes_owned,
    elect,
    intervals,
    replicated_writer,
)

from . import oracle


def heads(count: int, unit_bytes: int = 1) -> RowGeometry:
    return RowGeometry(unit_bytes, (count,), 1, replicated=False)


def moved(row: RowGeometry, src: tuple[int, int], dst: tuple[int, int]) -> list[tuple[int, int, int]]:
    """(source offset, destination offset, length) in bytes, for (tp, rank) on either side."""
    return [piece.bytes for piece in intervals(row, Shard(*src), Shard(*dst))]


# KV heads, H = 8 (one byte a head, so bytes are heads): (source rank, destination rank) -> (src, dst, length)
KV_8 = {
    (4, 2): {(0, 0): (0, 0, 2), (1, 0): (0, 2, 2), (2, 1): (0, 0, 2), (3, 1): (0, 2, 2)},
    (2, 4): {(0, 0): (0, 0, 2), (0, 1): (2, 0, 2), (1, 2): (0, 0, 2), (1, 3): (2, 0, 2)},
    (1, 4): {(0, 0): (0, 0, 2), (0, 1): (2, 0, 2), (0, 2): (4, 0, 2), (0, 3): (6, 0, 2)},
    (4, 1): {(0, 0): (0, 0, 2), (1, 0): (0, 2, 2), (2, 0): (0, 4, 2), (3, 0): (0, 6, 2)},
    (2, 2): {(0, 0): (0, 0, 4), (1, 1): (0, 0, 4)},
}


@pytest.mark.parametrize("tps", KV_8, ids=str)
def test_tp_12_kv_heads(tps: tuple[int, int]) -> None:
    got = {
        (s, d): pieces[0]
        for s in range(tps[0])
        for d in range(tps[1])
        if (pieces := moved(heads(8), (tps[0], s), (tps[1], d)))
    }
    assert got == KV_8[tps]


def sources(count: int, src_tp: int, dst_tp: int) -> dict[int, list[tuple[int, int]]]:
    """For each destination rank: (source rank, global head) of every head it gets, in its own order."""
    table: dict[int, list[tuple[int, int]]] = {}
    for d in range(dst_tp):
        placed = []
        for s in range(src_tp):
            for src, dst, length in moved(heads(count), (src_tp, s), (dst_tp, d)):
                mine = oracle.units_on((count,), src_tp, s)
                placed += [(dst + i, s, mine[src + i]) for i in range(length)]
        table[d] = [(s, head) for _, s, head in sorted(placed)]
    return table


def test_tp_02_replicated_heads_in_the_scatter_direction() -> None:
    assert {d: [head for _, head in got] for d, got in sources(2, 1, 4).items()} == {0: [0], 1: [0], 2: [1], 3: [1]}
    assert sources(2, 2, 4) == {0: [(0, 0)], 1: [(0, 0)], 2: [(1, 1)], 3: [(1, 1)]}


def test_tp4_to_tp8_with_two_heads_serves_two_ranks_from_each() -> None:
    want = {0: (0, 0), 1: (0, 0), 2: (1, 0), 3: (1, 0), 4: (2, 1), 5: (2, 1), 6: (3, 1), 7: (3, 1)}
    assert sources(2, 4, 8) == {d: [pair] for d, pair in want.items()}


def test_tp4_to_tp1_with_two_heads_has_writers_0_and_2() -> None:
    assert sources(2, 4, 1) == {0: [(0, 0), (2, 1)]}
    assert moved(heads(2, 16), (4, 0), (1, 0)) == [(0, 0, 16)]
    assert moved(heads(2, 16), (4, 2), (1, 0)) == [(0, 16, 16)]
    assert moved(heads(2, 16), (4, 1), (1, 0)) == moved(heads(2, 16), (4, 3), (1, 0)) == []


def test_sizes_that_do_not_divide_six_heads_over_three_and_two() -> None:
    assert sources(6, 3, 2) == {0: [(0, 0), (0, 1), (1, 2)], 1: [(1, 3), (2, 4), (2, 5)]}
    assert moved(heads(6, 4), (3, 1), (2, 0)) == [(0, 8, 4)]
    assert moved(heads(6, 4), (3, 1), (2, 1)) == [(4, 0, 4)]
    assert moved(heads(6, 4), (3, 0), (2, 1)) == moved(heads(6, 4), (3, 2), (2, 0)) == []


CONV = RowGeometry(2, (4, 4, 8), 1, replicated=False)


@pytest.mark.parametrize(
    "src,dst,want",
    [
        ((4, 3), (2, 1), [(0, 2, 2), (2, 6, 2), (4, 12, 4)]),
        ((2, 1), (4, 3), [(2, 0, 2), (6, 2, 2), (12, 4, 4)]),
        ((1, 0), (4, 2), [(4, 0, 2), (12, 2, 2), (24, 4, 4)]),
    ],
    ids=str,
)
def test_st_05_conv_groups(src: tuple[int, int], dst: tuple[int, int], want: list[tuple[int, int, int]]) -> None:
    assert moved(CONV, src, dst) == want


def test_outer_count_three() -> None:
    three = RowGeometry(2, (16,), 3, replicated=False)
    assert moved(three, (2, 1), (4, 3)) == [(8, 0, 8), (24, 8, 8), (40, 16, 8)]
    assert moved(three, (1, 0), (1, 0)) == [(0, 0, 96)]
    grouped = RowGeometry(2, (4, 4, 8), 2, replicated=False)
    once = moved(CONV, (4, 3), (2, 1))
    assert moved(grouped, (4, 3), (2, 1)) == once + [(a + 8, b + 16, n) for a, b, n in once]


def test_pieces_that_touch_on_both_sides_are_one() -> None:
    assert moved(CONV, (2, 1), (2, 1)) == [(0, 0, 16)]
    assert moved(RowGeometry(2, (4, 4, 8), 3, replicated=False), (2, 0), (2, 0)) == [(0, 0, 48)]


# Election


def writes(src_tp: int, dst_tp: int) -> list[bool]:
    """For each source rank: does it write a replicated item into any destination rank?"""
    chosen = {replicated_writer(src_tp, dst_tp, d) for d in range(dst_tp)}
    return [s in chosen for s in range(src_tp)]


def test_tp_14_the_seeds_truth_table() -> None:
    assert writes(1, 4) == [True]
    assert writes(4, 4) == [True] * 4
    assert writes(4, 1) == [True, False, False, False]
    assert writes(8, 2) == [True, False, False, False, True, False, False, False]
    assert writes(3, 2) == [True, True, False]  # allowed here, on purpose
    assert [replicated_writer(3, 2, d) for d in range(2)] == [0, 1]


@given(st.integers(1, 9), st.integers(1, 9))
def test_the_truth_table_is_the_intervals_too(src_tp: int, dst_tp: int) -> None:
    copy = RowGeometry(3, (5,), 2, replicated=True)
    for d in range(dst_tp):
        writers = [s for s in range(src_tp) if intervals(copy, Shard(src_tp, s), Shard(dst_tp, d))]
        assert writers == [d * src_tp // dst_tp] == [replicated_writer(src_tp, dst_tp, d)]
        assert moved(copy, (src_tp, writers[0]), (dst_tp, d)) == [(0, 0, 30)]
        if src_tp % dst_tp == 0:  # the seed's rule for aggregation
            assert writers[0] % (src_tp // dst_tp) == 0


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-4, 1), (4, -1), (0, 0)], ids=str)
def test_sizes_of_zero_and_below_raise(sizes: tuple[int, int]) -> None:
    with pytest.raises(PlanError):
        replicated_writer(*sizes, 0)
    for tp in (size for size in sizes if size < 1):
        with pytest.raises(PlanError):
            Shard(tp, 0)


def test_ranks_out_of_range_raise() -> None:
    for rank in (-1, 4):
        with pytest.raises(PlanError):
            replicated_writer(2, 4, rank)
        with pytest.raises(PlanError):
            Shard(4, rank)
    for owners, wanting, position in (((), 1, 0), ((0,), 0, 0), ((0,), 1, 1), ((0,), 1, -1)):
        with pytest.raises(PlanError):
            elect(owners, wanting, position)


def test_context_sizes_divide() -> None:
    for tp, dcp in ((4, 3), (4, 0), (4, 8), (4, -1)):
        with pytest.raises(PlanError):
            Shard(tp, 0, dcp)


def test_uneven_groups_raise_and_never_give_some_bytes() -> None:
    for groups, src_tp, dst_tp in (((6,), 4, 2), ((6,), 2, 4), ((4, 6), 4, 1), ((2,), 3, 1)):
        for s in range(src_tp):
            with pytest.raises(PlanError):
                intervals(RowGeometry(2, groups, 1, replicated=False), Shard(src_tp, s), Shard(dst_tp, 0))
    assert intervals(RowGeometry(2, (6,), 1, replicated=True), Shard(4, 0), Shard(2, 0)) == (Interval(0, 0, 12),)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True).map(sorted), st.integers(1, 9))
def test_the_writers_are_spread_in_rank_order(owners: list[int], wanting: int) -> None:
    got = [elect(owners, wanting, position) for position in range(wanting)]
    assert got == sorted(got) and set(got) <= set(owners) and got[0] == owners[0]
    load = [got.count(owner) for owner in owners]
    assert max(load) - min(load) <= 1 and max(load) == -(-wanting // len(owners))


# All small cases against units counted one by one


@st.composite
def cases(draw: st.DrawFn) -> tuple[RowGeometry, int, int]:
    src_tp, dst_tp = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    sizes = [
        g for g in range(1, lcm(src_tp, dst_tp) * 2 + 1) if all(g % t == 0 or t % g == 0 for t in (src_tp, dst_tp))
    ]
    groups = draw(st.lists(st.sampled_from(sizes[:8]), min_size=1, max_size=4))
    row = RowGeometry(draw(st.integers(1, 3)), tuple(groups), draw(st.integers(1, 3)), replicated=draw(st.booleans()))
    return row, src_tp, dst_tp


def row_bytes(row: RowGeometry, tp: int, rank: int) -> list[int]:
    """For each byte a rank holds: its place in the whole row."""
    units = list(range(row.units_total)) if row.replicated else oracle.units_on(row.groups, tp, rank)
    assert len(units) == row.units_on_rank(tp)
    return [
        (o * row.units_total + u) * row.unit_bytes + b
        for o in range(row.outer_count)
        for u in units
        for b in range(row.unit_bytes)
    ]


@given(cases())
def test_tp_01_each_destination_byte_comes_once_from_a_rank_that_owns_it(case: tuple[RowGeometry, int, int]) -> None:
    row, src_tp, dst_tp = case
    for d in range(dst_tp):
        want = row_bytes(row, dst_tp, d)
        got: list[int | None] = [None] * len(want)
        for s in range(src_tp):
            have = row_bytes(row, src_tp, s)
            pieces = moved(row, (src_tp, s), (dst_tp, d))
            assert [b for _, b, _ in pieces] == sorted(b for _, b, _ in pieces)
            for a, b, n in pieces:
                assert n > 0 and a + n <= len(have) and b + n <= len(want)
                assert got[b : b + n] == [None] * n, "written twice"
                got[b : b + n] = have[a : a + n]
            # maximal: no two neighbours could have been one
            for (a, b, n), (c, e, _) in zip(pieces, pieces[1:], strict=False):
                assert (a + n, b + n) != (c, e)
        assert got == want


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("src_tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dst_tp", [1, 2, 4, 8, 16])
def test_tp_01_the_sweep_of_the_report(count: int, src_tp: int, dst_tp: int) -> None:
    for d, got in sources(count, src_tp, dst_tp).items():
        assert [head for _, head in got] == oracle.units_on((count,), dst_tp, d)
        assert all(head in oracle.units_on((count,), src_tp, s) for s, head in got)


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_with_context_shards_each_class_has_one_writer_for_each_byte(tp: int, dst_tp: int, data: st.DataObject) -> None:
    dcp = data.draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]))
    sizes = [g for g in range(1, 17) if all(g % t == 0 or t % g == 0 for t in (tp, dst_tp))]
    group, replicated = data.draw(st.sampled_from(sizes)), data.draw(st.booleans())
    row = RowGeometry(2, (group,), 1, replicated=replicated)
    holders = {
        u: {r % dcp for r in range(tp) if replicated or u in oracle.units_on((group,), tp, r)} for u in range(group)
    }
    owned = all(len(classes) == dcp for classes in holders.values())
    assert context_classes_owned(row, tp, dcp) == owned
    if not owned:
        return
    for d in range(dst_tp):
        for klass in range(dcp):
            times = [0] * len(row_bytes(row, dst_tp, d))
            for s in range(klass, tp, dcp):
                for piece in intervals(row, Shard(tp, s, dcp), Shard(dst_tp, d)):
                    for byte in range(piece.length_bytes):
                        times[piece.dst_offset_bytes + byte] += 1
            assert set(times) == {1}
