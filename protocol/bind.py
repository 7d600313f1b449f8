"""From a plan and a room's index lists to descriptors: numpy broadcasting over cached geometry, checked once.

`RoomIndices` checks both sides' lists against their own count rules, for all ranks. `bind` turns a chunk of tokens into
a `GridBatch`. Nothing here loops over pages, tokens or layers in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from sglang_pd.protocol.batch import U64, Grid, GridBatch
from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.idx import I64, Idx, mismatch
from sglang_pd.protocol.kinds import Elements, Prompt, Validity, first_page, kind_of, list_count, list_tokens
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.plan import Items, Move, Plan
from sglang_pd.protocol.space_maps import local_address
from sglang_pd.protocol.spaces import AnySpace, LocalTok, Page, RecurrentSlot, RequestRow, Ring, Scaled, VirtualTok

IndexLists = Mapping[AnySpace, Idx[Any]]
"""One index list a list space: pages, a request row, a recurrent slot. Keys are `Space.list_space`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Token positions [start, stop) of the prompt that are ready, and whether the prompt ends here."""

    start: int
    stop: int
    last: bool


@dataclass(frozen=True, slots=True)
class NeededLists:
    """For each side of a pair: the list spaces a room needs, each with the first kind that needs it.

    late: source spaces that only after-last kinds use. Their lists may come with the last chunk, since a sliding window
    gives pages back while the prompt is computed.
    """

    src: Mapping[AnySpace, str]
    dst: Mapping[AnySpace, str]
    late: frozenset[AnySpace] = frozenset()


def needed_lists(instance: InstanceManifest, kinds: tuple[str, ...]) -> dict[AnySpace, str]:
    """List spaces that the components of `kinds` need, each with the first kind that needs it."""
    needed: dict[AnySpace, str] = {}
    for rank in instance.ranks:
        for component in rank.components:
            if component.kind in kinds:
                needed.setdefault(component.space.list_space, component.kind)
    return needed


def late_spaces(instance: InstanceManifest, kinds: tuple[str, ...]) -> frozenset[AnySpace]:
    """List spaces of which every kind that uses them is valid only after the last chunk."""
    validity: dict[AnySpace, set[Validity]] = {}
    for rank in instance.ranks:
        for component in rank.components:
            if component.kind in kinds:
                validity.setdefault(component.space.list_space, set()).add(kind_of(component.kind).validity)
    return frozenset(space for space, kinds_of in validity.items() if kinds_of == {Validity.LAST})


def check_lists(needed: Mapping[AnySpace, str], lists: IndexLists, prompt: Prompt, side: str) -> None:
    """Check one side's lists: all there, in their spaces, of the exact count, nothing reserved, nothing twice.

    A source passes a prompt with prefix 0. Raises `PlanError` (`count_mismatch`, `index_invalid`), `SpaceMismatch`.
    """
    for space, kind in needed.items():
        where = f"{side} list for {kind}"
        idx = lists.get(space)
        if idx is None:
            raise PlanError(
                "no index list for a space", code="count_mismatch", where=where, expected=str(space), actual="none"
            )
        if idx.space != space:
            raise mismatch(space, idx, where, "bind")
        want = list_count(space, prompt)
        if len(idx) != want:
            raise PlanError(
                "an index list has the wrong length; nothing was written",
                code="count_mismatch",
                where=where,
                expected=f"{want} ({prompt.tokens} tokens, prefix {prompt.prefix_tokens}, {space})",
                actual=len(idx),
                component=kind,
                side=side,
            )
        values = idx.lower()
        if want and int(values.min()) < space.reserve:
            raise PlanError(
                "an index is reserved for padding", code="index_invalid", where=where,
                expected=f">= {space.reserve}", actual=int(values.min()), component=kind,
            )  # fmt: skip
        if want < 2:
            continue
        ordered = np.sort(values)
        if bool((ordered[1:] == ordered[:-1]).any()):
            twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
            raise PlanError("an index appears twice", code="index_invalid", where=where, actual=twice, component=kind)


@dataclass(frozen=True, slots=True)
class RoomIndices:
    """A room's prompt and both sides' lists, checked. Build with `of`; one serves the plans of all rank pairs."""

    prompt: Prompt
    src: IndexLists
    dst: IndexLists

    @staticmethod
    def of(needed: NeededLists, prompt: Prompt, src: IndexLists, dst: IndexLists) -> RoomIndices:
        """Check everything that does not depend on the rank. Raises as `check_lists`, and `prefix_unaligned`.

        Late source lists may be missing until `completed`.
        """
        check_prefix(needed.dst, prompt)
        due = {space: kind for space, kind in needed.src.items() if space in src or space not in needed.late}
        check_lists(due, src, Prompt(prompt.tokens), "source")
        check_lists(needed.dst, dst, prompt, "destination")
        return RoomIndices(prompt, src, dst)

    def completed(self, needed: NeededLists, late: IndexLists) -> RoomIndices:
        """With the source lists that came with the last chunk; afterwards none may be missing. Raises as `of`.

        A list that was given before may come again, but not as another one: chunks were bound to the first.
        """
        if not late and all(space in self.src for space in needed.src):
            return self  # all were given before, and checked then
        for space, idx in late.items():
            if self.src.get(space, idx) != idx:
                kind = needed.src.get(space, "")
                raise PlanError(
                    "a list that was given before is another now",
                    code="index_invalid",
                    where=f"source list for {kind}",
                    expected="the same indices",
                    component=kind,
                )
        src = {**late, **self.src}
        check_lists(needed.src, src, Prompt(self.prompt.tokens), "source")
        return RoomIndices(self.prompt, src, self.dst)


def check_prefix(needed: Mapping[AnySpace, str], prompt: Prompt) -> None:
    """Refuse a prefix that is no multiple of decode's virtual page: a shared page is never rewritten.

    A sliding window's own page counts where the prefix reaches into the window.
    """
    for space, kind in needed.items():
        if not isinstance(space, Page) or prompt.prefix_tokens % space.of.page_len == 0:
            continue
        tokens = list_tokens(space, prompt)
        if isinstance(space.of, VirtualTok) or (len(tokens) and tokens.start == prompt.prefix_tokens):
            raise PlanError(
                "the prefix on decode is not a whole number of pages",
                code="prefix_unaligned",
                where=f"destination list for {kind}",
                expected=f"a multiple of {space.of.page_len} tokens",
                actual=prompt.prefix_tokens,
                hint="Round decode's prefix hit down to its virtual page.",
            )


def live_elements(kind: str, space: AnySpace, prompt: Prompt) -> Elements:
    """Elements of a component that decode must receive. The space is the component's own."""
    return kind_of(kind).live(prompt, space)


