"""The decode side of a room: opens it, counts what arrives against what was agreed, admits or quarantines."""

from __future__ import annotations

from typing import ClassVar

from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.ledger import RangeLedger
from sglang_pd.protocol.messages import (
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
    RoomRefused,
    StatusQuery,
    StatusReply,
    Writer,
    Wrote,
)
from sglang_pd.protocol.peers import Peer
from sglang_pd.protocol.room import TERMINAL, Limits, Memory, Role, State
from sglang_pd.protocol.room import Trigger as T
from sglang_pd.protocol.room_events import (
    Admit,
    Alert,
    Allocated,
    Begin,
    Cancel,
    Fail,
    PeerLost,
    Revoke,
    Revoked,
    TimerFired,
    Verified,
    Verify,
)
from sglang_pd.protocol.room_machine import Handler, RoomMachine

_NEVER = float("inf")


class DecodeRoom(RoomMachine):
    """One room at decode, with the generation it minted and the prefill incarnation it speaks to."""

    role: ClassVar[Role] = Role.DECODE
    HANDLERS: ClassVar[dict[type, tuple[T, Handler]]]
    peer: Peer

    def __init__(self, room: int, generation: int, peer: Peer, limits: Limits, now_s: float) -> None:
        super().__init__(room, generation, peer, limits, now_s)
        self.open: RoomOpen | None = None
        self.handoff: Handoff | None = None
        self.end: RoomEnd | None = None
        self.ranks: frozenset[str] = frozenset()
        self.revoked: set[str] = set()
        self._ledger = RangeLedger(())
        self._fenced: set[Writer] = set()
        self._all_fenced = False
        self._distrusted: set[Writer] = set()
        self._verify = False
        self._record_writer: Writer | None = None
        self._alerted = False
        self._nonce = 0
        self._after = 0
        self._asked = False
        self._ask_s = _NEVER
        self._step_s = limits.status_interval_s

    # --- opening -----------------------------------------------------------------------------------------------------

    def _on_begin(self, event: Begin, now_s: float) -> None:
        self._go(T.BEGIN)
        self._ask_s = now_s + self.limits.lease_renew_s

    def _on_allocated(self, event: Allocated, now_s: float) -> None:
        message = event.open
        if (message.room, message.generation, message.to_epoch) != (self.room, self.generation, self.peer.epoch):
            raise LocalProtocolError("the open is of another room, generation or peer", where=f"room {self.room}")
        if not event.ranks:
            raise LocalProtocolError("a room's memory lies on at least one rank", where=f"room {self.room}")
        self._ledger = RangeLedger(event.expected)
        self.open, self.ranks, self._verify = message, event.ranks, event.verify
        self._record_writer = event.record_writer
        self._go(T.ALLOCATED)
        self._send(message)
        self._heard(now_s)

    def _on_accepted(self, event: RoomAccepted, now_s: float) -> None:
        self._move(T.ACCEPTED)
        self._heard(now_s)

    def _on_queued(self, event: Queued, now_s: float) -> None:
        self._move(T.QUEUED)
        self._heard(now_s)

    def _on_refused(self, event: RoomRefused, now_s: float) -> None:
        # This generation was never opened and never will be: that is every writer's fence.
        self._all_fenced = True
        if self.state.terminal:
            self._take_fences()
            return
        self._end(T.FAILED if event.error.code == "room_aborted" else T.REFUSED, event.error, now_s)

    def _move(self, trigger: T) -> None:
        """Follow a trigger; once the open was answered, what was asked before that says nothing any more."""
        if self.now_in is State.OPENING:
            self._asked = False
        self._go(trigger)

    def _heard(self, now_s: float) -> None:
        """Something new came: ask again only after a silence."""
        self._step_s = self.limits.status_interval_s
        self._ask_s = now_s + self._step_s

    # --- arriving ----------------------------------------------------------------------------------------------------

    def _on_wrote(self, event: Wrote, now_s: float) -> None:
        if self.state.terminal:
            return
        try:
            new = self._ledger.add(event)
        except RemoteProtocolError as error:
            # Two claims on the same bytes: neither this room nor this writer's word on it can be trusted.
            self._distrusted.add(event.writer)
            self._end(T.BROKEN, error.info(), now_s)
            return
        self._move(T.WROTE)
        if new:
            self._heard(now_s)
            self._check_complete(now_s)

    def _on_handoff(self, event: Handoff, now_s: float) -> None:
        if self.state.terminal or event == self.handoff:
            return
        if event.writer != self._record_writer:
            error = ErrorInfo(
                code="range_conflict",
                message="a handoff record of a rank that has none to give",
                where=f"room {self.room}",
                expected=str(self._record_writer),
                actual=str(event.writer),
            )
            self._end(T.BROKEN, error, now_s)
            return
        asked = self.open.prompt_tokens if self.open is not None else 0
        if self.handoff is not None or event.covered_tokens != asked:
            error = ErrorInfo(
                code="prompt_mismatch" if self.handoff is None else "range_conflict",
                message="the handoff record stands for another prompt length"
                if self.handoff is None
                else "two different handoff records came for one room",
                where=f"room {self.room} {event.writer}",
                expected=f"{asked} tokens",
                actual=f"{event.covered_tokens} tokens",
            )
            self._end(T.BROKEN, error, now_s)
            return
        self.handoff = event
        self._move(T.HANDOFF)
        self._heard(now_s)
        self._check_complete(now_s)

    def _on_end(self, event: RoomEnd, now_s: float) -> None:
        if self.now_in is State.DONE:
            self._send(Admitted(room=self.room, generation=self.generation))
        elif self.state.terminal:
            self._send_abort()
        else:
            self.end = event
            self._move(T.END)
            if not self._short(now_s) and self.now_in is not State.VERIFYING:
                self._ask(now_s, after=0)

    def _check_complete(self, now_s: float) -> None:
        if self.handoff is None or not self._ledger.complete:
            self._short(now_s)
        elif self._verify:
            self._go(T.ARRIVED)
            self._out.append(Verify(self.room, self.generation, self._ledger.held()))
        else:
            self._admit(T.COMPLETE, self.handoff, now_s)

    def _on_verified(self, event: Verified, now_s: float) -> None:
        if self.handoff is not None:
            self._admit(T.VERIFIED, self.handoff, now_s)

    def _admit(self, trigger: T, handoff: Handoff, now_s: float) -> None:
        self._out.append(Admit(self.room, self.generation, handoff))
        self._finish(trigger, None, now_s)
        self._send(Admitted(room=self.room, generation=self.generation))

    def _short(self, now_s: float) -> bool:
        """Fail the room when prefill has ended, all its records are here, and yet something is missing."""
        if self.state.terminal or self.end is None or self.handoff is None:
            return False
        if self._ledger.complete or self._ledger.records < self.end.records:
            return False
        missing = self._ledger.missing()
        error = ErrorInfo(
            code="ranges_incomplete",
            message="prefill sent all it had and ranges are missing: " + "; ".join(missing)[:1_500],
            where=f"room {self.room}",
            actual=f"{self._ledger.records} of {self.end.records} records",
        )
        self._end(T.BROKEN, error, now_s)
        return True

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self, trigger: T, error: ErrorInfo, now_s: float) -> None:
        exposed = self.state.memory is Memory.EXPOSED
        if self.now_in is State.VERIFYING:  # what was said to be here was not found to be: no claim of it is a fence
            self._distrusted |= self._ledger.writers
        self._finish(trigger, error, now_s)
        if trigger not in (T.FAILED, T.PEER_FAILED, T.REFUSED):
            self._send_abort()
        self._step_s = self.limits.status_interval_s
        self._ask_s = now_s + self._step_s
        if exposed:
            # A writer whose every range came with its last record has nothing left to write.
            self.unfenced = {
                writer
                for writer in self._ledger.writers
                if writer in self._distrusted or not self._ledger.writer_complete(writer)
            }
            self._take_fences()
            if trigger is T.PEER_LOST:
                self._seek_proof()

    def _seek_proof(self) -> None:
        """The peer can not answer any more: only this side's own ranks can prove the fence."""
        if self.state.memory is Memory.QUARANTINED and self.unfenced:
            self._out.append(Revoke(self.room, self.generation, self.peer.epoch, self.ranks))

    def _send_abort(self) -> None:
        error = self.error or ErrorInfo(code="room_aborted", message="the room was aborted on request")
        self._send(Abort(room=self.room, generation=self.generation, error=error))

    def _take_fences(self) -> None:
        self.unfenced = set() if self._all_fenced else self.unfenced - self._fenced

    def _fence_proven(self) -> bool:
        return not self.unfenced or bool(self.ranks) and self.ranks <= self.revoked

    def _on_failed(self, event: Failed, now_s: float) -> None:
        if not self.state.terminal:
            aborted = event.error.code == "room_aborted"
            self._end(T.FAILED if aborted else T.PEER_FAILED, event.error, now_s)

    def _on_ack(self, event: AbortAck, now_s: float) -> None:
        if event.fenced and event.writer is None:
            self._all_fenced = True
        elif event.fenced and event.writer is not None:
            self._fenced.add(event.writer)
        elif self.state.memory is Memory.QUARANTINED and not self._alerted:
            self._alerted = True
            who = str(event.writer) if event.writer is not None else "some writer"
            text = f"{who} cannot prove that it writes no more: {event.reason or 'no reason given'}"
            self._out.append(Alert(self.room, self.generation, "transfer_unknown", text[:2_000]))
        if self.state.terminal:
            self._take_fences()

    def _on_revoked(self, event: Revoked, now_s: float) -> None:
        if event.rank not in self.ranks:
            raise LocalProtocolError(
                "the room has no memory on that rank", where=f"room {self.room}", actual=event.rank
            )
        self.revoked.add(event.rank)

    def _on_fail(self, event: Fail, now_s: float) -> None:
        if not self.state.terminal:
            self._end(T.FAIL, event.error, now_s)

    def _on_peer_lost(self, event: PeerLost, now_s: float) -> None:
        if self.state.terminal:
            self._seek_proof()
        else:
            self._end(T.PEER_LOST, event.error, now_s)

    def _on_cancel(self, event: Cancel, now_s: float) -> None:
        if not self.state.terminal:
            self._end(T.CANCEL, event.error, now_s)

    # --- questions and time ------------------------------------------------------------------------------------------

    def _ask(self, now_s: float, *, after: int, again: bool = False) -> None:
        """Send a query. An unanswered one is repeated under its nonce, so that a slow answer still counts."""
        if self._asked and not again:
            return
        if not self._asked:
            self._nonce = (self._nonce + 1) % 2**32
            self._after = after
            self._asked = True
        self._send(
            StatusQuery(
                room=self.room,
                generation=self.generation,
                nonce=self._nonce,
                have=self._ledger.records,
                after=self._after,
            )
        )
        self._ask_s = now_s + self._step_s
        self._step_s = min(2 * self._step_s, self.limits.status_max_s)

    def _on_status_reply(self, event: StatusReply, now_s: float) -> None:
        current = self._asked and event.nonce == self._nonce
        if current:
            self._asked = False
        for ack in event.acks:
            self._on_ack(ack, now_s)
        if self.state.terminal:
            return
        if not event.known:
            if current:
                self._unknown_there(now_s)
            return
        if self.now_in is State.OPENING:
            self._move(T.ACCEPTED)
        for record in event.wrote:
            self._on_wrote(record, now_s)
        if event.handoff is not None:
            self._on_handoff(event.handoff, now_s)
        if self.now_in in TERMINAL:
            return
        if event.error is not None:
            self._on_failed(Failed(room=self.room, generation=self.generation, error=event.error), now_s)
            return
        if event.ended:
            self.end = RoomEnd(room=self.room, generation=self.generation, records=event.total)
            self._move(T.END)
            if self._short(now_s):
                return
        if current and event.wrote and self._ledger.records < event.total:
            # The next page; from the start again when the last page left a gap open.
            reached = event.first + len(event.wrote)
            self._ask(now_s, after=reached if reached < event.total else 0)

    def _unknown_there(self, now_s: float) -> None:
        if self.now_in is State.OPENING and self.open is not None:
            self._send(self.open)
            self._ask_s = now_s + self._step_s
            return
        error = ErrorInfo(
            code="room_unknown",
            message="prefill, which had accepted the room, does not know it any more",
            where=f"room {self.room}",
        )
        self._end(T.BROKEN, error, now_s)

    def _on_timer(self, event: TimerFired, now_s: float) -> None:
        if self.state.terminal:
            self._on_quarantine_timer(now_s)
        elif now_s >= self.peer.deadline_s:
            self._end(T.PEER_LOST, self.peer.silence(now_s), now_s)
        elif self.now_in is State.ALLOCATING:
            if now_s >= self.created_s + self.limits.alloc_wait_s:
                text = f"no memory was free within {self.limits.alloc_wait_s:g} s"
                self._end(T.EXPIRED, ErrorInfo(code="pool_exhausted", message=text, where=f"room {self.room}"), now_s)
            elif now_s >= self._ask_s:
                lease_ms = max(1, min(2**32 - 1, round(3_000 * self.limits.lease_renew_s)))
                self._send(LeaseRenew(room=self.room, lease_ms=lease_ms))
                self._ask_s = now_s + self.limits.lease_renew_s
        elif now_s >= self._ask_s and self.now_in is not State.VERIFYING:
            self._ask(now_s, after=0, again=True)

    def _on_quarantine_timer(self, now_s: float) -> None:
        if self._overdue(now_s):
            waiting = ", ".join(str(writer) for writer in sorted(self.unfenced))
            text = f"memory is still in quarantine: no fence from {waiting}"
            self._out.append(Alert(self.room, self.generation, "transfer_unknown", text[:2_000]))
        if self.state.memory is Memory.QUARANTINED and now_s >= self._ask_s:
            self._send_abort()
            self._step_s = min(2 * self._step_s, self.limits.status_max_s)
            self._ask_s = now_s + self._step_s

    def deadline_s(self) -> float | None:
        """See `RoomMachine.deadline_s`."""
        if self.settled or self.now_in is State.NEW:
            return None
        if self.now_in in TERMINAL:
            return self._alarm_s
        if self.now_in is State.ALLOCATING:
            return min(self.peer.deadline_s, self.created_s + self.limits.alloc_wait_s)
        return self.peer.deadline_s

    def next_timer_s(self) -> float | None:
        """See `RoomMachine.next_timer_s`."""
        deadline_s = self.deadline_s()
        if deadline_s is None or self.now_in is State.VERIFYING:  # there is nothing to ask the peer
            return deadline_s
        return min(deadline_s, self._ask_s)


