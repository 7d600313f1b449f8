"""Memory of a worker process for tests, and the byte oracle over it.

A live row is a function of (seed, region, shard, element) alone, every other byte is a canary, and memory that comes
back is wiped to the canary at once, so that a late byte shows for ever.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.hybrid_state import capacity, hybrid_state

from sglang_pd.backends.base import Backend
from sglang_pd.memory.layout import layout_rank
from sglang_pd.memory.live import element_slots
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.views import host_bytes
from sglang_pd.protocol.bind import IndexLists
from sglang_pd.protocol.digest import mix64
from sglang_pd.protocol.kinds import Prompt, kind_of
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.spaces import Page

CANARIES = {"decode": 0xA5, "prefill": 0x5A}
"""They differ, so that a byte shows that is written late from source memory that was wiped meanwhile."""
Visit = Callable[[int, np.ndarray, Any, np.ndarray], None]


def content(seed: int, region: int, elements: np.ndarray, row_bytes: int) -> np.ndarray:
    """Expected bytes of live rows: uint8 [elements, row_bytes], never the canary alone."""
    words = -(-row_bytes // 8)
    base = mix64(elements.astype(np.uint64) + np.uint64((seed * 1_000_003 + region * 7_919) % 2**63))
    rows = mix64(base[:, None] + np.arange(words, dtype=np.uint64))
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(elements), words * 8)[:, :row_bytes]


def prompt_ids(seed: int, tokens: int) -> list[int]:
    """The prompt of a seed: both sides derive it alike."""
    return [(seed * 31 + i * 7) % 50_000 for i in range(tokens)]


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """The pools of one rank. Shards are told apart by TP rank, so both sides of a test have equal TP."""

    def __init__(self, backend: Backend, conf: dict[str, Any]) -> None:
        state, size = hybrid_state(), capacity(conf.get("pages", 24), conf.get("rows", 8), conf.get("slots", 8))
        topology, rank = Topology(**conf.get("topology", {})), RankId(*conf.get("rank", (0, 0)))
        self.canary = CANARIES[conf["side"] if conf["role"] == "rank" else conf["role"]]
        self.layout = layout_rank(state, size, topology, rank)
        self.pools = RankPools(self.layout, Scope(backend).allocate_layout(self.layout))
        for segment in self.pools.segments:
            host_bytes(segment)[:] = self.canary
        self._names = [
            zlib.crc32("/".join((*map(str, key), str(rank.tp_rank if self.pools.region(*key)[0].dim else 0))).encode())
            for key in self.pools.keys
        ]

    def numbers(self, lists: IndexLists) -> dict[str, list[int]]:
        """Index lists as plain numbers, by space."""
        return {str(space.digest): idx.lower().tolist() for space, idx in lists.items()}

    def lists(self, numbers: dict[str, list[int]]) -> IndexLists:
        """The way back."""
        spaces = {str(space.digest): space for space in self.layout.roots.list_spaces}
        return {spaces[key]: spaces[key].ingest(np.array(some), consumer="test") for key, some in numbers.items()}

    def _rows(self, lists: IndexLists, prompt: Prompt, visit: Visit) -> None:
        for number, key in enumerate(self.pools.keys):
            region, space = self.pools.region(*key)
            elements = kind_of(key[0]).live(prompt, space)
            if isinstance(space.list_space, Page) and not len(elements):
                continue
            numbers, slots = element_slots(space, lists, prompt, elements)
            view = self.pools.row_bytes(*key)
            visit(number, view, (slots // region.rows_per_item, slots % region.rows_per_item), numbers)

    def write(self, lists: IndexLists, prompt: Prompt, seed: int) -> None:
        """What computing the prompt leaves in the pools."""

        def put(number: int, view: np.ndarray, at: Any, elements: np.ndarray) -> None:
            view[at] = content(seed, self._names[number], elements, view.shape[-1])

        self._rows(lists, prompt, put)

    def wipe(self, lists: IndexLists, prompt: Prompt) -> None:
        """Back to the canary: the memory is about to be somebody else's."""

        def clear(number: int, view: np.ndarray, at: Any, elements: np.ndarray) -> None:
            view[at] = self.canary

        self._rows(lists, prompt, clear)

    def verify(self, lists: IndexLists, prompt: Prompt, seed: int) -> list[str]:
        """Regions of a room whose live rows are not what they must be."""
        bad: list[str] = []

        def check(number: int, view: np.ndarray, at: Any, elements: np.ndarray) -> None:
            if not np.array_equal(view[at], content(seed, self._names[number], elements, view.shape[-1])):
                bad.append("/".join(map(str, self.pools.keys[number])))

        self._rows(lists, prompt, check)
        return bad

    def dirty_bytes(self) -> int:
        """Bytes that are not the canary. 0 is right when nothing is leased or withheld."""
        return sum(int((host_bytes(segment) != self.canary).sum()) for segment in self.pools.segments)

    def dirty_places(self, most: int = 8) -> list[str]:
        """Rows that are not the canary: region, item, row, how many bytes."""
        found = []
        for key in self.pools.keys:
            view = self.pools.row_bytes(*key)
            differs = (view != self.canary).sum(axis=-1)
            for at in np.argwhere(differs):
                found.append(f"{'/'.join(map(str, key))} item {at[0]} row {at[1]}: {differs[tuple(at)]} bytes")
        return [f"{len(found)} rows", *found[:most]]
