"""Where each region of one rank lies: spaces, item sizes and offsets derived from state, capacity and topology.

Pure: the standard library and `protocol` only. The same function serves engines, `check` and `explain`. A region's size
follows from its index space alone, so a global-indexed component is as large as the whole virtual space (x DCP).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sglang_pd.memory.spec import HEAD_MAJOR, ComponentSpec, RegionSpec, StateSpec, refuse
from sglang_pd.protocol.errors import ManifestError
from sglang_pd.protocol.kinds import kind_of
from sglang_pd.protocol.manifest import Component, RankId, RankManifest, Region, SegmentInfo, Topology, Transport
from sglang_pd.protocol.spaces import (
    AnySpace,
    LocalTok,
    RecurrentSlot,
    RequestRow,
    Ring,
    Scaled,
    SwaTok,
    VirtualTok,
)

REGION_ALIGN_BYTES: Final = 256
"""Regions start at multiples of this within their segment."""

RegionKey = tuple[str, int, str]
"""(kind, layer id, part)."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of an instance's pools, reserves not counted; everything on one rank follows from them.

    tokens: C, token slots of one rank, a multiple of page_tokens (under DCP the instance holds C * D tokens).
    page_tokens: p. rows: requests that may run. slots: recurrent states. swa_tokens: token slots of the sliding-window
    pool. interleave: neighbouring tokens that stay on one DCP rank.
    """

    tokens: int
    page_tokens: int
    rows: int = 1
    slots: int = 1
    swa_tokens: int = 0
    interleave: int = 1


@dataclass(frozen=True, slots=True)
class Roots:
    """The spaces that allocators issue; None where no component of the model needs one."""

    tokens: VirtualTok | None
    swa: SwaTok | None
    rows: RequestRow | None
    slots: RecurrentSlot | None

    @property
    def list_spaces(self) -> tuple[AnySpace, ...]:
        """Spaces of a room's index lists: pages, sliding-window pages, rows, slots, those that exist."""
        return tuple(s.list_space for s in (self.tokens, self.swa, self.rows, self.slots) if s is not None)


def roots_of(state: StateSpec, capacity: Capacity, topology: Topology) -> Roots:
    """The allocator spaces of an instance. Raises `SpaceError` for impossible sizes."""
    need = state.roots
    c = capacity
    return Roots(
        VirtualTok(capacity_tokens=c.tokens, page_tokens=c.page_tokens, dcp_size=topology.dcp, interleave=c.interleave)
        if "tokens" in need
        else None,
        SwaTok(capacity_tokens=c.swa_tokens, page_tokens=c.page_tokens, window_tokens=state.window_tokens)
        if "swa" in need
        else None,
        RequestRow(rows=c.rows) if "rows" in need else None,
        RecurrentSlot(slots=c.slots) if "slots" in need else None,
    )


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One allocation that a rank asks its scope for."""

    nbytes: int
    device: str
    name: str


@dataclass(frozen=True, slots=True)
class ViewShape:
    """How an engine sees a region: [items, rows_per_item, outer_count, units, *unit_shape] of dtype.

    initial: value of a fresh slot.
    """

    dtype: str
    items: int
    rows_per_item: int
    outer_count: int
    units: int
    unit_shape: tuple[int, ...]
    initial: int | float

    @property
    def shape(self) -> tuple[int, ...]:
        """The five parts as one shape."""
        return (self.items, self.rows_per_item, self.outer_count, self.units, *self.unit_shape)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a region lies: segment number, bytes from its start, bytes from item to item."""

    segment: int
    offset: int
    stride_bytes: int


