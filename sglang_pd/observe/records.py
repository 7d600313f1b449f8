"""One line a room, one table a registration: the facts that an operator greps for, with the first cause always."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.kinds import SENTINELS
from sglang_pd.protocol.manifest import Component, InstanceManifest
from sglang_pd.protocol.messages import Mismatch, Verdict

MAX_LAYERS_SHOWN = 8


def epoch_text(epoch: int) -> str:
    """An epoch as all that people read writes it: 16 hexadecimal digits (JSON's numbers lose some); empty for 0."""
    return f"{epoch:016x}" if epoch else ""


class RoomRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="room"):
    """One room at its terminal state, on one side.

    time: seconds since the epoch. stage_s, total_s: seconds, stages sum to the total. bytes: by component, sent by a
    prefill, received by a decode. epochs: as `epoch_text`. pages: by list space. verified_layers: digests
    compared. cause: the first one.
    """

    time: float
    role: str
    instance: str
    epoch: str
    backend: str
    room: int
    generation: int
    result: str
    request_id: str = ""
    traceparent: str = ""
    peer: str = ""
    peer_epoch: str = ""
    ranks: tuple[str, ...] = ()
    peer_ranks: tuple[str, ...] = ()
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    pages: dict[str, int] = {}
    bytes: dict[str, int] = {}
    descriptors: int = 0
    verified_layers: int = 0
    stage_s: dict[str, float] = {}
    total_s: float = 0.0
    last_stage: str = ""
    cause: ErrorInfo | None = None


class ComponentLine(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a component as an instance registers it. Bytes are those of one rank."""

    kind: str
    part: str
    dtype: str
    layers: str
    item_bytes: int
    row_bytes: int
    page: int
    space: str
    extent: int
    units: str
    layout: str = ""


class Registration(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="registration"):
    """One judged pair. own, peer: component tables. mismatches: every differing field, empty when accepted."""

    time: float
    role: str
    instance: str
    peer: str
    peer_epochs: tuple[str, ...]
    accepted: bool
    protocol: str
    backend: str
    transport: str
    devices: tuple[str, ...]
    topology: str
    peer_topology: str
    mismatches: tuple[Mismatch, ...] = ()
    own_components: tuple[ComponentLine, ...] = ()
    peer_components: tuple[ComponentLine, ...] = ()


def to_line(record: RoomRecord | Registration) -> str:
    """The record as one line of JSON; fields without content are left out."""
    data = msgspec.to_builtins(record)
    return msgspec.json.encode({k: v for k, v in data.items() if v not in ("", {}, [], (), None)}).decode()


def component_lines(instance: InstanceManifest) -> tuple[ComponentLine, ...]:
    """A table of what an instance registers: one line a kind and part, over all ranks' layers."""
    layers: dict[tuple[str, str], set[int]] = {}
    first: dict[tuple[str, str], ComponentLine] = {}
    for rank in instance.ranks:
        for component in rank.components:
            for line, ids in _parts(component):
                key = (line.kind, line.part)
                first.setdefault(key, line)
                layers.setdefault(key, set()).update(ids)
    return tuple(
        msgspec.structs.replace(line, layers=_layer_text(sorted(layers[key]))) for key, line in sorted(first.items())
    )


def _parts(component: Component) -> Iterator[tuple[ComponentLine, list[int]]]:
    space = component.space
    for part in dict.fromkeys(region.part for region in component.regions):
        regions = [region for region in component.regions if region.part == part]
        region = regions[0]
        units = f"{region.units_total} replicated" if region.dim == 0 else f"{region.dim} of {region.units_total}"
        line = ComponentLine(
            kind=component.kind,
            part=part,
            dtype=region.dtype,
            layers="",
            item_bytes=region.item_bytes,
            row_bytes=region.row_bytes,
            page=space.page_len,
            space=type(space).__name__,
            extent=space.extent,
            units=units + (f" in {region.shard_groups}" if region.shard_groups else ""),
            layout=component.layout,
        )
        yield line, [r.layer_id for r in regions]


def _layer_text(layers: list[int]) -> str:
    named = [str(layer) for layer in layers if layer not in SENTINELS]
    if not named:
        return "request-wide"
    shown = " ".join(named[:MAX_LAYERS_SHOWN])
    return shown if len(named) <= MAX_LAYERS_SHOWN else f"{shown} ... ({len(named)})"


def registration_of(
    own: InstanceManifest, peer: InstanceManifest, verdict: Verdict, *, transport: str, role: str, time: float
) -> Registration:
    """The record of a judged pair."""
    devices = sorted({segment.device for rank in own.ranks for segment in rank.segments})
    return Registration(
        time=time,
        role=role,
        instance=own.instance_id,
        peer=peer.instance_id,
        peer_epochs=tuple(epoch_text(rank.epoch) for rank in peer.ranks),
        accepted=verdict.accepted,
        protocol=".".join(str(part) for part in own.protocol),
        backend=" ".join(sorted({rank.transport.backend for rank in own.ranks})),
        transport=transport,
        devices=tuple(devices),
        topology=topology_text(own),
        peer_topology=topology_text(peer),
        mismatches=verdict.mismatches,
        own_components=component_lines(own),
        peer_components=component_lines(peer),
    )


def topology_text(instance: InstanceManifest) -> str:
    """`pp1 tp4 dcp2`."""
    t = instance.topology
    return f"pp{t.pp} tp{t.tp} dcp{t.dcp}"


def registration_text(record: Registration) -> str:
    """The registration as a plain table for a log."""
    head = (
        f"{record.role} {record.instance} ({record.topology}) and {record.peer} ({record.peer_topology}), "
        f"{record.backend} {record.transport or '(transport not known yet)'}, protocol {record.protocol}: "
        + ("accepted" if record.accepted else f"REFUSED, {len(record.mismatches)} differences")
    )
    lines = [head]
    if not record.accepted:
        rows = [("component", "region", "field", "prefill", "decode")]
        rows += [(m.component, m.region, m.field, m.prefill, m.decode) for m in record.mismatches]
        return "\n".join([head, *plain_table(rows)])
    fields = ("kind", "part", "dtype", "layers", "item_bytes", "row_bytes", "page", "space", "extent", "units")
    rows_any: list[tuple[Any, ...]] = [fields]
    rows_any += [tuple(getattr(line, field) for field in fields) for line in record.own_components]
    return "\n".join([*lines, *plain_table(rows_any)])


def plain_table(rows: list[tuple[Any, ...]]) -> list[str]:
    """Rows, the first being the head, as lines with aligned columns."""
    text = [[str(cell) or "-" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in text) for i in range(len(text[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in text]
