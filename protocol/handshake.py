"""Two instance manifests -> a verdict: accepted, or refused with every mismatch by name.

Whole-item facts are compared (bytes a row over all ranks, units, page tokens, layer sets), never rank-local lengths.
TP, PP, DCP, pool sizes, addresses and the order of components may differ freely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from sglang_pd.protocol.coverage import overlapping_regions
from sglang_pd.protocol.kinds import SENTINELS
from sglang_pd.protocol.manifest import (
    Component,
    InstanceManifest,
    Region,
    Transport,
    WholeRegion,
    semantic_space,
    whole_facts,
)
from sglang_pd.protocol.messages import MAX_MISMATCHES, Mismatch, Verdict
from sglang_pd.protocol.placement import context_classes_owned
from sglang_pd.protocol.plan import row_geometry
from sglang_pd.protocol.spaces import AnySpace, LocalTok, Ring, Scaled, SwaTok, VirtualTok

MAX_VALUE: Final = 500
"""Longest text of a mismatch's value, in characters."""
MAX_VERDICT_BYTES: Final = 4 * 2**20
"""Mismatches of one verdict, about half of what its message may hold."""


def compare(prefill: InstanceManifest, decode: InstanceManifest) -> Verdict:
    """Judge a pair. Lists all mismatches, in order of component, region and field; both sides get the same list."""
    found = [
        *_whole_instance(prefill, decode),
        *_size(prefill, decode),
        *_transports(prefill, decode),
        *_components(prefill, decode),
        *_destination(decode),
    ]
    return Verdict(accepted=not found, mismatches=tuple(_fitting(found[:MAX_MISMATCHES])))


def _fitting(found: list[Mismatch]) -> Iterator[Mismatch]:
    """As many as a message has room for."""
    size = 0
    for one in found:
        texts = (one.component, one.region, one.field, one.prefill, one.decode)
        size += sum(len(text.encode()) for text in texts) + 64
        if size > MAX_VERDICT_BYTES:
            return
        yield one


def _mismatch(component: str, region: str, field: str, prefill: object, decode: object) -> Mismatch:
    return Mismatch(
        component=component,
        region=region,
        field=field,
        prefill=str(prefill)[:MAX_VALUE],
        decode=str(decode)[:MAX_VALUE],
    )


def _differ(component: str, region: str, facts: Mapping[str, tuple[object, object]]) -> Iterator[Mismatch]:
    for field, (prefill, decode) in facts.items():
        if prefill != decode:
            yield _mismatch(component, region, field, prefill, decode)


def _whole_instance(prefill: InstanceManifest, decode: InstanceManifest) -> Iterator[Mismatch]:
    yield from _differ(
        "",
        "",
        {
            "protocol_major": (prefill.protocol[0], decode.protocol[0]),
            "model": (prefill.model, decode.model),
            "revision": (prefill.revision, decode.revision),
            "direction": (prefill.direction, decode.direction),
        },
    )


MAX_REGION_PAIRS: Final = 2**21
"""Regions to compare over all pairs of ranks, 64 a pair at the least: some seconds of the thread that judges. What a
stranger declares must not take it for minutes."""


def _size(prefill: InstanceManifest, decode: InstanceManifest) -> Iterator[Mismatch]:
    src, dst = (max(sum(len(c.regions) for c in rank.components) for rank in m.ranks) for m in (prefill, decode))
    if len(prefill.ranks) * len(decode.ranks) * max(64, min(src, dst)) > MAX_REGION_PAIRS:
        facts = (f"{len(m.ranks)} ranks of up to {n} regions" for m, n in ((prefill, src), (decode, dst)))
        yield _mismatch("", "", "region_pairs", *facts)


