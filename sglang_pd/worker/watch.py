"""Tells an observer what happens to rooms, from both threads that know: the engine's and the control's.

A room is watched from the moment its job waits (or its endpoint call, where no runner is used) to its end: at decode
until the engine has taken the request over, at prefill until the hand-over is done. Until decode has opened it, it has
generation 0. Stages are what this worker can see itself: prefill's compute is part of `queue`, its turn at the engine.

Whose turn it is is told as well, since a worker is stalled only by work of its own. The other side's: at prefill a room
that is computed and not opened, and one that is written and not admitted; at decode everything between the open and the
last byte. A wait for memory is the engine's own, unless rooms that wait for the other side hold some.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sglang_pd.memory.allocator import Allocator, pool_name
from sglang_pd.observe import Count, Observer, PeerState, Pool, Quarantine, Result, RoomKey, Stage
from sglang_pd.observe import RoomFacts as Seen
from sglang_pd.protocol.errors import ErrorInfo, wire_text
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.messages import (
    MAX_VALUE,
    Queued,
    RoomAccepted,
    RoomMessage,
    RoomOpen,
    StatusReply,
    Verdict,
    Writer,
    Wrote,
)
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.room import Role
from sglang_pd.worker.events import EventKind, RoomEvent
from sglang_pd.worker.jobs import Job

log = logging.getLogger("sglang_pd.worker")

LEVELS_S = 0.1
"""How often pools and queue are told while work goes on."""
CONTROL = "control"
"""Whose decisions these are, in a dump."""

_COUNTS: dict[str, tuple[Count, str]] = {
    "unknown_room": (Count.UNKNOWN_ROOM, ""),
    "unknown_fields": (Count.UNKNOWN_FIELD, "any"),
    "expired_then_opened": (Count.UNKNOWN_ROOM, ""),
    "engine_replaced": (Count.ENGINE_REPLACED, "not_trusted"),
}
"""The control's counters that are metrics, with their label."""

_CODES = {"lease_expired": Count.LEASE_EXPIRED, "room_duplicate": Count.DUPLICATE_ROOM}
"""Causes that are counted."""

_RESULTS = {EventKind.DONE: Result.DONE, EventKind.FAILED: Result.FAILED, EventKind.ABORTED: Result.ABORTED}


@dataclass(slots=True)
class _Room:
    key: RoomKey
    facts: Seen
    job: Job | None = None
    computed: bool = False
    started: bool = False
    posted: bool = False
    owed: set[tuple[Writer, str]] = field(default_factory=set)
    """Prefill: who has not yet written the last of which component."""
    arrived: bool = False
    records: set[Wrote] = field(default_factory=set)


def _facts(request_id: str, traceparent: str, prompt_tokens: int) -> Seen:
    """What a caller says of a request: records, logs and dumps keep it, so it is cut as `Trace` is, and made text that
    can be written."""
    return Seen(
        request_id=wire_text(request_id[:MAX_VALUE])[:MAX_VALUE],
        traceparent=wire_text(traceparent[:MAX_VALUE])[:MAX_VALUE],
        prompt_tokens=prompt_tokens,
    )


