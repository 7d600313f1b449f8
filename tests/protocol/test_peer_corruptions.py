"""Ways in which an existing service moves wrong bytes without an error: here each is refused, or the bytes are right.

The thirteen in order, then the hazards of the same family that no other file covers.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from sglang_pd.protocol.errors import IndexOutOfSpace, ManifestError, PlanError
from sglang_pd.protocol.handshake import compare
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import InstanceManifest, RankId
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.spaces import AnySpace, Page, SwaTok

from . import oracle
from .builders import Part, Pools, Shape, Spec, build, every_kind, map_ranks, region
from .handover import hand_over, simple

OWN = Pools()


def refused(prefill: InstanceManifest, decode: InstanceManifest) -> set[tuple[str, str]]:
    """(component, field) of all mismatches of a refused pair."""
    verdict = compare(prefill, decode)
    assert not verdict.accepted
    return {(m.component, m.field) for m in verdict.mismatches}


def listed(side: InstanceManifest, tokens: int) -> dict[AnySpace, list[int]]:
    return oracle.make_lists(side, oracle.Request(tokens), Random(3))


def test_1_components_in_another_order_with_items_of_equal_size() -> None:
    swa = Spec("SWA", OWN.swa, (Part("k", (2,), 4, replicated=True),))
    index_k = Spec("INDEX_K", OWN.virtual, (Part("key", (2,), 4, replicated=True),))
    prefill, decode = build(Shape((swa, index_k))), build(Shape((index_k, swa)))
    sizes = {r.item_bytes for c in prefill.ranks[0].components for r in c.regions}
    assert len(sizes) == 1 and [c.kind for c in decode.ranks[0].components] == ["INDEX_K", "SWA"]
    hand_over(simple(prefill, decode, 7))


def test_2_items_of_another_length_at_equal_tp() -> None:
    def kv(rows: int, pad: int) -> InstanceManifest:
        return build(Shape((Spec("KV", OWN.virtual, (Part("k", (2,), 4, rows_per_item=rows, pad_bytes=pad),)),)))

    for rows, pad in ((1, 0), (1, 5), (2, 1), (4, 9)):
        hand_over(simple(kv(4, 0), kv(rows, pad), 11))  # each side has a stride of its own
    other = build(Shape((Spec("KV", OWN.virtual, (Part("k", (2,), 8, rows_per_item=4),)),)))
    assert refused(kv(4, 0), other) == {("KV", "row_bytes"), ("KV", "unit_bytes")}


def test_3_recurrent_state_from_tp4_to_tp2() -> None:
    parts = (Part("conv", (4, 4, 8), 2), Part("temporal", (4,), 16))
    four, two = (build(Shape((Spec("MAMBA", OWN.slot, parts),), tp=tp)) for tp in (4, 2))
    hand_over(simple(four, two, 9))
    # without a dimension it is a copy: then all ranks hold all of it, and the two sides must agree on that
    copies = tuple(replace(part, replicated=True) for part in parts)
    assert refused(build(Shape((Spec("MAMBA", OWN.slot, copies),), tp=4)), two) == {("MAMBA", "dim")}


def test_4_a_draft_whose_layers_are_a_multiple_of_the_models() -> None:
    kv = Spec("KV", OWN.virtual, (Part("k", (2,), 4), Part("v", (2,), 4)), (0, 1))
    draft = Spec("DRAFT_KV", OWN.virtual, (Part("k", (2,), 4), Part("v", (2,), 4)), (2, 3), optional=True)
    plain, drafted = build(Shape((kv,))), build(Shape((kv, draft)))
    hand_over(simple(plain, drafted, 9))  # V lands in V, and the draft stays canary
    hand_over(simple(drafted, plain, 9))
    hand_over(simple(drafted, drafted, 9))


@pytest.mark.parametrize("kind", ["SWA", "INDEX_K", "BLOCK_SCALE", "KV"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_5_empty_and_short_lists_move_nothing(kind: str, side: str) -> None:
    spec = next(spec for spec in every_kind(OWN) if spec.kind == kind)
    instance = build(Shape((spec,)))
    pairing = Pairing(instance, instance)
    for keep in (0, 1):
        lists = [listed(instance, 11), listed(instance, 11)]
        number = ("source", "destination").index(side)
        lists[number] = {space: values[:keep] for space, values in lists[number].items()}
        with pytest.raises(PlanError) as caught:
            pairing.room(Prompt(11), *(oracle.ingest(each) for each in lists))
        assert caught.value.code == "count_mismatch"
        assert caught.value.where == f"{side} list for {kind}" and caught.value.actual == keep


def test_6_an_odd_number_of_entries() -> None:
    both = Spec("KV", OWN.virtual, (Part("k", (2,), 4), Part("v", (2,), 4)), (0, 1))

    def odd(rank: Any) -> Any:
        (component,) = rank.components
        return msgspec.structs.replace(
            rank, components=(msgspec.structs.replace(component, regions=component.regions[:-1]),)
        )

    prefill, decode = (map_ranks(build(Shape((both,), tp=tp)), odd) for tp in (2, 1))
    assert len(decode.ranks[0].components[0].regions) == 3
    hand_over(simple(prefill, decode, 9))
    assert refused(prefill, build(Shape((both,)))) == {("KV", "layer_ids")}


def test_7_a_destination_out_of_range() -> None:
    instance = build(Shape(every_kind(OWN)))
    for space in listed(instance, 9):
        for wrong in (space.extent, space.extent + 1, 2**31, -1):
            with pytest.raises(IndexOutOfSpace):
                space.ingest([wrong])


def test_8_a_destination_page_twice() -> None:
    instance = build(Shape(every_kind(OWN)))
    pairing = Pairing(instance, instance)
    for space, values in listed(instance, 9).items():
        if len(values) > 1:
            twice = {**listed(instance, 9), space: [values[0]] * len(values)}
            with pytest.raises(PlanError) as caught:
                pairing.room(Prompt(9), oracle.ingest(listed(instance, 9)), oracle.ingest(twice))
            assert caught.value.code == "index_invalid"


def test_9_one_prefill_serves_decodes_of_several_sizes_in_turn() -> None:
    one = build(Shape(every_kind(OWN)))
    decodes = [build(Shape(every_kind(OWN), tp=tp, name=f"tp{tp}")) for tp in (2, 4, 1, 4, 2)]
    for decode in decodes:
        hand_over(simple(one, decode, 9))
    # plans made for one of them stay what they were
    plans = [Pairing(one, decode).plan(RankId(0, 0), RankId(0, 0)) for decode in decodes]
    heads = [next(m.length.tolist()[0] for m in plan.moves if m.kind == "KV") for plan in plans]
    assert heads == [6, 3, 12, 3, 6]


def test_10_keys_and_values_of_other_widths() -> None:
    kv = Spec("KV", OWN.virtual, (Part("k", (4,), 6, rows_per_item=4), Part("v", (4,), 2, rows_per_item=4)), (0, 1))
    swa = Spec("SWA", OWN.swa, (Part("k", (4,), 6, rows_per_item=4), Part("v", (4,), 2, rows_per_item=4)), (0, 1))
    sides = [build(Shape((kv, swa), tp=tp)) for tp in (1, 2, 4)]
    for prefill in sides:
        for decode in sides:
            hand_over(simple(prefill, decode, 11))


def test_11_groups_that_do_not_add_up_and_bytes_that_do_not_divide() -> None:
    conv = Part("conv", (4, 4, 8), 2)
    for groups in ((4, 4), (4, 4, 4), (4, 4, 8, 1)):
        with pytest.raises(ManifestError, match="shard_groups"):
            region(conv, 1, shard_groups=groups)
    for row in (31, 33):
        with pytest.raises(ManifestError, match="row_bytes"):
            region(conv, 1, row_bytes=row, item_bytes=row, stride_bytes=row)
    # heads that a padded model repeats: 6 units over 4 ranks are no even share, and no floor is taken
    with pytest.raises(ManifestError, match="shard_groups"):
        build(Shape((Spec("MAMBA", OWN.slot, (Part("conv", (6, 6, 12), 2),)),), tp=4))


def test_12_request_rows_are_paired_by_name_and_a_missing_one_is_refused() -> None:
    def rows(*layers: int) -> InstanceManifest:
        return build(Shape((Spec("REQUEST_ROW", OWN.row, (Part("row", (3,), 1, replicated=True),), layers),)))

    hand_over(simple(rows(7, 8, 9), rows(9, 7, 8), 3))
    assert refused(rows(7, 8), rows(7, 8, 9)) == refused(rows(7, 8, 9), rows(7, 8)) == {("REQUEST_ROW", "layer_ids")}


def test_13_two_stages_into_one_with_a_sliding_window_in_each() -> None:
    specs = every_kind(OWN, layers=(0, 1, 2, 3))
    prefill = build(Shape(specs, pp=2, stages={2: 1, 3: 1, 100: 1}))
    decode = build(Shape(specs))
    for tokens in (3, 9, 14):
        hand_over(simple(prefill, decode, tokens))
    stage = [r.layer_id for r in prefill.rank(RankId(1, 0)).component("SWA").regions]
    assert stage == [2, 2, 3, 3]
    # a stage that calls its layers 0 and 1 again is no instance at all
    second = prefill.rank(RankId(1, 0)).component("SWA")
    low = tuple(msgspec.structs.replace(r, layer_id=r.layer_id - 2) for r in second.regions)
    ranks = (
        prefill.ranks[0],
        msgspec.structs.replace(
            prefill.ranks[1], components=(msgspec.structs.replace(second, regions=low),)
        ),
    )  # fmt: skip
    with pytest.raises(ManifestError, match="stage 0 only"):
        msgspec.structs.replace(prefill, ranks=ranks)


# Hazards of the same family


@pytest.mark.parametrize("tps", [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (1, 8)], ids=str)
def test_st_05_conv_groups_of_unequal_size(tps: tuple[int, int]) -> None:
    spec = Spec("MAMBA", OWN.slot, (Part("conv", (4, 4, 8), 2), Part("temporal", (8,), 3)))
    hand_over(simple(*(build(Shape((spec,), tp=tp)) for tp in tps), 9))


def test_st_16_two_geometries_in_one_component_are_refused() -> None:
    # sharded target KV and replicated draft KV are two components, and one component has one space
    two = Pools(dcp=2)
    kv = Spec("KV", two.virtual, (Part("k", (1,), 4),), local=True)
    draft = Spec("DRAFT_KV", two.virtual, (Part("k", (1,), 4),), optional=True)
    decode = build(Shape((kv, draft), tp=2, dcp=2))
    one = [replace(spec, space=OWN.virtual, local=False) for spec in (kv, draft)]
    hand_over(simple(build(Shape(tuple(one))), decode, 13))
    with pytest.raises(ManifestError, match="one component a kind"):
        build(Shape((kv, replace(kv, layers=(1,), local=False)), tp=2, dcp=2))


def test_ix_04_low_water_cannot_tell_but_places_can() -> None:
    # a request at the bottom of both pools, where slot and local slot are both small: rows, not round trips, are judged
    spec = Spec("MLA", Pools(dcp=4).virtual, (Part("latent", (5,), 1, replicated=True),), local=True)
    prefill = build(Shape((replace(spec, space=OWN.virtual, local=False),)))
    decode = build(Shape((spec,), tp=4, dcp=4))
    for top in (False, True):
        hand_over(replace(simple(prefill, decode, 15), top=top))


def test_ix_16_a_dropped_window_map_leaves_the_others_alone() -> None:
    instance = build(Shape(every_kind(OWN)))
    pairing = Pairing(instance, instance)
    without = {
        space: values
        for space, values in listed(instance, 9).items()
        if not (isinstance(space, Page) and isinstance(space.of, SwaTok))
    }
    with pytest.raises(PlanError, match="list for SWA"):
        pairing.room(Prompt(9), oracle.ingest(listed(instance, 9)), oracle.ingest(without))
    rest = build(Shape(tuple(spec for spec in every_kind(OWN) if spec.kind != "SWA")))
    Pairing(rest, rest).room(Prompt(9), oracle.ingest(without), oracle.ingest(without))
