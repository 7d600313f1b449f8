"""Verify before admission: what memory holds once everything is said to be there is what its writers say they sent.

Rooms are chosen by their id, so that both sides choose alike. A record is right once every destination rank's digests
add up to what its writer stated. All are taken when the last has come, not as they come: a row that something writes
over meanwhile would else be admitted as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from sglang_pd.protocol.digest import MASK, mix64
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import RankId
from sglang_pd.protocol.messages import Wrote
from sglang_pd.protocol.room_events import Verify
from sglang_pd.worker.ranks.orders import Check, Checked

VerifyMode = Literal["off", "sampled", "full"]
SAMPLE_ONE_IN: Final = 32


def chosen(room: int, mode: VerifyMode) -> bool:
    """Whether a room is verified. `sampled` takes one room in 32, by a mix of the room's id."""
    if mode == "sampled":
        return int(mix64(np.array([room], dtype=np.uint64))[0]) % SAMPLE_ONE_IN == 0
    return mode == "full"


@dataclass(slots=True)
class _Room:
    """A room whose records are compared, one after another."""

    left: deque[Wrote]
    number: int = 0
    waiting: set[RankId] = field(default_factory=set)
    total: dict[int, int] = field(default_factory=dict)


class Verification:
    """All checks of a decode control. Calls out to order checks, and with what was found."""

    def __init__(
        self,
        ranks: Iterable[RankId],
        order: Callable[[Check], None],
        found: Callable[[Wrote], None],
        done: Callable[[int, int, ErrorInfo | None], None],
    ) -> None:
        """order: to every rank. found(record): it is as stated. done(room, generation, error): all are, or the first
        that is not."""
        self._ranks = frozenset(ranks)
        self._order, self._found, self._done = order, found, done
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._numbers: dict[int, tuple[int, int]] = {}
        self._next = 0
        self.checked = 0

    def start(self, effect: Verify) -> None:
        """Compare all records of a room. Its end is told by `done`, unless `forget` comes first."""
        key = effect.room, effect.generation
        self._rooms[key] = _Room(deque(effect.records))
        self._advance(key)

    def _advance(self, key: tuple[int, int]) -> None:
        room = self._rooms[key]
        if not room.left:
            self._end(key, None)
            return
        record = room.left[0]
        if not record.digests:
            error = ErrorInfo(
                code="digest_mismatch",
                message="prefill sent no digests for a room that is to be verified",
                where=f"room {record.room} {record.writer}/{record.component}",
                hint="Set the same `verify` on both sides.",
            )
            self._end(key, error)
            return
        self._next += 1
        room.number, room.waiting, room.total = self._next, set(self._ranks), {}
        self._numbers[self._next] = key
        self._order(Check(number=self._next, record=record))

    def answer(self, rank: RankId, report: Checked) -> None:
        """One rank's contribution. Late and repeated ones are ignored."""
        key = self._numbers.get(report.number)
        room = self._rooms.get(key) if key is not None else None
        if key is None or room is None or rank not in room.waiting:
            return
        room.waiting.discard(rank)
        for layer, value in report.digests.items():
            room.total[layer] = (room.total.get(layer, 0) + value) & MASK
        if report.error is not None:
            self._end(key, report.error)
        elif not room.waiting:
            self._judge(key, room)

    def _judge(self, key: tuple[int, int], room: _Room) -> None:
        del self._numbers[room.number]
        record = room.left.popleft()
        stated = np.frombuffer(record.digests, dtype="<u8").tolist()
        layers = sorted(room.total)
        found = [room.total[layer] for layer in layers]
        self.checked += 1
        if stated == found:
            self._found(record)
            self._advance(key)
            return
        wrong = [n for n, a, b in zip(layers, stated, found, strict=False) if a != b]
        error = ErrorInfo(
            code="digest_mismatch",
            message="the state that arrived is not the state that was sent",
            where=f"room {record.room} {record.writer}/{record.component}, layers {wrong or layers}, "
            f"elements [{record.token_start}, {record.token_stop})",
            expected=str([f"{value:016x}" for value in stated[:8]]),
            actual=str([f"{value:016x}" for value in found[:8]]),
        )
        self._end(key, error)

    def _end(self, key: tuple[int, int], error: ErrorInfo | None) -> None:
        self.forget(*key)
        self._done(*key, error)

    def forget(self, room_id: int, generation: int) -> None:
        """A room is over."""
        room = self._rooms.pop((room_id, generation), None)
        if room is not None:
            self._numbers.pop(room.number, None)
