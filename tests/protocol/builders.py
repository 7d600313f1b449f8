"""Builds manifests for tests: a short description of an instance in, an `InstanceManifest` with real offsets out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_pd.protocol.manifest import (
    Component,
    InstanceManifest,
    RankId,
    RankManifest,
    Region,
    SegmentInfo,
    Topology,
    Transport,
)
from sglang_pd.protocol.spaces import AnySpace, LocalTok, RecurrentSlot, RequestRow, Ring, Scaled, SwaTok, VirtualTok

ROPE = 2**32 - 2
NGRAM = 2**32 - 1


@dataclass(frozen=True)
class Part:
    """One part of a component: `groups` of units of `unit_bytes`; `sentinel` replaces the layers where it is set."""

    name: str
    groups: tuple[int, ...] = (1,)
    unit_bytes: int = 2
    outer: int = 1
    replicated: bool = False
    rows_per_item: int = 1
    pad_bytes: int = 0
    dtype: str = "u8"
    sentinel: int | None = None


@dataclass(frozen=True)
class Spec:
    """A component. `local`: the space is what each DCP rank makes of `space`. `shared_page`: parts share one stride."""

    kind: str
    space: AnySpace
    parts: tuple[Part, ...]
    layers: tuple[int, ...] = (0,)
    layout: str = "NHD"
    optional: bool = False
    local: bool = False
    shared_page: bool = False


@dataclass(frozen=True)
class Shape:
    """An instance. `stages`: layer id -> PP stage (stage 0 where it is silent)."""

    components: tuple[Spec, ...]
    pp: int = 1
    tp: int = 1
    dcp: int = 1
    stages: Mapping[int, int] = field(default_factory=dict)
    name: str = "instance"
    segments: int = 1
    gap_bytes: int = 0
    lead_bytes: int = 0


def region(part: Part, tp: int, layer_id: int = 0, **changes: Any) -> Region:
    """A region of one rank of `tp`, at offset 0 of segment 0 unless `changes` say otherwise."""
    units = sum(part.groups) if part.replicated else sum(max(1, group // tp) for group in part.groups)
    row = part.outer * units * part.unit_bytes
    facts: dict[str, Any] = {
        "layer_id": layer_id if part.sentinel is None else part.sentinel,
        "part": part.name,
        "dtype": part.dtype,
        "item_bytes": row * part.rows_per_item,
        "stride_bytes": row * part.rows_per_item + part.pad_bytes,
        "row_bytes": row,
        "unit_bytes": part.unit_bytes,
        "units_total": sum(part.groups),
        "dim": 0 if part.replicated else units,
        "segment": 0,
        "offset": 0,
        "outer_count": part.outer,
        "shard_groups": part.groups if len(part.groups) > 1 else (),
    }
    return Region(**(facts | changes))


class _Layout:
    """Hands out offsets, segment by segment in turn."""

    def __init__(self, shape: Shape) -> None:
        self.ends = [shape.lead_bytes] * shape.segments
        self.gap, self.turn = shape.gap_bytes, 0

    def place(self, length: int) -> tuple[int, int]:
        segment = self.turn % len(self.ends)
        self.turn += 1
        offset = self.ends[segment]
        self.ends[segment] = offset + length + self.gap
        return segment, offset


def _component(spec: Spec, shape: Shape, rank: RankId, layout: _Layout) -> Component | None:
    space: AnySpace = spec.space
    if spec.local:
        if not isinstance(space, VirtualTok):
            raise TypeError(space)
        space = LocalTok(virtual=space, dcp_rank=rank.tp_rank % shape.dcp)
    layers = [layer for layer in spec.layers if shape.stages.get(layer, 0) == rank.pp_rank]
    regions: list[Region] = []
    for layer in layers:
        parts = [part for part in spec.parts if part.sentinel is None]
        regions += _shared(parts, shape.tp, layer, layout, space) if spec.shared_page else []
        for part in [] if spec.shared_page else parts:
            regions.append(_placed(region(part, shape.tp, layer), layout, space))
    if layers:
        for part in spec.parts:
            if part.sentinel is not None:
                regions.append(_placed(region(part, shape.tp), layout, space))
    if not regions:
        return None
    return Component(kind=spec.kind, space=space, regions=tuple(regions), layout=spec.layout, optional=spec.optional)


def _placed(made: Region, layout: _Layout, space: AnySpace) -> Region:
    segment, offset = layout.place(made.items(space) * made.stride_bytes)
    return msgspec.structs.replace(made, segment=segment, offset=offset)


def _shared(parts: list[Part], tp: int, layer: int, layout: _Layout, space: AnySpace) -> list[Region]:
    made = [region(part, tp, layer) for part in parts]
    stride = sum(one.stride_bytes for one in made)
    segment, offset = layout.place(made[0].items(space) * stride)
    placed = []
    for one in made:
        placed.append(msgspec.structs.replace(one, segment=segment, offset=offset, stride_bytes=stride))
        offset += one.stride_bytes
    return placed


def build(shape: Shape, **changes: Any) -> InstanceManifest:
    """The instance's manifest; `changes` replace fields of `InstanceManifest`."""
    ranks = []
    for pp_rank in range(shape.pp):
        for tp_rank in range(shape.tp):
            layout = _Layout(shape)
            rank = RankId(pp_rank, tp_rank)
            made = [_component(spec, shape, rank, layout) for spec in shape.components]
            ranks.append(
                RankManifest(
                    rank=rank,
                    epoch=1000 + pp_rank * 100 + tp_rank,
                    segments=tuple(SegmentInfo(nbytes=max(end, 1)) for end in layout.ends),
                    components=tuple(component for component in made if component is not None),
                    transport=Transport(backend="local"),
                )
            )
    facts: dict[str, Any] = {
        "instance_id": shape.name,
        "topology": Topology(pp=shape.pp, tp=shape.tp, dcp=shape.dcp),
        "model": "model-a",
        "ranks": tuple(ranks),
    }
    return InstanceManifest(**(facts | changes))


