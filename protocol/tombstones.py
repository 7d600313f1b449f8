"""What is remembered of rooms that ended: enough to answer late messages, bounded, and safe when it forgets.

Generations rise within a decode epoch. When a tombstone is forgotten, for age or for room, its generation becomes the
epoch's *floor*: a generation at or under it that is not on record is never opened. So a late or repeated open can not
bring a room back whose fence was already given away, however little is remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from sglang_pd.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class Tombstone:
    """One ended generation.

    state: its terminal state. error: the first cause, None when done. proven: every writer's fence is proven.
    refused: it was never opened. expires_s: when it may be forgotten.
    """

    room: int
    generation: int
    state: str
    error: ErrorInfo | None
    proven: bool
    refused: bool
    expires_s: float


def bounded(error: ErrorInfo | None) -> ErrorInfo | None:
    """The error with short texts: a peer chooses what it sends, not how much is kept of it."""
    if error is None:
        return None
    return ErrorInfo(
        code=error.code,
        message=error.message[:400],
        where=error.where[:200],
        expected=error.expected[:200],
        actual=error.actual[:200],
        hint=error.hint[:200],
        details={key[:40]: value[:100] for key, value in list(error.details.items())[:8]},
    )


class Tombstones:
    """The tombstones of one peer epoch, at most `limit` of them, each kept for `keep_s` seconds when room allows."""

    def __init__(self, limit: int, keep_s: float) -> None:
        self.limit = limit
        self.keep_s = keep_s
        self.floor = 0
        """Highest generation forgotten; 0: none."""
        self.unproven_floor = 0
        """Highest forgotten generation whose fence was not proven."""
        self._stones: OrderedDict[tuple[int, int], Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def get(self, room: int, generation: int) -> Tombstone | None:
        """The tombstone of that generation, if it is remembered."""
        return self._stones.get((room, generation))

    def add(self, stone: Tombstone) -> list[Tombstone]:
        """Remember a generation; gives those that were forgotten for it. A second one of the same key is not kept."""
        key = (stone.room, stone.generation)
        if key not in self._stones:
            self._stones[key] = stone
        gone: list[Tombstone] = []
        while len(self._stones) > self.limit:
            gone.append(self._forget())
        return gone

    def prove(self, room: int, generation: int) -> Tombstone | None:
        """Its fence is proven after all; gives what is remembered now, None for nothing."""
        stone = self._stones.get((room, generation))
        if stone is None:
            return None
        self._stones[room, generation] = proven = replace(stone, proven=True)
        return proven

    def sweep(self, now_s: float) -> list[Tombstone]:
        """Forget what is old; gives it. All are kept equally long, so the oldest are in front."""
        gone: list[Tombstone] = []
        while self._stones and next(iter(self._stones.values())).expires_s <= now_s:
            gone.append(self._forget())
        return gone

    def _forget(self) -> Tombstone:
        _, stone = self._stones.popitem(last=False)
        self.floor = max(self.floor, stone.generation)
        if not stone.proven:
            self.unproven_floor = max(self.unproven_floor, stone.generation)
        return stone

    def next_expiry_s(self) -> float | None:
        """When `sweep` has something to do next."""
        return next(iter(self._stones.values())).expires_s if self._stones else None
