"""An open that waits for its peer's handshake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_pd.protocol.errors import ErrorInfo, RoomError
from sglang_pd.worker.peers.conversation import Conversation
from sglang_pd.worker.rooms.facts import RoomFacts

MAX_PENDING: Final = 16_384
"""Opens that wait at a time."""


@dataclass(slots=True)
class PendingOpen:
    """declined: the room will not be opened; prefill is to be told why."""

    facts: RoomFacts
    address: str
    deadline_s: float
    declined: ErrorInfo | None = None

    def too_late(self, talk: Conversation) -> RoomError:
        """Why it waits no longer."""
        said = f": {talk.error.message}" if talk.error is not None else ""
        return RoomError(
            f"no handshake with the peer in time{said}",
            code="peer_unknown",
            where=self.address,
            hint="Is that prefill's control port (bootstrap_port), and do both sides name each other's CURVE keys?",
        )