class Watch:
    """One worker's rooms, for one observer. Safe from any thread; never raises into the worker."""

    def __init__(self, role: Role = Role.DECODE, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self._prefill = role is Role.PREFILL
        self._rooms: dict[int, _Room] = {}
        self._away: set[int] = set()
        """Rooms that hold memory and wait for the other side."""
        self._lock = threading.RLock()
        self._told_s = 0.0
        self._counted: dict[str, float] = {}

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def queued(self, job: Job) -> None:
        """A job waits for its turn."""
        facts = _facts(job.request_id, job.traceparent, len(job.token_ids))
        with self._lock:
            if job.room in self._rooms:
                self.observer.count(Count.DUPLICATE_ROOM)
                return
            self._open(job.room, facts, Stage.QUEUE).job = job

    def waits_for_memory(self, jobs: Iterable[Job]) -> None:
        """Jobs in the queue that wait for memory rather than for their turn. Prefill has no such stage."""
        with self._lock:
            for job in jobs:
                room = self._rooms.get(job.room)
                if room is not None and room.job is job:
                    if not self._prefill:
                        self.observer.stage(room.key, Stage.ALLOC_WAIT)
                    self.observer.waits_for_peer(room.key, bool(self._away))

    def ended(self, job: Job, error: ErrorInfo | None) -> None:
        """The job is through with its hand-over: at decode admitted by the engine, or failed with `error`."""
        with self._lock:
            room = self._rooms.get(job.room)
            if room is not None and room.job is job:
                aborted = error is not None and error.code == "room_aborted"
                result = Result.ABORTED if aborted else Result.FAILED if error else Result.DONE
                self._end(job.room, result, error)

    def levels(self, queued: int, limit: int, allocator: Allocator) -> None:
        """Queue and pools as they are now."""
        now_s = time.monotonic()
        if queued or now_s - self._told_s >= LEVELS_S:
            self._told_s = now_s
            self.tell_levels(queued, limit, allocator)

    def tell_levels(self, queued: int, limit: int, allocator: Allocator) -> None:
        """The same, at once."""
        self.observer.queue(queued, limit)
        for space, count in allocator.counts().items():
            self.observer.pool(Pool(pool_name(space), count.free, count.held, count.withheld))
        quarantine = allocator.quarantine
        since_s = quarantine.oldest_since_s
        self.observer.quarantine(
            Quarantine(
                quarantine.held_bytes,
                quarantine.budget_bytes or 0,
                None if since_s is None else int(since_s * 1e9),
            )
        )

    def worked(self, tokens: int) -> None:
        """Tokens that the engine has computed so far."""
        self.observer.worked(tokens)

    def counts(self, stats: Mapping[str, float]) -> None:
        """Counters of the control plane as they stand now; what was added since the last call is told."""
        with self._lock:
            for name, value in stats.items():
                counter = name.removeprefix("count_")
                what, label = _COUNTS.get(counter, (None, ""))
                if counter.startswith("refused_") and counter != "refused_by_peer":
                    what, label = Count.MESSAGE_REFUSED, counter.removeprefix("refused_")
                added = int(value - self._counted.get(name, 0))
                if counter != name and what is not None and added > 0:
                    self._counted[name] = value
                    self.observer.count(what, label, added)

    # --- the control's thread ----------------------------------------------------------------------------------------

    def requested(self, room: int, request_id: str, traceparent: str, *, prompt_tokens: int) -> None:
        """Prefill: the room's request is with the control."""
        with self._lock:
            known = self._rooms.get(room)
            if known is None:
                known = self._open(room, _facts(request_id, traceparent, prompt_tokens), Stage.QUEUE)
            self._prefill_stage(known)

    def opened(self, message: RoomOpen, pairing: Pairing) -> None:
        """Decode opens the room."""
        with self._lock:
            known = self._rooms.get(message.room) or self._open(message.room, Seen(), Stage.HANDSHAKE)
            self._name(known, message, pairing)
            self._stage(known, Stage.HANDSHAKE, away=True)

    def started(self, message: RoomOpen, pairing: Pairing) -> None:
        """Prefill: request and open agree, chunks may be written."""
        with self._lock:
            known = self._rooms.get(message.room)
            if known is not None:
                known.started = True
                known.owed = {
                    (Writer(pp=rank.rank.pp_rank, tp=rank.rank.tp_rank), component)
                    for rank in pairing.prefill.ranks
                    for component in pairing.owed(rank.rank)
                }
                self._name(known, message, pairing)
                self._prefill_stage(known)

    def computed(self, room: int) -> None:
        """Prefill: the prompt is computed."""
        with self._lock:
            if (known := self._rooms.get(room)) is not None:
                known.computed = True
                self._prefill_stage(known)

    def posted(self, room: int) -> None:
        """Prefill: the last chunk's descriptors are with the backend."""
        with self._lock:
            if (known := self._rooms.get(room)) is not None:
                known.posted = True
                self._prefill_stage(known)

    def wrote(self, record: Wrote, descriptors: int) -> None:
        """Prefill: a record's bytes are DONE. descriptors: pieces that they were posted in."""
        with self._lock:
            known = self._known(record)
            if known is None:
                return
            if record.nbytes:
                self.observer.bytes_moved(known.key, record.component, record.nbytes, descriptors)
            if record.last:
                known.owed.discard((record.writer, record.component))
                self._prefill_stage(known)

    def heard(self, message: RoomMessage) -> None:
        """Decode: a message of the room counts; new records in it are bytes that arrived."""
        records = message.wrote if isinstance(message, StatusReply) else (message,)
        with self._lock:
            known = self._known(message)
            if known is None:
                return
            if isinstance(message, RoomAccepted | Queued) and not known.arrived:
                self._stage(known, Stage.QUEUE, away=True)
            for record in records:
                if not isinstance(record, Wrote) or record.empty or record in known.records:
                    continue
                known.records.add(record)
                if not known.arrived:
                    self._stage(known, Stage.WIRE, away=True)
                self.observer.bytes_moved(known.key, record.component, record.nbytes)

    def verifying(self, room: int, generation: int) -> None:
        """Decode: everything is here, and is compared."""
        with self._lock:
            known = self._rooms.get(room)
            if known is not None and known.key.generation == generation:
                known.arrived = True
                self._stage(known, Stage.VERIFY, away=False)

    def verified(self, record: Wrote) -> None:
        """Decode: a record is in memory as it was sent."""
        with self._lock:
            if (known := self._known(record)) is not None:
                self.observer.verified(known.key, record.component, len(record.digests) // 8, 0)

    def event(self, event: RoomEvent) -> None:
        """What the control tells the engine."""
        with self._lock:
            known = self._rooms.get(event.room)
            if event.error is not None and event.error.code == "digest_mismatch" and known is not None:
                self.observer.verified(known.key, "", 1, 1)
            if event.error is not None and event.error.code in _CODES:
                self.observer.count(_CODES[event.error.code])
            key = known.key if known is not None else RoomKey(event.room, event.generation)
            detail = f"[{event.error.code}] {event.error.message}" if event.error else ""
            self.observer.decision(CONTROL, event.kind.value, key, detail)
            if known is None or (event.generation and known.key.generation not in (0, event.generation)):
                return
            if event.kind is EventKind.ADMITTED:
                known.arrived = True
                self._stage(known, Stage.ADMIT, away=False)
            elif event.kind in _RESULTS and not self._engine_ends(known, event):
                self._end(event.room, _RESULTS[event.kind], event.error)

    def _engine_ends(self, known: _Room, event: RoomEvent) -> bool:
        """A decode room that is done ends when the engine has it."""
        return event.kind is EventKind.DONE and not self._prefill and known.job is not None

    # --- peers -------------------------------------------------------------------------------------------------------

    def judged(self, own: InstanceManifest, peer: InstanceManifest, verdict: Verdict, transport: str) -> None:
        """A verdict stands on both sides."""
        self.observer.registration(own, peer, verdict, transport)

    def peer(self, instance: str, epoch: int, state: PeerState, reason: str = "") -> None:
        """A peer's state changed."""
        self.observer.decision(CONTROL, f"peer {state.value}", None, f"{instance} {reason}")
        self.observer.peer(instance, epoch, state, reason)
        if state is PeerState.LOST:
            log.warning("peer %s is lost: %s", instance, reason)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _open(self, room: int, facts: Seen, stage: Stage) -> _Room:
        known = self._rooms[room] = _Room(RoomKey(room, 0), facts)
        self.observer.room_opened(known.key, facts, stage)
        return known

    def _known(self, message: RoomMessage) -> _Room | None:
        known = self._rooms.get(message.room)
        return known if known is not None and known.key.generation == message.generation else None

    def _name(self, known: _Room, message: RoomOpen, pairing: Pairing) -> None:
        peer = pairing.decode if self._prefill else pairing.prefill
        spaces = {space.digest: type(getattr(space, "of", space)).__name__ for space in pairing.needed.dst}
        named = RoomKey(message.room, message.generation)
        if known.key != named:
            self.observer.room_named(known.key, message.generation)
            known.key = named
        known.facts = Seen(
            request_id=known.facts.request_id or message.request_id,
            traceparent=known.facts.traceparent or message.traceparent,
            peer=peer.instance_id,
            peer_epoch=peer.epoch,
            peer_ranks=tuple(str(rank.rank) for rank in peer.ranks),
            prompt_tokens=message.prompt_tokens,
            prefix_tokens=message.prefix_tokens,
            pages={spaces.get(packed.space, f"{packed.space:08x}"): packed.count for packed in message.index_lists},
        )
        self.observer.room_facts(known.key, known.facts)
        self.observer.decision(CONTROL, "opened", known.key, f"{message.prompt_tokens} tokens")

    def _prefill_stage(self, known: _Room) -> None:
        if not known.computed:
            stage = Stage.QUEUE
        elif not known.started:
            stage = Stage.HANDSHAKE
        else:
            stage = Stage.WIRE if known.posted or not known.owed else Stage.POST
        away = stage is Stage.HANDSHAKE or (stage is Stage.WIRE and not known.owed)
        self._stage(known, stage, away=away)

    def _stage(self, known: _Room, stage: Stage, *, away: bool) -> None:
        """The room's stage, and whether what it waits for there is the other side's to do."""
        (self._away.add if away else self._away.discard)(known.key.room)
        self.observer.stage(known.key, stage)
        self.observer.waits_for_peer(known.key, away)

    def _end(self, room: int, result: Result, error: ErrorInfo | None) -> None:
        known = self._rooms.pop(room)
        self._away.discard(room)
        self.observer.room_ended(known.key, result, error)