def _transports(prefill: InstanceManifest, decode: InstanceManifest) -> Iterator[Mismatch]:
    """Capabilities: an impossible pair of backends is refused here, never at the first request."""
    src = {rank.transport.backend: rank.transport for rank in prefill.ranks}
    dst = {rank.transport.backend: rank.transport for rank in decode.ranks}
    if len(src) > 1 or src.keys() != dst.keys():
        # Two on one side are as bad: some rank would meet a peer of the other backend.
        yield _mismatch("", "", "backend", " ".join(sorted(src)), " ".join(sorted(dst)))
    hosts = {r.transport.host_id for r in (*prefill.ranks, *decode.ranks) if r.transport.same_host_only}
    if len(hosts) > 1 or (hosts and "" in hosts):
        sides = (sorted({r.transport.host_id or "unknown" for r in m.ranks}) for m in (prefill, decode))
        yield _mismatch("", "", "host_id", *sides)
    for side, instance in (("prefill", prefill), ("decode", decode)):
        lacking = sorted({lack for rank in instance.ranks for lack in _lacks(rank.transport, rank.segments)})
        for lack in lacking:
            yield _mismatch("", "", "memory", *((lack, "any") if side == "prefill" else ("any", lack)))
        unable = [rank for rank in instance.ranks if instance.direction not in rank.transport.directions]
        if unable:
            lack = f"rank {unable[0].rank} can only {' '.join(unable[0].transport.directions)}"
            able = f"{instance.direction} wanted"
            yield _mismatch("", "", "transport.directions", *((lack, able) if side == "prefill" else (able, lack)))


def _lacks(transport: Transport, segments: tuple[object, ...]) -> Iterator[str]:
    devices = {getattr(segment, "device", "cpu").split(":")[0] for segment in segments}
    if "cpu" in devices and not transport.host_memory:
        yield f"{transport.backend} cannot move host memory"
    if devices - {"cpu"} and not transport.device_memory:
        yield f"{transport.backend} cannot move {' '.join(sorted(devices - {'cpu'}))} memory"


def _components(prefill: InstanceManifest, decode: InstanceManifest) -> Iterator[Mismatch]:
    src, dst = _by_kind(prefill), _by_kind(decode)
    for kind in sorted(set(src) | set(dst)):
        if kind not in src or kind not in dst:
            present = src.get(kind) or dst[kind]
            if not present[0].optional:
                count = f"{len(present[1])} regions"
                yield _mismatch(
                    kind, "", "component", count if kind in src else "absent", "absent" if kind in src else count
                )
            continue
        (src_component, src_regions), (dst_component, dst_regions) = src[kind], dst[kind]
        facts = {"layout": (src_component.layout, dst_component.layout)}
        yield from _differ(kind, "", facts)
        yield from _differ(kind, "", _space_facts(src_component.space, dst_component.space))
        yield from _regions(kind, src_regions, dst_regions)
        yield from _expressible(kind, src_component, src_regions, prefill)
        yield from _expressible(kind, dst_component, dst_regions, decode, prefill_side=False)


def _by_kind(instance: InstanceManifest) -> dict[str, tuple[Component, dict[tuple[int, str], Region]]]:
    found: dict[str, tuple[Component, dict[tuple[int, str], Region]]] = {}
    for rank in instance.ranks:
        for component in rank.components:
            regions = found.setdefault(component.kind, (component, {}))[1]
            for region in component.regions:
                regions.setdefault(region.key, region)
    return found


def _space_facts(src: AnySpace, dst: AnySpace) -> dict[str, tuple[object, object]]:
    """What two spaces of a component must agree on. Capacity, DCP size, interleave and ring width may differ."""
    facts: dict[str, tuple[object, object]] = {
        "space": (type(semantic_space(src)).__name__, type(semantic_space(dst)).__name__)
    }
    if isinstance(src, Scaled) and isinstance(dst, Scaled):
        facts["group_tokens"] = (src.ratio, dst.ratio)
        facts["space.of"] = (type(src.of).__name__, type(dst.of).__name__)
    if isinstance(src, Ring) and isinstance(dst, Ring):
        facts["group_tokens"] = (src.group_tokens, dst.group_tokens)
    src_base, dst_base = (s.of if isinstance(s, Scaled) else semantic_space(s) for s in (src, dst))
    if isinstance(src_base, VirtualTok | SwaTok) and isinstance(dst_base, VirtualTok | SwaTok):
        # Only equal pages for now: unequal ones need a proof that every split row is still written once.
        facts["page_tokens"] = (src_base.page_tokens, dst_base.page_tokens)
    if isinstance(src_base, SwaTok) and isinstance(dst_base, SwaTok):
        facts["window_tokens"] = (src_base.window_tokens, dst_base.window_tokens)
    return facts


