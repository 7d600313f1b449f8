"""What is remembered of a room that the engine knows, in either role."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pd.worker.rooms.facts import RoomFacts


@dataclass(slots=True)
class Known:
    """A room of this side. It is kept until it has ended and its memory is releasable, whichever comes first.

    absent: see `RoomEvent`.
    """

    facts: RoomFacts
    absent: tuple[str, ...] = ()
    ended: bool = False
    released: bool = False
