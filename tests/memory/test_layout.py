"""Layouts: sizes follow from spaces, stages keep their own layers, and any two topologies pair."""

from __future__ import annotations

import itertools

import pytest
from support.hybrid_state import PAGE, RATIO, capacity, every_rank, hybrid_state, instance, layouts

from sglang_pd.memory.layout import Capacity, RankLayout, layout_rank
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.protocol.errors import ManifestError
from sglang_pd.protocol.kinds import PLE_NGRAM_STATE_LAYER_ID, QSA_ROPE_STATE_LAYER_ID
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.spaces import LocalTok, VirtualTok


def region_bytes(layout: RankLayout, kind: str, layer: int, part: str) -> int:
    component = layout.component(kind)
    assert component is not None
    region = next(r for r in component.regions if r.key == (layer, part))
    return region.items(component.space) * region.item_bytes


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_a_global_indexed_component_is_as_large_as_the_whole_virtual_space(dcp: int) -> None:
    pages = 5
    layout = layout_rank(hybrid_state(), capacity(pages), Topology(tp=4, dcp=dcp), RankId(0, 3))
    rows = (pages + 1) * PAGE  # C + p: the reserve is one page of each rank
    assert region_bytes(layout, "INDEX_K", 5, "key") == rows * dcp * 4
    assert region_bytes(layout, "QSA_COMPRESSED", 2, "key") == rows * dcp // RATIO * 5 * 4
    assert region_bytes(layout, "MLA", 5, "latent") == rows * 6 * 4
    component = layout.component("MLA")
    assert component is not None
    assert isinstance(component.space, LocalTok if dcp > 1 else VirtualTok)


def test_stages_keep_their_layers_and_request_wide_parts_only_where_needed() -> None:
    topology = Topology(pp=3)
    by_stage = layouts(hybrid_state(stage_starts=(0, 2, 5)), capacity(4), topology)
    kinds = [{c.kind for c in layout.components} for layout in by_stage]
    assert kinds[0] == {"SWA", "MAMBA", "PLE"}
    assert kinds[1] == {"KV", "QSA_PENDING", "QSA_COMPRESSED", "MAMBA", "PLE"}
    assert kinds[2] == {"KV", "MLA", "INDEX_K", "QSA_PENDING", "QSA_COMPRESSED"}
    wide = [{k[1] for k in layout.views if k[1] >= 2**32 - 2} for layout in by_stage]
    assert wide == [
        {PLE_NGRAM_STATE_LAYER_ID},
        {PLE_NGRAM_STATE_LAYER_ID, QSA_ROPE_STATE_LAYER_ID},
        {QSA_ROPE_STATE_LAYER_ID},
    ]


def test_conv_blocks_are_sharded_each_on_its_own() -> None:
    layout = layout_rank(hybrid_state(), capacity(2), Topology(tp=4), RankId(0, 1))
    assert layout.views["MAMBA", 0, "conv"].shape == (5, 1, 1, 1 + 1 + 2, 3)
    assert layout.views["MAMBA", 0, "temporal"].shape == (5, 1, 1, 1, 2, 3)
    assert layout.views["PLE", 0, "conv"].shape == (5, 1, 1, 4, 9)


def test_more_ranks_than_heads_repeat_heads() -> None:
    layout = layout_rank(hybrid_state(), capacity(2), Topology(tp=8), RankId(0, 5))
    assert layout.views["KV", 2, "k"].units == 1


def test_qsa_parts_are_views_of_one_allocation_without_overlap() -> None:
    layout = layout_rank(hybrid_state(), capacity(4), Topology(), RankId(0, 0))
    regions = [(r, c.space) for c in layout.components if c.kind.startswith("QSA") for r in c.regions]
    assert {layout.segments[r.segment].name for r, _ in regions} == {"QSA"}
    spans = sorted((r.offset, r.offset + r.span_bytes(s)) for r, s in regions)
    assert len(spans) == 5
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.segments[regions[0][0].segment].nbytes


