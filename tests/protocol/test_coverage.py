"""The proof and the overlap rule on their own: against bytes counted one by one, and against hostile manifests."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol.coverage import overlapping_regions, prove_coverage
from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.manifest import Component, RankId, RankManifest, Region, SegmentInfo, Transport
from sglang_pd.protocol.plan import Plan, compile_plan
from sglang_pd.protocol.spaces import RecurrentSlot

from .builders import Part, Pools, Shape, Spec, build, every_kind

ZERO = RankId(0, 0)


def rank(regions: list[Region], slots: int = 3) -> RankManifest:
    """A rank with single-state regions: `slots` items each."""
    component = Component(kind="MAMBA", space=RecurrentSlot(slots=slots, reserved=0), regions=tuple(regions))
    return RankManifest(
        rank=ZERO,
        epoch=1,
        segments=(SegmentInfo(nbytes=2**30),) * 2,
        components=(component,),
        transport=Transport(backend="local"),
    )


def view(number: int, offset: int, item: int, stride: int, segment: int = 0) -> Region:
    return Region(
        layer_id=number, part="conv", dtype="u8", item_bytes=item, stride_bytes=stride, row_bytes=item, unit_bytes=item,
        units_total=1, dim=1, segment=segment, offset=offset,
    )  # fmt: skip


VIEWS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(0, 8), st.integers(0, 1)), min_size=1, max_size=6
)


@given(VIEWS, st.integers(4, 12), st.integers(1, 4), st.booleans())
def test_regions_that_share_a_byte_are_found(
    views: list[tuple[int, int, int, int]], stride: int, slots: int, one_stride: bool
) -> None:
    regions = [
        view(n, offset, item, stride if one_stride else item + pad, segment)
        for n, (offset, item, pad, segment) in enumerate(views)
    ]
    byte_sets = [
        {(r.segment, r.offset + i * r.stride_bytes + b) for i in range(slots) for b in range(r.item_bytes)}
        for r in regions
    ]
    shared = any(byte_sets[i] & byte_sets[j] for i in range(len(regions)) for j in range(i))
    found = overlapping_regions(rank(regions, slots))
    assert found is not None if shared else True
    if one_stride:
        # Equal strides are judged by places in the stride, so a span that ends early is still told apart exactly when
        # the places differ; only equal places in spans that do not meet may be passed.
        spans = [
            (r.segment, r.offset, r.offset + r.span_bytes(RecurrentSlot(slots=slots, reserved=0))) for r in regions
        ]
        meet = any(
            spans[i][0] == spans[j][0] and spans[i][1] < spans[j][2] and spans[j][1] < spans[i][2]
            for i in range(len(regions))
            for j in range(i)
        )
        assert found is None or meet
    if found is not None:
        assert found[0] != found[1]


def test_views_inside_one_stride() -> None:
    side_by_side = [view(0, 0, 4, 10), view(1, 4, 4, 10), view(2, 8, 2, 10)]
    assert overlapping_regions(rank(side_by_side)) is None
    assert overlapping_regions(rank(side_by_side[::-1])) is None
    for wrong in (view(3, 9, 1, 10), view(3, 3, 1, 10), view(3, 0, 1, 10), view(3, 4, 4, 10), view(3, 19, 1, 20)):
        pair = overlapping_regions(rank([*side_by_side, wrong]))
        assert pair is not None and any("[3/conv]" in name for name in pair)
    assert overlapping_regions(rank([*side_by_side, view(3, 0, 10, 10, segment=1)])) is None
    assert overlapping_regions(rank([*side_by_side, view(3, 30, 10, 10)])) is None
    # an item that runs over the end of its stride into the next one's first place
    assert overlapping_regions(rank([view(0, 0, 4, 10), view(1, 8, 4, 10)])) is not None


def test_a_hostile_number_of_views_is_judged_in_time() -> None:
    views = [view(n, n, 1, 2**15) for n in range(2**15)]
    assert overlapping_regions(rank(views)) is None
    views[-1] = view(2**15 - 1, 5, 1, 2**15)
    assert overlapping_regions(rank(views)) is not None


# The proof says where


def spoiled(plan: Plan, number: int, **columns: list[int]) -> Plan:
    move = plan.moves[number]
    arrays = {name: np.array(values, getattr(move, name).dtype) for name, values in columns.items()}
    return replace(plan, moves=(*plan.moves[:number], replace(move, **arrays), *plan.moves[number + 1 :]))


def test_the_proof_names_rank_region_and_bytes() -> None:
    spec = Spec("KV", Pools().virtual, (Part("k", (4,), 3),), (7,))
    prefill, decode = build(Shape((spec,), tp=2)), build(Shape((spec,)))
    plans = [compile_plan(prefill, r.rank, decode, ZERO) for r in prefill.ranks]
    prove_coverage(prefill, decode, ZERO, plans)
    for wrong, bytes_text in (
        ([plans[0]], "[0, 6)"),
        ([plans[1]], "[6, 12)"),
        ([], "0 of 1 source context classes"),
        ([plans[0], plans[1], plans[1]], "[6, 12)"),
        ([spoiled(plans[0], 0, length=[5]), plans[1]], "[6, 12)"),
        ([spoiled(plans[0], 0, length=[7]), plans[1]], "[6, 12)"),
        ([plans[0], spoiled(plans[1], 0, dst_inner=[7])], "[7, 13)"),
        ([plans[0], spoiled(plans[1], 0, length=[7])], "[6, 13)"),
        ([spoiled(plans[0], 0, src_inner=[1]), plans[1]], "land as"),
    ):
        with pytest.raises(PlanError) as caught:
            prove_coverage(prefill, decode, ZERO, wrong)
        assert caught.value.code == "coverage_incomplete"
        assert caught.value.where == "rank pp0/tp0, KV[7/k]" and "[0, 12) once" in str(caught.value.expected)
        assert bytes_text in str(caught.value.actual), caught.value


def test_a_plan_of_another_source_rank_under_a_false_name_is_found() -> None:
    # both source ranks hold two heads; rank 1's plan read from rank 0 would bring heads 0 and 1 twice
    spec = Spec("KV", Pools().virtual, (Part("k", (4,), 3),))
    prefill, decode = build(Shape((spec,), tp=2)), build(Shape((spec,)))
    first, second = (compile_plan(prefill, r.rank, decode, ZERO) for r in prefill.ranks)
    with pytest.raises(PlanError, match="land as"):
        prove_coverage(prefill, decode, ZERO, [first, replace(second, src_rank=first.src_rank)])


def test_layers_and_parts_that_are_swapped_are_found_although_every_byte_is_written_once() -> None:
    spec = Spec("KV", Pools().virtual, (Part("k", (4,), 3), Part("v", (4,), 3)), (0, 1))
    prefill, decode = (build(Shape((spec,), name=name)) for name in "pd")
    plan = compile_plan(prefill, ZERO, decode, ZERO)
    assert plan.moves[0].src_region.tolist() == [0, 1, 2, 3]
    for regions in ([1, 0, 2, 3], [2, 1, 0, 3], [0, 0, 2, 3], [0, 1, 2, 4]):
        with pytest.raises(PlanError, match="coverage_incomplete"):
            prove_coverage(prefill, decode, ZERO, [spoiled(plan, 0, src_region=regions)])


def test_conv_groups_taken_as_one_slice_are_found() -> None:
    # the contiguous slice that the sub-blocks exist to prevent: every destination byte once, yet wrong
    conv = Spec("MAMBA", Pools().slot, (Part("conv", (4, 4, 8), 2),))
    prefill, decode = build(Shape((conv,))), build(Shape((conv,), tp=4))
    plan = compile_plan(prefill, ZERO, decode, RankId(0, 2))
    assert plan.moves[0].src_inner.tolist() == [4, 12, 24]
    flat = spoiled(plan, 0, src_inner=[16], dst_inner=[0], length=[8], layer_id=[0], src_region=[0], dst_region=[0])
    with pytest.raises(PlanError, match="land as"):
        prove_coverage(prefill, decode, RankId(0, 2), [flat])


def test_item_geometry_that_is_not_the_regions_own_is_found() -> None:
    specs = every_kind(Pools())
    prefill, decode = (build(Shape(specs, name=name)) for name in "pd")
    plan = compile_plan(prefill, ZERO, decode, ZERO)
    for number, move in enumerate(plan.moves):
        for side in ("src", "dst"):
            items = getattr(move, side)
            for change in ({"stride_bytes": items.stride_bytes + 1}, {"rows_per_item": items.rows_per_item + 1}):
                wrong = replace(move, **{side: replace(items, **change)})
                moves = (*plan.moves[:number], wrong, *plan.moves[number + 1 :])
                with pytest.raises(PlanError, match="coverage_incomplete"):
                    prove_coverage(prefill, decode, ZERO, [replace(plan, moves=moves)])


def test_a_rank_without_regions_needs_no_plan_and_takes_none() -> None:
    specs = every_kind(Pools(), layers=(0,))
    one, two = build(Shape(specs)), build(Shape(specs, pp=2))
    prove_coverage(one, two, RankId(1, 0), [])
    plan = compile_plan(one, ZERO, two, RankId(1, 0))
    assert plan.entries == 0
    prove_coverage(one, two, RankId(1, 0), [plan])
    with pytest.raises(PlanError):
        prove_coverage(one, two, ZERO, [])


def test_components_that_prefill_lacks_are_for_the_verdict() -> None:
    specs = every_kind(Pools())
    prefill = build(Shape(tuple(spec for spec in specs if not spec.optional)))
    decode = build(Shape(specs))
    prove_coverage(prefill, decode, ZERO, [compile_plan(prefill, ZERO, decode, ZERO)])
    shorter = msgspec.structs.replace(decode.ranks[0], components=decode.ranks[0].components[:3])
    less = msgspec.structs.replace(decode, ranks=(shorter,))
    prove_coverage(prefill, less, ZERO, [compile_plan(prefill, ZERO, less, ZERO)])
