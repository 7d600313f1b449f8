"""What a rank, and an instance, states about itself: topology, segments, components, regions.

A `Region` is a typed view on a segment. It has no row count: its capacity follows from the component's space, and a
region that does not fit its segment is refused. Nothing here is paired by position: kinds and layer ids are explicit.
All structs are frozen and checked when built, whether by this process or by the decoder; an invalid one raises
`ManifestError` with the path of the field.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Final

import msgspec

from sglang_pd.protocol.errors import ManifestError
from sglang_pd.protocol.kinds import MAX_LAYER_ID, SENTINELS, Placement, kind_of
from sglang_pd.protocol.manifest_size import (
    MAX_COMPONENT_REGIONS,
    MAX_COMPONENTS,
    MAX_RANK_SEGMENTS,
    MAX_RANKS,
    check_total,
)
from sglang_pd.protocol.spaces import AnySpace, LocalTok, Page, RaggedScratch, Scaled, Space, SwaTok, VirtualTok

MAX_BYTES: Final = 2**52
"""Largest length or offset in bytes (4 PiB): fits every pool, and sums of two never wrap 64 bits."""
MAX_UNITS: Final = 2**24
MAX_GROUPS: Final = 64
MAX_PIECES: Final = 4096
"""Most pieces that a row falls into (outer_count * groups): a plan holds a descriptor for each."""

Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Units = Annotated[int, msgspec.Meta(ge=0, le=MAX_UNITS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=256)]


def _refuse(where: str, expected: object, actual: object, message: str = "impossible value", hint: str = "") -> None:
    raise ManifestError(message, where=where, expected=expected, actual=actual, hint=hint)


def _within(where: str, value: object, least: int, most: int, message: str = "impossible value") -> None:
    """Integers are checked here as the decoder checks them: what we can build, a peer can read."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(where, f"an integer from {least} to {most}", repr(value), message)


def _named(where: str, value: object, least: int = 1, most: int = 64) -> None:
    if not isinstance(value, str) or not least <= len(value) <= most:
        _refuse(where, f"text of {least} to {most} characters", repr(value)[:80])


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of an instance: pp x tp ranks; dcp divides tp and dcp_rank = tp_rank % dcp; one of dp_size replicas."""

    pp: int = 1
    tp: int = 1
    dcp: int = 1
    dp_size: int = 1
    dp_rank: int = 0

    def __post_init__(self) -> None:
        for field in ("pp", "tp", "dcp", "dp_size"):
            _within(f"topology.{field}", getattr(self, field), 1, MAX_RANKS)
        if self.tp % self.dcp:
            _refuse("topology.dcp", f"a divisor of tp = {self.tp}", self.dcp)
        _within("topology.dp_rank", self.dp_rank, 0, self.dp_size - 1)
        if self.pp * self.tp > MAX_RANKS:
            _refuse("topology", f"at most {MAX_RANKS} ranks", self.pp * self.tp)

    @property
    def record_rank(self) -> RankId:
        """The rank whose handoff record travels: the last PP stage's TP rank 0."""
        return RankId(self.pp - 1, 0)