def test_host_components_lie_beside_device_ones() -> None:
    layout = layout_rank(hybrid_state(), capacity(4), Topology(), RankId(0, 0), device="cuda:0")
    devices = {c.kind: layout.segments[c.regions[0].segment].device for c in layout.components}
    assert devices.pop("PLE") == "cpu"
    assert set(devices.values()) == {"cuda:0"}


def test_padding_between_items_is_part_of_the_stride_only() -> None:
    padded = ComponentSpec("KV", "tokens", (RegionSpec("k", (0,), "float32", 1, (3,)),), item_align_bytes=64)
    layout = layout_rank(StateSpec((padded,), 1), Capacity(PAGE, PAGE), Topology(), RankId(0, 0))
    (region,) = layout.components[0].regions
    assert (region.item_bytes, region.stride_bytes) == (PAGE * 12, 128)
    assert layout.total_bytes == 2 * 128


def test_index_bytes_sum_to_the_whole() -> None:
    layout = layout_rank(hybrid_state(), capacity(6), Topology(tp=2, dcp=2), RankId(0, 1))
    per_index = layout.index_bytes
    whole = sum(space.extent * nbytes for space, nbytes in per_index.items())
    assert whole == sum(layout.component_bytes(c.kind) for c in layout.components)


TOPOLOGIES = [
    Topology(),
    Topology(tp=2),
    Topology(pp=2, tp=4),
    Topology(pp=3),
    Topology(tp=4, dcp=2),
    Topology(tp=2, dcp=2),
]


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(TOPOLOGIES, TOPOLOGIES)))
def test_any_two_topologies_pair_with_proven_coverage(src: Topology, dst: Topology) -> None:
    window = [hybrid_state()] * 2
    if src.dcp > 1 or dst.dcp > 1:  # a sliding window is not defined under DCP
        whole = hybrid_state()
        without = tuple(c for c in whole.components if c.kind != "SWA")
        window = [hybrid_state(components=without, window_tokens=0)] * 2
    pairing = Pairing(
        instance("p", layouts(window[0], capacity(4), src)), instance("d", layouts(window[1], capacity(7, 5, 6), dst))
    )
    for rank in every_rank(dst):
        pairing.prove(rank)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("dtype", lambda: RegionSpec("k", (0,), "float7", 1)),
        ("layer_ids", lambda: RegionSpec("k", (), "int8", 1)),
        ("layer_ids", lambda: RegionSpec("k", (3, 1), "int8", 1)),
        ("shard_groups", lambda: RegionSpec("k", (0,), "int8", 5, shard_groups=(2, 2))),
        ("KV.scale", lambda: ComponentSpec("KV", "tokens", (RegionSpec("scale", (0,), "int8", 1),))),
        ("ring_width", lambda: ComponentSpec("KV", "tokens", (RegionSpec("k", (0,), "int8", 1),), ring_width=4)),
        ("ratio", lambda: ComponentSpec("KV", "rows", (RegionSpec("k", (0,), "int8", 1),), ratio=4)),
        ("layer_ids", lambda: hybrid_state(layers=4)),
        ("window_tokens", lambda: hybrid_state(window_tokens=0)),
        ("stage_starts", lambda: layouts(hybrid_state(stage_starts=(0, 3)), capacity(2), Topology(pp=3))),
        ("shard_groups", lambda: layouts(hybrid_state(), capacity(2), Topology(tp=3))),
    ],
)
def test_impossible_descriptions_are_refused_by_field(field: str, make: object) -> None:
    with pytest.raises(ManifestError) as caught:
        make()  # type: ignore[operator]
    assert field in caught.value.where


def test_a_root_that_is_none_is_refused_with_those_that_are() -> None:
    """It was laid out as `tokens`, whole on every DCP rank."""
    for wrong in ("lokal_tokens", "recurrent_slots", ""):
        with pytest.raises(ManifestError, match=r"KV\.root.*tokens \| local_tokens \| swa \| rows \| slots"):
            ComponentSpec("KV", wrong, (RegionSpec("k", (0,), "float32", 1, (8,)),))  # type: ignore[arg-type]
