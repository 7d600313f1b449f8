"""Opens that wait for their peer's handshake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sglang_pd.protocol.errors import ErrorInfo, PdError, RoomError
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
        said = f": {talk.error}" if talk.error is not None else ""
        return RoomError(
            f"no handshake with the peer in time{said}",
            code="peer_unknown",
            where=self.address,
            hint=""
            if said
            else "Is that prefill's control port (bootstrap_port), and do both sides name each other's CURVE keys?",
        )


class PendingOpens:
    """All of one control, in the order they came."""

    def __init__(self) -> None:
        self._opens: list[PendingOpen] = []

    def __len__(self) -> int:
        return len(self._opens)

    def add(self, pending: PendingOpen) -> None:
        """One more waits. There must be room for it."""
        self._opens.append(pending)

    @property
    def full(self) -> bool:
        """No more may wait."""
        return len(self._opens) >= MAX_PENDING

    def take(self, handle: int) -> list[PendingOpen]:
        """Those that go by that handle and were to be opened; they wait no more."""
        taken = [pending for pending in self._opens if pending.facts.handle == handle and pending.declined is None]
        self._opens = [p for p in self._opens if p.facts.handle != handle or p.declined is not None]
        return taken

    def try_all(self, opened: Callable[[PendingOpen], bool], refuse: Callable[[PendingOpen, PdError], None]) -> None:
        """Open what waited for a handshake that is through; refuse what waited for one that failed, or too long.

        opened: True when it was; raises the `PdError` it is refused with; False: it waits.
        """
        opens, self._opens = self._opens, []
        for pending in opens:
            try:
                if not opened(pending):
                    self._opens.append(pending)
            except PdError as error:
                refuse(pending, error)
            except Exception as error:  # a defect may cost this room its life, but none of those behind it its end
                refuse(pending, RoomError(f"{type(error).__name__}: {error}", code="internal"))

    @property
    def deadlines_s(self) -> list[float]:
        """When each waits no longer."""
        return [pending.deadline_s for pending in self._opens]
