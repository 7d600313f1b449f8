"""A request's live rows in a rank's pools: which slots hold its elements, and their bytes.

For oracles and digests. Built from the typed maps of `protocol.space_maps` alone, so that it does not share a mistake
with the planner's arithmetic.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sglang_pd.memory.pools import RankPools
from sglang_pd.protocol.bind import IndexLists
from sglang_pd.protocol.errors import SpaceError
from sglang_pd.protocol.idx import I64, Idx
from sglang_pd.protocol.kinds import Elements, Prompt, first_page, kind_of
from sglang_pd.protocol.space_maps import DivideGroups, Localize, RingAt, TokenAt
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


def element_slots(space: AnySpace, lists: IndexLists, prompt: Prompt, elements: Elements) -> tuple[I64, I64]:
    """Element numbers that this rank holds, and the slot of each in the region's own space. Both int64 [n].

    lists: one side's index lists; prompt: with the prefix by which that side's lists start.
    """
    positions = np.arange(elements.start, elements.stop, dtype=np.int64)
    listed: Idx[Any] = lists[space.list_space]
    if isinstance(space, RequestRow | RecurrentSlot):
        return positions, np.broadcast_to(listed.lower()[:1], positions.shape)
    if isinstance(space, Ring):
        return positions, RingAt(space)(listed, positions).lower()
    at = first_page(space.list_space, prompt)
    if isinstance(space, Scaled):
        tokens = TokenAt(cast(Any, space.of), at)(listed, positions * space.ratio)
        return positions, DivideGroups(space)(tokens).lower()
    if isinstance(space, LocalTok):
        owned = Localize(space.virtual, space.dcp_rank)(TokenAt(space.virtual, at)(listed, positions))
        return positions[owned.positions], owned.idx.lower()
    if isinstance(space, VirtualTok | SwaTok):
        return positions, TokenAt(cast(Any, space), at)(listed, positions).lower()
    raise SpaceError("a space without elements", where="element_slots", actual=str(space))


def live_rows(
    pools: RankPools, key: tuple[str, int, str], lists: IndexLists, prompt: Prompt
) -> tuple[I64, NDArray[np.uint8]]:
    """Element numbers int64 [n] and bytes uint8 [n, row_bytes] of a region's live rows on this rank. Host memory."""
    region, space = pools.region(*key)
    elements = kind_of(key[0]).live(prompt, space)
    if isinstance(space.list_space, Page) and not len(elements):
        return np.empty(0, np.int64), np.empty((0, region.row_bytes), np.uint8)
    numbers, slots = element_slots(space, lists, prompt, elements)
    rows = pools.row_bytes(*key)
    return numbers, rows[slots // region.rows_per_item, slots % region.rows_per_item]