def _regions(kind: str, src: dict[tuple[int, str], Region], dst: dict[tuple[int, str], Region]) -> Iterator[Mismatch]:
    for part in sorted({key[1] for key in (*src, *dst)}):
        src_layers, dst_layers = ({key[0] for key in side if key[1] == part} for side in (src, dst))
        if src_layers != dst_layers:
            only_src, only_dst = sorted(src_layers - dst_layers), sorted(dst_layers - src_layers)
            yield _mismatch(
                kind,
                part,
                "layer_ids",
                f"{len(src_layers)} layers, only here: {_ids(only_src)}",
                f"{len(dst_layers)} layers, only here: {_ids(only_dst)}",
            )
    seen: set[tuple[str, WholeRegion, WholeRegion]] = set()
    for key in sorted(set(src) & set(dst)):
        src_whole, dst_whole = whole_facts(src[key]), whole_facts(dst[key])
        if src_whole is dst_whole or src_whole == dst_whole or (key[1], src_whole, dst_whole) in seen:
            continue
        seen.add((key[1], src_whole, dst_whole))  # name the first layer of many that differ alike
        yield from _differ(
            kind,
            f"{_ids([key[0]])}/{key[1]}",
            {
                "dtype": (src_whole.dtype, dst_whole.dtype),
                "row_bytes": (src_whole.row_bytes, dst_whole.row_bytes),
                "units_total": (src_whole.units_total, dst_whole.units_total),
                "unit_bytes": (src_whole.unit_bytes, dst_whole.unit_bytes),
                "outer_count": (src_whole.outer_count, dst_whole.outer_count),
                "shard_groups": (src_whole.shard_groups, dst_whole.shard_groups),
                "dim": (_dim(src_whole), _dim(dst_whole)),
            },
        )


def _dim(whole: WholeRegion) -> str:
    return "0 (replicated)" if whole.replicated else "sharded"


def _ids(layers: list[int]) -> str:
    names = [f"sentinel {layer}" if layer in SENTINELS else str(layer) for layer in layers[:16]]
    return ", ".join(names) + (f", ... ({len(layers)} in all)" if len(layers) > 16 else "") if names else "none"


def _expressible(
    kind: str,
    component: Component,
    regions: dict[tuple[int, str], Region],
    instance: InstanceManifest,
    prefill_side: bool = True,
) -> Iterator[Mismatch]:
    """A side that shards context needs, for every unit, a rank of each context class, or some tokens have no place."""
    if not isinstance(component.space, LocalTok):
        return
    shape = instance.topology
    for key, region in regions.items():
        if not context_classes_owned(row_geometry(region), shape.tp, shape.dcp):
            fault = f"tp {shape.tp} with dcp {shape.dcp} leaves units unowned"
            yield _mismatch(kind, f"{_ids([key[0]])}/{key[1]}", "tp", *((fault, "") if prefill_side else ("", fault)))
            return


def _destination(decode: InstanceManifest) -> Iterator[Mismatch]:
    """Regions of one destination rank that could share bytes: one request's state would land on another's."""
    for rank in decode.ranks:
        pair = overlapping_regions(rank)
        if pair is not None:
            yield _mismatch("", f"{pair[0]} and {pair[1]}", "overlap", "", f"rank {rank.rank}: regions share bytes")
            return
