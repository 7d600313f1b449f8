"""Plans: for one source rank and one destination rank, which bytes of which regions move.

`compile_plan` pairs regions by (kind, layer_id, part) and asks `placement` which intervals of a row this source rank
writes. It knows no request: pages and lengths come in at `bind.py`. A plan is immutable and can be used for every room
of the pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import xxhash

from sglang_pd.protocol.batch import U32, U64, RegionTable
from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.kinds import kind_of
from sglang_pd.protocol.manifest import Component, InstanceManifest, RankId, RankManifest, Region, whole_facts
from sglang_pd.protocol.placement import Interval, RowGeometry, Shard, intervals
from sglang_pd.protocol.spaces import AnySpace, LocalTok

PACKING_ORDER: Final = 1
"""Number of the rule that orders descriptors; negotiated, since staging packs in this order.

1: components by kind name; within one, moves by first region key; within a move, region entries by (layer_id, part,
interval); within an entry, blocks by token position.
"""


@dataclass(frozen=True, slots=True)
class Items:
    """One side's items: slot s lies at s // rows_per_item * stride_bytes + s % rows_per_item * row_bytes."""

    space: AnySpace
    rows_per_item: int
    stride_bytes: int
    row_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Region pairs of one component that share their item geometry; every array has shape [entries].

    layer_id, src_region, dst_region: uint32. src_inner, dst_inner: uint64 bytes from a row's start. length: uint64
    bytes of a row that move. Where `whole`, entries cover complete rows of equal length on both sides, so that
    neighbouring rows move as one piece.
    """

    kind: str
    src: Items
    dst: Items
    whole: bool
    layer_id: U32
    src_region: U32
    dst_region: U32
    src_inner: U64
    dst_inner: U64
    length: U64

    def __len__(self) -> int:
        return int(self.length.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What `src_rank` of one instance writes into `dst_rank` of another.

    moves: the byte ranges. src, dst: where the regions of both ranks lie, for the backend.
    """

    src_rank: RankId
    dst_rank: RankId
    moves: tuple[Move, ...]
    src: RegionTable
    dst: RegionTable

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of which this plan moves anything."""
        return frozenset(move.kind for move in self.moves)

    @property
    def entries(self) -> int:
        """Region intervals over all moves."""
        return sum(len(move) for move in self.moves)


def region_table(rank: RankManifest) -> RegionTable:
    """Bases of a rank's regions in the order of its manifest: component by component, region by region."""
    regions = [(region, component) for component in rank.components for region in component.regions]
    return RegionTable(
        segment=np.array([r.segment for r, _ in regions], dtype=np.uint32),
        base=np.array([r.offset for r, _ in regions], dtype=np.uint64),
        size_bytes=np.array([r.span_bytes(c.space) for r, c in regions], dtype=np.uint64),
    )


def region_numbers(rank: RankManifest) -> dict[str, dict[tuple[int, str], tuple[int, Region]]]:
    """For each kind and region key: the region's number in `region_table`, and the region."""
    numbers: dict[str, dict[tuple[int, str], tuple[int, Region]]] = {}
    number = 0
    for component in rank.components:
        by_key = numbers.setdefault(component.kind, {})
        for region in component.regions:
            by_key[region.key] = (number, region)
            number += 1
    return numbers


def row_geometry(region: Region) -> RowGeometry:
    """How the region's whole row is built, from its manifest."""
    return RowGeometry(region.unit_bytes, region.groups, region.outer_count, replicated=region.dim == 0)


def shard_of(instance: InstanceManifest, rank: RankId, space: AnySpace) -> Shard:
    """A rank's place in its instance for regions of `space`: only local token spaces are cut by context."""
    dcp = instance.topology.dcp if isinstance(space, LocalTok) else 1
    return Shard(instance.topology.tp, rank.tp_rank, dcp)


def lowest_holder(instance: InstanceManifest, kind: str, key: tuple[int, str], tp_rank: int) -> int:
    """The lowest PP stage that registers a region: the one that writes it, where several hold a request-wide part."""
    for stage in range(instance.topology.pp):
        component = instance.rank(RankId(stage, tp_rank)).component(kind)
        if component is not None and any(region.key == key for region in component.regions):
            return stage
    raise PlanError("no stage holds the region", where=f"{kind}[{key}]", actual=instance.instance_id)


def compile_plan(
    src_instance: InstanceManifest, src_rank: RankId, dst_instance: InstanceManifest, dst_rank: RankId
) -> Plan:
    """What `src_rank` owes `dst_rank`. Pure; the same on both sides of a pair. Raises as `Compiler.compile`."""
    return Compiler(src_instance, dst_instance).compile(src_rank, dst_rank)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """What every plan of a rank needs of its manifest. geometry: by kind and region key."""

    rank: RankManifest
    numbers: dict[str, dict[tuple[int, str], tuple[int, Region]]]
    geometry: dict[str, dict[tuple[int, str], RowGeometry]]
    table: RegionTable

    @staticmethod
    def of(rank: RankManifest) -> _Side:
        numbers = region_numbers(rank)
        geometry = {
            kind: {key: row_geometry(region) for key, (_, region) in regions.items()}
            for kind, regions in numbers.items()
        }
        return _Side(rank, numbers, geometry, region_table(rank))


