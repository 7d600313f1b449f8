"""A machine in each state, and one event of each class, for tests that enumerate."""

from __future__ import annotations

from typing import Any

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.messages import (
    Abort,
    AbortAck,
    Admitted,
    Failed,
    Handoff,
    LeaseRenew,
    Message,
    Queued,
    RoomAccepted,
    RoomEnd,
    RoomRefused,
    StatusQuery,
    StatusReply,
)
from sglang_pd.protocol.peers import Peer
from sglang_pd.protocol.room import Role, State
from sglang_pd.protocol.room_decode import DecodeRoom
from sglang_pd.protocol.room_events import (
    Allocated,
    Begin,
    Bound,
    Cancel,
    Computed,
    Fail,
    HandoffReady,
    LeaseExtended,
    LocalEvent,
    PeerLost,
    QueueNote,
    RankFenced,
    RankWrote,
    Request,
    Revoked,
    TimerFired,
    Verified,
)
from sglang_pd.protocol.room_machine import RoomMachine
from sglang_pd.protocol.room_prefill import PrefillRoom

from .pair import DIGEST, EXPECTED, LIMITS, LIVENESS_S, PIECES, RANKS, TOKENS, W0, open_message, wrote

NOW_S = 500.0
ROOM, GENERATION = 77, 5
KEY: dict[str, Any] = {"room": ROOM, "generation": GENERATION}
BROKE = ErrorInfo(code="transfer_failed", message="broke")
GONE = ErrorInfo(code="room_aborted", message="client left")
OPEN = open_message(ROOM, GENERATION, to_epoch=11)
HANDOFF = Handoff(**KEY, writer=W0, covered_tokens=TOKENS, record=b"facts")


def peer(epoch: int = 22) -> Peer:
    return Peer(epoch=epoch, instance="peer", liveness_s=LIVENESS_S, alive_until_s=NOW_S + LIVENESS_S)


EVENTS: dict[Role, list[LocalEvent | Message]] = {
    Role.PREFILL: [
        Request(prompt_tokens=TOKENS, prompt_digest=DIGEST),
        QueueNote(2),
        Computed(),
        Bound(EXPECTED),
        RankWrote(wrote(ROOM, GENERATION, 0)),
        HandoffReady(writer=W0, covered_tokens=TOKENS, record=b"facts"),
        RankFenced(writer=W0, fenced=True),
        LeaseExtended(5.0),
        Fail(BROKE),
        Cancel(),
        PeerLost(ErrorInfo(code="peer_lost", message="gone")),
        TimerFired(),
        OPEN,
        Admitted(**KEY),
        Abort(**KEY, error=GONE),
        StatusQuery(**KEY, nonce=1),
        LeaseRenew(room=ROOM, lease_ms=1000),
    ],
    Role.DECODE: [
        Begin(),
        Allocated(open=OPEN, expected=EXPECTED, record_writer=W0, ranks=RANKS),
        Revoked("d0"),
        Verified(),
        Fail(BROKE),
        Cancel(),
        PeerLost(ErrorInfo(code="peer_lost", message="gone")),
        TimerFired(),
        RoomAccepted(**KEY, state="matched"),
        RoomRefused(**KEY, error=BROKE),
        Queued(**KEY, ahead=1),
        wrote(ROOM, GENERATION, 0),
        HANDOFF,
        RoomEnd(**KEY, records=len(PIECES)),
        Failed(**KEY, error=BROKE),
        AbortAck(**KEY, writer=W0, fenced=True),
        StatusReply(**KEY, nonce=9, known=True, state="matched"),
    ],
}


def prefill_in(state: State) -> PrefillRoom:
    """A prefill room that was driven into `state` by legal events."""
    request, claim = EVENTS[Role.PREFILL][0], OPEN
    room = PrefillRoom(ROOM, LIMITS, NOW_S)
    if state is State.NEW:
        return room
    if state is State.AWAIT_REQUEST:
        room.handle(claim, NOW_S, peer())
        return room
    room.handle(request, NOW_S)
    if state is State.COMPUTED_UNCLAIMED:
        room.handle(Computed(), NOW_S)
    if state in (State.AWAIT_OPEN, State.COMPUTED_UNCLAIMED):
        return room
    room.handle(claim, NOW_S, peer())
    if state is State.MATCHED:
        return room
    room.handle(Bound(EXPECTED), NOW_S)
    if state is State.FAILED:
        room.handle(Fail(BROKE), NOW_S)
    if state is State.ABORTED:
        room.handle(Abort(**KEY, error=GONE), NOW_S)
    if state in (State.FAILED, State.ABORTED):
        return room
    for piece, (writer, *_) in enumerate(PIECES):
        if state is not State.WRITING or writer == W0:  # so that the record may go out while another rank writes
            room.handle(RankWrote(wrote(ROOM, GENERATION, piece)), NOW_S)
    if state is State.WRITING:
        return room
    room.handle(HandoffReady(writer=W0, covered_tokens=TOKENS, record=b"facts"), NOW_S)
    if state is State.DONE:
        room.handle(Admitted(**KEY), NOW_S)
    return room


def decode_in(state: State, *, verify: bool = False) -> DecodeRoom:
    """A decode room that was driven into `state` by legal events. verify: its bytes are compared; always for
    VERIFYING."""
    room = DecodeRoom(ROOM, GENERATION, peer(11), LIMITS, NOW_S)
    if state is State.NEW:
        return room
    room.handle(Begin(), NOW_S)
    if state is State.ALLOCATING:
        return room
    allocated = Allocated(
        open=OPEN, expected=EXPECTED, record_writer=W0, ranks=RANKS, verify=verify or state is State.VERIFYING
    )  # fmt: skip
    room.handle(allocated, NOW_S)
    arrivals: dict[State, list[LocalEvent | Message]] = {
        State.ACCEPTED: [RoomAccepted(**KEY, state="matched")],
        State.QUEUED: [Queued(**KEY)],
        State.RECEIVING: [wrote(ROOM, GENERATION, 1)],
        State.VERIFYING: [*(wrote(ROOM, GENERATION, piece) for piece in range(len(PIECES))), HANDOFF],
        State.DONE: [*(wrote(ROOM, GENERATION, piece) for piece in range(len(PIECES))), HANDOFF],
        State.FAILED: [Failed(**KEY, error=BROKE)],
        State.ABORTED: [Cancel()],
    }
    for event in arrivals.get(state, []):
        room.handle(event, NOW_S)
    return room


def machine_in(role: Role, state: State) -> RoomMachine:
    return prefill_in(state) if role is Role.PREFILL else decode_in(state)


def freeze(value: object) -> object:
    """A deep, comparable picture of an object's state."""
    if isinstance(value, dict):
        return tuple(sorted(((repr(k), freeze(v)) for k, v in value.items()), key=repr))
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(item) for item in value))
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if type(value).__module__.startswith("sglang_pd") and not isinstance(value, Message):
        names = getattr(type(value), "__slots__", None) or vars(value)
        return type(value).__name__, tuple((name, freeze(getattr(value, name))) for name in names)
    return repr(value)
