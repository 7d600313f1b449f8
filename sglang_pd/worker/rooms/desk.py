"""The room desk: carries events into the room tables and their effects out to sockets, ranks and the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import msgspec

from sglang_pd.protocol.bind import check_lists, check_prefix
from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, PdError, RoomError
from sglang_pd.protocol.indices import IndexList
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import InstanceManifest, RankId
from sglang_pd.protocol.messages import Message, RoomMessage, RoomOpen, Writer
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.room import Limits, Role
from sglang_pd.protocol.room_events import (
    Admit,
    Alert,
    Allocated,
    Bound,
    Cancel,
    Computed,
    Effect,
    Ended,
    Fail,
    HandoffReady,
    LocalEvent,
    RankFenced,
    RankWrote,
    Releasable,
    Request,
    Revoke,
    Send,
    Start,
    Stop,
    Verified,
    Verify,
)
from sglang_pd.protocol.room_events import Revoked as Proven
from sglang_pd.protocol.rooms_decode import DecodeRooms
from sglang_pd.protocol.rooms_prefill import PrefillRooms
from sglang_pd.worker.events import EventKind, RoomEvent
from sglang_pd.worker.peers.seeking import Seeking
from sglang_pd.worker.ranks.agent import unpack
from sglang_pd.worker.ranks.meetings import info_of
from sglang_pd.worker.ranks.orders import (
    AnyReport,
    Begin,
    Checked,
    Fenced,
    Forget,
    Halt,
    HandedOff,
    Live,
    Revoked,
    RoomFault,
    Seek,
    Through,
    WroteRange,
)
from sglang_pd.worker.rooms.claims import Claims
from sglang_pd.worker.rooms.facts import RoomFacts
from sglang_pd.worker.rooms.known import Known
from sglang_pd.worker.rooms.outside import Outside
from sglang_pd.worker.rooms.verification import Verification, VerifyMode, chosen
from sglang_pd.worker.watch import Watch

MAX_EARLY_FAULTS: Final = 4_096
"""Faults kept of rooms whose request has not come yet; one that is not kept ends by its lease."""


def _writer(rank: RankId) -> Writer:
    return Writer(pp=rank.pp_rank, tp=rank.tp_rank)


_TERMINAL = {"done": EventKind.DONE, "failed": EventKind.FAILED, "aborted": EventKind.ABORTED}


class RoomDesk:
    """Rooms of one incarnation, in both roles. Control thread only."""

    def __init__(
        self, epoch: int, outside: Outside, ranks: tuple[RankId, ...], *, limits: Limits, verify: VerifyMode
    ) -> None:
        self._outside = outside
        self._ranks = ranks
        self._verify_mode = verify
        self.prefill = PrefillRooms(epoch, limits=limits)
        self.decode = DecodeRooms(epoch, limits=limits)
        self.counts: Counter[str] = Counter()
        self._known: dict[tuple[Role, int], Known] = {}
        self._claims = Claims()
        self._handles: dict[int, tuple[Role, int]] = {}
        """Rooms by their handles."""
        self._early_faults: dict[int, ErrorInfo] = {}
        self._owed_handles: dict[int, int] = {}
        """By generation, of rooms that are over and owe a proof."""
        self._dead: frozenset[Writer] = frozenset()
        """Own ranks whose process has ended."""
        self.seeking = Seeking()
        self._now_s = 0.0
        self.watch = Watch()
        self.verification = Verification(ranks, outside.order, lambda r: self.watch.verified(r), self._verified)

    # --- from the engine ---------------------------------------------------------------------------------------------

    def request(self, facts: RoomFacts, now_s: float) -> None:
        """Prefill: the request of a room is here, with its source lists. A refusal is an event for its handle."""
        self._now_s = now_s
        try:
            event = Request(prompt_tokens=facts.prompt_tokens, prompt_digest=facts.prompt_digest)
            effects = self.prefill.request(facts.room, event, now_s)
        except PdError as error:
            self._refuse(facts, error)
            return
        self._known[Role.PREFILL, facts.room] = Known(facts)
        self._handles[facts.handle] = Role.PREFILL, facts.room
        early = self._early_faults.pop(facts.handle, None)
        self.watch.requested(facts.room, facts.request_id, facts.traceparent, prompt_tokens=facts.prompt_tokens)
        self._carry(Role.PREFILL, effects)
        if early is not None:
            self._local(Role.PREFILL, facts.room, Fail(early))

    def computed(self, handle: int, now_s: float) -> None:
        """Prefill: the whole prompt of the room that goes by that handle is computed."""
        self._now_s = now_s
        if handle in self._handles:
            role, room = self._handles[handle]
            self.watch.computed(room)
            self._local(role, room, Computed())

    def open(self, facts: RoomFacts, peer_epoch: int, now_s: float) -> None:
        """Decode: memory is held, open the room at that peer. A refusal is an event for its handle."""
        self._now_s = now_s
        pairing = self._outside.pairing(peer_epoch)
        if pairing is None:
            self._refuse(facts, RoomError("the peer is not agreed with", code="peer_unknown", actual=peer_epoch))
            return
        try:
            prompt = Prompt(facts.prompt_tokens, facts.prefix_tokens)
            check_prefix(pairing.needed.dst, prompt)
            facts = replace(facts, lists=pairing.needed_of(facts.lists, source=False))
            lists = unpack(pairing.needed.dst, facts.lists)
            check_lists(pairing.needed.dst, lists, prompt, "destination")
            self._claims.take(facts.handle, lists)
            generation, effects = self.decode.begin(facts.room, peer_epoch, now_s)
        except PdError as error:
            self._claims.give_back(facts.handle)
            self._refuse(facts, error)
            return
        self._known[Role.DECODE, facts.room] = Known(facts, pairing.absent)
        self._handles[facts.handle] = Role.DECODE, facts.room
        try:
            self._carry(Role.DECODE, effects)
            self._expose(facts, generation, peer_epoch, pairing)
        except Exception as error:  # it has begun, so it ends as rooms do
            self._local(Role.DECODE, facts.room, Fail(info_of(error)), generation)

    def _expose(self, facts: RoomFacts, generation: int, peer_epoch: int, pairing: Pairing) -> None:
        """From here on prefill may write into the room's memory."""
        message = RoomOpen(
            room=facts.room,
            generation=generation,
            to_epoch=peer_epoch,
            request_id=facts.request_id,
            traceparent=facts.traceparent,
            prompt_tokens=facts.prompt_tokens,
            prompt_digest=facts.prompt_digest,
            prefix_tokens=facts.prefix_tokens,
            index_lists=facts.lists,
        )
        self.watch.opened(message, pairing)
        verify = chosen(facts.room, self._verify_mode)
        if verify:
            self._outside.order(self._begin(message, peer_epoch, src_lists=(), verify=True))
        allocated = Allocated(
            open=message,
            expected=pairing.expected(Prompt(facts.prompt_tokens, facts.prefix_tokens)),
            record_writer=_writer(pairing.prefill.topology.record_rank),
            ranks=frozenset(str(rank) for rank in self._ranks),
            verify=verify,
        )
        self._local(Role.DECODE, facts.room, allocated)

    def decline(self, room: int, peer_epoch: int, error: ErrorInfo, now_s: float) -> None:
        """Decode: a room is refused before it opens (it can never fit, say); its prefill fails it with this cause.

        Raises `RoomError` where the room runs here, or the peer is gone.
        """
        self._now_s = now_s
        self._carry(Role.DECODE, self.decode.decline(room, peer_epoch, error))

    def abort(self, handle: int, error: ErrorInfo, now_s: float) -> None:
        """This side wants the room that goes by that handle no more."""
        self._now_s = now_s
        if handle in self._handles:
            role, room = self._handles[handle]
            self._local(role, room, Cancel(error))

    def _refuse(self, facts: RoomFacts, error: PdError) -> None:
        self._outside.emit(RoomEvent(EventKind.FAILED, facts.room, 0, handle=facts.handle, error=error.info()))
        self._outside.emit(RoomEvent(EventKind.RELEASABLE, facts.room, 0, handle=facts.handle))
        self._outside.order(Forget(room=facts.room, generation=0, handle=facts.handle))

    # --- from peers --------------------------------------------------------------------------------------------------

    def receive(self, peer_epoch: int, message: Message, *, source: bool, now_s: float) -> None:
        """A message of an agreed peer. source: this side is prefill in the pair. Raises `RemoteProtocolError`."""
        self._now_s = now_s
        if source:
            self._carry(Role.PREFILL, self.prefill.receive(peer_epoch, message, now_s))
        else:
            effects = self.decode.receive(peer_epoch, message, now_s)
            if isinstance(message, RoomMessage):
                self.watch.heard(message)
            self._carry(Role.DECODE, effects)

    def _verified(self, room: int, generation: int, error: ErrorInfo | None) -> None:
        self._local(Role.DECODE, room, Verified() if error is None else Fail(error), generation)

    # --- from own ranks ----------------------------------------------------------------------------------------------

    def report(self, rank: RankId, report: AnyReport, now_s: float) -> None:
        """What a rank says of a room. What comes too late for its room is counted and dropped."""
        self._now_s = now_s
        writer = _writer(rank)
        if isinstance(report, WroteRange):
            self.watch.wrote(report.record, report.descriptors)
            self._local(Role.PREFILL, report.record.room, RankWrote(report.record), report.record.generation)
        elif isinstance(report, HandedOff):
            event = HandoffReady(writer=writer, covered_tokens=report.covered_tokens, record=report.record)
            self._local(Role.PREFILL, report.room, event, report.generation)
        elif isinstance(report, RoomFault):
            self._fault(report)
        elif isinstance(report, Fenced):
            fenced = RankFenced(
                writer=writer, fenced=report.fenced, source_free=report.source_free, reason=report.reason
            )  # fmt: skip
            self._local(Role.PREFILL, report.room, fenced, report.generation)
        elif isinstance(report, Revoked):
            self._prove(report.peer_epoch, rank)
            self.seeking.answered(report.peer_epoch, rank)
        elif isinstance(report, Checked):
            self.verification.answer(rank, report)

    def _prove(self, peer_epoch: int, rank: RankId) -> None:
        """Nothing of that peer lands at that own rank any more."""
        for room in self.seeking.prove(peer_epoch, rank):
            self._local(Role.DECODE, room, Proven(str(rank)))

    def fenced_by_peer(self, peer_epoch: int, manifest: InstanceManifest | None, now_s: float) -> None:
        """Decode: the ranks of that manifest, which live, say that they write no more as that lost peer. None: the
        control that spoke as it says so of all its ranks.
        """
        self._now_s = now_s
        if self.seeking.wrote(peer_epoch, manifest):
            self.seeking.settle(peer_epoch, self._ranks)
            for rank in self._ranks:
                self._prove(peer_epoch, rank)
            self._outside.order(Through(peer_epoch=peer_epoch))

    def stated(self, manifest: InstanceManifest) -> None:
        """Ranks of lost peers state that they write no more as those."""
        for epoch, writers in self.seeking.ended_by(manifest).items():
            self._outside.order(Through(peer_epoch=epoch, writers=writers))

    def _fault(self, report: RoomFault) -> None:
        if report.generation:
            for role in (Role.PREFILL, Role.DECODE):
                self._local(role, report.room, Fail(report.error), report.generation)
        elif report.handle in self._handles:
            role, room = self._handles[report.handle]
            self._local(role, room, Fail(report.error))
        elif len(self._early_faults) < MAX_EARLY_FAULTS:  # its rank was faster than the request
            self._early_faults[report.handle] = report.error

    def rank_gone(self, rank: RankId, error: ErrorInfo, now_s: float) -> None:
        """An own rank is silent for too long: every room fails, its fence stays unproven. It may live, and go on
        reading and writing: until it says that it does not, or is dead, its memory comes back to nobody.
        """
        self._now_s = now_s
        for role, table in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            self._carry(role, table.fail_all(error, now_s))
        self._unfenced(RankFenced(writer=_writer(rank), fenced=False, reason="the rank is silent"))

    def rank_dead(self, rank: RankId, now_s: float) -> None:
        """That rank's process is proven dead: its source memory is gone with it."""
        self._now_s = now_s
        self._dead |= {_writer(rank)}
        gone = RankFenced(writer=_writer(rank), fenced=False, source_free=True, reason="the rank's process is gone")
        self._unfenced(gone)

    def _unfenced(self, said: RankFenced) -> None:
        for room in list(self.prefill.rooms):
            self._local(Role.PREFILL, room, said)

    def repeat_orders(self, rank: RankId) -> None:
        """A rank may have missed orders: halt again what waits for its fence, seek again what is not proven."""
        writer = _writer(rank)
        for room in self.prefill.rooms.values():
            if room.state.terminal and writer in room.unfenced:
                self._outside.order(self._halt(room.room, room.generation), rank)
        for epoch in self.seeking.open_at(rank):
            self._outside.order(Seek(peer_epoch=epoch), rank)
        for epoch in self.seeking.settling_at(rank):
            self._outside.order(Through(peer_epoch=epoch), rank)
        for epoch, writers in self.seeking.ended.items():
            self._outside.order(Through(peer_epoch=epoch, writers=writers), rank)
        live = {room.generation for table in (self.prefill, self.decode) for room in table.rooms.values()}
        # One that is lost is left: an order to leave it may be among those that are gone.
        peers = {*(e for e, peer in self.prefill.peers.items() if peer.lost is None), *self.decode.peers}
        self._outside.order(Live(generations=tuple(live), peers=tuple(peers)), rank)
        owed = self.prefill.owed_by(writer)
        self._owed_handles = {g: handle for g, handle in self._owed_handles.items() if self.prefill.owes(g)}
        for generation, room_id in owed:
            handle = self._owed_handles.get(generation, 0)
            self._outside.order(Halt(room=room_id, generation=generation, handle=handle), rank)

    # --- both --------------------------------------------------------------------------------------------------------

    def _local(self, role: Role, room: int, event: LocalEvent, generation: int = 0) -> None:
        table = self.prefill if role is Role.PREFILL else self.decode
        found = table.rooms.get(room)
        if found is None or (generation and found.generation != generation):
            self.counts["late_events"] += 1
            if isinstance(event, RankFenced) and event.fenced:
                self._carry(Role.PREFILL, self.prefill.late_fence(room, generation, event.writer))
            return
        try:
            effects = table.local(room, event, self._now_s)
        except LocalProtocolError as error:
            if isinstance(event, Fail | Cancel | RankFenced | Computed | Proven | Verified):
                self.counts[f"ignored_{type(event).__name__}"] += 1
                return
            # What one of our own ranks claims cannot be: the room must not go on as if it could.
            effects = table.local(room, Fail(error.info()), self._now_s)
        self._carry(role, effects)

    def tick(self, now_s: float) -> None:
        """Time passed."""
        self._now_s = now_s
        self._carry(Role.PREFILL, self.prefill.tick(now_s))
        self._carry(Role.DECODE, self.decode.tick(now_s))

    def forgive(self, stall_s: float) -> None:
        """This side did not listen for so long."""
        for peer in (*self.prefill.peers.values(), *self.decode.peers.values()):
            peer.alive_until_s += stall_s

    def lose_peer(self, peer_epoch: int, error: ErrorInfo, now_s: float) -> None:
        """A peer incarnation is gone: its rooms fail with this cause, and destinations seek their fence."""
        self._now_s = now_s
        self._carry(Role.PREFILL, self.prefill.lose_peer(peer_epoch, error, now_s))
        self._carry(Role.DECODE, self.decode.lose_peer(peer_epoch, error, now_s))

    def fail_all(self, error: ErrorInfo, now_s: float) -> None:
        """Fail every room that has not ended."""
        self._now_s = now_s
        self._carry(Role.PREFILL, self.prefill.fail_all(error, now_s))
        self._carry(Role.DECODE, self.decode.fail_all(error, now_s))

    # --- effects -----------------------------------------------------------------------------------------------------

    def _carry(self, role: Role, effects: list[Effect]) -> None:
        for effect in effects:
            try:
                self._carry_out(role, effect)
            except Exception as error:  # what follows it must still happen; the room it belongs to must not go on
                self.counts["effects_failed"] += 1
                info = info_of(error)
                where = effect.message if isinstance(effect, Send) else effect
                if not isinstance(where, Message) or isinstance(where, RoomMessage):
                    self._local(role, where.room, Fail(info), where.generation)

    def _carry_out(self, role: Role, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._outside.send(effect.peer_epoch, effect.message)
        elif isinstance(effect, Start):
            self._start(effect)
        elif isinstance(effect, Stop):
            for writer in sorted(effect.writers):
                order = self._halt(effect.room, effect.generation)
                self._outside.order(order, RankId(writer.pp, writer.tp))
        elif isinstance(effect, Verify):
            self.watch.verifying(effect.room, effect.generation)
            self.verification.start(effect)
        elif isinstance(effect, Revoke):
            self._seek(effect)
        elif isinstance(effect, Releasable):
            self._release(role, effect)
        else:
            self._tell(role, effect)

    def _tell(self, role: Role, effect: Admit | Ended | Alert) -> None:
        known = self._known.get((role, effect.room))
        handle = known.facts.handle if known else 0
        if isinstance(effect, Admit):
            event = RoomEvent(EventKind.ADMITTED, effect.room, effect.generation, handle=handle)
            event = replace(event, record=effect.handoff.record, absent=known.absent if known else ())
        elif isinstance(effect, Ended):
            kind = _TERMINAL[effect.state]
            event = RoomEvent(kind, effect.room, effect.generation, handle=handle, error=effect.error)
            if known:
                known.ended = True
        else:
            alert = ErrorInfo(code=effect.code, message=effect.text, where=f"room {effect.room}")
            event = RoomEvent(EventKind.ALERT, effect.room, effect.generation, handle=handle, error=alert)
        self._outside.emit(event)
        self._drop_if_over(role, effect.room)

    def _drop_if_over(self, role: Role, room: int) -> None:
        known = self._known.get((role, room))
        if known and known.ended and known.released:
            del self._known[role, room]
            self._handles.pop(known.facts.handle, None)

    def _halt(self, room: int, generation: int) -> Halt:
        known = self._known.get((Role.PREFILL, room))
        return Halt(room=room, generation=generation, handle=known.facts.handle if known else 0)

    def _start(self, effect: Start) -> None:
        """Request and open agree: check both sides' lists, then every rank may write."""
        facts = self._known[Role.PREFILL, effect.room].facts
        peer_epoch = self.prefill.rooms[effect.room].peer
        pairing = self._outside.pairing(peer_epoch.epoch) if peer_epoch else None
        if peer_epoch is None or pairing is None:
            gone = ErrorInfo(code="peer_unknown", message="the peer went away before its room began")
            self._local(Role.PREFILL, effect.room, Fail(gone))
            return
        prompt = Prompt(effect.open.prompt_tokens, effect.open.prefix_tokens)
        try:
            own = pairing.needed_of(facts.lists, source=True)
            src = unpack(pairing.needed.src, own)
            pairing.room(prompt, src, unpack(pairing.needed.dst, effect.open.index_lists))
        except PdError as error:
            self._local(Role.PREFILL, effect.room, Fail(error.info()))
            return
        verify = chosen(effect.room, self._verify_mode)
        self.watch.started(effect.open, pairing)
        self._local(Role.PREFILL, effect.room, Bound(pairing.expected(prompt)))
        order = self._begin(effect.open, peer_epoch.epoch, src_lists=own, verify=verify)
        self._outside.order(msgspec.structs.replace(order, handle=facts.handle))

    def _begin(self, message: RoomOpen, peer_epoch: int, *, src_lists: tuple[IndexList, ...], verify: bool) -> Begin:
        return Begin(
            room=message.room,
            generation=message.generation,
            peer_epoch=peer_epoch,
            prompt_tokens=message.prompt_tokens,
            prefix_tokens=message.prefix_tokens,
            src_lists=src_lists,
            dst_lists=message.index_lists,
            verify=verify,
        )

    def _seek(self, effect: Revoke) -> None:
        if self.seeking.add(effect.peer_epoch, effect.room):
            self._outside.order(Seek(peer_epoch=effect.peer_epoch))
        for rank in self.seeking.proven(effect.peer_epoch):
            self._local(Role.DECODE, effect.room, Proven(str(rank)))

    def _release(self, role: Role, effect: Releasable) -> None:
        known = self._known.get((role, effect.room))
        handle = known.facts.handle if known else 0
        if known:
            known.released = True
        self._drop_if_over(role, effect.room)
        self._outside.emit(RoomEvent(EventKind.RELEASABLE, effect.room, effect.generation, handle=handle))
        source = handle if role is Role.PREFILL else 0
        if source and self.prefill.owes(effect.generation):
            self._owed_handles[effect.generation] = source
        self._outside.order(Forget(room=effect.room, generation=effect.generation, handle=source))
        if role is Role.DECODE:
            self._claims.give_back(handle)
            self.verification.forget(effect.room, effect.generation)
            self.seeking.drop(effect.room)

    @property
    def open_rooms(self) -> int:
        """Rooms that have not settled: running, or waiting for a fence."""
        return len(self.prefill.rooms) + len(self.decode.rooms)

    @property
    def settled(self) -> bool:
        """No room is open, nor does a peer wait for a proof of one that is over."""
        return not self.open_rooms and not self.prefill.awaited(self._dead)

    def next_timer_s(self) -> float | None:
        """When `tick` is due."""
        return min(
            (t for t in (self.prefill.next_timer_s(), self.decode.next_timer_s()) if t is not None), default=None
        )