def map_ranks(instance: InstanceManifest, change: Callable[[RankManifest], RankManifest]) -> InstanceManifest:
    """The instance with every rank changed."""
    return msgspec.structs.replace(instance, ranks=tuple(change(rank) for rank in instance.ranks))


def map_components(instance: InstanceManifest, change: Callable[[Component], Component | None]) -> InstanceManifest:
    """The instance with every component changed, or left out where `change` gives None."""

    def one(rank: RankManifest) -> RankManifest:
        made = [change(component) for component in rank.components]
        return msgspec.structs.replace(rank, components=tuple(c for c in made if c is not None))

    return map_ranks(instance, one)


def map_regions(
    instance: InstanceManifest, kind: str, change: Callable[[Region], Iterable[Region]]
) -> InstanceManifest:
    """The instance with every region of a kind replaced by what `change` gives."""

    def one(component: Component) -> Component | None:
        if component.kind != kind:
            return component
        regions = tuple(new for old in component.regions for new in change(old))
        return msgspec.structs.replace(component, regions=regions) if regions else None

    return map_components(instance, one)


def roomy(instance: InstanceManifest, nbytes: int = 2**40) -> InstanceManifest:
    """The same instance with segments of `nbytes`, so that a test can change geometry without outgrowing them."""
    return map_ranks(
        instance,
        lambda rank: msgspec.structs.replace(rank, segments=tuple(SegmentInfo(nbytes=nbytes) for _ in rank.segments)),
    )


@dataclass(frozen=True)
class Pools:
    """Pool sizes and widths of one side: nothing here has to be equal on two sides but `page_tokens`, `window`, `r`."""

    capacity_tokens: int = 64
    swa_capacity_tokens: int = 32
    page_tokens: int = 4
    rows: int = 5
    slots: int = 7
    ring_width: int = 4
    window: int = 6
    dcp: int = 1
    interleave: int = 1
    r: int = 2

    @property
    def virtual(self) -> VirtualTok:
        return VirtualTok(
            capacity_tokens=self.capacity_tokens,
            page_tokens=self.page_tokens,
            dcp_size=self.dcp,
            interleave=self.interleave,
        )

    @property
    def swa(self) -> SwaTok:
        return SwaTok(capacity_tokens=self.swa_capacity_tokens, page_tokens=self.page_tokens, window_tokens=self.window)

    @property
    def scaled(self) -> Scaled:
        return Scaled(of=self.virtual, ratio=self.r)

    @property
    def row(self) -> RequestRow:
        return RequestRow(rows=self.rows)

    @property
    def ring(self) -> Ring:
        return Ring(of=self.row, width=self.ring_width, group_tokens=self.r)

    @property
    def slot(self) -> RecurrentSlot:
        return RecurrentSlot(slots=self.slots)


def every_kind(pools: Pools, heads: int = 4, layers: tuple[int, ...] = (0, 1)) -> tuple[Spec, ...]:
    """All kinds on all layers, small. SWA and its scales are left out where DCP forbids them."""
    page, r = pools.page_tokens, pools.r
    whole = {"replicated": True}
    local = pools.dcp > 1
    specs = [
        Spec("KV", pools.virtual, (Part("k", (heads,), 3, rows_per_item=page), Part("v", (heads,), 2)), layers),
        Spec("MLA", pools.virtual, (Part("latent", (5,), 1, **whole), Part("rope", (3,), 1, **whole)), local=local),
        Spec(
            "INDEX_K",
            pools.virtual,
            (
                Part("key", (4,), 1, rows_per_item=page, **whole),
                Part("scale", (1,), 4, rows_per_item=page, **whole),
            ),
            layers,
            layout="keys_then_scales",
            shared_page=True,
        ),
        Spec("INDEX_K_TAIL", pools.ring, (Part("key", (2,), 2, **whole), Part("score", (1,), 2, **whole)), layers),
        Spec(
            "QSA_PENDING",
            pools.ring,
            (Part("key", (3,), 2, **whole), Part("rope", (3,), 8, sentinel=ROPE, **whole)),
            layers,
        ),
        Spec("QSA_COMPRESSED", pools.scaled, (Part("key", (3,), 2, rows_per_item=page // r, **whole),), layers),
        Spec("QSA_RAW_K", pools.virtual, (Part("key", (3,), 2, **whole),), layers),
        Spec("QSA_POSITIONS", pools.virtual, (Part("position", (3,), 1, **whole),), layers[:1]),
        Spec(
            "MAMBA",
            pools.slot,
            (Part("conv", (heads, heads, 2 * heads), 2, outer=3, pad_bytes=6), Part("temporal", (heads,), 4)),
            layers,
        ),
        Spec(
            "PLE",
            pools.slot,
            (Part("conv", (9,), 2, **whole), Part("ngram", (2,), 8, sentinel=NGRAM, **whole)),
            layers[:1],
        ),
        Spec("DRAFT_KV", pools.virtual, (Part("k", (heads,), 2), Part("v", (heads,), 2)), (100,), optional=True),
        Spec("BLOCK_SCALE", pools.virtual, (Part("k", (heads,), 1), Part("v", (heads,), 1)), layers),
        Spec("REQUEST_ROW", pools.row, (Part("row", (11,), 1, **whole),), (100,), optional=True),
    ]
    if pools.dcp == 1:
        specs.insert(4, Spec("SWA", pools.swa, (Part("k", (heads,), 2), Part("v", (heads,), 3)), layers))
    return tuple(specs)
