"""What is said to the sender of a message that cannot be taken: so many a second, and never to a refusal."""

from __future__ import annotations

from typing import Final

from sglang_pd.protocol.codec import Received, type_number
from sglang_pd.protocol.errors import RemoteProtocolError
from sglang_pd.protocol.messages import Message, Refusal, RoomMessage

REFUSALS_PER_S: Final = 200


class Stopping(RemoteProtocolError):
    """This side meets nobody any more. fenced: as in `Refusal`."""

    default_code = "draining"

    def __init__(self, fenced: tuple[int, ...]) -> None:
        super().__init__("the instance is stopping", where="Hello")
        self.fenced = fenced


class Refusals:
    """The refusals of one control."""

    def __init__(self) -> None:
        self._left = float(REFUSALS_PER_S)
        self._refilled_s = float("inf")

    def of(
        self, received: Received | None, error: RemoteProtocolError, now_s: float, kind: type[Message] | None = None
    ) -> Refusal | None:
        """The refusal of what was received; None where none is due. kind: what it was, if it is not at hand."""
        self._left = min(REFUSALS_PER_S, self._left + max(0.0, now_s - self._refilled_s) * REFUSALS_PER_S)
        self._refilled_s = now_s
        message = received.message if received else None
        if self._left < 1 or isinstance(message, Refusal):
            return None
        self._left -= 1
        room = message if isinstance(message, RoomMessage) else None
        return Refusal(
            error=error.info(),
            refused_type=received.header.type if received else type_number(kind) if kind else 0,
            room=room.room if room else 0,
            generation=room.generation if room else 0,
            fenced=error.fenced if isinstance(error, Stopping) else (),
        )