class Compiler:
    """Compiles the plans of an accepted pair of instances; what a rank's plans have in common is worked out once."""

    def __init__(self, src: InstanceManifest, dst: InstanceManifest) -> None:
        self._src, self._dst = src, dst
        self._kinds = sorted(set(src.kinds) & set(dst.kinds))
        self._sides: dict[tuple[str, RankId], _Side] = {}

    def _side(self, name: str, instance: InstanceManifest, rank: RankId) -> _Side:
        found = self._sides.get((name, rank))
        if found is None:
            found = self._sides[name, rank] = _Side.of(instance.rank(rank))
        return found

    def compile(self, src_rank: RankId, dst_rank: RankId) -> Plan:
        """What `src_rank` owes `dst_rank`.

        Raises `PlanError` for regions of which something would move and that do not agree. Whether all plans together
        write every byte is for `coverage.prove_coverage` to say.
        """
        src, dst = self._side("src", self._src, src_rank), self._side("dst", self._dst, dst_rank)
        moves: list[Move] = []
        for kind in self._kinds:
            src_component, dst_component = src.rank.component(kind), dst.rank.component(kind)
            if src_component is None or dst_component is None:
                continue
            pairs = _Pairs(kind, src_component, dst_component)
            src_shard = shard_of(self._src, src_rank, src_component.space)
            dst_shard = shard_of(self._dst, dst_rank, dst_component.space)
            request_wide = set(kind_of(kind).request_wide.values())
            src_numbers, dst_numbers = src.numbers[kind], dst.numbers[kind]
            for key in sorted(src_numbers.keys() & dst_numbers.keys()):
                pieces = intervals(src.geometry[kind][key], src_shard, dst_shard)
                if not pieces:
                    continue
                if key[0] in request_wide and self._writes_elsewhere(kind, key, src_rank):
                    continue
                if whole_facts(src_numbers[key][1]) != whole_facts(dst_numbers[key][1]):
                    raise PlanError("regions disagree", code="peer_incompatible", where=f"{kind}[{key[0]}/{key[1]}]")
                pairs.add(src_numbers[key], dst_numbers[key], pieces)
            moves.extend(pairs.moves())
        return Plan(src_rank, dst_rank, tuple(moves), src.table, dst.table)

    def _writes_elsewhere(self, kind: str, key: tuple[int, str], rank: RankId) -> bool:
        return lowest_holder(self._src, kind, key, rank.tp_rank) != rank.pp_rank


class _Pairs:
    """Collects region pairs of one component, grouped by the geometry of their items."""

    def __init__(self, kind: str, src: Component, dst: Component) -> None:
        self.kind, self.src_space, self.dst_space = kind, src.space, dst.space
        self._groups: dict[tuple[Items, Items, bool], list[tuple[int, int, int, int, int, int]]] = {}

    def add(self, src: tuple[int, Region], dst: tuple[int, Region], pieces: Iterable[Interval]) -> None:
        """Add one region pair with the intervals of its row."""
        (src_number, a), (dst_number, b) = src, dst
        for piece in pieces:
            whole = piece.length_bytes == a.row_bytes == b.row_bytes
            shape = (
                Items(self.src_space, a.rows_per_item, a.stride_bytes, a.row_bytes),
                Items(self.dst_space, b.rows_per_item, b.stride_bytes, b.row_bytes),
                whole,
            )
            entry = (a.layer_id, src_number, dst_number, *piece.bytes)
            self._groups.setdefault(shape, []).append(entry)

    def moves(self) -> list[Move]:
        """One move a geometry, in order of first appearance (region keys are added in order)."""
        result = []
        for (src, dst, whole), entries in self._groups.items():
            columns = np.array(entries, dtype=np.uint64).T
            layer, src_region, dst_region = (np.ascontiguousarray(c, dtype=np.uint32) for c in columns[:3])
            src_inner, dst_inner, length = (np.ascontiguousarray(c) for c in columns[3:])
            result.append(Move(self.kind, src, dst, whole, layer, src_region, dst_region, src_inner, dst_inner, length))
        return result


def semantic_digest(plans: Iterable[tuple[Plan, RankManifest]]) -> int:
    """64-bit digest of what plans mean: which byte range of which region row goes where.

    `plans` come with their source rank's manifest. Independent of addresses, of packing and of how
    descriptors are merged: it covers, sorted, every maximal interval as (source rank, destination rank, kind, layer_id,
    part, source offset, destination offset, length), in bytes of a row.
    """
    digest = xxhash.xxh3_64()
    for plan, src in sorted(plans, key=lambda entry: (entry[0].src_rank, entry[0].dst_rank)):
        parts = [region.part for component in src.components for region in component.regions]
        rows = [
            (move.kind, int(layer), parts[int(region)], int(a), int(b), int(n))
            for move in plan.moves
            for layer, region, a, b, n in zip(
                move.layer_id, move.src_region, move.src_inner, move.dst_inner, move.length, strict=True
            )
        ]
        digest.update(msgspec.msgpack.encode((plan.src_rank, plan.dst_rank, sorted(rows))))
    return digest.intdigest()
