"""Manifests: each refusal with the path of its field, what is legal, and what travels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang_pd.protocol.errors import ManifestError, SpaceError
from sglang_pd.protocol.manifest import (
    MAX_BYTES,
    Component,
    InstanceManifest,
    RankId,
    RankManifest,
    Region,
    SegmentInfo,
    Topology,
    Transport,
    check_instance,
    whole_facts,
)
from sglang_pd.protocol.spaces import LocalTok, Page, RaggedScratch, RequestRow, Scaled, SwaTok, VirtualTok

from .builders import NGRAM, ROPE, Part, Pools, Shape, Spec, build, every_kind, map_components, map_regions, region

HEADS = Part("k", (8,), 2, rows_per_item=4)
VIRTUAL = VirtualTok(capacity_tokens=16, page_tokens=4)


def refused(make: Any, path: str, *texts: object) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        make()
    assert caught.value.where == path, caught.value
    for text in texts:
        assert str(text) in str(caught.value)
    return caught.value


# Topology


@pytest.mark.parametrize(
    "facts,field",
    [
        ({"pp": 0}, "topology.pp"),
        ({"tp": -1}, "topology.tp"),
        ({"tp": 4097}, "topology.tp"),
        ({"tp": True}, "topology.tp"),
        ({"tp": 4, "dcp": 3}, "topology.dcp"),
        ({"tp": 3, "dcp": 0}, "topology.dcp"),
        ({"tp": 2, "dcp": 4}, "topology.dcp"),
        ({"dp_size": 2, "dp_rank": 2}, "topology.dp_rank"),
        ({"dp_rank": -1}, "topology.dp_rank"),
        ({"pp": 65, "tp": 64}, "topology"),
    ],
    ids=str,
)
def test_topology(facts: dict[str, int], field: str) -> None:
    refused(lambda: Topology(**facts), field)


# Regions

BAD_REGION: dict[str, dict[str, Any]] = {
    "item_bytes": {"item_bytes": 0},
    "item_bytes ": {"item_bytes": 65},
    "item_bytes  ": {"item_bytes": 24},
    "stride_bytes": {"stride_bytes": 63},
    "stride_bytes ": {"stride_bytes": MAX_BYTES + 1},
    "row_bytes": {"row_bytes": 0},
    "row_bytes ": {"row_bytes": 32, "item_bytes": 64},
    "row_bytes  ": {"outer_count": 2},
    "row_bytes   ": {"dim": 4},
    "unit_bytes": {"unit_bytes": 0},
    "unit_bytes ": {"unit_bytes": -2},
    "unit_bytes  ": {"unit_bytes": np.int64(2)},
    "units_total": {"units_total": 0},
    "units_total ": {"units_total": 2**24 + 1},
    "dim": {"dim": -1},
    "dim ": {"dim": 9},
    "dim  ": {"dim": 8.0},
    "offset": {"offset": -1},
    "segment": {"segment": -1},
    "segment ": {"segment": 2**20 + 1},
    "layer_id": {"layer_id": 2**32},
    "layer_id ": {"layer_id": -1},
    "outer_count": {"outer_count": 0},
    "outer_count ": {"outer_count": 2**13, "row_bytes": 2**17, "item_bytes": 2**17, "stride_bytes": 2**17},
    "shard_groups": {"shard_groups": (4, 3)},
    "shard_groups ": {"shard_groups": (4, 4, 8)},
    "shard_groups  ": {"shard_groups": (9, -1)},
    "shard_groups   ": {"shard_groups": (8, 0)},
    "shard_groups    ": {"shard_groups": (1,) * 65, "units_total": 65, "dim": 65},
    "dtype": {"dtype": ""},
    "dtype ": {"dtype": "x" * 65},
}


@pytest.mark.parametrize("field", BAD_REGION)
def test_a_region_refuses(field: str) -> None:
    facts = BAD_REGION[field]
    layer = facts.get("layer_id", 0)
    refused(lambda: region(HEADS, 1, **facts), f"region[{layer}/k].{field.strip()}")


def test_an_item_may_exceed_four_gib_and_still_travels() -> None:
    unit = 2**33
    huge = region(Part("temporal", (3,), unit, replicated=True), 1, stride_bytes=3 * unit + 7)
    assert huge.item_bytes == 3 * 2**33 > 2**32
    space = Pools(slots=2).slot
    assert huge.span_bytes(space) == 2 * (3 * unit + 7) + 3 * unit
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(huge), type=Region)
    assert again == huge


def test_dim_zero_means_replicated_and_the_row_holds_all_units() -> None:
    copy = region(Part("conv", (4, 4, 8), 2, replicated=True), 4)
    assert copy.dim == 0 and copy.row_bytes == 32 and whole_facts(copy).replicated
    cut = region(Part("conv", (4, 4, 8), 2), 4)
    assert cut.dim == 4 and cut.row_bytes == 8 and whole_facts(cut).row_bytes == 32


# Components


def component(kind: str = "KV", space: Any = VIRTUAL, *parts: Part, **facts: Any) -> Component:
    regions = tuple(region(part, 1) for part in parts or (HEADS,))
    return Component(**({"kind": kind, "space": space, "regions": regions} | facts))


def test_a_component_is_never_empty_but_may_be_absent() -> None:
    error = refused(lambda: component(regions=()), "component[KV].regions", "never empty")
    assert "registers no such component" in error.hint


def test_a_component_refuses_spaces_its_kind_has_not() -> None:
    for space in (RequestRow(rows=2), Page(of=VIRTUAL), RaggedScratch(token_counts=(1,)), Pools().ring, Pools().swa):
        refused(lambda space=space: component(space=space), "component[KV].space", type(space).__name__)
    refused(lambda: component("MAMBA", VIRTUAL, Part("conv")), "component[MAMBA].space", "RecurrentSlot")


def test_a_component_refuses_an_unknown_kind() -> None:
    with pytest.raises(ManifestError) as caught:
        component("KVV")
    assert caught.value.code == "kind_unknown"
    refused(lambda: component("K" * 65), "component.kind")


def test_only_optional_kinds_may_be_optional() -> None:
    refused(lambda: component(optional=True), "component[KV].optional")
    assert component("DRAFT_KV", optional=True).optional


def test_a_component_refuses_parts_and_placements_its_kind_has_not() -> None:
    refused(lambda: component("KV", VIRTUAL, Part("q")), "component[KV].regions[0/q].part", "k | v")
    refused(
        lambda: component("MLA", VIRTUAL, Part("latent", (8,))), "component[MLA].regions[0/latent].dim", "replicated"
    )


def test_one_region_a_layer_and_part() -> None:
    refused(lambda: component("KV", VIRTUAL, HEADS, HEADS), "component[KV].regions[0/k]", "two")


def test_sentinels_belong_to_request_wide_parts_and_to_no_other() -> None:
    ring = Pools().ring
    rope = Part("rope", (3,), 8, replicated=True)
    refused(lambda: component("QSA_PENDING", ring, rope), "component[QSA_PENDING].regions[0/rope].layer_id", ROPE)
    key = Part("key", (3,), 2, replicated=True, sentinel=ROPE)
    refused(
        lambda: component("QSA_PENDING", ring, key), f"component[QSA_PENDING].regions[{ROPE}/key].layer_id", "sentinel"
    )
    wrong = Part("ngram", (3,), 8, replicated=True, sentinel=ROPE)
    refused(
        lambda: component("PLE", Pools().slot, wrong), f"component[PLE].regions[{ROPE}/ngram].layer_id", NGRAM
    )  # fmt: skip
    ring_of = Part("rope", (3,), 8, replicated=True, sentinel=ROPE)
    component("QSA_PENDING", ring, Part("key", (3,), 2, replicated=True), ring_of)


@pytest.mark.parametrize(
    ("kind", "space", "part"),
    [("QSA_PENDING", Pools().ring, Part("rope", (3,), 8, replicated=True, sentinel=ROPE)),
     ("PLE", Pools().slot, Part("ngram", (2,), 8, replicated=True, sentinel=NGRAM))],
)  # fmt: skip
def test_a_request_wide_part_comes_with_a_layer(kind: str, space: Any, part: Part) -> None:
    """A stage without QSA layers has no RoPE ring: as the lowest holder it would send what nobody has written."""
    refused(lambda: component(kind, space, part), f"component[{kind}].regions", part.name)


@pytest.mark.parametrize(
    "dcp,rows,legal",
    [
        *((2, 1, True), (2, 2, True), (2, 4, True), (2, 3, False), (2, 8, True), (2, 12, False), (2, 16, False)),
        *((3, 6, False), (3, 8, False), (3, 12, True)),
    ],
)
def test_items_are_whole_pages_or_parts_of_one(dcp: int, rows: int, legal: bool) -> None:
    space = VirtualTok(capacity_tokens=16, page_tokens=4, dcp_size=dcp)
    part = Part("k", (8,), 2, rows_per_item=rows)
    if legal:
        component("KV", space, part)
    else:
        refused(lambda: component("KV", space, part), "component[KV].regions[0/k].item_bytes", f"{rows} rows")


def test_items_of_rows_slots_and_rings() -> None:
    two = Part("conv", (1,), rows_per_item=2, replicated=True)
    refused(lambda: component("PLE", Pools().slot, two), "component[PLE].regions[0/conv].item_bytes")
    key = Part("key", (1,), rows_per_item=3, replicated=True)
    refused(lambda: component("QSA_PENDING", Pools().ring, key), "component[QSA_PENDING].regions[0/key].item_bytes")
    refused(
        lambda: component("QSA_COMPRESSED", Pools().scaled, key), "component[QSA_COMPRESSED].regions[0/key].item_bytes"
    )


# Ranks


def rank(*components: Component, nbytes: int = 10**6, **facts: Any) -> RankManifest:
    made = {
        "rank": RankId(0, 0),
        "epoch": 5,
        "segments": (SegmentInfo(nbytes=nbytes),),
        "components": components,
        "transport": Transport(backend="local"),
    }
    return RankManifest(**(made | facts))


def test_one_component_a_kind() -> None:
    refused(lambda: rank(component(), component()), "rank[pp0/tp0].component[KV]", "two")


def test_a_region_fits_its_segment_to_the_byte() -> None:
    # 4 pages and the reserve, 64 bytes each, with 8 bytes of padding between: the last padding need not be there
    part = Part("k", (8,), 2, rows_per_item=4, pad_bytes=8)
    need = 4 * 72 + 64
    rank(component("KV", VIRTUAL, part), nbytes=need)
    path = "rank[pp0/tp0].component[KV].regions[0/k].segment"
    error = refused(lambda: rank(component("KV", VIRTUAL, part), nbytes=need - 1), path, need, need - 1)
    assert "index space" in error.message and "20" in str(error.expected)
    moved = Component(kind="KV", space=VIRTUAL, regions=(region(part, 1, offset=1),))
    refused(lambda: rank(moved, nbytes=need), path)
    elsewhere = Component(kind="KV", space=VIRTUAL, regions=(region(part, 1, segment=1),))
    refused(lambda: rank(elsewhere), path, "below 1")


def test_a_larger_space_needs_a_larger_segment() -> None:
    shape = VirtualTok(capacity_tokens=16, page_tokens=4, dcp_size=2)
    refused(lambda: rank(component("KV", shape), nbytes=320), "rank[pp0/tp0].component[KV].regions[0/k].segment", 640)
    rank(component("KV", shape), nbytes=640)


@pytest.mark.parametrize("epoch", [-1, 2**64])
def test_epochs_are_64_bits(epoch: int) -> None:
    refused(lambda: rank(epoch=epoch), "rank[pp0/tp0].epoch")
    assert rank(epoch=2**64 - 1).epoch == 2**64 - 1


def test_segments_have_bytes() -> None:
    for nbytes in (0, -1, MAX_BYTES + 1):
        refused(lambda nbytes=nbytes: SegmentInfo(nbytes=nbytes), "segment.nbytes")


# Instances


def test_all_ranks_each_once_in_order() -> None:
    whole = build(Shape(every_kind(Pools()), pp=2, tp=2, stages={1: 1}))
    for ranks in (
        whole.ranks[:-1],
        whole.ranks[::-1],
        (*whole.ranks, whole.ranks[0]),
        (*whole.ranks[:3], whole.ranks[0]),
    ):
        refused(lambda ranks=ranks: msgspec.structs.replace(whole, ranks=ranks), "instance.ranks", "4 ranks")
    refused(lambda: msgspec.structs.replace(whole, ranks=whole.ranks[:-1]), "instance.ranks", "pp1/tp1")
    assert whole.rank(RankId(1, 0)) is whole.ranks[2]
    for missing in (RankId(2, 0), RankId(0, 2), RankId(-1, 0)):
        with pytest.raises(ManifestError):
            whole.rank(missing)


@pytest.mark.parametrize(
    "facts",
    [{"instance_id": ""}, {"instance_id": "x" * 65}, {"direction": ""}, {"model": "x" * 257}, {"max_tokens": 0}],
    ids=lambda facts: next(iter(facts)),
)
def test_what_we_build_a_peer_can_read(facts: dict[str, Any]) -> None:
    whole = build(Shape(every_kind(Pools())))
    refused(lambda: msgspec.structs.replace(whole, **facts), f"instance.{next(iter(facts))}")


def test_a_stage_without_layers_of_a_kind_registers_nothing_of_it() -> None:
    whole = build(Shape(every_kind(Pools(), layers=(0,)), pp=2, tp=2, stages={100: 1}))
    second = whole.rank(RankId(1, 0))
    assert second.component("QSA_PENDING") is None and second.component("DRAFT_KV") is not None
    assert whole.rank(RankId(0, 1)).component("QSA_PENDING").regions[-1].layer_id == ROPE
    assert "QSA_PENDING" in whole.kinds


def changed_on_one_rank(whole: InstanceManifest, kind: str, change: Any, number: int = 1) -> tuple[RankManifest, ...]:
    made = list(whole.ranks)
    components = tuple(change(c) if c.kind == kind else c for c in made[number].components)
    made[number] = msgspec.structs.replace(made[number], components=components)
    return tuple(made)


@pytest.mark.parametrize(
    "field,change",
    [
        ("space", {"space": Pools(capacity_tokens=32).virtual}),
        ("layout", {"layout": "HND"}),
        ("optional", {"optional": False}),
    ],
    ids=str,
)
def test_ranks_of_an_instance_agree(field: str, change: dict[str, Any]) -> None:
    whole = build(Shape(every_kind(Pools()), tp=2))
    ranks = changed_on_one_rank(whole, "DRAFT_KV", lambda c: msgspec.structs.replace(c, **change))
    refused(
        lambda: msgspec.structs.replace(whole, ranks=ranks), f"instance.rank[pp0/tp1].component[DRAFT_KV].{field}"
    )  # fmt: skip


def test_ranks_agree_on_whole_items_even_where_their_shares_look_alike() -> None:
    # TP-05: equal local rows, other totals
    whole = build(Shape(every_kind(Pools()), tp=2))

    def grow(c: Component) -> Component:
        first = msgspec.structs.replace(c.regions[0], units_total=8)
        return msgspec.structs.replace(c, regions=(first, *c.regions[1:]))

    ranks = changed_on_one_rank(whole, "KV", grow)
    refused(
        lambda: msgspec.structs.replace(whole, ranks=ranks), "instance.rank[pp0/tp1].component[KV].regions[0/k]"
    )  # fmt: skip


def test_every_tp_rank_of_a_stage_has_the_same_layers() -> None:
    whole = build(Shape(every_kind(Pools()), tp=2))
    ranks = changed_on_one_rank(whole, "KV", lambda c: msgspec.structs.replace(c, regions=c.regions[:-1]))
    refused(
        lambda: msgspec.structs.replace(whole, ranks=ranks), "instance.rank[pp0/tp1].component[KV].regions", "(1, 'v')"
    )  # fmt: skip


def test_a_layer_lies_in_one_stage_only_but_a_sentinel_may_lie_in_several() -> None:
    whole = build(Shape(every_kind(Pools()), pp=2, tp=1, stages={1: 1}))
    assert [r.layer_id for r in whole.ranks[1].component("QSA_PENDING").regions] == [1, ROPE]
    double = msgspec.structs.replace(whole.ranks[0], rank=RankId(1, 0))
    refused(
        lambda: msgspec.structs.replace(whole, ranks=(whole.ranks[0], double)),
        "instance.rank[pp1/tp0].component[KV].regions[0/k]",
        "stage 0 only",
    )


@pytest.mark.parametrize("tp,groups,legal", [
    (4, (8,), True), (4, (2,), True), (3, (6,), True), (4, (6,), False), (3, (2,), False), (8, (4, 4, 12), False),
    (4, (4, 4, 8), True), (8, (4, 4, 8), True),
])  # fmt: skip
def test_groups_divide_by_tp_or_tp_by_them(tp: int, groups: tuple[int, ...], legal: bool) -> None:
    spec = Spec("MAMBA", Pools().slot, (Part("conv", groups, 2),))
    if legal:
        build(Shape((spec,), tp=tp))
    else:
        refused(
            lambda: build(Shape((spec,), tp=tp)), "instance.rank[pp0/tp0].component[MAMBA].regions[0/conv].shard_groups"
        )  # fmt: skip


def test_a_rank_holds_exactly_its_share() -> None:
    # a rank that says 4 of 8 heads in an instance of TP 4
    whole = build(Shape((Spec("KV", VIRTUAL, (Part("k", (8,), 2),)),), tp=4))
    wide = [region(Part("k", (8,), 2), 2)]
    path = "instance.rank[pp0/tp0].component[KV].regions[0/k].dim"
    big = map_components(build(Shape((Spec("KV", VIRTUAL, (Part("k", (8,), 2),)),), tp=2)), lambda c: c)
    ranks = tuple(msgspec.structs.replace(big.ranks[0], rank=r.rank) for r in whole.ranks)
    refused(lambda: msgspec.structs.replace(whole, ranks=ranks), path, wide[0].dim)


def test_context_spaces_follow_the_topology() -> None:
    own = Pools(dcp=2)
    virtual = Spec("INDEX_K", own.virtual, (Part("key", replicated=True),))
    for dcp, tp in ((1, 2), (4, 4)):
        refused(
            lambda dcp=dcp, tp=tp: build(Shape((virtual,), tp=tp, dcp=dcp)),
            "instance.rank[pp0/tp0].component[INDEX_K].space.dcp_size",
        )
    scaled = Spec("QSA_COMPRESSED", own.scaled, (Part("key", replicated=True),))
    refused(
        lambda: build(Shape((scaled,), tp=2)), "instance.rank[pp0/tp0].component[QSA_COMPRESSED].space.dcp_size"
    )  # fmt: skip
    right = build(Shape((Spec("MLA", own.virtual, (Part("latent", replicated=True),), local=True),), tp=4, dcp=2))
    assert [r.components[0].space.dcp_rank for r in right.ranks] == [0, 1, 0, 1]
    swapped = tuple(
        msgspec.structs.replace(r, components=right.ranks[1 - i % 2].components) for i, r in enumerate(right.ranks)
    )
    refused(
        lambda: msgspec.structs.replace(right, ranks=swapped), "instance.rank[pp0/tp0].component[MLA].space.dcp_rank"
    )  # fmt: skip


def test_ranks_do_not_mix_shards_and_copies() -> None:
    own = Pools(dcp=2)
    spec = Spec("MLA", own.virtual, (Part("latent", replicated=True),))
    copies, shards = (build(Shape((replace(spec, local=local),), tp=2, dcp=2)) for local in (False, True))
    for a, b in ((copies, shards), (shards, copies)):
        refused(
            lambda a=a, b=b: msgspec.structs.replace(a, ranks=(a.ranks[0], b.ranks[1])),
            "instance.rank[pp0/tp1].component[MLA].space",
            "LocalTok",
        )


def test_a_sliding_window_under_dcp_is_refused() -> None:
    swa = Spec("SWA", Pools().swa, (Part("k", replicated=True),))
    refused(lambda: build(Shape((swa,), tp=2, dcp=2)), "instance.rank[pp0/tp0].component[SWA].space")


# Travel


def test_a_manifest_travels_whole_and_is_checked_on_arrival() -> None:
    whole = build(Shape(every_kind(Pools(dcp=2)), tp=4, dcp=2))
    raw = msgspec.msgpack.encode(whole)
    assert msgspec.msgpack.decode(raw, type=InstanceManifest) == whole
    body = msgspec.msgpack.decode(raw)
    body["ranks"][0]["components"][0]["regions"][0][3] += 1  # item_bytes
    with pytest.raises(ManifestError, match="item_bytes"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=InstanceManifest)
    body = msgspec.msgpack.decode(raw)
    body["ranks"][0]["components"][0]["space"]["capacity_tokens"] = 3
    with pytest.raises((ManifestError, SpaceError), match="capacity_tokens"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=InstanceManifest)
    body = msgspec.msgpack.decode(raw)
    body["ranks"][0]["components"][0]["space"]["space"] = "global"
    with pytest.raises(msgspec.ValidationError, match="space"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=InstanceManifest)


def test_spaces_that_are_made_by_hand_are_checked_too() -> None:
    check_instance(build(Shape(every_kind(Pools()))))
    with pytest.raises(SpaceError):
        LocalTok(virtual=VIRTUAL, dcp_rank=1)
    with pytest.raises(SpaceError):
        Scaled(of=SwaTok(capacity_tokens=8, page_tokens=4, window_tokens=2), ratio=3)
    with pytest.raises(ManifestError):
        map_regions(build(Shape(every_kind(Pools()))), "KV", lambda r: [r, r])
