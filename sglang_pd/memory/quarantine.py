"""Memory withheld until a fence: on a budget of bytes, never freed by a timer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.protocol.idx import I64
from sglang_pd.protocol.spaces import AnySpace

log = logging.getLogger("sglang_pd.memory")


@dataclass(frozen=True, slots=True)
class Withheld:
    """What one lease left behind. generation: of the lease. since_s: the caller's monotonic clock, in seconds."""

    generation: int
    reason: str
    nbytes: int
    since_s: float
    indices: tuple[tuple[AnySpace, I64], ...]


class Quarantine:
    """Withheld memory by lease generation.

    budget_bytes: past it `over_budget` is True and `on_over_budget` is called, once a crossing; the worker then drains.
    Nothing here frees memory: whoever has the proof of a fence calls `take`.
    """

    def __init__(self, budget_bytes: int | None = None, on_over_budget: Callable[[int], None] | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._on_over_budget = on_over_budget
        self._held: dict[int, Withheld] = {}
        self.held_bytes = 0
        """Bytes withheld now."""
        self.admitted_total = 0
        """Leases that ever came here."""
        self.fenced_total = 0
        """Leases that left by a fence."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def over_budget(self) -> bool:
        """True while more bytes wait than the budget allows."""
        return self.budget_bytes is not None and self.held_bytes > self.budget_bytes

    @property
    def oldest_since_s(self) -> float | None:
        """When the oldest of what is held came, on the caller's clock; None when empty."""
        return min((item.since_s for item in self._held.values()), default=None)

    def reasons(self) -> dict[int, str]:
        """Generation -> why it waits."""
        return {generation: item.reason for generation, item in self._held.items()}

    def admit(self, item: Withheld) -> None:
        """Keep `item` until its fence."""
        if item.generation in self._held:
            raise LeaseError("a lease was quarantined twice", where=f"generation {item.generation}")
        was_over = self.over_budget
        self._held[item.generation] = item
        self.held_bytes += item.nbytes
        self.admitted_total += 1
        if self.over_budget and not was_over and self._on_over_budget is not None:
            try:
                self._on_over_budget(self.held_bytes)
            except Exception:  # it is only told: the lease must not stay in a state that denies what was done
                log.exception("what is to happen over the quarantine's budget failed")

    def take(self, generation: int) -> Withheld:
        """Remove what a fence has freed. Raises `LeaseError` where nothing of that generation is held."""
        item = self._held.pop(generation, None)
        if item is None:
            raise LeaseError("nothing of that generation is in quarantine", where=f"generation {generation}")
        self.held_bytes -= item.nbytes
        self.fenced_total += 1
        return item

    def __contains__(self, generation: int) -> bool:
        return generation in self._held

    def __iter__(self) -> Iterator[Withheld]:
        return iter(tuple(self._held.values()))
