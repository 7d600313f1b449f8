"""Proof, before the first byte: all plans into one decode rank write every byte of every row exactly once.

Independent of how plans are made: it looks only at what they say. Rows are the unit of proof; that every live row is
bound, and no other, is a property of `bind.py`'s element ranges.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.idx import I64
from sglang_pd.protocol.manifest import InstanceManifest, RankId, RankManifest, Region
from sglang_pd.protocol.plan import Plan
from sglang_pd.protocol.spaces import LocalTok


def prove_coverage(
    src_instance: InstanceManifest, dst_instance: InstanceManifest, dst_rank: RankId, plans: Iterable[Plan]
) -> None:
    """Raise `PlanError` (`coverage_incomplete`) unless the plans of all source ranks tile every row of `dst_rank`.

    For each region that decode registers, and for each context class of the source (its ranks hold different tokens),
    the intervals of a row must start at 0, touch without gap or overlap, and end at the row's length. Components that
    the source lacks are left out: whether that is allowed is for the verdict.
    """
    manifest = dst_instance.rank(dst_rank)
    regions = [(c, r) for c in manifest.components for r in c.regions]
    classes = np.array([_classes(src_instance, c.kind) for c, _ in regions], dtype=np.int64)
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


def _refuse(entry: tuple[object, Region], dst_rank: RankId, actual: str) -> None:
    component, region = entry
    raise PlanError(
        "the plans do not write a row exactly once",
        where=f"rank {dst_rank}, {getattr(component, 'kind', '')}[{region.layer_id}/{region.part}]",
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
    open_spans: list[tuple[int, int, int, str, Region]] = []
    for span in spans:
        open_spans = [other for other in open_spans if other[0] == span[0] and other[2] > span[1]]
        for other in open_spans:
            if not _interleaved(other[4], span[4]):
                return other[3], span[3]
        open_spans.append(span)
    return None


def _interleaved(a: Region, b: Region) -> bool:
    if a.stride_bytes != b.stride_bytes:
        return False
    shift = (b.offset - a.offset) % a.stride_bytes
    return shift >= a.item_bytes and shift + b.item_bytes <= a.stride_bytes
