"""The prefill side of a room: pairs the request with decode's open, streams its ranks' reports, proves the fences."""

from __future__ import annotations

from typing import ClassVar

from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.ledger import RangeLedger
from sglang_pd.protocol.messages import (
    MAX_RECORD_BYTES,
    MAX_REPLAY,
    Abort,
    AbortAck,
    Admitted,
    Failed,
    Handoff,
    LeaseRenew,
    Queued,
    RoomAccepted,
    RoomEnd,
    RoomOpen,
    StatusQuery,
    StatusReply,
    Writer,
    Wrote,
)
from sglang_pd.protocol.peers import Peer
from sglang_pd.protocol.room import Limits, Memory, Role, State
from sglang_pd.protocol.room import Trigger as T
from sglang_pd.protocol.room_events import (
    Alert,
    Bound,
    Cancel,
    Computed,
    Fail,
    HandoffReady,
    LeaseExtended,
    PeerLost,
    QueueNote,
    RankFenced,
    RankWrote,
    Request,
    Start,
    Stop,
    TimerFired,
)
from sglang_pd.protocol.room_machine import Handler, RoomMachine

UNCLAIMED = frozenset({State.AWAIT_OPEN, State.COMPUTED_UNCLAIMED})

_REPLAY_BYTES = 2**20
"""A status reply carries records up to about this many bytes of digests."""


