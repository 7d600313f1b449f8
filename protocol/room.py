"""The room's state machines as tables. Two rules: everything that changes a room's state is in this file, and nothing
in it knows which of the two roles runs here: the role is a key like any other.

A room is two machines for each role. The *room* machine says where the hand-over stands. It reaches exactly one
terminal state, at once when the cause is known, so that whoever waits is told. The *memory* machine says whether a
transfer may still touch the room's memory; it ends in RELEASABLE, and only a fence leads out of QUARANTINED. The two
are coupled by `JOINT`: some room states move the memory machine by themselves.

A trigger is an event after it was judged: what a message or report *means* where the room stands. Those of kind
JUDGED are conclusions ("everything arrived"), the others are messages or reports as they come. A trigger that a
state's row lacks is illegal there: it raises and changes nothing. Time is a trigger as well; when it must come says
`DEADLINES`: every state that waits has at least one, and each is either the peer's liveness or a configured duration.
The machines that feed these tables are `room_prefill.py` and `room_decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_pd.protocol.errors import LocalProtocolError


class Label(Enum):
    """Members are told apart by identity and hashed by it: `Enum.__hash__` is Python code, and tables look up often."""

    __hash__ = object.__hash__


class Role(Label):
    """Which side of a room this is."""

    PREFILL = "prefill"
    DECODE = "decode"


class State(Label):
    """Where a room stands."""

    NEW = "new"
    # prefill
    AWAIT_REQUEST = "await_request"
    AWAIT_OPEN = "await_open"
    COMPUTED_UNCLAIMED = "computed_unclaimed"
    MATCHED = "matched"
    WRITING = "writing"
    SENT = "sent"
    # decode
    ALLOCATING = "allocating"
    OPENING = "opening"
    ACCEPTED = "accepted"
    QUEUED = "queued"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    # both
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


TERMINAL = frozenset({State.DONE, State.FAILED, State.ABORTED})


class Memory(Label):
    """Whether transfers may touch the room's memory: source pages at prefill, destination pages at decode."""

    UNTOUCHED = "untouched"
    EXPOSED = "exposed"
    QUARANTINED = "quarantined"
    RELEASABLE = "releasable"


class Kind(Label):
    """Where a trigger comes from."""

    LOCAL = "local"
    REMOTE = "remote"
    JUDGED = "judged"


class Trigger(Label):
    """A judged event: name, and where it comes from. LOCAL ones that are illegal are the caller's fault, REMOTE ones
    the peer's.
    """

    def __init__(self, label: str, kind: Kind) -> None:
        self.label = label
        self.kind = kind

    # this side, prefill
    REQUEST = ("request", Kind.LOCAL)
    QUEUE_NOTE = ("queue_note", Kind.LOCAL)
    COMPUTED = ("computed", Kind.LOCAL)
    BOUND = ("bound", Kind.LOCAL)
    RANK_WROTE = ("rank_wrote", Kind.LOCAL)
    HANDOFF_READY = ("handoff_ready", Kind.LOCAL)
    RANK_FENCED = ("rank_fenced", Kind.LOCAL)
    LEASE_EXTENDED = ("lease_extended", Kind.LOCAL)
    # this side, decode
    BEGIN = ("begin", Kind.LOCAL)
    ALLOCATED = ("allocated", Kind.LOCAL)
    REVOKED = ("revoked", Kind.LOCAL)
    VERIFIED = ("verified", Kind.LOCAL)
    # this side, both
    FAIL = ("fail", Kind.LOCAL)
    CANCEL = ("cancel", Kind.LOCAL)
    PEER_LOST = ("peer_lost", Kind.LOCAL)
    TIMER = ("timer", Kind.LOCAL)
    # from decode
    OPEN = ("RoomOpen", Kind.REMOTE)
    ADMITTED = ("Admitted", Kind.REMOTE)
    ABORT = ("Abort", Kind.REMOTE)
    STATUS_QUERY = ("StatusQuery", Kind.REMOTE)
    LEASE_RENEW = ("LeaseRenew", Kind.REMOTE)
    # from prefill
    ACCEPTED = ("RoomAccepted", Kind.REMOTE)
    REFUSED = ("RoomRefused", Kind.REMOTE)
    QUEUED = ("Queued", Kind.REMOTE)
    WROTE = ("Wrote", Kind.REMOTE)
    HANDOFF = ("Handoff", Kind.REMOTE)
    END = ("RoomEnd", Kind.REMOTE)
    FAILED = ("Failed", Kind.REMOTE)
    ABORT_ACK = ("AbortAck", Kind.REMOTE)
    STATUS_REPLY = ("StatusReply", Kind.REMOTE)
    # conclusions
    MISMATCH = ("prompts differ", Kind.JUDGED)
    ALL_SENT = ("all sent", Kind.JUDGED)
    ARRIVED = ("all arrived, to be verified", Kind.JUDGED)
    COMPLETE = ("all arrived", Kind.JUDGED)
    BROKEN = ("cannot complete", Kind.JUDGED)
    EXPIRED = ("deadline passed", Kind.JUDGED)
    PEER_FAILED = ("the peer failed", Kind.JUDGED)


