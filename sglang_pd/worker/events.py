"""What an endpoint tells its engine."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.room import Label


class EventKind(Label):
    """Kinds of room events. Every room gives exactly one of DONE, FAILED, ABORTED, and exactly one RELEASABLE."""

    ADMITTED = "admitted"
    """Decode: every byte is here and verified as configured; `record` is the handoff record. DONE follows."""
    DONE = "done"
    """The hand-over succeeded."""
    FAILED = "failed"
    """The hand-over failed; `error` is the first cause."""
    ABORTED = "aborted"
    """Somebody gave the room up; `error` says who and why."""
    RELEASABLE = "releasable"
    """No transfer touches the room's memory any more: source pages, or those of a failed destination, may be reused."""
    ALERT = "alert"
    """Memory stays in quarantine; `error` says why. Nothing is freed by it."""


TERMINAL_EVENTS = frozenset({EventKind.DONE, EventKind.FAILED, EventKind.ABORTED})


@dataclass(frozen=True, slots=True)
class RoomEvent:
    """One event of one room. handle: what the endpoint's `open` or `request` returned for it.

    absent: with ADMITTED, kinds of this side's optional components that prefill does not have. Nothing was written for
    them: their rows hold what they held before, which may be another request's.
    """

    kind: EventKind
    room: int
    generation: int
    handle: int = 0
    record: bytes = b""
    error: ErrorInfo | None = None
    absent: tuple[str, ...] = ()
