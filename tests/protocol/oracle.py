"""A second opinion on what must arrive: slow loops over tokens and units, knowing nothing of placement, plan or bind.

Memory is an array of uint64, one number for each byte. A source byte holds a number that says which byte of the model's
state it is (region, element, place in the whole row over all ranks), or a number that is nowhere else (rubbish). So
equality at the destination is equality of meaning, whoever sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.idx import Idx
from sglang_pd.protocol.manifest import InstanceManifest, RankId, RankManifest, Region
from sglang_pd.protocol.spaces import (
    AnySpace,
    LocalTok,
    Page,
    RecurrentSlot,
    RequestRow,
    Ring,
    Scaled,
    SwaTok,
    VirtualTok,
)

U64 = NDArray[np.uint64]
CANARY = 0
RUBBISH = 2**62

TOKENS = "tokens"
LIVE = {
    "KV": TOKENS,
    "MLA": TOKENS,
    "QSA_RAW_K": TOKENS,
    "QSA_POSITIONS": TOKENS,
    "DRAFT_KV": TOKENS,
    "INDEX_K": "groups",
    "QSA_COMPRESSED": "groups",
    "SWA": "window",
    "BLOCK_SCALE": "window",
    "INDEX_K_TAIL": "open group",
    "QSA_PENDING": "open group",
    "MAMBA": "state",
    "PLE": "state",
    "REQUEST_ROW": "state",
}
STREAMS = {"KV", "MLA", "DRAFT_KV"}


@dataclass(frozen=True)
class Request:
    """Prompt tokens, and how many of them decode has already."""

    tokens: int
    prefix: int = 0


def units_on(groups: tuple[int, ...], tp: int, rank: int) -> list[int]:
    """Numbers, in the whole dimension, of the units a rank holds, in its own order."""
    held: list[int] = []
    base = 0
    for size in groups:
        if size >= tp:
            share = size // tp
            held += [base + rank * share + i for i in range(share)]
        else:
            held.append(base + rank // (tp // size))
        base += size
    return held


def row_meaning(region: Region, tp: int, rank: int) -> list[int]:
    """For each byte of a rank's row: its place in the whole row."""
    groups = region.shard_groups or (region.units_total,)
    units = list(range(region.units_total)) if region.dim == 0 else units_on(groups, tp, rank)
    places = []
    for outer in range(region.outer_count):
        for unit in units:
            for byte in range(region.unit_bytes):
                places.append((outer * region.units_total + unit) * region.unit_bytes + byte)
    return places


def live(kind: str, space: AnySpace, request: Request) -> list[int]:
    """Elements that decode must receive."""
    rule = LIVE[kind]
    tokens, held = request.tokens, request.prefix
    if rule == "state":
        return [0]
    if rule == "window" and isinstance(space, SwaTok):
        return [t for t in range(held, tokens) if t >= tokens - space.window_tokens]
    if rule == "groups" and isinstance(space, Scaled):
        r, first = space.ratio, first_listed(space.of, request)
        return [g for g in range(tokens) if g * r >= first and (g + 1) * r <= tokens]
    if rule == "open group" and isinstance(space, Ring):
        closed = tokens - tokens % space.group_tokens
        return list(range(closed, tokens))
    return list(range(held, tokens))


def first_listed(of: VirtualTok | SwaTok | LocalTok, request: Request) -> int:
    """The first token whose page is on a list over pages."""
    return max(request.prefix, request.tokens - of.window_tokens, 0) if isinstance(of, SwaTok) else request.prefix