DecodeRoom.HANDLERS = {
    Begin: (T.BEGIN, DecodeRoom._on_begin),
    Allocated: (T.ALLOCATED, DecodeRoom._on_allocated),
    Revoked: (T.REVOKED, DecodeRoom._on_revoked),
    Verified: (T.VERIFIED, DecodeRoom._on_verified),
    Fail: (T.FAIL, DecodeRoom._on_fail),
    Cancel: (T.CANCEL, DecodeRoom._on_cancel),
    PeerLost: (T.PEER_LOST, DecodeRoom._on_peer_lost),
    TimerFired: (T.TIMER, DecodeRoom._on_timer),
    RoomAccepted: (T.ACCEPTED, DecodeRoom._on_accepted),
    RoomRefused: (T.REFUSED, DecodeRoom._on_refused),
    Queued: (T.QUEUED, DecodeRoom._on_queued),
    Wrote: (T.WROTE, DecodeRoom._on_wrote),
    Handoff: (T.HANDOFF, DecodeRoom._on_handoff),
    RoomEnd: (T.END, DecodeRoom._on_end),
    Failed: (T.FAILED, DecodeRoom._on_failed),
    AbortAck: (T.ABORT_ACK, DecodeRoom._on_ack),
    StatusReply: (T.STATUS_REPLY, DecodeRoom._on_status_reply),
}
