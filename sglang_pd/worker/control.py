"""The control of an instance: knows rooms, peers and indices; holds no tensor, imports no torch.

One thread owns it. Frames, rank reports, engine calls and time come in; frames, orders and events go out. Each part has
one job: `peering` who talks to whom, `ranks` who belongs to this instance, `desk` what happens to rooms.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from sglang_pd.observe import PeerState
from sglang_pd.protocol.errors import ErrorInfo, ManifestError, PdError, RoomError, from_info
from sglang_pd.protocol.manifest import InstanceManifest, RankId
from sglang_pd.protocol.messages import Draining, Message
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.worker.events import EventKind, RoomEvent
from sglang_pd.worker.peers.conversation import Conversation, Self, Stage
from sglang_pd.worker.peers.link import Caller, Link, Party
from sglang_pd.worker.peers.peering import RETRY_REFUSED_S, Peering
from sglang_pd.worker.peers.seeking import Seeking
from sglang_pd.worker.ranks.agent import RankAgent
from sglang_pd.worker.ranks.connections import RankConnections
from sglang_pd.worker.ranks.orders import (
    Alive,
    AnyOrder,
    AnyReport,
    Forget,
    HandedOff,
    Joined,
    Pair,
    Paired,
    PeerFault,
    Revoked,
    Unpair,
    decode_report,
)
from sglang_pd.worker.ranks.roster import Ranks, not_paired, not_proven
from sglang_pd.worker.rooms.desk import RoomDesk
from sglang_pd.worker.rooms.facts import RoomFacts
from sglang_pd.worker.rooms.pending import PendingOpen, PendingOpens
from sglang_pd.worker.settings import MAX_DURATION_S, ControlConfig
from sglang_pd.worker.watch import Watch

PEERS: Final = "peers"
RANKS: Final = "ranks"
STALL_S: Final = 0.75
"""A longer time between two turns of the control thread, which sleeps 0.25 s at most, is a stall of its own."""


class InstanceControl:
    """One incarnation of an instance's control."""

    def __init__(
        self,
        config: ControlConfig,
        link: Link,
        emit: Callable[[RoomEvent], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        epoch: int | None = None,
    ) -> None:
        self.config = config
        self.epoch = epoch or secrets.randbits(64) or 1
        self.link = link
        self._emit = emit
        self._clock = clock
        self.ranks = Ranks(config.topology, config.rank_liveness_s)
        self.connections = RankConnections(link, self.epoch, config.rank_liveness_s)
        self._reports: list[tuple[RankId, AnyReport]] = []
        self.called = True
        """Whether peers may call here. A decode calls, and tells its memory to nobody else."""
        self.peering: Peering | None = None
        self.desk: RoomDesk | None = None
        self.seeking = Seeking()
        self._pending = PendingOpens()
        self._calls_before_ready: list[tuple[str, bytes | None]] = []
        self.failed: ErrorInfo | None = None
        self.draining_until_s: float | None = None
        self._turned_s = clock()
        self.watch = Watch()

    # --- ranks -------------------------------------------------------------------------------------------------------

    def attach(self, agent: RankAgent) -> None:
        """A rank in this process; its reports come through `report_of`."""
        self._join(agent.joined(), agent.order, remote=False)

    def report_of(self, rank: RankId) -> Callable[[AnyReport], None]:
        """What an agent in this process calls to report. Reports are queued: an agent is never re-entered."""
        return lambda report: self._reports.append((rank, report))

    def _join(self, joined: Joined, reach: Callable[[AnyOrder], None], *, remote: bool) -> bool:
        """False for a process that claims the place of a rank that another one has."""
        if self.ranks.refuses(joined, serving=self.desk is not None, now_s=self._clock()):
            return False  # the former one serves on; once it is silent it is lost, and the instance with it
        known, rebuilt = self.ranks.epoch_of(joined.rank), joined.rebuilt > self.ranks.rebuilt(joined.rank)
        changed = self.ranks.join(joined, reach, remote=remote, now_s=self._clock())
        self.seeking.owe(joined.rank, joined.owed)
        if self.desk is None or self.peering is None:
            if not self.ranks.missing:
                self._all_joined()
        elif changed and known == joined.epoch:
            self._renew(joined, rebuilt=rebuilt)
        return True

    def _own(self) -> Self:
        return self.config.introduce(self.ranks.manifests, self.epoch)

    def _all_joined(self) -> None:
        try:
            own = self._own()
        except ManifestError as error:  # their pools differ, say; one of them may yet come back as it should be
            self.ranks.disagree(error, self._clock())
            return
        self.ranks.fault = None
        self.desk = RoomDesk(self.epoch, self, self.ranks.ids, limits=self.config.limits, verify=self.config.verify)
        self.desk.seeking = self.seeking
        self.peering = Peering(own, self.link, self, self.seeking)
        self.peering.called = self.called
        self.desk.watch = self.watch
        calls, self._calls_before_ready = self._calls_before_ready, []
        for address, key in calls:
            self.call(address, key)

    def _renew(self, joined: Joined, *, rebuilt: bool) -> None:
        """A rank describes itself anew after a fence, for peers to come. Where it had to rebuild its transport for it,
        what was on its way to it is void, and peers must meet it anew.
        """
        if self.desk is None or self.peering is None or self.ranks.missing:  # one that is lost ends the instance
            return
        if not rebuilt:
            self.peering.restate(self._own())
            return
        text = "the destination's transport was rebuilt to prove a fence"
        cause = ErrorInfo(code="transfer_failed", message=text, where=f"rank {joined.rank}")
        self.peering.begin_anew(self._own(), cause)

    def _fail(self, message: str, rank: RankId | None = None) -> None:
        """The instance cannot go on: every room fails with this cause."""
        cause = ErrorInfo(code="peer_lost", message=message, where=self.config.instance_id)
        self.failed = self.failed or cause
        if self.desk is not None and rank is not None:
            self.desk.rank_gone(rank, cause, self._clock())
        elif self.desk is not None:
            self.desk.fail_all(self.failed, self._clock())
        self._take_no_more(1.0, message)
        self._try_pending()

    def _take_no_more(self, deadline_s: float, reason: str) -> None:
        """Refuse new rooms and peers, and tell those who are there how long this one stays."""
        if self.peering is not None and self.desk is not None:
            self.peering.draining = True
            self.desk.prefill.draining = self.desk.decode.draining = True
            told_ms = max(1, int(min(deadline_s, MAX_DURATION_S) * 1000))
            self.peering.broadcast(Draining(deadline_ms=told_ms, reason=reason[:200]))

    # --- asked by the engine -----------------------------------------------------------------------------------------

    def call(self, address: str, server_key: bytes | None = None) -> None:
        """Shake hands with the prefill instance at `address`, now and whenever it comes back."""
        if self.peering is None:
            self._calls_before_ready.append((address, server_key))
        else:
            self.peering.call(address, server_key, self._clock(), wanted=True)

    def request(self, facts: RoomFacts) -> None:
        """Prefill: a request arrived."""
        if self.desk is None or self._stopped():
            self._refuse(facts, self._why_stopped())
        else:
            self.desk.request(facts, self._clock())

    def computed(self, handle: int) -> None:
        """Prefill: the prompt of the room that goes by that handle is computed."""
        if self.desk is not None:
            self.desk.computed(handle, self._clock())

    def open(self, facts: RoomFacts, address: str, declined: ErrorInfo | None = None) -> None:
        """Decode: open a room at the instance behind `address`; waits for the handshake. declined: only tell it why
        the room will never be opened."""
        if (self._stopped() and declined is None) or self._pending.full:
            self._refuse(facts, self._why_stopped())
            return
        self._pending.add(PendingOpen(facts, address, self._clock() + self.config.peer_wait_s, declined))
        self._try_pending()

    def abort(self, handle: int, error: ErrorInfo) -> None:
        """Give the room up that goes by that handle."""
        for pending in self._pending.take(handle):
            self._refuse(pending.facts, RoomError(error.message, code=error.code), EventKind.ABORTED)
        if self.desk is not None:
            self.desk.abort(handle, error, self._clock())

    def drain(self, deadline_s: float) -> None:
        """Take no new rooms; give open ones `deadline_s` seconds, then fail them. The process waits for fences."""
        if self.draining_until_s is not None:
            return
        self.draining_until_s = self._clock() + deadline_s
        self._take_no_more(deadline_s, "stopping")
        self._try_pending()

    @property
    def drained(self) -> bool:
        """True when draining and no room is left, fences included, also those that peers wait for."""
        left = len(self._pending) or (self.desk is not None and not self.desk.settled)
        return self.draining_until_s is not None and not left

    def _stopped(self) -> bool:
        return self.failed is not None or self.draining_until_s is not None

    def _why_stopped(self) -> PdError:
        if self.failed is not None:
            return RoomError(self.failed.message, code="peer_lost", where=self.failed.where)
        if self.draining_until_s is not None:
            return RoomError("the worker is stopping", code="draining")
        if self.ranks.fault is not None:
            return from_info(self.ranks.fault)
        if self.desk is None:
            missing = [str(rank) for rank in self.ranks.missing]
            return RoomError("not all ranks have joined yet", code="peer_unknown", actual=f"missing {missing}")
        if self.seeking.owed:
            return not_proven(self.seeking.owed)
        return RoomError("too many rooms wait for their peers", code="queue_full")

    @property
    def ready(self) -> bool:
        """True when every rank has joined, and its memory is nobody else's."""
        return self.desk is not None and self.failed is None and not self.seeking.owed

    @property
    def why_not_ready(self) -> str:
        """What keeps rooms from opening here, other than a drain; empty where nothing does."""
        return "" if self.ready else str(self._why_stopped().info())

    def _refuse(self, facts: RoomFacts, error: PdError, kind: EventKind = EventKind.FAILED) -> None:
        if not facts.handle:
            return  # nobody waits for a room that was only declined
        self._emit(RoomEvent(kind, facts.room, 0, handle=facts.handle, error=error.info()))
        self._emit(RoomEvent(EventKind.RELEASABLE, facts.room, 0, handle=facts.handle))
        self.ranks.order(Forget(room=facts.room, generation=0, handle=facts.handle))

    def _try_pending(self) -> None:
        self._pending.try_all(
            lambda pending: self._try(pending, self._clock()),
            lambda pending, error: self._refuse(pending.facts, error),
        )

    def _try(self, pending: PendingOpen, now_s: float) -> bool:
        """True when the room was opened; raises the `PdError` it is refused with; False: it waits."""
        if self._stopped() and pending.declined is None:
            raise self._why_stopped()
        talk = self.peering.call(pending.address, None, now_s) if self.peering is not None else None
        if talk is not None and self.desk is not None:
            if talk.stage is Stage.AGREED and pending.declined is not None:
                self.desk.decline(pending.facts.room, talk.epoch, pending.declined, now_s)
                return True
            if talk.stage is Stage.AGREED and not talk.unpaired(self.ranks.ids) and not self.seeking.owed:
                self.desk.open(pending.facts, talk.epoch, now_s)
                return True
            if talk.stage is Stage.REFUSED and talk.error is not None:
                raise from_info(talk.error)
        if now_s < pending.deadline_s:
            return False
        if talk is None or self.seeking.owed:
            raise self._why_stopped()
        if talk.stage is Stage.AGREED:
            raise not_paired(talk.unpaired(self.ranks.ids), pending.address)
        raise pending.too_late(talk)

    # --- Outside, for the desk ---------------------------------------------------------------------------------------

    def send(self, peer_epoch: int, message: Message) -> None:
        """See `outside.Outside`."""
        if self.peering is not None:
            self.peering.send(peer_epoch, message)

    def order(self, order: AnyOrder, rank: RankId | None = None) -> None:
        """See `outside.Outside`."""
        self.ranks.order(order, rank)

    def emit(self, event: RoomEvent) -> None:
        """See `outside.Outside`."""
        self._emit(event)

    def pairing(self, peer_epoch: int) -> Pairing | None:
        """See `outside.Outside`."""
        talk = self.peering.talk_with(peer_epoch) if self.peering else None
        return talk.pairing if talk else None

    # --- Heard, for the peering --------------------------------------------------------------------------------------

    def agreed(self, talk: Conversation) -> None:
        """See `heard.Heard`."""
        if self.desk is None or self.peering is None or talk.manifest is None:
            return
        table = self.desk.prefill if talk.source else self.desk.decode
        table.add_peer(talk.epoch, talk.instance, talk.liveness_s, self._clock(), own_epoch=talk.own_epoch)
        self.watch.peer(talk.instance, talk.incarnation, PeerState.READY)
        self._keep_met()
        self._pair_ranks(talk)
        self._try_pending()

    def _pair_ranks(self, talk: Conversation, rank: RankId | None = None) -> None:
        if self.peering is None or talk.manifest is None:
            return
        own, peer = self.peering.own.encoded, talk.stated
        prefill, decode = (own, peer) if talk.source else (peer, own)
        pair = Pair(peer_epoch=talk.epoch, source=talk.source, prefill=prefill, decode=decode, address=talk.address)
        self.ranks.order(pair, rank)

    def lost(self, talk: Conversation, epoch: int, error: ErrorInfo) -> None:
        """See `heard.Heard`."""
        self.watch.peer(talk.instance, talk.incarnation, PeerState.LOST, error.message)
        if self.desk is not None:
            self.desk.lose_peer(epoch, error, self._clock())
            if talk.manifest is not None:
                self.seeking.lost(epoch, talk.manifest)
            if self.seeking.open(epoch):
                return  # a rank that lost the order to seek must not take this one for the end of it
        self.ranks.order(Unpair(peer_epoch=epoch))
        self._keep_met()

    def _keep_met(self) -> None:
        if self.desk is not None and self.peering is not None:
            seeking, talk_with = self.seeking, self.peering.talk_with
            self.ranks.keep_met(lambda epoch: talk_with(epoch) is not None or seeking.open(epoch))

    def fenced(self, own_epoch: int) -> bool:
        """See `heard.Heard`."""
        return self.desk is not None and self.desk.prefill.fenced(own_epoch)

    def leave(self) -> None:
        """This side ends, and has given all its memory back."""
        if self.desk is not None and self.peering is not None:
            self.peering.leave(self.desk.prefill.through_with)

    def fenced_by_peer(self, epoch: int, manifest: InstanceManifest | None) -> None:
        """See `heard.Heard`."""
        if self.desk is not None:
            self.desk.fenced_by_peer(epoch, manifest, self._clock())

    def stated(self, manifest: InstanceManifest) -> None:
        """See `heard.Heard`."""
        if self.desk is not None:
            self.desk.stated(manifest)

    def refused(self, talk: Conversation) -> None:
        """See `heard.Heard`."""
        self.watch.peer(talk.instance or talk.address, talk.incarnation, PeerState.REFUSED, str(talk.error or ""))
        self._tell_verdict(talk)
        self._try_pending()

    def room_message(self, talk: Conversation, message: Message) -> None:
        """See `heard.Heard`."""
        if self.desk is not None:
            self.desk.receive(talk.epoch, message, source=talk.source, now_s=self._clock())

    # --- driven by the loop ------------------------------------------------------------------------------------------

    def on_frame(self, party: Party, frame: bytes) -> None:
        """One frame from a socket."""
        if isinstance(party, Caller) and party.socket == RANKS:
            self._on_rank_frame(party, frame)
        elif self.peering is not None:
            self.peering.receive(party, frame, self._clock())

    def _on_rank_frame(self, party: Party, frame: bytes) -> None:
        try:
            report = decode_report(frame)
            if isinstance(report, Joined):
                self._join_remote(party, report)
                return
        except (msgspec.MsgspecError, RecursionError, PdError):
            self.link.counts["malformed_reports"] += 1
            return
        rank = self.connections.rank_at(party)
        if rank is None or not self.ranks.heard(rank, self._clock()):
            # This control is new, or gave the rank up: it must introduce itself.
            self.connections.rejoin(party)
            return
        if self.connections.missed(rank):
            self._rejoined(rank, "orders to the rank were dropped: too many waited for it")
        if isinstance(report, Alive):
            self.connections.welcome(party)
        else:
            self._on_report(rank, report)

    def _join_remote(self, party: Party, report: Joined) -> None:
        if report.control_epoch != self.epoch:  # it has not asked whether this rank is through with another one
            self.connections.rejoin(party)
            return
        known = self.ranks.epoch_of(report.rank)
        again = known == report.epoch and self.connections.rank_at(party) != report.rank
        if not self._join(report, self.connections.reach(party), remote=True):
            return
        self.connections.settle(report.rank, party)
        if (self.ranks.was_lost(report.rank) or again) and self.desk is not None:
            self._rejoined(report.rank, "the connection between control and rank was lost and made again")

    def _rejoined(self, rank: RankId, text: str) -> None:
        """Orders to a rank, or reports of it, are gone. Its rooms cannot go on."""
        cause = ErrorInfo(code="peer_lost", message=text, where=f"{self.config.instance_id} rank {rank}")
        if self.desk is None or self.peering is None:
            return
        for talk in self.peering.all():
            if talk.stage is Stage.AGREED:
                talk.paired.pop(rank, None)  # it may have missed that order, too
                self._pair_ranks(talk, rank)
        self.desk.fail_all(cause, self._clock())
        self.desk.repeat_orders(rank)

    def _on_report(self, rank: RankId, report: AnyReport) -> None:
        if isinstance(report, Paired):
            self._on_paired(rank, report)
        elif isinstance(report, PeerFault) and self.peering is not None:
            self.peering.give_up(report.peer_epoch, report.error)
        elif isinstance(report, Joined):
            self._join(report, self.ranks.reach_of(rank), remote=False)
        elif isinstance(report, HandedOff) and rank != self.config.topology.record_rank:
            self.link.counts["records_of_other_ranks"] += 1  # every rank may call `finish`; one record travels
        elif self.desk is not None:
            self.desk.report(rank, report, self._clock())
        elif isinstance(report, Revoked):  # other ranks have not joined yet
            self.seeking.answered(report.peer_epoch, rank)

    def _on_paired(self, rank: RankId, report: Paired) -> None:
        talk = self.peering.talk_with(report.peer_epoch) if self.peering else None
        if talk is None or self.peering is None:
            return
        talk.paired[rank] = report.error
        if report.transport:
            talk.transports.add(report.transport)
        if len(talk.paired) == len(self.ranks.ids):
            self._tell_verdict(talk)
        if report.error is not None:
            self.peering.give_up(report.peer_epoch, report.error)
            talk.error, talk.next_send_s = report.error, self._clock() + RETRY_REFUSED_S

    def _tell_verdict(self, talk: Conversation) -> None:
        if self.peering is not None and talk.manifest is not None and talk.verdict is not None:
            transport = " ".join(sorted(talk.transports))
            self.watch.judged(self.peering.own.manifest, talk.manifest, talk.verdict, transport)

    def wake(self) -> None:
        """Who did not look (a stopped process, a starved thread) cannot say that nobody spoke: peers get that time. Who
        was silent for as long as its own liveness was given up by those it writes to, and must write no more.
        """
        self.connections.note_dropped()
        now_s = self._clock()
        stall_s, self._turned_s = now_s - self._turned_s, now_s
        if self.desk is None or self.peering is None or stall_s < STALL_S:
            return
        self.desk.forgive(stall_s)
        self.ranks.forgive(stall_s)
        if stall_s + self.config.heartbeat_s >= self.config.liveness_s:
            text = f"this side did not run for {stall_s:.1f} s, which its peers take for its end"
            self.peering.give_up_decodes(ErrorInfo(code="peer_lost", message=text))

    def turn(self) -> None:
        """Everything that is due: queued reports, timers, handshakes, silent ranks."""
        reports, self._reports = self._reports, []  # what they give rise to has the next turn: heartbeats come between
        for rank, report in reports:
            self._on_report(rank, report)
        now_s = self._clock()
        self._try_pending()
        if self.peering is None or self.desk is None:
            return
        self.peering.ask(self.seeking.owed, now_s)
        for rank in self.ranks.lost(now_s):
            self._fail(f"rank {rank} of this instance is gone", rank)
        for rank in self.ranks.dead():
            self.desk.rank_dead(rank, now_s)
        self.desk.tick(now_s)
        self.peering.give_up_lost(self.desk.prefill.peers, self.desk.decode.peers)
        if self.draining_until_s is not None and now_s >= self.draining_until_s:
            self.desk.fail_all(ErrorInfo(code="draining", message="the drain deadline passed"), now_s)
        tables = (self.desk.prefill, self.desk.decode)
        self.peering.tick(now_s, lambda epoch: sum(table.rooms_with(epoch) for table in tables))

    def next_timer_s(self) -> float | None:
        """When `turn` is due next, by this control's clock; None: nothing waits."""
        if self._reports:
            return self._clock()
        times: list[float | None] = [*self._pending.deadlines_s]
        if self.peering is not None and self.desk is not None:
            times += [self.peering.next_timer_s(), self.desk.next_timer_s()]
        if self.draining_until_s is not None and self.draining_until_s > self._turned_s:
            times.append(self.draining_until_s)  # once it has passed there is nothing to wake for
        return min((t for t in times if t is not None), default=None)

    def peers(self) -> list[dict[str, Any]]:
        """State of every conversation, for `/peers` and dumps."""
        return [talk.describe() for talk in self.peering.all()] if self.peering else []
