"""What a control is told of a room by its engine."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pd.protocol.indices import IndexList


@dataclass(frozen=True, slots=True)
class RoomFacts:
    """What the engine said of a room. handle: this use of the room's id; the engine's chunks and events carry it."""

    handle: int
    room: int
    prompt_tokens: int
    prompt_digest: int
    lists: tuple[IndexList, ...]
    prefix_tokens: int = 0
    request_id: str = ""
    traceparent: str = ""
