"""A small hybrid state with every kind the pools know, and plan-driven copies between two instances' pools."""

from __future__ import annotations

import itertools

import numpy as np

from sglang_pd.memory.layout import Capacity, RankLayout, layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.memory.views import host_bytes
from sglang_pd.protocol.bind import Chunk, RoomIndices, bind
from sglang_pd.protocol.manifest import InstanceManifest, RankId, Topology, Transport
from sglang_pd.protocol.pairing import Pairing

EOS = 2
RATIO, WINDOW, PAGE = 4, 6, 8


def hybrid_state(**change: object) -> StateSpec:
    """Layers 0 to 5: MAMBA 0 1 3, QSA 2 5, full 4, SWA 1, PLE 0 3, MLA with index keys 5."""
    heads = RegionSpec("k", (2, 4, 5), "float32", 4, (3,))
    values = RegionSpec("v", (2, 4, 5), "float32", 4, (3,))
    swa = tuple(RegionSpec(part, (1,), "float32", 4, (2,)) for part in ("k", "v"))
    state = StateSpec(
        (
            ComponentSpec("KV", "tokens", (heads, values)),
            ComponentSpec("SWA", "swa", swa),
            ComponentSpec("MLA", "local_tokens", (RegionSpec("latent", (5,), "float32", 1, (6,), replicated=True),)),
            ComponentSpec(
                "INDEX_K",
                "tokens",
                (
                    RegionSpec("key", (5,), "int8", 1, (4,), replicated=True),
                    RegionSpec("scale", (5,), "float32", 1, replicated=True),
                ),
            ),
            ComponentSpec(
                "QSA_PENDING",
                "rows",
                (
                    RegionSpec("key", (2, 5), "float32", 1, (5,), replicated=True),
                    RegionSpec("rope", (2, 5), "int64", 3, replicated=True),
                ),
                ring_width=RATIO + 1,
                group_tokens=RATIO,
                segment="QSA",
            ),
            ComponentSpec(
                "QSA_COMPRESSED",
                "tokens",
                (RegionSpec("key", (2, 5), "float32", 1, (5,), replicated=True),),
                ratio=RATIO,
                segment="QSA",
            ),
            ComponentSpec(
                "MAMBA",
                "slots",
                (
                    RegionSpec("conv", (0, 1, 3), "float32", 16, (3,), shard_groups=(4, 4, 8)),
                    RegionSpec("temporal", (0, 1, 3), "float32", 4, (2, 3)),
                ),
            ),
            ComponentSpec(
                "PLE",
                "slots",
                (
                    RegionSpec("conv", (0, 3), "float32", 4, (9,), replicated=True),
                    RegionSpec("ngram", (0, 3), "int64", 2, replicated=True, initial=EOS),
                ),
                device="cpu",
            ),
        ),
        layers=6,
        window_tokens=WINDOW,
    )
    return StateSpec(**{**{f: getattr(state, f) for f in state.__slots__}, **change})  # type: ignore[arg-type]


def capacity(pages: int, rows: int = 3, slots: int = 4) -> Capacity:
    """Sizes in pages of 8 tokens, the sliding window's pool half as many."""
    return Capacity(pages * PAGE, PAGE, rows, slots, max(2, pages // 2) * PAGE)


def every_rank(topology: Topology) -> list[RankId]:
    """Ranks in the order of an instance manifest."""
    return [RankId(p, t) for p, t in itertools.product(range(topology.pp), range(topology.tp))]


def layouts(state: StateSpec, size: Capacity, topology: Topology) -> list[RankLayout]:
    """Layouts of all ranks."""
    return [layout_rank(state, size, topology, rank) for rank in every_rank(topology)]


def instance(name: str, of: list[RankLayout], epoch: int = 1) -> InstanceManifest:
    """The instance that these ranks make, for plans executed inside one process."""
    ranks = tuple(layout.manifest(epoch + n, Transport(backend="in-process")) for n, layout in enumerate(of))
    return InstanceManifest(instance_id=name, topology=of[0].topology, model="test", ranks=ranks)


def copy_chunk(pairing: Pairing, room: RoomIndices, chunk: Chunk, src: list[RankPools], dst: list[RankPools]) -> int:
    """Execute every rank pair's plan with plain numpy copies. Returns the bytes moved."""
    moved = 0
    for source, destination in itertools.product(src, dst):
        plan = pairing.plan(source.layout.rank, destination.layout.rank)
        batch = bind(plan, room, chunk)
        from_raw = [host_bytes(segment) for segment in source.segments]
        to_raw = [host_bytes(segment) for segment in destination.segments]
        src_segment, src_offset = batch.src_addresses()
        dst_segment, dst_offset = batch.dst_addresses()
        for a, i, b, j, n in zip(src_segment, src_offset, dst_segment, dst_offset, batch.length, strict=True):
            to_raw[b][int(j) : int(j) + int(n)] = from_raw[a][int(i) : int(i) + int(n)]
        moved += batch.total_bytes
    return moved


def fill(pools: RankPools, value: int) -> None:
    """Every byte of a rank's pools."""
    for segment in pools.segments:
        host_bytes(segment)[:] = np.uint8(value)
