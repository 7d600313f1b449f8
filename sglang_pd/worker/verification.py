"""Verify on the wire: a record is believed once every destination rank's digests add up to what its writer stated.

Rooms are chosen by their id, so that both sides choose alike. Records of a chosen room, and whatever follows them, wait
until the check of the one before is through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
import numpy as np

from sglang_pd.protocol.digest import MASK, mix64
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import RankId
from sglang_pd.protocol.messages import RoomMessage, StatusReply, Wrote
from sglang_pd.worker.orders import Check, Checked

VerifyMode = Literal["off", "sampled", "full"]
SAMPLE_ONE_IN: Final = 32
MAX_HELD: Final = 65_536
"""Messages of one room that may wait for a check; more than a room can have records is a fault of the peer."""


def chosen(room: int, mode: VerifyMode) -> bool:
    """Whether a room is verified. `sampled` takes one room in 32, by a mix of the room's id."""
    if mode == "sampled":
        return int(mix64(np.array([room], dtype=np.uint64))[0]) % SAMPLE_ONE_IN == 0
    return mode == "full"


@dataclass(slots=True)
class _Room:
    verified: set[Wrote] = field(default_factory=set)
    held: deque[RoomMessage] = field(default_factory=deque)
    number: int = 0
    record: Wrote | None = None
    waiting: set[RankId] = field(default_factory=set)
    total: dict[int, int] = field(default_factory=dict)


class Verification:
    """All checks of a decode control. Calls out to order checks, and to hand on what is believed or failed."""

    def __init__(
        self,
        ranks: Iterable[RankId],
        order: Callable[[Check], None],
        believe: Callable[[int, RoomMessage], None],
        fail: Callable[[int, int, ErrorInfo], None],
    ) -> None:
        """order: to every rank. believe(peer_epoch, message): into the room table. fail(room, generation,
        error): a mismatch."""
        self._ranks = frozenset(ranks)
        self._order, self._believe, self._fail = order, believe, fail
        self._rooms: dict[tuple[int, int, int], _Room] = {}
        self._numbers: dict[int, tuple[int, int, int]] = {}
        self._next = 0
        self.checked = 0

    def take(self, peer_epoch: int, message: RoomMessage) -> None:
        """A message of a chosen room: check it, hold it behind a check, or believe it."""
        key = (peer_epoch, message.room, message.generation)
        room = self._rooms.setdefault(key, _Room())
        if len(room.held) >= MAX_HELD:
            self._fail(
                message.room,
                message.generation,
                ErrorInfo(code="queue_full", message="too many messages wait for a check"),
            )
            return
        room.held.append(message)
        self._advance(key, room)

    def _advance(self, key: tuple[int, int, int], room: _Room) -> None:
        while room.held and room.record is None:
            message = room.held.popleft()
            if isinstance(message, StatusReply) and any(r not in room.verified and not r.empty for r in message.wrote):
                # Replayed records pass the same gate; the rest of the reply follows them.
                room.held.appendleft(msgspec.structs.replace(message, wrote=(), first=0))
                room.held.extendleft(r for r in reversed(message.wrote) if r not in room.verified)
            elif isinstance(message, Wrote) and not message.empty and message not in room.verified:
                self._start(key, room, message)
            else:
                self._believe(key[0], message)

    def _start(self, key: tuple[int, int, int], room: _Room, record: Wrote) -> None:
        if not record.digests:
            self._fail(
                record.room,
                record.generation,
                ErrorInfo(
                    code="digest_mismatch",
                    message="prefill sent no digests for a room that is to be verified",
                    where=f"room {record.room} {record.writer}/{record.component}",
                    hint="Set the same `verify` on both sides.",
                ),
            )
            return
        self._next += 1
        room.number, room.record, room.waiting, room.total = self._next, record, set(self._ranks), {}
        self._numbers[self._next] = key
        self._order(Check(number=self._next, record=record))

    def answer(self, rank: RankId, report: Checked) -> None:
        """One rank's contribution. Late and repeated ones are ignored."""
        key = self._numbers.get(report.number)
        room = self._rooms.get(key) if key is not None else None
        if key is None or room is None or room.record is None or rank not in room.waiting:
            return
        room.waiting.discard(rank)
        for layer, value in report.digests.items():
            room.total[layer] = (room.total.get(layer, 0) + value) & MASK
        if report.error is not None:
            self._fail(key[1], key[2], report.error)
        if not room.waiting:
            self._judge(key, room, room.record)

    def _judge(self, key: tuple[int, int, int], room: _Room, record: Wrote) -> None:
        del self._numbers[room.number]
        stated = np.frombuffer(record.digests, dtype="<u8").tolist()
        found = [room.total[layer] for layer in sorted(room.total)]
        room.record = None
        self.checked += 1
        if stated == found:
            room.verified.add(record)
            self._believe(key[0], record)
        else:
            layers = sorted(room.total)
            wrong = [n for n, (a, b) in zip(layers, zip(stated, found, strict=False), strict=False) if a != b]
            self._fail(
                record.room,
                record.generation,
                ErrorInfo(
                    code="digest_mismatch",
                    message="the state that arrived is not the state that was sent",
                    where=f"room {record.room} {record.writer}/{record.component}, layers {wrong or layers}, "
                    f"elements [{record.token_start}, {record.token_stop})",
                    expected=str([f"{value:016x}" for value in stated[:8]]),
                    actual=str([f"{value:016x}" for value in found[:8]]),
                ),
            )
        self._advance(key, room)

    def forget(self, room_id: int, generation: int) -> None:
        """A room is over."""
        for key in [k for k in self._rooms if k[1:] == (room_id, generation)]:
            room = self._rooms.pop(key)
            self._numbers.pop(room.number, None)