def chunk_elements(kind: str, space: AnySpace, prompt: Prompt, chunk: Chunk) -> Elements | None:
    """Elements that a chunk makes ready: the live ones it covers, or all after the last chunk; None for nothing yet."""
    live = live_elements(kind, space, prompt)
    if kind_of(kind).validity is Validity.LAST:
        return live if chunk.last else None
    ratio = space.ratio if isinstance(space, Scaled) else 1
    start = min(max(live.start, chunk.start // ratio), live.stop)
    stop = live.stop if chunk.last else min(live.stop, chunk.stop // ratio)
    return Elements(start, max(start, stop))


def bind(plan: Plan, room: RoomIndices, chunk: Chunk) -> GridBatch:
    """Descriptors of what the chunk makes ready, each grid of one kind; none for an empty plan.

    A chunk that is not the last may end anywhere: streaming components move the token rows it covers. Offsets and
    lengths are in range by construction: lists were checked against their spaces, regions against their segments.
    """
    if not 0 <= chunk.start <= chunk.stop <= room.prompt.tokens or (chunk.last and chunk.stop != room.prompt.tokens):
        raise PlanError(
            "a chunk lies inside the prompt, and the last one ends it",
            where="chunk",
            expected=f"0 <= start <= stop <= {room.prompt.tokens}",
            actual=f"[{chunk.start}, {chunk.stop}), last={chunk.last}",
        )
    grids = []
    for move in plan.moves:
        elements = chunk_elements(move.kind, move.dst.space, room.prompt, chunk)
        if elements is not None and len(elements):
            blocks = _blocks(move, room, elements)
            if blocks.length.shape[0]:
                grids.append(
                    Grid(
                        move.src_region,
                        move.dst_region,
                        move.src_inner,
                        move.dst_inner,
                        blocks.src_offset,
                        blocks.dst_offset,
                        blocks.length,
                        None if move.whole else move.length,
                    )
                )
    return GridBatch(plan.src, plan.dst, tuple(grids))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Runs of rows that are contiguous within one item on both sides. uint64 bytes [blocks]."""

    src_offset: U64
    dst_offset: U64
    length: U64


@dataclass(frozen=True, slots=True)
class Rows:
    """Single rows that a move covers: element number (int64), byte offset in source and destination region (uint64)."""

    element: I64
    src_offset: U64
    dst_offset: U64


def rows_of(move: Move, room: RoomIndices, elements: Elements) -> Rows:
    """Every row of the range that this plan's ranks hold, one by one: what verification reads. Not merged."""
    starts = np.arange(elements.start, elements.stop, dtype=np.int64)
    kept, src_at, dst_at = _located(move, room, starts)
    return Rows(starts[kept], _offsets(move.src, src_at), _offsets(move.dst, dst_at))


def _located(move: Move, room: RoomIndices, starts: I64) -> tuple[Any, I64, I64]:
    """Slots on both sides of the element positions that both ranks hold, and the selection of those positions."""
    src_at, src_here = _slots(move.src.space, room.src, Prompt(room.prompt.tokens), starts)
    dst_at, dst_here = _slots(move.dst.space, room.dst, room.prompt, starts)
    here = src_here if dst_here is None else dst_here if src_here is None else src_here & dst_here
    if here is None:
        return slice(None), src_at, dst_at
    return here, src_at[here], dst_at[here]


def _blocks(move: Move, room: RoomIndices, elements: Elements) -> _Blocks:
    size = gcd(_run(move.src), _run(move.dst)) if move.whole else 1
    starts = np.arange(elements.start // size, -(-elements.stop // size), dtype=np.int64) * size
    stops = np.minimum(starts + size, elements.stop)
    starts = np.maximum(starts, elements.start)
    kept, src_at, dst_at = _located(move, room, starts)
    rows = (stops - starts)[kept].astype(np.uint64)
    blocks = _Blocks(_offsets(move.src, src_at), _offsets(move.dst, dst_at), rows * np.uint64(move.src.row_bytes))
    return _merged(blocks) if move.whole else blocks


def _run(items: Items) -> int:
    """Rows that stay neighbours inside one item, at element positions that are multiples of the result."""
    space = items.space
    if isinstance(space, Ring | RequestRow | RecurrentSlot):
        return 1
    if isinstance(space, LocalTok) and space.virtual.dcp_size > 1:
        return gcd(space.virtual.interleave, items.rows_per_item)
    return items.rows_per_item


def _slots(space: AnySpace, lists: IndexLists, prompt: Prompt, positions: I64) -> tuple[I64, Any]:
    """Slot of each element position in the region's own space, and a mask of those this rank holds (None: all)."""
    if space.list_space not in lists:
        raise PlanError(
            "no index list for a space", code="count_mismatch", where="bind", expected=str(space), actual="none",
            hint="Give late lists with the last chunk.",
        )  # fmt: skip
    listed = lists[space.list_space].lower()
    if isinstance(space, Ring):
        return listed[0] * space.width + positions % space.width, None
    if isinstance(space, RequestRow | RecurrentSlot):
        return np.broadcast_to(listed[:1], positions.shape), None
    tokens = positions * space.ratio if isinstance(space, Scaled) else positions
    length = space.list_space.of.page_len if isinstance(space.list_space, Page) else 1
    place = tokens // length - first_page(space.list_space, prompt)
    if place.size and not (0 <= int(place[0]) and int(place[-1]) < listed.shape[0]):
        # A kind whose live rule reaches beyond its list: numpy would count a negative place from the end.
        raise PlanError(
            "live elements lie outside the index list", code="count_mismatch", where=str(space),
            expected=f"pages 0 to {listed.shape[0] - 1}", actual=f"{int(place[0])} to {int(place[-1])}",
        )  # fmt: skip
    slots = listed[place] * length + tokens % length
    if isinstance(space, LocalTok):
        owner, local = local_address(slots, space.virtual)
        return local, owner == space.dcp_rank
    return slots // space.ratio if isinstance(space, Scaled) else slots, None


def _offsets(items: Items, slots: I64) -> U64:
    rows = items.rows_per_item
    if items.stride_bytes == rows * items.row_bytes:
        return (slots * items.row_bytes).astype(np.uint64)
    return (slots // rows * items.stride_bytes + slots % rows * items.row_bytes).astype(np.uint64)


def _merged(blocks: _Blocks) -> _Blocks:
    """Join neighbours that touch on both sides."""
    if blocks.length.shape[0] < 2:
        return blocks
    src_end, dst_end = blocks.src_offset + blocks.length, blocks.dst_offset + blocks.length
    joined = (src_end[:-1] == blocks.src_offset[1:]) & (dst_end[:-1] == blocks.dst_offset[1:])
    if not joined.any():
        return blocks
    first = np.concatenate([[0], np.flatnonzero(~joined) + 1])
    return _Blocks(blocks.src_offset[first], blocks.dst_offset[first], np.add.reduceat(blocks.length, first))
