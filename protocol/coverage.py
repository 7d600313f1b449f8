"""Proof, before the first byte: all plans into one decode rank write every byte of every row exactly once.

Independent of how plans are made: it looks only at what they say, and works out with arithmetic of its own which bytes
of the whole row, over all ranks, an interval means on either side. Rows are the unit of proof; that every live row is
bound, and no other, is a property of `bind.py`'s element ranges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.idx import I64
from sglang_pd.protocol.manifest import Component, InstanceManifest, RankId, RankManifest, Region
from sglang_pd.protocol.plan import Plan
from sglang_pd.protocol.spaces import LocalTok

_Entry = tuple[Component, Region]


def prove_coverage(
    src_instance: InstanceManifest, dst_instance: InstanceManifest, dst_rank: RankId, plans: Iterable[Plan]
) -> None:
    """Raise `PlanError` (`coverage_incomplete`) unless the plans of all source ranks tile every row of `dst_rank`.

    For each region that decode registers, and for each context class of the source (its ranks hold different tokens),
    the intervals of a row must start at 0, touch without gap or overlap, and end at the row's length; and each must
    mean the same bytes of the whole row at its source. Components that the source lacks are left out: whether that is
    allowed is for the verdict.
    """
    manifest = dst_instance.rank(dst_rank)
    regions = [(c, r) for c in manifest.components for r in c.regions]
    plans = tuple(plans)
    by_kind = {c.kind: _classes(src_instance, c.kind) for c in manifest.components}
    classes = np.array([by_kind[c.kind] for c, _ in regions], dtype=np.int64)
    row_bytes = np.array([r.row_bytes for _, r in regions], dtype=np.int64)
    region, klass, start, length = _pieces(src_instance, dst_rank, plans)
    order = np.lexsort((start, klass, region))
    region, klass, start, length = region[order], klass[order], start[order], length[order]
    fresh = np.ones(region.shape, dtype=np.bool_)
    fresh[1:] = (region[1:] != region[:-1]) | (klass[1:] != klass[:-1])
    expected = np.zeros(region.shape, dtype=np.int64)
    expected[1:] = np.where(fresh[1:], 0, (start + length)[:-1])
    closing = np.ones(region.shape, dtype=np.bool_)
    closing[:-1] = fresh[1:]
    bad = (start != expected) | (closing & (start + length != row_bytes[region]))
    if bad.any():
        first = int(np.argmax(bad))
        _refuse(regions[int(region[first])], dst_rank, f"bytes [{start[first]}, {start[first] + length[first]})")
    have = np.bincount(region[fresh], minlength=len(regions)) if region.size else np.zeros(len(regions), np.int64)
    if (have != classes).any():
        first = int(np.argmax(have != classes))
        _refuse(regions[first], dst_rank, f"{have[first]} of {classes[first]} source context classes write it")
    for plan in plans:
        _prove_meaning(src_instance, dst_instance, plan, regions)


def _prove_meaning(
    src_instance: InstanceManifest, dst_instance: InstanceManifest, plan: Plan, dst_regions: list[_Entry]
) -> None:
    """Refuse an entry that reads another region, row geometry or part of the row than the one it writes."""
    src_regions = [(c, r) for c in src_instance.rank(plan.src_rank).components for r in c.regions]
    src_tp, dst_tp = src_instance.topology.tp, dst_instance.topology.tp
    for move in plan.moves:
        columns = (move.src_region, move.dst_region, move.src_inner, move.dst_inner, move.length)
        for s, d, src_inner, dst_inner, length in zip(*(column.tolist() for column in columns), strict=True):
            if s >= len(src_regions):
                _refuse(dst_regions[d], plan.dst_rank, f"source region {s} of {len(src_regions)}")
            (src_component, a), (dst_component, b) = src_regions[s], dst_regions[d]
            meant = (a.key, _meaning(_geometry(a), (src_tp, plan.src_rank.tp_rank), (src_inner, length)))
            lands = (b.key, _meaning(_geometry(b), (dst_tp, plan.dst_rank.tp_rank), (dst_inner, length)))
            rows = [(i.rows_per_item, i.stride_bytes, i.row_bytes) for i in (move.src, move.dst)]
            if (
                meant != lands
                or not src_component.kind == dst_component.kind == move.kind
                or rows != [(r.rows_per_item, r.stride_bytes, r.row_bytes) for r in (a, b)]
                or (move.whole and not length == a.row_bytes == b.row_bytes)
            ):
                actual = f"bytes {meant[1]} of {src_component.kind}{a.key} from {plan.src_rank} land as {lands[1]}"
                _refuse(dst_regions[d], plan.dst_rank, actual)


def _geometry(region: Region) -> tuple[int, int, tuple[int, ...], bool]:
    return region.unit_bytes, region.outer_count, region.groups, region.dim == 0


@lru_cache(maxsize=16_384)
def _meaning(
    geometry: tuple[int, int, tuple[int, ...], bool], place: tuple[int, int], part: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Byte ranges of the whole row that bytes (start, length) of the row of rank (tp, rank) stand for, in order."""
    (unit_bytes, outer_count, groups, replicated), (tp, rank), (start, length) = geometry, place, part
    found: list[tuple[int, int]] = []
    here = whole = 0
    for _ in range(outer_count):
        for group in groups:
            share = group if replicated else max(1, group // tp)
            first = 0 if replicated else rank * share if group >= tp else rank // (tp // group)
            low, high = max(start, here), min(start + length, here + share * unit_bytes)
            if low < high:
                begin = whole + first * unit_bytes + low - here
                if found and found[-1][1] == begin:
                    begin = found.pop()[0]
                found.append((begin, whole + first * unit_bytes + high - here))
            here += share * unit_bytes
            whole += group * unit_bytes
    return tuple(found)


def _pieces(src_instance: InstanceManifest, dst_rank: RankId, plans: Iterable[Plan]) -> tuple[I64, I64, I64, I64]:
    columns: list[tuple[I64, I64, I64, I64]] = []
    for plan in plans:
        if plan.dst_rank != dst_rank:
            raise PlanError("a plan for another rank", where="coverage", expected=dst_rank, actual=plan.dst_rank)
        for move in plan.moves:
            dcp = src_instance.topology.dcp if isinstance(move.src.space, LocalTok) else 1
            klass = np.full(len(move), plan.src_rank.tp_rank % dcp, dtype=np.int64)
            columns.append(
                (move.dst_region.astype(np.int64), klass, move.dst_inner.astype(np.int64), move.length.astype(np.int64))
            )
    if not columns:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty, empty
    region, klass, start, length = (np.concatenate(column) for column in zip(*columns, strict=True))
    return region, klass, start, length


def _classes(src_instance: InstanceManifest, kind: str) -> int:
    for rank in src_instance.ranks:
        component = rank.component(kind)
        if component is not None:
            return src_instance.topology.dcp if isinstance(component.space, LocalTok) else 1
    return 0


def _refuse(entry: _Entry, dst_rank: RankId, actual: str) -> None:
    component, region = entry
    raise PlanError(
        "the plans do not write a row exactly once",
        where=f"rank {dst_rank}, {component.kind}[{region.layer_id}/{region.part}]",
        expected=f"bytes [0, {region.row_bytes}) once, without gap or overlap",
        actual=actual,
    )


def overlapping_regions(rank: RankManifest) -> tuple[str, str] | None:
    """Two regions of a rank whose items could share bytes, or None.

    Regions are views, so their spans may interleave: equal strides with disjoint places inside the stride never meet
    (K and V of one page, keys and scales of one page). Anything else that shares bytes is named.
    """
    spans = sorted(
        (r.segment, r.offset, r.offset + r.span_bytes(c.space), f"{c.kind}[{r.layer_id}/{r.part}]", r)
        for c in rank.components
        for r in c.regions
    )
    # Spans open at one point share bytes of the address range, so all of them must have one stride, and each its own
    # place in it. Sorted by place, only the neighbours of a newcomer can meet it: a hostile manifest costs n log n.
    ends: list[tuple[int, tuple[int, int, str]]] = []
    places: list[tuple[int, int, str]] = []
    segment = stride = -1
    for its_segment, offset, end, label, region in spans:
        if its_segment != segment:
            ends, places, segment = [], [], its_segment
        while ends and ends[0][0] <= offset:
            places.pop(bisect_left(places, heappop(ends)[1]))
        entry = (offset % region.stride_bytes, region.item_bytes, label)
        at = bisect_left(places, entry)
        if places:
            before, after = places[at - 1], places[at % len(places)]
            if stride != region.stride_bytes or (entry[0] - before[0]) % stride < before[1]:
                return before[2], label
            if (after[0] - entry[0]) % stride < entry[1]:
                return after[2], label
        places.insert(at, entry)
        heappush(ends, (end, entry))
        stride = region.stride_bytes
    return None
