"""The observer that keeps: rooms with their clocks, records, metrics, health and the last decisions."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from sglang_pd.observe.decisions import MAX_DETAIL, Decision, DecisionRing, Dump, OpenRoom, PeerLine
from sglang_pd.observe.health import Condition, Health, HealthState
from sglang_pd.observe.logs import RateLimited
from sglang_pd.observe.metrics import METRICS, Metrics
from sglang_pd.observe.observer import (
    Count,
    Observer,
    PeerState,
    Pool,
    Quarantine,
    Result,
    RoomFacts,
    RoomKey,
)
from sglang_pd.observe.records import Registration, RoomRecord, epoch_text, registration_of, registration_text, to_line
from sglang_pd.observe.stages import ROLE_STAGES, Nanoseconds, Stage, StageClock, StageTimes
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.messages import Verdict
from sglang_pd.protocol.room import Role

MAX_OPEN_ROOMS: Final = 65_536
MAX_PEERS: Final = 4096
MAX_ENDED: Final = 64
"""Terminal records that a dump shows."""

_log = logging.getLogger("sglang_pd.observe")
_rooms_log = logging.getLogger("sglang_pd.rooms")

Sink = Callable[[str], None]
"""Takes one line of JSON for each terminal room and each registration."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is observed. instance: its id; epoch: its incarnation; backend: its transport's name."""

    role: Role
    instance: str
    epoch: int
    backend: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Clocks and bounds. stall_s: see `Health`. decisions: kept for each rank."""

    stall_s: float = 30.0
    decisions: int = 256
    clock: Nanoseconds = time.monotonic_ns
    wall: Callable[[], float] = time.time
    sink: Sink = _rooms_log.info


@dataclass(slots=True)
class _Room:
    facts: RoomFacts
    clock: StageClock
    waits_for_peer: bool = False
    moved_bytes: dict[str, int] = field(default_factory=dict)
    descriptors: int = 0
    verified_layers: int = 0


@dataclass(slots=True)
class _Peer:
    epoch: int
    state: PeerState
    since_ns: int
    reason: str


class Recorder(Observer):
    """Keeps what it is told. Told by one thread; `metrics`, `health` and `dump` may be asked from others."""

    def __init__(self, identity: Identity, settings: Settings | None = None) -> None:
        self.identity = identity
        self._settings = settings or Settings()
        self._clock = self._settings.clock
        self._lock = threading.RLock()
        self._rooms: dict[RoomKey, _Room] = {}
        self._peers: dict[str, _Peer] = {}
        self._ended: deque[RoomRecord] = deque(maxlen=MAX_ENDED)
        self._ring = DecisionRing(self._settings.decisions)
        self._health = Health(self._settings.stall_s, self._clock)
        self._limited = RateLimited(_log, clock=lambda: self._clock() / 1e9)
        self._queue_depth = 0
        self._waiting_for_peers = 0
        self._tokens = 0
        self._quarantine = Quarantine(0, 0)
        self._was_stalled = False
        self.registrations: dict[str, Registration] = {}
        self.metrics = Metrics(identity.role, identity.backend, self._refresh)

    # What is told

    def ready(self) -> None:
        """See `Observer`."""
        with self._lock:
            self._health.ready()

    def draining(self, reason: str) -> None:
        """See `Observer`."""
        with self._lock:
            self._health.drain(reason)

    def registration(self, own: InstanceManifest, peer: InstanceManifest, verdict: Verdict, transport: str) -> None:
        """See `Observer`. Logs the table, and emits the record."""
        role = self.identity.role.value
        wall = self._settings.wall()
        record = registration_of(own, peer, verdict, transport=transport, role=role, time=wall)
        with self._lock:
            if record.peer in self.registrations or len(self.registrations) < MAX_PEERS:
                self.registrations[record.peer] = record
            else:
                self.metrics.add("observer_dropped_total")
        self.metrics.add("registration_total", 1, "accepted" if verdict.accepted else "refused")
        for name in {mismatch.field for mismatch in verdict.mismatches}:
            self.metrics.add("registration_rejected_total", 1, name)
        level = logging.INFO if verdict.accepted else logging.WARNING
        self._limited.log(level, f"registration of {record.peer}", "%s", registration_text(record))
        self._emit(to_line(record))

    def peer(self, instance: str, epoch: int, state: PeerState, reason: str = "") -> None:
        """See `Observer`."""
        with self._lock:
            if instance not in self._peers and len(self._peers) >= MAX_PEERS:
                gone = next((name for name, p in self._peers.items() if p.state is PeerState.LOST), None)
                if gone is None:
                    self.metrics.add("observer_dropped_total")
                    return
                del self._peers[gone]
            self._peers[instance] = _Peer(epoch, state, self._clock(), reason)

    def room_opened(self, key: RoomKey, facts: RoomFacts, stage: Stage) -> None:
        """See `Observer`."""
        with self._lock:
            if key in self._rooms or len(self._rooms) >= MAX_OPEN_ROOMS or not self._has(stage):
                self.metrics.add("observer_dropped_total")
                return
            self._rooms[key] = _Room(facts, StageClock(self.identity.role, stage, self._clock))
            self._waiting()
            self._health.progress()

    def room_named(self, key: RoomKey, generation: int) -> None:
        """See `Observer`."""
        named = RoomKey(key.room, generation)
        with self._lock:
            if named in self._rooms:
                self.metrics.add("observer_dropped_total")
            elif (room := self._known(key)) is not None:
                del self._rooms[key]
                self._rooms[named] = room

    def room_facts(self, key: RoomKey, facts: RoomFacts) -> None:
        """See `Observer`."""
        with self._lock:
            if (room := self._known(key)) is not None:
                room.facts = facts

    def stage(self, key: RoomKey, stage: Stage) -> None:
        """See `Observer`."""
        with self._lock:
            if (room := self._known(key)) is not None and room.clock.stage is not stage and self._has(stage):
                room.clock.enter(stage)
                self._health.progress()

    def waits_for_peer(self, key: RoomKey, waits: bool) -> None:
        """See `Observer`."""
        with self._lock:
            if (room := self._known(key)) is not None and room.waits_for_peer is not waits:
                room.waits_for_peer = waits
                self._waiting_for_peers += 1 if waits else -1
                self._waiting()

    def worked(self, tokens: int) -> None:
        """See `Observer`."""
        with self._lock:
            if tokens != self._tokens:
                self._tokens = tokens
                self._health.progress()

    def bytes_moved(self, key: RoomKey, component: str, nbytes: int, descriptors: int = 0) -> None:
        """See `Observer`."""
        with self._lock:
            room = self._known(key)
            if room is None:
                return
            room.moved_bytes[component] = room.moved_bytes.get(component, 0) + nbytes
            room.descriptors += descriptors
            self._health.progress()
        direction = "sent" if self.identity.role is Role.PREFILL else "received"
        self.metrics.add("bytes_total", nbytes, component, direction, room.facts.peer)

    def verified(self, key: RoomKey, component: str, layers: int, wrong: int) -> None:
        """See `Observer`."""
        with self._lock:
            if (room := self._known(key)) is not None:
                room.verified_layers += layers
                self._health.progress()
        self.metrics.add("verified_layers_total", layers - wrong, "equal")
        if wrong:
            self.metrics.add("verified_layers_total", wrong, "different")

    def room_ended(self, key: RoomKey, result: Result, cause: ErrorInfo | None) -> None:
        """See `Observer`. The first end counts; a second one is reported as a defect and changes nothing."""
        with self._lock:
            room = self._rooms.pop(key, None)
            if room is None:
                self.metrics.add("observer_dropped_total")
                self._limited.warning("ended", "room %d/%d ended, but is not open here", *key)
                return
            self._waiting_for_peers -= room.waits_for_peer
            times = room.clock.end()
            record = self._record(key, room, times, (result, cause))
            self._ended.append(record)
            self._waiting()
            self._health.progress()
        self._measure(room, times, result, cause)
        self._emit(to_line(record))

    def queue(self, depth: int, limit: int) -> None:
        """See `Observer`."""
        with self._lock:
            self._queue_depth = depth
            self._waiting()
        self.metrics.set("queue_depth", depth)
        self.metrics.set("queue_limit", limit)

    def pool(self, pool: Pool) -> None:
        """See `Observer`."""
        for state in ("free", "leased", "quarantined"):
            self.metrics.set("pool_units", getattr(pool, state), pool.space, state)

    def quarantine(self, quarantine: Quarantine) -> None:
        """See `Observer`."""
        with self._lock:
            self._quarantine = quarantine

    def staging(self, used_bytes: int, lag_slots: int) -> None:
        """See `Observer`."""
        self.metrics.set("staging_used_bytes", used_bytes)
        self.metrics.set("staging_lag_slots", lag_slots)

    def count(self, what: Count, label: str = "", times: int = 1) -> None:
        """See `Observer`."""
        labels = (label,) * len(METRICS[what.value].labels)
        self.metrics.add(what.value, times, *labels)
        if what is Count.EXPIRED_THEN_USED:
            self._limited.log(logging.ERROR, what.value, "memory was used after it was given back: %s", label)

    def decision(self, rank: str, what: str, key: RoomKey | None = None, detail: str = "") -> None:
        """See `Observer`."""
        room, generation = key or (0, 0)
        with self._lock:
            self._ring.add(rank, Decision(self._clock(), what, room, generation, detail[:MAX_DETAIL]))

    # What may be asked, by whoever holds the recorder

    def health(self) -> HealthState:
        """The condition now. When it turns stalled, the dump goes to the log: ask at least every few seconds."""
        with self._lock:
            state = self._health.state()
            stalled = state.condition is Condition.STALLED
            first, self._was_stalled = stalled and not self._was_stalled, stalled
        if first:
            _log.error("stalled: %s\n%s", state.reason, self.dump().text())
        return state

    def dump(self) -> Dump:
        """Rooms, peers, the last ends and the last decisions of every rank, now."""
        with self._lock:
            now_ns, health = self._clock(), self._health.state()
            return Dump(
                role=self.identity.role.value,
                instance=self.identity.instance,
                epoch=epoch_text(self.identity.epoch),
                now_ns=now_ns,
                condition=health.condition.value,
                reason=health.reason,
                rooms=tuple(_open_room(key, room) for key, room in self._rooms.items()),
                peers=tuple(
                    PeerLine(
                        instance=name,
                        epoch=epoch_text(peer.epoch),
                        state=peer.state.value,
                        since_s=(now_ns - peer.since_ns) / 1e9,
                        reason=peer.reason,
                    )
                    for name, peer in self._peers.items()
                ),
                ended=tuple(msgspec.to_builtins(record) for record in self._ended),
                decisions=self._ring.snapshot(),
            )

    def answer(self, command: str) -> bytes:
        """For `AdminServer`: `dump`, `health`, `registrations`; JSON, an error for anything else."""
        if command == "dump":
            return msgspec.json.encode(self.dump())
        if command == "health":
            return msgspec.json.encode(self.health())
        if command == "registrations":
            with self._lock:
                return msgspec.json.encode(list(self.registrations.values()))
        known = ["dump", "health", "registrations"]
        return msgspec.json.encode({"error": "no such command", "expected": known, "actual": command[:64]})

    # Inside

    def _known(self, key: RoomKey) -> _Room | None:
        room = self._rooms.get(key)
        if room is None:
            self.metrics.add("observer_dropped_total")
        return room

    def _has(self, stage: Stage) -> bool:
        if stage in ROLE_STAGES[self.identity.role]:
            return True
        self._limited.warning("stage", "a %s room has no stage %s", self.identity.role.value, stage.value)
        return False

    def _emit(self, line: str) -> None:
        """An observer that cannot write must not stop a worker."""
        try:
            self._settings.sink(line)
        except Exception as error:
            self.metrics.add("observer_dropped_total")
            self._limited.log(logging.ERROR, "sink", "a record could not be written: %s", error)

    def _waiting(self) -> None:
        # Whoever is in the queue has a room as a rule.
        self._health.waiting(max(self._queue_depth, len(self._rooms)) - self._waiting_for_peers)

    def _record(self, key: RoomKey, room: _Room, times: StageTimes, end: tuple[Result, ErrorInfo | None]) -> RoomRecord:
        facts, me = room.facts, self.identity
        return RoomRecord(
            time=self._settings.wall(),
            role=me.role.value,
            instance=me.instance,
            epoch=epoch_text(me.epoch),
            backend=me.backend,
            room=key.room,
            generation=key.generation,
            result=end[0].value,
            request_id=facts.request_id,
            traceparent=facts.traceparent,
            peer=facts.peer,
            peer_epoch=epoch_text(facts.peer_epoch),
            ranks=facts.ranks,
            peer_ranks=facts.peer_ranks,
            prompt_tokens=facts.prompt_tokens,
            prefix_tokens=facts.prefix_tokens,
            pages=dict(facts.pages),
            bytes=dict(room.moved_bytes),
            descriptors=room.descriptors,
            verified_layers=room.verified_layers,
            stage_s={stage.value: ns / 1e9 for stage, ns in times.stage_ns.items()},
            total_s=times.total_ns / 1e9,
            last_stage=times.last.value,
            cause=end[1],
        )

    def _measure(self, room: _Room, times: StageTimes, result: Result, cause: ErrorInfo | None) -> None:
        metrics, peer = self.metrics, room.facts.peer
        metrics.add("rooms_total", 1, result.value)
        if result is not Result.DONE:
            metrics.add("failed_total", 1, times.last.value, cause.code if cause is not None else "unknown")
        for stage, ns in times.stage_ns.items():
            metrics.observe("stage_seconds", ns / 1e9, stage.value, peer)
        metrics.observe("room_seconds", times.total_ns / 1e9, result.value, peer)
        if result is not Result.DONE:
            return
        moved = sum(room.moved_bytes.values())
        metrics.observe("room_bytes", moved)
        wire_ns = times.stage_ns[Stage.WIRE]
        metrics.observe("room_bytes_per_second", moved * 1e9 / wire_ns if wire_ns else 0.0)
        metrics.observe("room_descriptors", room.descriptors)
        metrics.observe("descriptor_bytes", moved / room.descriptors if room.descriptors else 0.0)

    def _refresh(self) -> None:
        """Gauges that follow from the tables, set when somebody looks."""
        health = self.health()
        with self._lock:
            rooms: dict[Stage, int] = {}
            oldest: dict[Stage, int] = {}
            for room in self._rooms.values():
                stage, age_ns = room.clock.stage, room.clock.age_ns()[0]
                rooms[stage] = rooms.get(stage, 0) + 1
                oldest[stage] = max(oldest.get(stage, 0), age_ns)
            peers = {state: sum(p.state is state for p in self._peers.values()) for state in PeerState}
            quarantine, now_ns = self._quarantine, self._clock()
        known = ROLE_STAGES[self.identity.role]
        self.metrics.reset("rooms", {(s.value,): rooms.get(s, 0) for s in known})
        self.metrics.reset("oldest_room_seconds", {(s.value,): oldest.get(s, 0) / 1e9 for s in known})
        self.metrics.reset("peers", {(state.value,): count for state, count in peers.items()})
        since_ns = quarantine.oldest_since_ns
        self.metrics.set("quarantined_bytes", quarantine.nbytes)
        self.metrics.set("quarantine_budget_bytes", quarantine.budget_bytes)
        self.metrics.set("quarantine_oldest_seconds", 0 if since_ns is None else max(now_ns - since_ns, 0) / 1e9)
        self.metrics.set("ready", float(health.is_ready))
        self.metrics.set("stalled_seconds", health.idle_s)
        self.metrics.set("threads", threading.active_count())
        self.metrics.set("open_fds", _open_fds())


def _open_room(key: RoomKey, room: _Room) -> OpenRoom:
    age_ns, stage_ns = room.clock.age_ns()
    return OpenRoom(
        room=key.room,
        generation=key.generation,
        stage=room.clock.stage.value,
        age_s=age_ns / 1e9,
        stage_age_s=stage_ns / 1e9,
        peer=room.facts.peer,
        request_id=room.facts.request_id,
        prompt_tokens=room.facts.prompt_tokens,
        moved_bytes=sum(room.moved_bytes.values()),
    )


def _open_fds() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