class PrefillRoom(RoomMachine):
    """One room at prefill. generation is 0 and peer None until a decode claims the room by its open."""

    role: ClassVar[Role] = Role.PREFILL
    HANDLERS: ClassVar[dict[type, tuple[T, Handler]]]

    def __init__(
        self, room: int, limits: Limits, now_s: float, *, peer: Peer | None = None, generation: int = 0
    ) -> None:
        super().__init__(room, generation, peer, limits, now_s)
        self.request: Request | None = None
        self.open: RoomOpen | None = None
        self.computed = False
        self.acks: dict[Writer, AbortAck] = {}
        self._ahead: int | None = None
        self._ledger = RangeLedger(())
        self._log: list[Wrote] = []
        self._handoff: Handoff | None = None
        self._lease_until_s = now_s
        self._resend_s = now_s
        self._resend_step_s = limits.status_interval_s

    # --- the two legs meet -------------------------------------------------------------------------------------------

    def _on_request(self, event: Request, now_s: float) -> None:
        self.request = event
        if self.now_in is State.AWAIT_REQUEST:
            self._match(T.REQUEST, now_s)
            return
        self._lease_until_s = now_s + self.limits.lease_s
        self._go(T.REQUEST)

    def _on_open(self, event: RoomOpen, now_s: float) -> None:
        if self.peer is None:
            self._claim(event)
            if self.now_in is not State.NEW:
                self._match(T.OPEN, now_s)
                return
        elif event != self.open:
            # Of a room that was aborted before its open came, no open is on record: then any is late, not another.
            if self.open is not None:
                raise RemoteProtocolError("another open under the same generation", where=f"room {self.room}")
        if self.state.terminal:
            self._repeat_end()
            return
        self._go(T.OPEN)
        self._send(RoomAccepted(room=self.room, generation=self.generation, state=self.now_in.value))

    def _claim(self, event: RoomOpen | Abort) -> None:
        if self._sender is None:
            raise LocalProtocolError("a message that claims a room needs its peer", code="internal", where="room")
        self.peer, self.generation = self._sender, event.generation
        if isinstance(event, RoomOpen):
            self.open = event

    def _match(self, trigger: T, now_s: float) -> None:
        """Request and open are both here: they must speak of the same prompt."""
        if self.request is None or self.open is None:
            raise LocalProtocolError("nothing to match", code="internal", where="room")
        own = (self.request.prompt_tokens, self.request.prompt_digest)
        asked = (self.open.prompt_tokens, self.open.prompt_digest)
        if own != asked:
            error = ErrorInfo(
                code="prompt_mismatch",
                message="prefill and decode hold different prompts under one room",
                where=f"room {self.room}",
                expected=f"prefill: {own[0]} tokens, digest {own[1]:016x}",
                actual=f"decode: {asked[0]} tokens, digest {asked[1]:016x}",
            )
            self._end(T.MISMATCH, error, now_s)
            return
        self._go(trigger)
        self._send(RoomAccepted(room=self.room, generation=self.generation, state=self.now_in.value))
        if self._ahead is not None and not self.computed:
            self._send(Queued(room=self.room, generation=self.generation, ahead=self._ahead))
        self._out.append(Start(self.room, self.generation, self.open))

    def _on_lease(self, event: LeaseRenew | LeaseExtended, now_s: float) -> None:
        if isinstance(event, LeaseRenew):
            duration_s = min(event.lease_ms / 1000, self.limits.lease_s)
        else:
            duration_s = event.lease_s
        if not 0 < duration_s < 10**9:
            raise LocalProtocolError("a lease is a finite, positive duration", where="lease_s", actual=duration_s)
        self._lease_until_s = max(self._lease_until_s, now_s + duration_s)

    # --- the engine and the ranks report -----------------------------------------------------------------------------

    def _on_queue_note(self, event: QueueNote, now_s: float) -> None:
        if self.state.terminal:
            return
        self._ahead = event.ahead
        if self.now_in in (State.MATCHED, State.WRITING):
            self._send(Queued(room=self.room, generation=self.generation, ahead=event.ahead))

    def _on_computed(self, event: Computed, now_s: float) -> None:
        self.computed = True
        if self.now_in is State.AWAIT_OPEN:
            self._lease_until_s = max(self._lease_until_s, now_s + self.limits.lease_s)
        self._go(T.COMPUTED)

    def _on_bound(self, event: Bound, now_s: float) -> None:
        self._ledger = RangeLedger(event.expected)
        self._go(T.BOUND)

    def _on_rank_wrote(self, event: RankWrote, now_s: float) -> None:
        record = event.record
        if (record.room, record.generation) != (self.room, self.generation):
            raise LocalProtocolError("the record is of another room", where=f"room {self.room}", actual=record.room)
        if self.state.terminal:
            return  # crossed with the order to stop; its writer's fence is what counts now
        try:
            new = self._ledger.add(record)
        except RemoteProtocolError as error:
            raise LocalProtocolError(
                error.message, code=error.code, where=error.where, expected=error.expected, actual=error.actual
            ) from error
        if new:
            self._log.append(record)
            self._send(record)
            self._check_sent(now_s)

    def _on_handoff(self, event: HandoffReady, now_s: float) -> None:
        if self.state.terminal:
            return
        handoff = Handoff(
            room=self.room,
            generation=self.generation,
            writer=event.writer,
            covered_tokens=event.covered_tokens,
            record=event.record,
        )
        if self._handoff == handoff:
            return
        if self._handoff is not None or not self._ledger.writer_complete(event.writer):
            raise LocalProtocolError(
                "the handoff record goes out once, after its writer's last transfer is DONE",
                where=f"room {self.room} {event.writer}",
            )
        if self.request is None or event.covered_tokens != self.request.prompt_tokens:
            raise LocalProtocolError(
                "the handoff record covers another number of tokens than the prompt has",
                code="prompt_mismatch",
                where=f"room {self.room}",
                expected=self.request.prompt_tokens if self.request else "a request",
                actual=event.covered_tokens,
            )
        if len(event.record) > MAX_RECORD_BYTES:
            raise LocalProtocolError(
                "the handoff record is too large; large tensors are a REQUEST_ROW component",
                code="message_malformed",
                where=f"room {self.room}",
                expected=f"<= {MAX_RECORD_BYTES} bytes",
                actual=f"{len(event.record)} bytes",
            )
        self._handoff = handoff
        self._send(handoff)
        self._check_sent(now_s)

    def _check_sent(self, now_s: float) -> None:
        if self._ledger.complete and self._handoff is not None:
            self._go(T.ALL_SENT)
            self._send(RoomEnd(room=self.room, generation=self.generation, records=len(self._log)))
            self._resend_s = now_s + self._resend_step_s

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self, trigger: T, error: ErrorInfo, now_s: float) -> None:
        told = trigger in (T.ABORT, T.PEER_FAILED)
        untouched = self.state.memory is not Memory.EXPOSED
        self._finish(trigger, error, now_s)
        if self.generation and not told:
            self._send(Failed(room=self.room, generation=self.generation, error=error))
        if not untouched:
            for writer in sorted(self._ledger.writers):
                if self._ledger.writer_complete(writer):
                    self._note_ack(writer, fenced=True)
                else:
                    self.unfenced.add(writer)
            self._out.append(Stop(self.room, self.generation, frozenset(self.unfenced)))
        elif self.generation:
            self._send(AbortAck(room=self.room, generation=self.generation, writer=None, fenced=True))
        self._log, self._handoff = [], None

    def _note_ack(self, writer: Writer, *, fenced: bool, reason: str = "") -> None:
        ack = AbortAck(room=self.room, generation=self.generation, writer=writer, fenced=fenced, reason=reason[:2_000])
        known = self.acks.get(writer)
        if known is None or (fenced and not known.fenced):
            self.acks[writer] = ack
            self._send(ack)

    def _on_rank_fenced(self, event: RankFenced, now_s: float) -> None:
        if event.writer not in self._ledger.writers:
            raise LocalProtocolError("that rank owes nothing here", where=f"room {self.room}", actual=event.writer)
        if self.now_in is State.DONE:
            return
        self._note_ack(event.writer, fenced=event.fenced, reason=event.reason)
        if event.fenced or event.source_free:
            self.unfenced.discard(event.writer)

    def _on_failure(self, event: Fail | PeerLost, now_s: float) -> None:
        if not self.state.terminal:
            self._end(T.FAIL if isinstance(event, Fail) else T.PEER_LOST, event.error, now_s)

    def _on_cancel(self, event: Cancel, now_s: float) -> None:
        if not self.state.terminal:
            self._end(T.CANCEL, event.error, now_s)

    def _on_abort(self, event: Abort, now_s: float) -> None:
        if self.peer is None:
            self._claim(event)
        if self.state.terminal:
            self._repeat_acks()
            return
        self._end(T.ABORT if event.error.code == "room_aborted" else T.PEER_FAILED, event.error, now_s)

    def _on_admitted(self, event: Admitted, now_s: float) -> None:
        if not self.state.terminal:
            self._finish(T.ADMITTED, None, now_s)
            self._log, self._handoff = [], None

    @property
    def proven(self) -> bool:
        """True when the room ended and every writer's fence is proven to decode."""
        return self.settled and all(ack.fenced for ack in self.acks.values())

    def all_acks(self) -> tuple[AbortAck, ...]:
        """The fences known now, in as few messages as say it; empty before the end."""
        if not self.state.terminal or not self.generation:
            return ()
        if self.proven:
            return (AbortAck(room=self.room, generation=self.generation, writer=None, fenced=True),)
        return tuple(self.acks[writer] for writer in sorted(self.acks))

    def _repeat_acks(self) -> None:
        for ack in self.all_acks():
            self._send(ack)

    def _repeat_end(self) -> None:
        if self.error is not None:
            self._send(Failed(room=self.room, generation=self.generation, error=self.error))
            self._repeat_acks()

    # --- questions and time ------------------------------------------------------------------------------------------

    def _on_status_query(self, event: StatusQuery, now_s: float) -> None:
        replay: list[Wrote] = []
        if event.have != len(self._log):
            size = 0
            for record in self._log[event.after : event.after + MAX_REPLAY]:
                size += len(record.digests)
                if replay and size > _REPLAY_BYTES:
                    break
                replay.append(record)
        self._send(
            StatusReply(
                room=self.room,
                generation=self.generation,
                nonce=event.nonce,
                known=True,
                state=self.now_in.value,
                first=event.after if replay else 0,
                total=len(self._log),
                wrote=tuple(replay),
                handoff=self._handoff,
                ended=self.now_in is State.SENT,
                error=self.error,
                acks=self.all_acks(),
            )
        )

    def _on_timer(self, event: TimerFired, now_s: float) -> None:
        if self.state.terminal:
            if self._overdue(now_s):
                waiting = ", ".join(str(writer) for writer in sorted(self.unfenced))
                text = f"source memory is still pinned: no fence from {waiting}"
                self._out.append(Alert(self.room, self.generation, "transfer_unknown", text))
            return
        if self.peer is not None and now_s >= self.peer.deadline_s:
            self._end(T.PEER_LOST, self.peer.silence(now_s), now_s)
        elif self.now_in is State.AWAIT_REQUEST and now_s >= self.created_s + self.limits.request_wait_s:
            text = f"no prefill request came within {self.limits.request_wait_s:g} s of the open"
            self._end(T.EXPIRED, ErrorInfo(code="room_expired", message=text, where=f"room {self.room}"), now_s)
        elif self.now_in in UNCLAIMED and now_s >= self._lease_until_s:
            text = "no decode opened the room within its lease"
            self._end(T.EXPIRED, ErrorInfo(code="lease_expired", message=text, where=f"room {self.room}"), now_s)
        elif self.now_in is State.SENT and now_s >= self._resend_s:
            self._send(RoomEnd(room=self.room, generation=self.generation, records=len(self._log)))
            self._resend_step_s = min(2 * self._resend_step_s, self.limits.status_max_s)
            self._resend_s = now_s + self._resend_step_s

    def deadline_s(self) -> float | None:
        """See `RoomMachine.deadline_s`."""
        if self.settled or self.now_in is State.NEW:
            return None
        if self.state.terminal:
            return self._alarm_s
        if self.peer is None:
            return self._lease_until_s
        if self.now_in is State.AWAIT_REQUEST:
            return min(self.peer.deadline_s, self.created_s + self.limits.request_wait_s)
        return self.peer.deadline_s

    def next_timer_s(self) -> float | None:
        """See `RoomMachine.next_timer_s`."""
        deadline_s = self.deadline_s()
        if self.now_in is State.SENT and deadline_s is not None:
            return min(deadline_s, self._resend_s)
        return deadline_s