class RankId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A rank of an instance."""

    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"pp{self.pp_rank}/tp{self.tp_rank}"


class Region(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A typed view on a segment. Item i lies at `offset + i * stride_bytes`; it holds item_bytes / row_bytes rows.

    A row (of a token, a group, a ring slot, a whole state) is `outer_count` repeats of the units this rank holds, each
    of `unit_bytes`. Sent as an array: fields are only ever appended.

    layer_id: u32, or a sentinel of `kinds.py` for request-wide parts. part: one of the kind's parts.
    dtype: element type, compared as text. item_bytes: payload of one item (u64). stride_bytes: from item to item;
    what lies between is never written. units_total: units of the whole dimension over all ranks.
    dim: units on this rank; 0 = replicated, the row then holds all `units_total`.
    shard_groups: sizes, in units, of sub-blocks that are sharded each on its own (q | k | v); they sum to units_total.
    segment, offset: number of the segment in the rank's table, and bytes from its start.
    """

    layer_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYER_ID)]
    part: Name
    dtype: Name
    item_bytes: Bytes
    stride_bytes: Bytes
    row_bytes: Bytes
    unit_bytes: Bytes
    units_total: Units
    dim: Units
    segment: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    offset: Bytes
    outer_count: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1
    shard_groups: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()

    def __post_init__(self) -> None:
        where = f"region[{self.layer_id}/{self.part}]"
        for field in ("item_bytes", "stride_bytes", "row_bytes", "unit_bytes"):
            _within(f"{where}.{field}", getattr(self, field), 1, MAX_BYTES, "a registered length is never 0")
        for field, least, most in (
            ("layer_id", 0, MAX_LAYER_ID),
            ("units_total", 1, MAX_UNITS),
            ("offset", 0, MAX_BYTES),
            ("segment", 0, 2**20),
            ("outer_count", 1, 2**20),
        ):
            _within(f"{where}.{field}", getattr(self, field), least, most)
        _named(f"{where}.part", self.part)
        _named(f"{where}.dtype", self.dtype)
        for group in self.shard_groups[:MAX_GROUPS]:
            _within(f"{where}.shard_groups", group, 1, MAX_UNITS)
        _within(f"{where}.dim", self.dim, 0, self.units_total)
        if len(self.shard_groups) > MAX_GROUPS or sum(self.groups) != self.units_total:
            _refuse(
                f"{where}.shard_groups",
                f"positive sizes that sum to units_total = {self.units_total}",
                self.shard_groups,
            )
        if self.outer_count * len(self.groups) > MAX_PIECES:
            _refuse(f"{where}.outer_count", f"at most {MAX_PIECES} pieces a row", self.outer_count * len(self.groups))
        units = self.dim or self.units_total
        if self.row_bytes != self.outer_count * units * self.unit_bytes:
            _refuse(
                f"{where}.row_bytes",
                f"outer_count * units * unit_bytes = {self.outer_count} * {units} * {self.unit_bytes}",
                self.row_bytes,
            )
        if self.item_bytes % self.row_bytes:
            _refuse(f"{where}.item_bytes", f"a multiple of row_bytes = {self.row_bytes}", self.item_bytes)
        if self.stride_bytes < self.item_bytes:
            _refuse(f"{where}.stride_bytes", f"at least item_bytes = {self.item_bytes}", self.stride_bytes)

    @property
    def groups(self) -> tuple[int, ...]:
        """Shard groups with the default made explicit: one group of all units."""
        return self.shard_groups or (self.units_total,)

    @property
    def rows_per_item(self) -> int:
        """Rows that one item holds."""
        return self.item_bytes // self.row_bytes

    @property
    def key(self) -> tuple[int, str]:
        """(layer_id, part): with the component's kind, what pairs regions of two instances."""
        return self.layer_id, self.part

    def items(self, space: Space) -> int:
        """Items the region holds: as many as its space's extent needs."""
        return -(-space.extent // self.rows_per_item)

    def span_bytes(self, space: Space) -> int:
        """Bytes from `offset` to the end of the last item's payload."""
        return (self.items(space) - 1) * self.stride_bytes + self.item_bytes


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """All regions of one kind on one rank. `layout` is a tag compared as text (`NHD`, `keys_then_scales`, ...).

    optional: a peer may lack this component (only for kinds that allow it). A rank without layers of the kind
    registers no component at all; one that is registered is never empty.
    """

    kind: Name
    space: AnySpace
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_COMPONENT_REGIONS)]
    layout: Text = ""
    optional: bool = False

    def __post_init__(self) -> None:
        _named("component.kind", self.kind)
        kind = kind_of(self.kind)
        where = f"component[{self.kind}]"
        _named(f"{where}.layout", self.layout, 0, 256)
        if isinstance(self.space, RaggedScratch | Page) or not isinstance(self.space, kind.spaces):
            _refuse(f"{where}.space", " | ".join(s.__name__ for s in kind.spaces), type(self.space).__name__)
        if self.optional and not kind.optional:
            _refuse(f"{where}.optional", "false: a peer must have this kind", True)
        if not self.regions:
            _refuse(
                f"{where}.regions",
                "at least one region",
                0,
                "a registered component is never empty",
                "A rank that has no layer of the kind registers no such component.",
            )
        seen: set[tuple[int, str]] = set()
        for region in self.regions:
            _check_in_kind(region, self, where)
            if region.key in seen:
                _refuse(f"{where}.regions[{region.layer_id}/{region.part}]", "one region a layer and part", "two")
            seen.add(region.key)
        if len(kind.request_wide) < len(kind.parts) and all(r.part in kind.request_wide for r in self.regions):
            # Such a stage computes no state of the kind: as its lowest holder it would send what nobody has written.
            _refuse(
                f"{where}.regions",
                "a layer beside the request-wide part",
                f"only {', '.join(sorted({r.part for r in self.regions}))}",
                hint="A rank that has no layer of the kind registers no request-wide part of it either.",
            )