@dataclass(frozen=True)
class RankLayout:
    """Everything about one rank's memory but its addresses."""

    topology: Topology
    rank: RankId
    roots: Roots
    components: tuple[Component, ...]
    segments: tuple[SegmentPlan, ...]
    views: Mapping[RegionKey, ViewShape]

    def component(self, kind: str) -> Component | None:
        """The component of a kind, or None where this rank has none."""
        return next((c for c in self.components if c.kind == kind), None)

    def component_bytes(self, kind: str) -> int:
        """Bytes of a component on this rank, padding between items included."""
        found = self.component(kind)
        return sum(r.items(found.space) * r.stride_bytes for r in found.regions) if found else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def index_bytes(self) -> dict[AnySpace, int]:
        """Bytes of this rank that one index of each list space stands for (a page over all its layers, a slot)."""
        result: dict[AnySpace, int] = dict.fromkeys(self.roots.list_spaces, 0)
        for component in self.components:
            listed = component.space.list_space
            for region in component.regions:
                result[listed] += region.items(component.space) * region.stride_bytes // listed.extent
        return result

    def manifest(self, epoch: int, transport: Transport) -> RankManifest:
        """What this rank registers. Raises `ManifestError` where a region does not fit its segment."""
        return RankManifest(
            rank=self.rank,
            epoch=epoch,
            segments=tuple(SegmentInfo(nbytes=s.nbytes, device=s.device) for s in self.segments),
            components=self.components,
            transport=transport,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """A region of one rank before it has a place: its key, its component, sizes in bytes, and the engine's view."""

    key: RegionKey
    component: ComponentSpec
    region: RegionSpec
    space: AnySpace
    units: int
    rows_per_item: int
    row_bytes: int

    @property
    def item_bytes(self) -> int:
        """Payload of one item."""
        return self.rows_per_item * self.row_bytes

    @property
    def stride_bytes(self) -> int:
        """Bytes from item to item where we choose them."""
        return -(-self.item_bytes // self.component.item_align_bytes) * self.component.item_align_bytes

    @property
    def items(self) -> int:
        """Items that the space needs."""
        return -(-self.space.extent // self.rows_per_item)

    @property
    def view(self) -> ViewShape:
        """The engine's view."""
        r = self.region
        return ViewShape(
            r.dtype, self.items, self.rows_per_item, r.outer_count, self.units, r.unit_shape, r.initial
        )  # fmt: skip

    def placed(self, place: Place) -> Region:
        """The region as a manifest states it."""
        r = self.region
        return Region(
            layer_id=self.key[1],
            part=r.part,
            dtype=r.dtype,
            item_bytes=self.item_bytes,
            stride_bytes=place.stride_bytes,
            row_bytes=self.row_bytes,
            unit_bytes=r.unit_bytes,
            units_total=r.units_total,
            dim=0 if r.replicated else self.units,
            segment=place.segment,
            offset=place.offset,
            outer_count=r.outer_count,
            shard_groups=r.shard_groups,
        )


def component_space(component: ComponentSpec, roots: Roots, topology: Topology, tp_rank: int) -> AnySpace:
    """The index space of a component on one rank."""
    if component.root == "slots" and roots.slots is not None:
        return roots.slots
    if component.root == "rows" and roots.rows is not None:
        if not component.ring_width:
            return roots.rows
        return Ring(of=roots.rows, width=component.ring_width, group_tokens=component.group_tokens)
    if component.root == "swa" and roots.swa is not None:
        return Scaled(of=roots.swa, ratio=component.ratio) if component.ratio else roots.swa
    if roots.tokens is None:
        refuse(f"{component.kind}.root", "an allocator that the state names", component.root)
    if component.ratio:
        return Scaled(of=roots.tokens, ratio=component.ratio)
    if component.root == "local_tokens" and topology.dcp > 1:
        return LocalTok(virtual=roots.tokens, dcp_rank=tp_rank % topology.dcp)
    return roots.tokens


def rows_per_item(space: AnySpace) -> int:
    """Rows of one item: one rank's page, a page's groups, a request's ring, or one."""
    if isinstance(space, VirtualTok | SwaTok):
        return space.page_tokens
    if isinstance(space, LocalTok):
        return space.virtual.page_tokens
    if isinstance(space, Scaled):
        return space.of.page_tokens // space.ratio
    return space.width if isinstance(space, Ring) else 1


def rank_shapes(state: StateSpec, capacity: Capacity, topology: Topology, rank: RankId) -> Iterator[Shape]:
    """Every region of one rank, component by component, part by part, in order of layers.

    A stage has its own layers only, and a request-wide part only where it has a layer that needs it. Raises
    `ManifestError` for a component that declares its pages head by head: plans address whole rows.
    """
    roots = roots_of(state, capacity, topology)
    stage = state.stage_layers(topology, rank.pp_rank)
    for component in state.components:
        space = component_space(component, roots, topology, rank.tp_rank)
        sentinels = kind_of(component.kind).request_wide
        for region in component.regions:
            layers = [layer for layer in region.layer_ids if layer in stage]
            if layers and region.part in sentinels:
                layers = [sentinels[region.part]]
            units = region.units_on_rank(topology.tp)
            if layers and component.layout.upper() == HEAD_MAJOR and units > 1 and rows_per_item(space) > 1:
                raise ManifestError(
                    "the declared layout puts a token's heads apart", where=f"{component.kind}.layout",
                    expected="a token's row contiguous, as in NHD", actual=component.layout,
                    hint="A plan moves rows; of a partial page it would move some heads only. Keep such pools as NHD.",
                )  # fmt: skip
            for layer in layers:
                yield Shape(
                    (component.kind, layer, region.part), component, region, space, units, rows_per_item(space),
                    region.outer_count * units * region.unit_bytes,
                )  # fmt: skip


def components_of(shapes: list[Shape], places: Mapping[RegionKey, Place]) -> tuple[Component, ...]:
    """Components of one rank from its regions and where they lie."""
    by_kind: dict[str, list[Shape]] = {}
    for shape in shapes:
        by_kind.setdefault(shape.component.kind, []).append(shape)
    return tuple(
        Component(
            kind=kind,
            space=members[0].space,
            regions=tuple(shape.placed(places[shape.key]) for shape in members),
            layout=members[0].component.layout,
            optional=members[0].component.optional,
        )
        for kind, members in by_kind.items()
    )


def layout_rank(
    state: StateSpec, capacity: Capacity, topology: Topology, rank: RankId, device: str = "cpu"
) -> RankLayout:
    """Lay out one rank's memory, one segment for each component (or `ComponentSpec.segment`) and device.

    Raises `ManifestError` or `SpaceError` for a state, capacity and topology that do not fit together.
    """
    shapes = list(rank_shapes(state, capacity, topology, rank))
    numbers: dict[tuple[str, str], int] = {}
    used: list[int] = []
    places: dict[RegionKey, Place] = {}
    for shape in shapes:
        name = (shape.component.segment or shape.component.kind, shape.component.device or device)
        number = numbers.setdefault(name, len(numbers))
        if number == len(used):
            used.append(0)
        offset = -(-used[number] // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES
        places[shape.key] = Place(number, offset, shape.stride_bytes)
        used[number] = offset + shape.items * shape.stride_bytes
    segments = tuple(SegmentPlan(nbytes, where, name) for (name, where), nbytes in zip(numbers, used, strict=True))
    return RankLayout(
        topology,
        rank,
        roots_of(state, capacity, topology),
        components_of(shapes, places),
        segments,
        {shape.key: shape.view for shape in shapes},
    )
