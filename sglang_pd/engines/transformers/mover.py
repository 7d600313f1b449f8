"""Between a cache of the library and a rank's pools: rows out after each step, whole caches back in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from sglang_pd.engines.transformers.walk import Carried, Walk, leaves, name_of, put
from sglang_pd.memory.lease import Tables
from sglang_pd.memory.pools import RankPools
from sglang_pd.protocol.errors import LocalProtocolError
from sglang_pd.protocol.idx import I64
from sglang_pd.protocol.kinds import kind_of
from sglang_pd.protocol.space_maps import TokenAt


@dataclass(frozen=True)
class Span:
    """A request of a batch: where its state lies, positions that are in the pools, positions that are new."""

    tables: Tables
    start: int
    stop: int


class Mover:
    """Copies state of one rank. Holds views of the pools, and nothing of any request."""

    def __init__(self, walk: Walk, new_cache: Callable[[], Any], pools: RankPools, device: str) -> None:
        self._walk, self._new_cache, self._device = walk, new_cache, torch.device(device)
        self._pools = pools  # its segments are the memory that the views below look at
        self._roots = pools.layout.roots
        self._window = self._roots.swa.window_tokens if self._roots.swa is not None else 0
        self._pool: dict[Carried, torch.Tensor] = {}
        for item in walk.carried:
            layer = kind_of(item.kind).request_wide.get(item.part, item.layer)
            rows = pools.slots(item.kind, layer, item.part)
            self._pool[item] = rows[:, item.first : item.first + item.shape[0]]

    # --- cache to pools ---

    def store(self, cache: Any, spans: Sequence[Span]) -> None:
        """Write the positions [start, stop) of each request of a batch, and its states, into the pools.

        On return the bytes are there, also for a transport. Raises `LocalProtocolError` where the cache is not what
        the probe saw.
        """
        found = [leaves(layer) for layer in cache.layers]
        most = max(span.stop for span in spans)
        self._check(found, most)
        for number, span in enumerate(spans):
            self._require_one_history(found, number)
            at = self._slots(span.tables, span.start, span.stop)
            for item, pool in self._pool.items():
                self._write(item, item.rows(found[item.layer][item.path], number), pool, (span, at))
        self._finish()

    def _write(
        self, item: Carried, rows: torch.Tensor, pool: torch.Tensor, where: tuple[Span, dict[str, torch.Tensor]]
    ) -> None:
        span, at = where
        slots = at[item.role].to(pool.device)
        if item.role == "slot":
            pool[slots] = rows.unsqueeze(0).to(pool.device)
            return
        new = slots.shape[0]
        kept = min(new, rows.shape[0])
        if kept < new:  # a layer whose window is shorter than another's: what it forgot is zero, not what lay there
            pool[slots[: new - kept]] = 0
        pool[slots[new - kept :]] = rows[rows.shape[0] - kept :].to(pool.device)

    def _check(self, found: list[dict[Any, Any]], tokens: int) -> None:
        for scalar in self._walk.scalars:
            value = found[scalar.layer].get(scalar.path)
            if type(value) is not type(scalar.at(tokens)) or value != scalar.at(tokens):
                _odd(name_of(scalar.layer, scalar.path), scalar.at(tokens), value)
        for item in self._walk.carried:
            value = found[item.layer].get(item.path)
            if not isinstance(value, torch.Tensor) or value.dtype != item.dtype:
                _odd(item.name, item.dtype, getattr(value, "dtype", value))
            rows = item.rows(value, 0)
            shape = item.shape if item.role == "slot" else (item.held(tokens), *item.shape)
            if tuple(rows.shape) != shape:
                _odd(item.name, shape, tuple(rows.shape))

    def _require_one_history(self, found: list[dict[Any, Any]], number: int) -> None:
        shared = [found[item.layer][item.path][number] for item in self._walk.carried if item.shared]
        if any(not torch.equal(shared[0], other) for other in shared[1:]):
            _odd("n-gram histories", "the same tokens in every layer", "different ones")

    def _finish(self) -> None:
        """A transport may read the pools as soon as the engine says so: wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # --- pools to cache ---

    def load(self, spans: Sequence[Span]) -> Any:
        """A fresh cache of these requests' positions [0, start), from the pools alone; shorter ones padded on the left
        with zeros."""
        cache = self._new_cache()
        longest = max(span.start for span in spans)
        places = [self._slots(span.tables, 0, span.start) for span in spans]
        for item in self._walk.carried:
            held = item.held(longest)
            rows = [self._read(item, at, held) for at in places]
            put(cache.layers[item.layer], item.path, item.whole(rows))
        for item in self._walk.empty:
            blank = torch.empty((longest, *item.shape), dtype=item.dtype, device=self._device)
            put(cache.layers[item.layer], item.path, item.whole([blank] * len(spans)))
        for layer, path, value in self._walk.fixed:
            put(cache.layers[layer], path, value)
        for layer, path in self._walk.devices:
            known = leaves(cache.layers[layer]).get(path)
            put(cache.layers[layer], path, known.to(self._device) if isinstance(known, torch.Tensor) else self._device)
        for scalar in self._walk.scalars:
            put(cache.layers[scalar.layer], scalar.path, scalar.at(longest))
        return cache

    def _read(self, item: Carried, at: dict[str, torch.Tensor], held: int) -> torch.Tensor:
        pool = self._pool[item]
        slots = at[item.role].to(pool.device)
        if item.role == "slot":
            return pool[slots][0].to(self._device)
        rows = pool[slots[-held:] if held else slots[:0]].to(self._device)
        missing = held - rows.shape[0]
        if missing:
            blank = torch.zeros((missing, *item.shape), dtype=item.dtype, device=self._device)
            rows = torch.cat([blank, rows])
        return rows

    # --- places ---

    def _slots(self, tables: Tables, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Rows of the pools for positions [start, stop): full attention, the window before `stop`, and the slot."""
        found: dict[str, I64] = {}
        if self._roots.tokens is not None:
            if tables.pages is None:
                _odd("tables", "pages", None)
            found["tokens"] = TokenAt(self._roots.tokens)(tables.pages, np.arange(start, stop, dtype=np.int64)).lower()
        if self._roots.swa is not None:
            if tables.swa_pages is None:
                _odd("tables", "pages of the sliding window", None)
            seen = np.arange(max(start, stop - self._window, 0), stop, dtype=np.int64)
            found["window"] = TokenAt(self._roots.swa, tables.swa_first_page)(tables.swa_pages, seen).lower()
        if self._roots.slots is not None:
            if tables.slot is None or len(tables.slot) != 1:
                _odd("tables", "one slot", None)
            found["slot"] = tables.slot.lower()
        return {role: torch.from_numpy(np.array(values)) for role, values in found.items()}


def _odd(where: str, expected: object, actual: object) -> NoReturn:
    raise LocalProtocolError(
        "a cache is not what the probe of this model saw", code="internal", where=where, expected=expected,
        actual=actual,
    )  # fmt: skip