def _check_in_kind(region: Region, component: Component, where: str) -> None:
    kind = kind_of(component.kind)
    path = f"{where}.regions[{region.layer_id}/{region.part}]"
    if region.part not in kind.parts:
        _refuse(f"{path}.part", " | ".join(kind.parts), region.part)
    sentinel = kind.request_wide.get(region.part)
    if sentinel is not None and region.layer_id != sentinel:
        _refuse(f"{path}.layer_id", f"the sentinel {sentinel}: this part exists once a request", region.layer_id)
    if sentinel is None and region.layer_id in SENTINELS:
        _refuse(f"{path}.layer_id", "a layer, not a request-wide sentinel", region.layer_id)
    placement = Placement.REPLICATED if region.dim == 0 else Placement.SHARDED
    if placement not in kind.placements:
        _refuse(f"{path}.dim", " or ".join(sorted(p.value for p in kind.placements)), placement.value)
    page = component.space.page_len
    if isinstance(component.space, VirtualTok):
        page = component.space.page_tokens  # an item may be one rank's page or a whole virtual page
    elif isinstance(component.space, Scaled):
        page = component.space.of.page_tokens // component.space.ratio
    rows = region.rows_per_item
    if component.space.page_len % rows or (rows > page and rows % page):
        _refuse(f"{path}.item_bytes", f"rows that divide a page of {component.space.page_len} rows", f"{rows} rows")


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A registered piece of memory as peers know it: its number is its place in the rank's table."""

    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
    device: Name = "cpu"

    def __post_init__(self) -> None:
        _within("segment.nbytes", self.nbytes, 1, MAX_BYTES)
        _named("segment.device", self.device)


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's backend as the verdict sees it. `connect` is the backend's opaque blob for its peers.

    host_id: identity of the host and PID namespace, for backends that work on one host only.
    """

    backend: Name
    host_memory: bool = True
    device_memory: bool = False
    same_host_only: bool = False
    host_id: Text = ""
    directions: tuple[str, ...] = ("write",)
    connect: Annotated[bytes, msgspec.Meta(max_length=2**20)] = b""


class Term(msgspec.Struct, frozen=True, array_like=True):
    """For how many-th of its controls a rank speaks: it may outlive one, and serve the next.

    agent: random, of what counts; 0: nothing is said. number: rises when the rank goes over to another control, which
    it does once nothing that it wrote for the former ones can land any more. So whoever states a term has ended those
    before it, however late that is heard.
    """

    agent: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    number: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0

    def ended(self, other: Term) -> bool:
        """Whether who states this term writes nothing of `other` any more."""
        return self.agent > 0 and self.agent == other.agent and self.number > other.number


class RankManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank registers. `epoch` is the random 64-bit identity of its process incarnation."""

    rank: RankId
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    segments: Annotated[tuple[SegmentInfo, ...], msgspec.Meta(max_length=MAX_RANK_SEGMENTS)]
    components: Annotated[tuple[Component, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]
    transport: Transport
    term: Term = Term()

    def __post_init__(self) -> None:
        if not 0 <= self.epoch < 2**64:  # a decoder cannot state a bound over int64
            _refuse(f"rank[{self.rank}].epoch", "an unsigned 64-bit integer", self.epoch)
        seen: set[str] = set()
        for component in self.components:
            where = f"rank[{self.rank}].component[{component.kind}]"
            if component.kind in seen:
                _refuse(where, "one component a kind", "two")
            seen.add(component.kind)
            for region in component.regions:
                self._check_fits(region, component, f"{where}.regions[{region.layer_id}/{region.part}]")

    def _check_fits(self, region: Region, component: Component, where: str) -> None:
        if region.segment >= len(self.segments):
            _refuse(f"{where}.segment", f"below {len(self.segments)} registered segments", region.segment)
        have = self.segments[region.segment].nbytes
        need = region.offset + region.span_bytes(component.space)
        if need > have:
            _refuse(
                f"{where}.segment",
                f"at least {need} bytes: offset {region.offset} and {region.items(component.space)} items of "
                f"{region.item_bytes} bytes, for {component.space} with extent {component.space.extent}",
                f"{have} bytes",
                "the region is smaller than its index space",
                "A region's size comes from its space; allocate what the space needs (a virtual space counts x D).",
            )

    def component(self, kind: str) -> Component | None:
        """The component of that kind, or None where this rank has no such layer."""
        return next((c for c in self.components if c.kind == kind), None)


class InstanceManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of an instance, gathered by its control.

    protocol: (major, minor) spoken. model: fingerprint of weights and architecture. revision: of the checkpoint.
    direction: who starts the transfer (`write`: prefill writes). max_tokens: longest prompt the instance can hold.
    """

    instance_id: Name
    topology: Topology
    model: Text
    ranks: Annotated[tuple[RankManifest, ...], msgspec.Meta(max_length=MAX_RANKS)]
    protocol: tuple[int, int] = (1, 0)
    revision: Text = ""
    direction: Name = "write"
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 2**40

    def __post_init__(self) -> None:
        _named("instance.instance_id", self.instance_id)
        _named("instance.direction", self.direction)
        _named("instance.model", self.model, 0, 256)
        _named("instance.revision", self.revision, 0, 256)
        _within("instance.max_tokens", self.max_tokens, 1, 2**40)
        want = [RankId(p, t) for p in range(self.topology.pp) for t in range(self.topology.tp)]
        have = [r.rank for r in self.ranks]
        if have != want:
            missing = [str(r) for r in want if r not in have]
            actual = f"{len(have)}; missing {missing or 'none'}"
            _refuse("instance.ranks", f"{len(want)} ranks, each once, in order of (pp_rank, tp_rank)", actual)
        check_total((len(r.segments), sum(len(c.regions) for c in r.components)) for r in self.ranks)
        check_instance(self)

    @property
    def epoch(self) -> int:
        """The first rank's epoch: what records and routers call this incarnation."""
        return self.ranks[0].epoch

    def rank(self, rank: RankId) -> RankManifest:
        """One rank's manifest. Raises `ManifestError` for a rank the topology has not."""
        shape = self.topology
        if not (0 <= rank.pp_rank < shape.pp and 0 <= rank.tp_rank < shape.tp):
            raise ManifestError("no such rank", where=self.instance_id, expected=str(shape), actual=str(rank))
        return self.ranks[rank.pp_rank * shape.tp + rank.tp_rank]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that any rank registers, sorted."""
        return tuple(sorted({c.kind for r in self.ranks for c in r.components}))


def semantic_space(space: AnySpace) -> AnySpace:
    """A space without what differs between ranks of one instance: a local space stands for its virtual one."""
    return space.virtual if isinstance(space, LocalTok) else space


def _any_rank(space: AnySpace) -> AnySpace:
    """A local space as rank 0 has it: either all ranks hold shards of one virtual space, or all hold all of it."""
    return LocalTok(virtual=space.virtual, dcp_rank=0) if isinstance(space, LocalTok) else space


def check_instance(manifest: InstanceManifest) -> None:
    """Refuse an instance whose ranks contradict each other. Raises `ManifestError` with the path of the field."""
    first: dict[tuple[str, object], object] = {}
    stage_keys: dict[tuple[str, int], dict[int, frozenset[tuple[int, str]]]] = {}
    holders: dict[tuple[str, int, str], int] = {}
    for rank in manifest.ranks:
        for component in rank.components:
            where = f"instance.rank[{rank.rank}].component[{component.kind}]"
            _check_space(component, rank, manifest.topology, where)
            for what, value in (
                ("space", _any_rank(component.space)),
                ("layout", component.layout),
                ("optional", component.optional),
            ):
                known = first.setdefault((component.kind, what), value)
                if known != value:
                    _refuse(f"{where}.{what}", known, value, "ranks of one instance disagree")
            keys = frozenset(r.key for r in component.regions)
            stage_keys.setdefault((component.kind, rank.rank.pp_rank), {})[rank.rank.tp_rank] = keys
            for region in component.regions:
                _check_region(region, rank, manifest, component.kind, first)
                holder = holders.setdefault((component.kind, *region.key), rank.rank.pp_rank)
                if holder != rank.rank.pp_rank and region.layer_id not in SENTINELS:
                    _refuse(f"{where}.regions[{region.layer_id}/{region.part}]", f"stage {holder} only", "two stages")
    for (kind, stage), by_rank in stage_keys.items():
        whole = frozenset().union(*by_rank.values())
        for tp_rank in range(manifest.topology.tp):
            lacking = whole - by_rank.get(tp_rank, frozenset())
            if lacking:
                _refuse(
                    f"instance.rank[pp{stage}/tp{tp_rank}].component[{kind}].regions",
                    "the same layers and parts on every TP rank of a stage",
                    f"missing {sorted(lacking)[:8]}",
                )


def _check_space(component: Component, rank: RankManifest, topology: Topology, where: str) -> None:
    space = component.space
    base = space.of if isinstance(space, Scaled) else semantic_space(space)
    if isinstance(base, VirtualTok) and base.dcp_size != topology.dcp:
        _refuse(f"{where}.space.dcp_size", f"the topology's dcp = {topology.dcp}", base.dcp_size)
    if isinstance(space, LocalTok) and space.dcp_rank != rank.rank.tp_rank % topology.dcp:
        _refuse(f"{where}.space.dcp_rank", f"tp_rank % dcp = {rank.rank.tp_rank % topology.dcp}", space.dcp_rank)
    if isinstance(base, SwaTok) and topology.dcp > 1:
        _refuse(f"{where}.space", "no sliding window under DCP (not defined yet)", "SwaTok")


def _check_region(
    region: Region,
    rank: RankManifest,
    manifest: InstanceManifest,
    kind: str,
    first: dict[tuple[str, object], object],
) -> None:
    where = f"instance.rank[{rank.rank}].component[{kind}].regions[{region.layer_id}/{region.part}]"
    whole = whole_facts(region)
    known = first.setdefault((kind, region.key), whole)
    if known != whole:
        _refuse(where, known, whole, "ranks of one instance disagree")
    if region.dim == 0:
        return
    tp = manifest.topology.tp
    for group in region.groups:
        if group % tp and tp % group:
            _refuse(f"{where}.shard_groups", f"each size divides tp = {tp}, or tp divides it", region.groups)
    dim = sum(max(1, group // tp) for group in region.groups)
    if region.dim != dim:
        _refuse(f"{where}.dim", f"{dim} units a rank of {region.groups} over tp = {tp}", region.dim)


class WholeRegion(msgspec.Struct, frozen=True):
    """Facts of a region that do not depend on how an instance is sharded; what two instances must agree on."""

    dtype: str
    row_bytes: int
    unit_bytes: int
    units_total: int
    outer_count: int
    shard_groups: tuple[int, ...]
    replicated: bool


@lru_cache(maxsize=4096)
def _whole(
    dtype: str, unit_bytes: int, units_total: int, outer_count: int, groups: tuple[int, ...], replicated: bool
) -> WholeRegion:
    return WholeRegion(
        dtype, outer_count * units_total * unit_bytes, unit_bytes, units_total, outer_count, groups, replicated
    )


def whole_facts(region: Region) -> WholeRegion:
    """The whole-item facts of a region: bytes a row over all ranks, units, groups, dtype."""
    return _whole(
        region.dtype, region.unit_bytes, region.units_total, region.outer_count, region.groups, region.dim == 0
    )