Row = dict[Trigger, State]
T, S = Trigger, State

# What may end a room in any state that is not terminal.
_ENDINGS: Row = {T.FAIL: S.FAILED, T.CANCEL: S.ABORTED}


def _stay(state: State, *triggers: Trigger) -> Row:
    return dict.fromkeys(triggers, state)


def _prefill() -> dict[State, Row]:
    # A claimed room has a peer; the peer may ask, abort, renew and repeat its open at any time.
    def claimed(state: State) -> Row:
        return {
            **_ENDINGS,
            **_stay(state, T.OPEN, T.STATUS_QUERY, T.LEASE_RENEW, T.TIMER),
            T.ABORT: S.ABORTED,
            T.PEER_FAILED: S.FAILED,
            T.PEER_LOST: S.FAILED,
        }

    def unclaimed(state: State) -> Row:
        return {
            **_ENDINGS,
            **_stay(state, T.LEASE_RENEW, T.LEASE_EXTENDED, T.TIMER),
            T.OPEN: S.MATCHED,
            T.MISMATCH: S.FAILED,
            T.ABORT: S.ABORTED,
            T.PEER_FAILED: S.FAILED,
            T.EXPIRED: S.FAILED,
        }

    # After the end everything that was on its way is harmless; only what this side should know better is illegal.
    def ended(state: State) -> Row:
        late = (T.OPEN, T.ADMITTED, T.ABORT, T.STATUS_QUERY, T.LEASE_RENEW, T.FAIL, T.CANCEL, T.PEER_LOST, T.TIMER)
        return _stay(state, *late, T.RANK_WROTE, T.RANK_FENCED, T.HANDOFF_READY, T.COMPUTED, T.QUEUE_NOTE)

    return {
        S.NEW: {T.OPEN: S.AWAIT_REQUEST, T.REQUEST: S.AWAIT_OPEN},
        S.AWAIT_REQUEST: {
            **claimed(S.AWAIT_REQUEST),
            T.REQUEST: S.MATCHED,
            T.MISMATCH: S.FAILED,
            T.EXPIRED: S.FAILED,
        },
        S.AWAIT_OPEN: {
            **unclaimed(S.AWAIT_OPEN),
            T.QUEUE_NOTE: S.AWAIT_OPEN,
            T.COMPUTED: S.COMPUTED_UNCLAIMED,
        },
        S.COMPUTED_UNCLAIMED: unclaimed(S.COMPUTED_UNCLAIMED),
        S.MATCHED: {
            **claimed(S.MATCHED),
            **_stay(S.MATCHED, T.QUEUE_NOTE, T.COMPUTED),
            T.BOUND: S.WRITING,
        },
        S.WRITING: {
            **claimed(S.WRITING),
            **_stay(S.WRITING, T.QUEUE_NOTE, T.COMPUTED, T.RANK_WROTE, T.HANDOFF_READY),
            T.ALL_SENT: S.SENT,
        },
        S.SENT: {
            **claimed(S.SENT),
            **_stay(S.SENT, T.COMPUTED, T.RANK_WROTE, T.HANDOFF_READY),
            T.ADMITTED: S.DONE,
        },
        S.DONE: ended(S.DONE),
        S.FAILED: ended(S.FAILED),
        S.ABORTED: ended(S.ABORTED),
    }


