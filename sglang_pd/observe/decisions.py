"""The last decisions of every rank, and the dump that shows them with rooms and peers: what to read when it hangs."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from sglang_pd.observe.records import plain_table

MAX_RANKS = 4096
MAX_DETAIL = 200
"""Longest detail of a decision, in characters; cut, not refused."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """at_ns: monotonic. room, generation: 0 where the decision is about no room."""

    at_ns: int
    what: str
    room: int = 0
    generation: int = 0
    detail: str = ""


class DecisionRing:
    """The last `size` decisions of each rank. Idle ranks have a ring too, once they said anything."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rings: dict[str, deque[Decision]] = {}

    def add(self, rank: str, decision: Decision) -> None:
        """Keep one more, dropping the oldest of that rank."""
        ring = self._rings.get(rank)
        if ring is None:
            if len(self._rings) >= MAX_RANKS:
                return
            ring = self._rings[rank] = deque(maxlen=self._size)
        ring.append(decision)

    def snapshot(self) -> dict[str, tuple[Decision, ...]]:
        """All rings, oldest first."""
        return {rank: tuple(ring) for rank, ring in sorted(self._rings.items())}


class OpenRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A room that has not ended. Ages in seconds."""

    room: int
    generation: int
    stage: str
    age_s: float
    stage_age_s: float
    peer: str = ""
    request_id: str = ""
    prompt_tokens: int = 0
    moved_bytes: int = 0


class PeerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A peer instance. since_s: seconds in that state."""

    instance: str
    epoch: str
    state: str
    since_s: float
    reason: str = ""


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an observer knows now. now_ns: the clock of the decisions. ended: the last terminal records."""

    role: str
    instance: str
    epoch: str
    now_ns: int
    condition: str
    reason: str
    rooms: tuple[OpenRoom, ...] = ()
    peers: tuple[PeerLine, ...] = ()
    ended: tuple[dict[str, Any], ...] = ()
    decisions: dict[str, tuple[Decision, ...]] = {}

    def text(self) -> str:
        """For a terminal or a log."""
        lines = [f"{self.role} {self.instance} epoch {self.epoch}: {self.condition} {self.reason}".rstrip()]
        if self.peers:
            rows = [("peer", "epoch", "state", "for", "reason")]
            rows += [(p.instance, p.epoch, p.state, f"{p.since_s:.1f} s", p.reason) for p in self.peers]
            lines += plain_table(rows)
        if self.rooms:
            rooms = [("room", "gen", "stage", "in it", "age", "bytes", "peer", "request")]
            rooms += [
                (
                    str(r.room), str(r.generation), r.stage, f"{r.stage_age_s:.3f} s", f"{r.age_s:.3f} s",
                    str(r.moved_bytes), r.peer, r.request_id,
                )
                for r in self.rooms
            ]  # fmt: skip
            lines += plain_table(rooms)
        for rank, ring in self.decisions.items():
            lines.append(f"  {rank}:")
            for d in ring:
                room = f" room {d.room}/{d.generation}" if d.room else ""
                lines.append(f"    {(d.at_ns - self.now_ns) / 1e9:+.3f} s {d.what}{room} {d.detail}".rstrip())
        return "\n".join(lines)