def pages_needed(of: Any, request: Request) -> int:
    """Pages that hold the tokens a list covers."""
    return len({t // of.page_len for t in range(first_listed(of, request), request.tokens)})


def owner_and_local(slot: int, virtual: VirtualTok) -> tuple[int, int]:
    """By dealing: hands of `interleave` slots go round the ranks, each rank lines up what it gets."""
    lined_up = [0] * virtual.dcp_size
    at, rank = 0, 0
    while True:
        for _ in range(virtual.interleave):
            if at == slot:
                return rank, lined_up[rank]
            lined_up[rank] += 1
            at += 1
        rank = (rank + 1) % virtual.dcp_size


@dataclass
class Side:
    """One instance with memory and a request's index lists (plain integers by list space)."""

    instance: InstanceManifest
    request: Request
    lists: Mapping[AnySpace, list[int]]
    memory: dict[RankId, list[U64]] = field(default_factory=dict)
    written: dict[RankId, list[U64]] = field(default_factory=dict)
    _dealt: dict[tuple[VirtualTok, int], tuple[int, int]] = field(default_factory=dict)

    def slot(self, space: AnySpace, element: int) -> int | None:
        """Where an element lies in the region's own space; None where this rank does not hold it."""
        if isinstance(space, RequestRow | RecurrentSlot):
            return self.lists[space][0]
        if isinstance(space, Ring):
            return self.lists[space.of][0] * space.width + element % space.width
        if isinstance(space, Scaled):
            token = self.slot(space.of, element * space.ratio)
            return None if token is None else token // space.ratio
        virtual = space.virtual if isinstance(space, LocalTok) else space
        if not isinstance(virtual, VirtualTok | SwaTok):
            raise TypeError(space)
        pages = self.lists[Page(of=virtual)]
        length = virtual.page_len
        page = pages[element // length - first_listed(virtual, self.request) // length]
        token = page * length + element % length
        if not isinstance(space, LocalTok) or not isinstance(virtual, VirtualTok):
            return token
        if (virtual, token) not in self._dealt:
            self._dealt[virtual, token] = owner_and_local(token, virtual)
        owner, local = self._dealt[virtual, token]
        return local if owner == space.dcp_rank else None

    def blank(self, value: Any) -> None:
        """Fill all memory with what `value()` gives for each segment's length."""
        for rank in self.instance.ranks:
            self.memory[rank.rank] = [value(segment.nbytes) for segment in rank.segments]
            self.written[rank.rank] = [np.zeros(segment.nbytes, np.uint64) for segment in rank.segments]


def row_start(region: Region, slot: int) -> int:
    """Byte, in its segment, at which a row starts."""
    rows = region.item_bytes // region.row_bytes
    return region.offset + (slot // rows) * region.stride_bytes + (slot % rows) * region.row_bytes


class Names:
    """Numbers for regions, the same for both sides."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int, str], int] = {}

    def base(self, kind: str, region: Region, element: int) -> int:
        number = self.numbers.setdefault((kind, region.layer_id, region.part), len(self.numbers) + 1)
        return (number * 2**16 + element) * 2**20 + 1

    def explain(self, value: int) -> str:
        """The byte a number stands for, for messages."""
        if value == CANARY or value >= RUBBISH:
            return "canary" if value == CANARY else f"rubbish {value - RUBBISH}"
        which = {number: name for name, number in self.numbers.items()}[value >> 36]
        return f"{which} element {value >> 20 & 0xFFFF} byte {(value & 0xFFFFF) - 1}"


def _stamp(side: Side, names: Names, rank: RankManifest, all_tokens: Request, memory: list[U64]) -> None:
    tp = side.instance.topology.tp
    for component in rank.components:
        for region in component.regions:
            meaning = np.array(row_meaning(region, tp, rank.rank.tp_rank), dtype=np.uint64)
            for element in live(component.kind, component.space, all_tokens):
                slot = side.slot(component.space, element)
                if slot is not None:
                    at = row_start(region, slot)
                    base = np.uint64(names.base(component.kind, region, element))
                    memory[region.segment][at : at + region.row_bytes] = base + meaning


def fill_source(side: Side, names: Names) -> None:
    """A prefill that computed the whole prompt; every other byte is rubbish, no two alike."""
    numbers = count(RUBBISH)
    side.blank(lambda length: np.array([next(numbers) for _ in range(length)], dtype=np.uint64))
    for rank in side.instance.ranks:
        _stamp(side, names, rank, Request(side.request.tokens), side.memory[rank.rank])


def expected(side: Side, names: Names, rank: RankId, kinds: set[str]) -> list[U64]:
    """What a decode rank's memory must hold afterwards, canary where nothing may land."""
    manifest = side.instance.rank(rank)
    memory = [canary(segment.nbytes) for segment in manifest.segments]
    only = RankManifest(
        rank=manifest.rank,
        epoch=manifest.epoch,
        segments=manifest.segments,
        components=tuple(c for c in manifest.components if c.kind in kinds),
        transport=manifest.transport,
    )
    _stamp(side, names, only, side.request, memory)
    return memory


def canary(length: int) -> U64:
    """Memory that nobody has written."""
    return np.full(length, CANARY, np.uint64)


def execute(batch: WriteBatch, src: list[U64], dst: list[U64], written: list[U64]) -> None:
    """Copy, one descriptor at a time, and count how often each destination byte is written."""
    src_segment, src_at = batch.src_addresses()
    dst_segment, dst_at = batch.dst_addresses()
    columns = (src_segment, src_at, dst_segment, dst_at, batch.length)
    if (len(batch), batch.total_bytes) != (len(batch.length), int(batch.length.sum())):
        raise AssertionError(f"a batch miscounts itself: {len(batch)} descriptors, {batch.total_bytes} bytes")
    for s, a, d, b, n in zip(*(column.tolist() for column in columns), strict=True):
        if not (n > 0 and a + n <= len(src[s]) and b + n <= len(dst[d])):
            raise AssertionError(f"a descriptor leaves its segment: {s, a, d, b, n}")
        dst[d][b : b + n] = src[s][a : a + n]
        written[d][b : b + n] += np.uint64(1)


def problems(side: Side, names: Names, rank: RankId, kinds: set[str]) -> list[str]:
    """Every kind of wrong byte on a decode rank, at most five, in words. Empty: exact."""
    found = []
    for number, want in enumerate(expected(side, names, rank, kinds)):
        have, times = side.memory[rank][number], side.written[rank][number]
        for at in np.flatnonzero((have != want) | (times != (want != CANARY)))[:5].tolist():
            found.append(
                f"rank {rank} segment {number} byte {at}: {names.explain(int(have[at]))}, written {times[at]} times, "
                f"expected {names.explain(int(want[at]))}"
            )
    return found[:5]


def make_lists(
    instance: InstanceManifest, request: Request, rng: Random, top: bool = True
) -> dict[AnySpace, list[int]]:
    """Index lists of a request: the highest pages, rows and slots (or any, with top=False), in shuffled order."""
    lists: dict[AnySpace, list[int]] = {}
    for rank in instance.ranks:
        for component in rank.components:
            space = component.space.list_space
            if space in lists:
                continue
            need = pages_needed(space.of, request) if isinstance(space, Page) else 1
            low = space.extent - need if top else space.reserve
            lists[space] = rng.sample(range(max(low, space.reserve), space.extent), need)
    return lists


def ingest(lists: Mapping[AnySpace, list[int]]) -> dict[AnySpace, Idx[Any]]:
    """The lists through the front door."""
    return {space: space.ingest(values) for space, values in lists.items()}