def _decode() -> dict[State, Row]:
    # From the moment the open is out any message of the room may come first: links lose, delay and reorder.
    def open_(state: State) -> Row:
        return {
            **_ENDINGS,
            **_stay(state, T.TIMER, T.ABORT_ACK, T.STATUS_REPLY),
            T.QUEUED: S.QUEUED,
            T.WROTE: S.RECEIVING,
            T.HANDOFF: S.RECEIVING,
            T.END: S.RECEIVING,
            T.FAILED: S.ABORTED,
            T.PEER_FAILED: S.FAILED,
            T.PEER_LOST: S.FAILED,
            T.BROKEN: S.FAILED,
        }

    def ended(state: State) -> Row:
        late = (T.ACCEPTED, T.QUEUED, T.WROTE, T.HANDOFF, T.END, T.FAILED, T.ABORT_ACK, T.STATUS_REPLY)
        return _stay(state, *late, T.REVOKED, T.FAIL, T.CANCEL, T.PEER_LOST, T.TIMER)

    return {
        S.NEW: {T.BEGIN: S.ALLOCATING},
        S.ALLOCATING: {
            **_ENDINGS,
            T.TIMER: S.ALLOCATING,
            T.ALLOCATED: S.OPENING,
            T.PEER_LOST: S.FAILED,
            T.EXPIRED: S.FAILED,
        },
        S.OPENING: {**open_(S.OPENING), T.ACCEPTED: S.ACCEPTED, T.REFUSED: S.FAILED},
        S.ACCEPTED: {**open_(S.ACCEPTED), T.ACCEPTED: S.ACCEPTED},
        S.QUEUED: {**open_(S.QUEUED), T.ACCEPTED: S.QUEUED},
        S.RECEIVING: {
            **open_(S.RECEIVING),
            **_stay(S.RECEIVING, T.ACCEPTED, T.QUEUED),
            T.ARRIVED: S.VERIFYING,
            T.COMPLETE: S.DONE,
        },
        # Everything is here; what still comes was on its way. A claim that contradicts it ends the room all the same.
        S.VERIFYING: {
            **open_(S.VERIFYING),
            **_stay(S.VERIFYING, T.ACCEPTED, T.QUEUED, T.WROTE, T.HANDOFF, T.END),
            T.VERIFIED: S.DONE,
        },
        S.DONE: ended(S.DONE),
        S.FAILED: {**ended(S.FAILED), T.REFUSED: S.FAILED},
        S.ABORTED: {**ended(S.ABORTED), T.REFUSED: S.ABORTED},
    }


TABLE: dict[Role, dict[State, Row]] = {Role.PREFILL: _prefill(), Role.DECODE: _decode()}
"""role -> state -> trigger -> next state. `FAILED` at decode and `ABORT` at prefill carry the code `room_aborted`;
with any other code the machine feeds `PEER_FAILED`, so that both sides end in the same state."""

JOINT: dict[Role, dict[tuple[State, Memory], Memory]] = {
    Role.PREFILL: {
        # Orders to write are out; source memory is read from here on.
        (S.WRITING, Memory.UNTOUCHED): Memory.EXPOSED,
        # Every rank reported its last range DONE: nothing reads the source any more.
        (S.SENT, Memory.EXPOSED): Memory.RELEASABLE,
        (S.FAILED, Memory.UNTOUCHED): Memory.RELEASABLE,
        (S.ABORTED, Memory.UNTOUCHED): Memory.RELEASABLE,
        (S.FAILED, Memory.EXPOSED): Memory.QUARANTINED,
        (S.ABORTED, Memory.EXPOSED): Memory.QUARANTINED,
    },
    Role.DECODE: {
        # The open is out: the peer may write before any answer of it is seen here.
        (S.OPENING, Memory.UNTOUCHED): Memory.EXPOSED,
        # Every writer's last record was seen and all ranges tile: nothing more can land.
        (S.DONE, Memory.EXPOSED): Memory.RELEASABLE,
        (S.FAILED, Memory.UNTOUCHED): Memory.RELEASABLE,
        (S.ABORTED, Memory.UNTOUCHED): Memory.RELEASABLE,
        (S.FAILED, Memory.EXPOSED): Memory.QUARANTINED,
        (S.ABORTED, Memory.EXPOSED): Memory.QUARANTINED,
    },
}
"""role -> (state, memory) -> memory: what a state does to the memory machine by itself, applied until nothing moves."""

FENCE: dict[Memory, Memory] = {Memory.QUARANTINED: Memory.RELEASABLE}
"""The one move of the memory machine that needs proof: every writer is fenced."""


