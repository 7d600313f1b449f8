"""One memory budget -> the sizes of all pools, with a table that shows where every byte goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sglang_pd.memory.allocator import window_pages
from sglang_pd.memory.layout import Capacity, RankLayout, layout_rank
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.spaces import MAX_EXTENT, LocalTok, Scaled, VirtualTok

SPAN_PAGES: Final = 1024
"""Pages over which the bytes of one page are measured."""


@dataclass(frozen=True, slots=True)
class Line:
    """One component on the rank that needs most: what an `explain` row shows."""

    kind: str
    device: str
    space: str
    extent: int
    regions: int
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """Chosen sizes, and their cost on the fullest rank of each device."""

    capacity: Capacity
    memory_bytes: Mapping[str, int]
    used_bytes: Mapping[str, int]
    lines: tuple[Line, ...]

    def text(self) -> str:
        """The table, as `explain` prints it."""
        rows = [("component", "device", "space", "extent", "regions", "bytes", "")]
        rows += [
            (x.kind, x.device, x.space, f"{x.extent:,}", str(x.regions), f"{x.nbytes:,}", x.note) for x in self.lines
        ]
        for device, used in sorted(self.used_bytes.items()):
            have = self.memory_bytes[device]
            rows.append(("total", device, "", "", "", f"{used:,}", f"of {have:,} ({100 * used / have:.1f} %)"))
        widths = [max(len(row[column]) for row in rows) for column in range(7)]
        lines = []
        for row in rows:
            cells = zip(row, widths, range(7), strict=True)
            lines.append("  ".join(c.ljust(w) if i in (0, 1, 2, 6) else c.rjust(w) for c, w, i in cells).rstrip())
        return "\n".join(lines)


def window_pool_tokens(rows: int, window_tokens: int, step_tokens: int, page_tokens: int) -> int:
    """Sliding-window slots with which `rows` requests, each taking up to `step_tokens` at once, never wait."""
    return rows * window_pages(window_tokens, step_tokens, page_tokens) * page_tokens


def lines_of(layout: RankLayout) -> tuple[Line, ...]:
    """One line a component. Index-K and other global-indexed components show their factor."""
    found = []
    for component in layout.components:
        space = component.space
        note = ""
        base = space.of if isinstance(space, Scaled) else space
        if isinstance(base, VirtualTok) and base.dcp_size > 1:
            note = f"global-indexed: x {base.dcp_size} (DCP)"
        elif isinstance(base, LocalTok):
            note = f"context-sharded: 1 of {base.virtual.dcp_size}"
        device = layout.segments[component.regions[0].segment].device
        found.append(
            Line(
                component.kind, device, type(space).__name__, space.extent, len(component.regions),
                layout.component_bytes(component.kind), note,
            )
        )  # fmt: skip
    return tuple(found)


def _device_bytes(layout: RankLayout) -> dict[str, int]:
    used: dict[str, int] = {}
    for segment in layout.segments:
        used[segment.device] = used.get(segment.device, 0) + segment.nbytes
    return used


def plan_budget(
    state: StateSpec, topology: Topology, fixed: Capacity, memory_bytes: Mapping[str, int], device: str = "cpu"
) -> Budget:
    """The largest token capacity with which every rank's pools fit.

    fixed: all sizes but `tokens`, which is ignored. memory_bytes: bytes for pools on one rank, by device (`cpu` for
    host memory beside a GPU's). Index-K and other global-indexed components are counted at their true size, x DCP.
    Raises `ConfigError` where not even one page fits, or a device has no budget.
    """
    page = fixed.page_tokens

    def ranks(pages: int) -> list[RankLayout]:
        sized = replace(fixed, tokens=pages * page)
        return [layout_rank(state, sized, topology, RankId(stage, 0), device) for stage in range(topology.pp)]

    def fits(pages: int) -> bool:
        return all(
            nbytes <= memory_bytes[where] for layout in ranks(pages) for where, nbytes in _device_bytes(layout).items()
        )

    smallest = ranks(1)
    for layout in smallest:
        for where, nbytes in _device_bytes(layout).items():
            if memory_bytes.get(where, 0) < nbytes:
                raise ConfigError(
                    "the memory budget does not hold the smallest pools", where="$.pools.memory_bytes",
                    expected=f"at least {nbytes} bytes on {where} for {layout.rank}", actual=memory_bytes.get(where, 0),
                    hint="It takes " + ", ".join(f"{x.kind} {x.nbytes}" for x in lines_of(layout)) + ".",
                )  # fmt: skip
    pages = 1
    if "tokens" in state.roots:
        pages = _most_pages(smallest, ranks(1 + SPAN_PAGES), memory_bytes)
        while not fits(pages):  # regions are aligned, so a straight line is a page or so off
            pages -= 1
        while fits(pages + 1):
            pages += 1
    layouts = ranks(pages)
    used: dict[str, int] = {}
    for layout in layouts:
        for where, nbytes in _device_bytes(layout).items():
            used[where] = max(used.get(where, 0), nbytes)
    fullest = max(layouts, key=lambda layout: layout.total_bytes)
    return Budget(replace(fixed, tokens=pages * page), memory_bytes, used, lines_of(fullest))


def _most_pages(one: list[RankLayout], many: list[RankLayout], memory_bytes: Mapping[str, int]) -> int:
    most = MAX_EXTENT
    for first, second in zip(one, many, strict=True):
        have = _device_bytes(first)
        for where, nbytes in _device_bytes(second).items():
            growth = nbytes - have[where]
            if growth > 0:
                most = min(most, 1 + (memory_bytes[where] - have[where]) * SPAN_PAGES // growth)
    return most