PrefillRoom.HANDLERS = {
    Request: (T.REQUEST, PrefillRoom._on_request),
    QueueNote: (T.QUEUE_NOTE, PrefillRoom._on_queue_note),
    Computed: (T.COMPUTED, PrefillRoom._on_computed),
    Bound: (T.BOUND, PrefillRoom._on_bound),
    RankWrote: (T.RANK_WROTE, PrefillRoom._on_rank_wrote),
    HandoffReady: (T.HANDOFF_READY, PrefillRoom._on_handoff),
    RankFenced: (T.RANK_FENCED, PrefillRoom._on_rank_fenced),
    LeaseExtended: (T.LEASE_EXTENDED, PrefillRoom._on_lease),
    Fail: (T.FAIL, PrefillRoom._on_failure),
    Cancel: (T.CANCEL, PrefillRoom._on_cancel),
    PeerLost: (T.PEER_LOST, PrefillRoom._on_failure),
    TimerFired: (T.TIMER, PrefillRoom._on_timer),
    RoomOpen: (T.OPEN, PrefillRoom._on_open),
    Admitted: (T.ADMITTED, PrefillRoom._on_admitted),
    Abort: (T.ABORT, PrefillRoom._on_abort),
    StatusQuery: (T.STATUS_QUERY, PrefillRoom._on_status_query),
    LeaseRenew: (T.LEASE_RENEW, PrefillRoom._on_lease),
}
