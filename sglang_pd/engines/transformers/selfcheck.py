"""At load: hand a short prompt over inside this process, and see what the model does with it.

A model may keep state outside its cache, take no padding, or start afresh at each chunk. None of this raises anywhere;
it gives other tokens. So the model is asked, with its own weights, before it serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from sglang_pd.backends.base import Segment
from sglang_pd.engines.transformers.model import Source
from sglang_pd.engines.transformers.mover import Mover, Span
from sglang_pd.engines.transformers.run import forward
from sglang_pd.engines.transformers.walk import Path, Walk, leaves
from sglang_pd.memory.allocator import Allocator
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.errors import ManifestError
from sglang_pd.protocol.manifest import RankId, Topology

CHUNKS: Final = (4, 3)
LENGTH: Final = sum(CHUNKS)
STEPS: Final = 3
PAGE_TOKENS: Final = 4
CLOSE: Final = 0.05
"""Largest difference of logits, in standard deviations of them, that rounding is taken to explain."""


@dataclass(frozen=True)
class Manners:
    """What a model can do. continues: a chunk of several tokens goes on from the state before it. pads: requests of
    unequal lengths decode in one forward. batches: several of equal length do."""

    continues: bool
    pads: bool
    batches: bool


class SelfCheck:
    """A model with pools of its own, small, in host memory."""

    def __init__(self, source: Source, model: Any, walk: Walk, state: StateSpec) -> None:
        self._source, self._model, self._walk = source, model, walk
        self._device = str(next(model.parameters()).device)
        tokens = 8 * PAGE_TOKENS
        capacity = Capacity(tokens, PAGE_TOKENS, rows=2, slots=2, swa_tokens=tokens if state.window_tokens else 0)
        layout = layout_rank(state, capacity, Topology(), RankId(0, 0))
        memory = [np.full(plan.nbytes, 0x7B, np.uint8) for plan in layout.segments]
        pools = RankPools(layout, [Segment(int(m.ctypes.data), m.nbytes, "cpu", m) for m in memory])
        self._mover = Mover(walk, source.new_cache, pools, self._device)
        allocator = Allocator(layout.roots)
        self._leases = [allocator.lease(LENGTH + STEPS, window_stop=0) for _ in range(2)]
        for lease in self._leases:
            lease.advance(LENGTH + STEPS)

    def run(self) -> Manners:
        """All checks. Raises `ManifestError` for a model whose logits change in a hand-over."""
        with torch.inference_mode():
            want, again = self._alone(0), self._alone(0)
            got = self._handed_over()
            noise = float((want - again).abs().max())  # not zero where a device's sums have no fixed order
            error = float((want - got).abs().max())
            if error > 10 * noise:
                raise ManifestError(
                    "the model's next logits change when its caches are rebuilt from pools",
                    where=self._source.model_class.__name__, expected=f"differences up to {10 * noise:g}",
                    actual=f"{error:g}", hint="It keeps state outside its caches, so it cannot be handed over.",
                )  # fmt: skip
            return Manners(self._continues(), self._together(LENGTH, CHUNKS[0]), self._together(*[LENGTH] * 2))

    def _ids(self, seed: int, count: int) -> torch.Tensor:
        drawn = np.random.default_rng(seed).integers(0, self._source.vocab_size, count)
        return torch.from_numpy(drawn)[None].to(self._device)

    def _decode(self, cache: Any, seed: int, length: int) -> torch.Tensor:
        """Logits of the next steps, over tokens that are given: [steps, vocabulary]."""
        given = self._ids(seed + 50, STEPS)
        return torch.cat([forward(self._model, given[:, n : n + 1], cache, [length + n]) for n in range(STEPS)])

    def _chunks(self, seed: int, length: int, cache: Any) -> Iterator[tuple[int, int]]:
        """Prefill chunk by chunk; yields (start, stop) after each."""
        ids, at = self._ids(seed, length), 0
        for count in CHUNKS:
            stop = min(length, at + count)
            if at < stop:
                forward(self._model, ids[:, at:stop], cache, [at])
                yield at, stop
            at = stop

    def _prefilled(self, seed: int, length: int) -> Any:
        cache = self._source.new_cache()
        for _ in self._chunks(seed, length, cache):
            pass
        return cache

    def _alone(self, seed: int, length: int = LENGTH) -> torch.Tensor:
        return self._decode(self._prefilled(seed, length), seed, length)

    def _store(self, number: int, length: int) -> Span:
        """Prefill a request, every chunk into the pools."""
        tables, cache = self._leases[number].tables(), self._source.new_cache()
        for start, stop in self._chunks(number, length, cache):
            self._mover.store(cache, [Span(tables, start, stop)])
        return Span(tables, length, length)

    def _handed_over(self) -> torch.Tensor:
        span = self._store(0, LENGTH)
        self._prefilled(1, 5)  # another request's, which overwrites what a model keeps for itself
        return self._decode(self._mover.load([span]), 0, LENGTH)

    def _together(self, *lengths: int) -> bool:
        """Decode two requests in one forward, and compare with each alone."""
        want = torch.stack([self._alone(number, length) for number, length in enumerate(lengths)])
        spans = [self._store(n, length) for n, length in enumerate(lengths)]
        try:
            cache = self._mover.load(spans)
            given = torch.cat([self._ids(n + 50, STEPS) for n in range(len(lengths))])
            steps = [
                forward(self._model, given[:, step : step + 1], cache, [length + step for length in lengths])
                for step in range(STEPS)
            ]
            return _close(torch.stack(steps, 1), want)
        except (RuntimeError, ValueError, TypeError, IndexError):  # the library, of a batch that it cannot take
            return False

    def _continues(self) -> bool:
        """True where a chunk of several tokens reads every state before it, and gives the logits of an unbroken prompt.

        The logits alone do not tell where a model selects tokens by score: a near tie may fall either way.
        """
        ids, start = self._ids(0, LENGTH), CHUNKS[0]
        want = forward(self._model, ids[:, start:], self._prefilled(0, start), [start])
        for path in {item.path for item in self._walk.carried if item.role == "slot"}:
            cache = self._prefilled(0, start)
            self._change(cache, path)
            if torch.equal(forward(self._model, ids[:, start:], cache, [start]), want):
                return False
        selects = any(item.kind in ("INDEX_K", "QSA_RAW_K") for item in self._walk.carried)
        return selects or _close(want, forward(self._model, ids, self._source.new_cache(), [0]))

    def _change(self, cache: Any, path: Path) -> None:
        for layer in cache.layers:
            tensor = leaves(layer).get(path)
            if isinstance(tensor, torch.Tensor):
                whole = not tensor.dtype.is_floating_point
                tensor.copy_((tensor + 1) % self._source.vocab_size if whole else tensor * 3 + 1)


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    spread = float(want.float().std())
    worst = float((got.float() - want.float()).abs().max())
    return bool(np.isfinite(worst)) and worst <= CLOSE * spread