class Deadline(Label):
    """What a waiting state's time is measured by."""

    LIVENESS = "the peer's liveness: its last heartbeat plus its liveness duration"
    REQUEST_WAIT = "request_wait_s after the open"
    LEASE = "the lease: lease_s after the request and again after it was computed, extended by renewals"
    ALLOC_WAIT = "alloc_wait_s after the request"
    FENCE_ALARM = "fence_alarm_s after the end, repeating: an alert, never a release"


DEADLINES: dict[Role, dict[State, tuple[Deadline, ...]]] = {
    Role.PREFILL: {
        S.AWAIT_REQUEST: (Deadline.LIVENESS, Deadline.REQUEST_WAIT),
        S.AWAIT_OPEN: (Deadline.LEASE,),
        S.COMPUTED_UNCLAIMED: (Deadline.LEASE,),
        S.MATCHED: (Deadline.LIVENESS,),
        S.WRITING: (Deadline.LIVENESS,),
        S.SENT: (Deadline.LIVENESS,),
    },
    Role.DECODE: {
        S.ALLOCATING: (Deadline.LIVENESS, Deadline.ALLOC_WAIT),
        S.OPENING: (Deadline.LIVENESS,),
        S.ACCEPTED: (Deadline.LIVENESS,),
        S.QUEUED: (Deadline.LIVENESS,),
        S.RECEIVING: (Deadline.LIVENESS,),
        S.VERIFYING: (Deadline.LIVENESS,),
    },
}
"""role -> waiting state -> what bounds it. Terminal states whose memory is quarantined wait under `FENCE_ALARM`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Durations and bounds of one side's rooms. Seconds; all finite and positive, else LocalProtocolError.

    request_wait_s: an opened room waits for its prefill request. lease_s: a request waits for its open, and again
    after it was computed. alloc_wait_s: a decode request waits for memory. status_interval_s: silence after which
    the other side is asked, doubling up to status_max_s. fence_alarm_s: quarantine after which an alert is raised.
    lease_renew_s: how often a decode that waits for memory renews prefill's lease.
    """

    request_wait_s: float = 120.0
    lease_s: float = 60.0
    alloc_wait_s: float = 1_800.0
    status_interval_s: float = 1.0
    status_max_s: float = 8.0
    fence_alarm_s: float = 30.0
    lease_renew_s: float = 15.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not 0 < value < 10**9:
                raise LocalProtocolError(
                    "a duration is finite and positive", code="config_invalid", where=name, actual=value
                )
        if self.status_max_s < self.status_interval_s:
            raise LocalProtocolError(
                "the longest status interval is shorter than the first", code="config_invalid", where="status_max_s"
            )


class RoomState:
    """One room's place in both machines. It moves by `process` and `fenced` alone, and only along the tables."""

    __slots__ = ("memory", "role", "state")

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = State.NEW
        self.memory = Memory.UNTOUCHED

    def allows(self, trigger: Trigger) -> bool:
        """True when the trigger is legal here."""
        return trigger in TABLE[self.role][self.state]

    def require(self, trigger: Trigger) -> None:
        """Raise LocalProtocolError (`illegal_transition`) when the trigger is illegal here."""
        if not self.allows(trigger):
            legal = sorted(known.label for known in TABLE[self.role][self.state])
            raise LocalProtocolError(
                f"{trigger.label!r} is illegal for a {self.role.value} room in state {self.state.value}",
                where="room",
                expected=f"one of {', '.join(legal)}",
                actual=trigger.label,
            )

    def process(self, trigger: Trigger) -> None:
        """Follow the trigger, then the joint moves. Raises as `require` does, and then nothing has changed."""
        self.require(trigger)
        self.state = TABLE[self.role][self.state][trigger]
        joint = JOINT[self.role]
        while (self.state, self.memory) in joint:
            self.memory = joint[self.state, self.memory]

    def fenced(self) -> None:
        """Every writer is fenced. Raises LocalProtocolError when the memory is not quarantined."""
        if self.memory not in FENCE:
            raise LocalProtocolError(f"memory in state {self.memory.value} needs no fence", where="room")
        self.memory = FENCE[self.memory]

    @property
    def terminal(self) -> bool:
        """True once the room has ended."""
        return self.state in TERMINAL

    @property
    def settled(self) -> bool:
        """True once the room has ended and its memory is releasable: nothing is left to wait for."""
        return self.terminal and self.memory is Memory.RELEASABLE
