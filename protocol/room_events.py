"""What a room is told by its own side, and what it asks for in return. What it is told by the peer are messages.

Events and effects are values. Events are validated when they are made; effects are to be carried out in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError
from sglang_pd.protocol.ledger import Expected
from sglang_pd.protocol.messages import Handoff, Message, RoomOpen, Writer, Wrote

# --- events at prefill -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The prefill request of this room arrived. prompt_digest: `indices.prompt_digest` of its token ids."""

    prompt_tokens: int
    prompt_digest: int

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_tokens < 2**31 or not 0 <= self.prompt_digest < 2**64:
            raise LocalProtocolError(
                "a request has 1 to 2**31 - 1 tokens and a 64-bit digest",
                code="prompt_empty" if self.prompt_tokens < 1 else "prompt_too_long",
                actual=f"{self.prompt_tokens} tokens",
            )


@dataclass(frozen=True, slots=True)
class QueueNote:
    """The request waits in the engine behind `ahead` others."""

    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Computed:
    """The whole prompt is computed."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The plans are bound and ranks have, or are about to get, orders to write; these are the ranges they owe."""

    expected: tuple[Expected, ...]


@dataclass(frozen=True, slots=True)
class RankWrote:
    """An own rank reports a range DONE at all its destinations."""

    record: Wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReady:
    """The handoff record of this room, from the last PP stage's TP rank 0, whose transfers are DONE."""

    writer: Writer
    covered_tokens: int
    record: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFenced:
    """An own rank has stopped writing this room.

    fenced: it proves that nothing more lands. source_free: nothing reads its memory for this room any more (its
    transport let go, or the rank is dead): nothing is pinned there, but nothing is proven to decode either.
    """

    writer: Writer
    fenced: bool
    source_free: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaseExtended:
    """An own component (the router's ticket, say) renews the lease by so many seconds from now."""

    lease_s: float


# --- events at decode ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The decode request of this room arrived; memory is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Memory is held and the open can go out.

    expected: what each source writer owes. record_writer: who owes the handoff record. ranks: own ranks (names) whose
    memory is written; a revoke proves the fence once every one of them has done it. verify: what arrived is compared
    with what was sent before it is admitted.
    """

    open: RoomOpen
    expected: tuple[Expected, ...]
    record_writer: Writer
    ranks: frozenset[str]
    verify: bool = False


@dataclass(frozen=True, slots=True)
class Revoked:
    """An own rank has proof that nothing more of the peer's epoch lands in its memory."""

    rank: str


@dataclass(frozen=True, slots=True)
class Verified:
    """Every record of `Verify` was found at all destinations as its writer stated it."""


# --- events at both --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fail:
    """Something of this side failed the room: engine, transfer, plan, digest."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Cancel:
    """Somebody of this side wants the room no more."""

    error: ErrorInfo = ErrorInfo(code="room_aborted", message="the room was aborted on request")


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer's incarnation is gone, or its liveness deadline passed."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class TimerFired:
    """Time passed: `now_s` has reached the room's `next_timer_s`, or was looked at anyway."""


LocalEvent = (
    Request
    | QueueNote
    | Computed
    | Bound
    | RankWrote
    | HandoffReady
    | RankFenced
    | LeaseExtended
    | Begin
    | Allocated
    | Revoked
    | Verified
    | Fail
    | Cancel
    | PeerLost
    | TimerFired
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the peer of that epoch."""

    peer_epoch: int
    message: Message


@dataclass(frozen=True, slots=True)
class Start:
    """Prefill: request and open are both there and agree. Bind the plans, then tell the room `Bound`."""

    room: int
    generation: int
    open: RoomOpen


@dataclass(frozen=True, slots=True)
class Stop:
    """Prefill: no rank may post anything more for the room; each of `writers` owes a `RankFenced`."""

    room: int
    generation: int
    writers: frozenset[Writer]


@dataclass(frozen=True, slots=True)
class Admit:
    """Decode: every byte and the record are here; the request may run."""

    room: int
    generation: int
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Verify:
    """Decode: every byte is said to be here. Compare all of these records with memory, then report `Verified`, or
    `Fail`.
    """

    room: int
    generation: int
    records: tuple[Wrote, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Decode: the peer is lost; own ranks should seek proof that its epoch writes no more, then report `Revoked`."""

    room: int
    generation: int
    peer_epoch: int
    ranks: frozenset[str]


@dataclass(frozen=True, slots=True)
class Releasable:
    """No transfer of this room touches memory any more: its pages, slots and rows may be used for something else.

    Comes exactly once a room and side. At decode, after Admit, it says that the memory belongs to the request alone.
    """

    room: int
    generation: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal state, "done", "failed" or "aborted". error: the first cause, None when done."""

    room: int
    generation: int
    state: str
    error: ErrorInfo | None


@dataclass(frozen=True, slots=True)
class Alert:
    """Somebody should know: memory that stays in quarantine past its alarm. Nothing is freed by it."""

    room: int
    generation: int
    code: str
    text: str


Effect = Send | Start | Stop | Admit | Verify | Revoke | Releasable | Ended | Alert
