"""The source side of one rank: takes chunks from its engine, writes them to every destination rank, proves fences.

A chunk may come before the room is begun: it waits. Chunks of a room are written in the order they came; several may be
in flight. Nothing is reported before its bytes are visible at all destinations.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sglang_pd.backends.base import Backend, Peer, Transfer, TransferState
from sglang_pd.protocol.batch import GridBatch
from sglang_pd.protocol.bind import Chunk, IndexLists, RoomIndices, bind
from sglang_pd.protocol.errors import ErrorInfo, RoomError
from sglang_pd.protocol.kinds import Elements
from sglang_pd.protocol.manifest import RankId
from sglang_pd.protocol.messages import Writer, Wrote
from sglang_pd.protocol.pairing import Pairing, Record
from sglang_pd.protocol.verify import RowDigest, layer_digests
from sglang_pd.worker.meetings import Meeting, Meetings, info_of
from sglang_pd.worker.orders import (
    AnyReport,
    Begin,
    Fenced,
    Forget,
    Halt,
    HandedOff,
    PeerFault,
    RoomFault,
    WroteRange,
)

MAX_WAITING_CHUNKS: Final = 65_536
"""Chunks that wait for their room to begin, over all rooms."""
MAX_WAITING_ROOMS: Final = 65_536
"""Rooms kept, begun or not."""
MAX_AHEAD_TOKENS: Final = 8_192
"""The rest of a prompt that is bound ahead is no longer than this, nor than what the engine has ever sent in one."""
MAX_FORGOTTEN: Final = 65_536
"""Rooms remembered as over, so that an engine's late chunk does not bring one back."""
FORGOTTEN_S: Final = 30.0
"""How long; shorter than the room table remembers an ended room, hence refuses it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A computed chunk. after: device event its bytes depend on. lists: source lists that came late, with the last."""

    chunk: Chunk
    after: Any = None
    lists: IndexLists | None = None


@dataclass(slots=True)
class _Flight:
    """One chunk on its way, with all its transfers and the peer of each."""

    chunk: Chunk
    transfers: list[tuple[Peer, Transfer]]
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By kind: bytes, descriptors."""

    def states(self) -> list[TransferState]:
        return [_state(transfer) for _, transfer in self.transfers]

    @property
    def quiesced(self) -> bool:
        return all(_quiesced(transfer) for _, transfer in self.transfers)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Descriptors of a chunk for every destination rank that gets some, of the lists and the meeting they are for."""

    chunk: Chunk
    indices: RoomIndices
    meeting: Meeting
    batches: list[tuple[RankId, GridBatch]]

    @staticmethod
    def of(rank: RankId, chunk: Chunk, indices: RoomIndices, meeting: Meeting) -> _Bound:
        plans = ((dst, meeting.pairing.plan(rank, dst)) for dst in meeting.peers)
        batches = [(dst, bind(plan, indices, chunk)) for dst, plan in plans]
        return _Bound(chunk, indices, meeting, [(dst, batch) for dst, batch in batches if len(batch)])

    def serves(self, chunk: Chunk, indices: RoomIndices, meeting: Meeting) -> bool:
        return self.chunk == chunk and self.indices is indices and self.meeting is meeting


@dataclass(slots=True)
class _Room:
    waiting: deque[Ready] = field(default_factory=deque)
    flights: deque[_Flight] = field(default_factory=deque)
    begun: Begin | None = None
    indices: RoomIndices | None = None
    ahead: _Bound | None = None
    """The chunk that is expected next, bound while it is computed."""
    next_token: int = 0
    complete: bool = False
    handoff: tuple[int, bytes] | None = None
    faulted: bool = False
    halted: bool = False
    orphan: bool = False
    """Its control is gone: forget it once fenced."""
    said: bool | None = None
    source_free: bool = False
    """`said` and `source_free`: last answer to `Halt`."""


class SourceSide:
    """Writes rooms. All methods are called by the rank's control thread."""

    def __init__(
        self,
        rank: RankId,
        backend: Backend,
        report: Callable[[AnyReport], None],
        *,
        digest: RowDigest,
        deadline_s: float,
    ) -> None:
        self._rank = rank
        self._backend = backend
        self._report = report
        self._digest = digest
        self._deadline_s = deadline_s
        self._rooms: dict[int, _Room] = {}
        self._forgotten: OrderedDict[int, float] = OrderedDict()
        self.meetings = Meetings(rank, backend, report, self._met)
        self._waiting = 0
        self._longest_chunk = 0
        self.bytes_written = 0
        self.descriptors_written = 0
        self.on_posted: Callable[[int], None] = lambda room: None
        """Told once everything of a room is with the backend."""

    # --- peers -------------------------------------------------------------------------------------------------------

    def pair(self, peer_epoch: int, pairing: Pairing) -> None:
        """Connect to the ranks of an instance that this one has bytes for. Answered by `Paired`, now or by a `step`."""
        self.meetings.pair(peer_epoch, pairing)

    def unpair(self, peer_epoch: int) -> None:
        """Forget a destination instance. Peers are disconnected once nothing of this rank can land there any more."""
        self.meetings.unpair(peer_epoch)

    def leave_all(self) -> None:
        """Post nothing more for anybody and leave every peer; `step` is False once nothing is in flight."""
        for room, entry in list(self._rooms.items()):
            self._drop_waiting(entry)
            entry.faulted = entry.halted = entry.orphan = True
            if not entry.flights:
                del self._rooms[room]
        self.meetings.unpair_all()

    def _met(self, peer_epoch: int) -> None:
        """Connecting to an instance has ended: what waited for it is posted, or fails."""
        for room, entry in list(self._rooms.items()):
            if entry.waiting and entry.begun is not None and entry.begun.peer_epoch == peer_epoch:
                self._post(room, entry)

    def _in_flight_to(self) -> set[int]:
        """`id` of each peer that something may still land at."""
        return {id(p) for e in self._rooms.values() for f in e.flights if not f.quiesced for p, _ in f.transfers}

    # --- the engine --------------------------------------------------------------------------------------------------

    def chunk(self, room: int, ready: Ready) -> None:
        """A chunk is computed; its bytes are ready once `after` (a device event, or None) has happened."""
        if self._is_over(room):
            return
        entry = self._entry(room)
        if entry.faulted:
            return
        entry.waiting.append(ready)
        self._waiting += 1
        self._post(room, entry)

    def handoff(self, room: int, covered_tokens: int, record: bytes) -> None:
        """The facts that travel with the state; reported after this rank's transfers are DONE."""
        if not self._is_over(room):
            entry = self._entry(room)
            entry.handoff = (covered_tokens, record)
            self._report_progress(room, entry)

    def _entry(self, room: int) -> _Room:
        """A room's entry. Where too much waits, the one that has waited longest gives way: rooms that nobody asked for,
        or that ended long ago, must not use up the place of those to come.
        """
        entry = self._rooms.setdefault(room, _Room())
        while self._waiting >= MAX_WAITING_CHUNKS or len(self._rooms) > MAX_WAITING_ROOMS:
            oldest = next((number for number, waits in self._rooms.items() if waits.begun is None), room)
            error = RoomError("too many chunks wait for their rooms", code="queue_full", where=f"room {oldest}")
            self._fault(oldest, self._rooms[oldest], error.info())
            self.forget(Forget(room=oldest, generation=0))
            if oldest == room:
                break
        return entry

    # --- orders ------------------------------------------------------------------------------------------------------

    def begin(self, order: Begin, indices: RoomIndices) -> None:
        """Both sides' lists are known: write what waits, and what will come. `RoomError`: it is over."""
        if self._is_over(order.room):
            raise RoomError(
                "the room was over at this rank a moment ago; what its engine sent since is lost",
                code="room_duplicate",
                where=f"room {order.room}, rank {self._rank}",
                hint="Use a new room id for every request.",
            )
        entry = self._rooms.setdefault(order.room, _Room())
        entry.begun, entry.indices = order, indices
        self._post(order.room, entry)

    def halt(self, order: Halt) -> None:
        """Post nothing more; the fence is reported by `step`."""
        entry = self._rooms.get(order.room)
        if entry is None or entry.begun is None or entry.begun.generation != order.generation:
            self._report(Fenced(room=order.room, generation=order.generation, fenced=True))
            return
        entry.halted, entry.said = True, None  # a repeated order is answered again
        self._drop_waiting(entry)
        self._check_fence(order.room, entry)

    def forget(self, order: Forget) -> None:
        """Drop a room. A late chunk of it is ignored from now on."""
        entry = self._rooms.pop(order.room, None)
        if entry is not None:
            self._drop_waiting(entry)
        self._forgotten[order.room] = time.monotonic() + FORGOTTEN_S
        self._forgotten.move_to_end(order.room)
        if len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def _is_over(self, room: int) -> bool:
        until_s = self._forgotten.get(room)
        if until_s is None or time.monotonic() < until_s:
            return until_s is not None
        del self._forgotten[room]
        return False

    def _drop_waiting(self, entry: _Room) -> None:
        self._waiting -= len(entry.waiting)
        entry.waiting.clear()

    # --- writing -----------------------------------------------------------------------------------------------------

    def _post(self, room: int, entry: _Room) -> None:
        if entry.begun is None or entry.halted or entry.faulted:
            return
        if self.meetings.approaching(entry.begun.peer_epoch):
            return  # `_met` calls again
        meeting = self.meetings.get(entry.begun.peer_epoch)
        if meeting is None:
            self._fault(room, entry, _no_peer(entry.begun.peer_epoch))
            return
        while entry.waiting:
            ready = entry.waiting.popleft()
            self._waiting -= 1
            try:
                self._write(entry, meeting, ready)
            except Exception as error:
                self._fault(room, entry, info_of(error))
                return
        if entry.complete:
            self.on_posted(room)
        self._report_progress(room, entry)
        try:
            self._bind_ahead(entry, meeting)
        except Exception as error:  # it could not be bound later either
            self._fault(room, entry, info_of(error))

    def _bind_ahead(self, entry: _Room, meeting: Meeting) -> None:
        """Bind the rest of the prompt while it is computed, where the engine may well send it in one: the time from the
        last token to its arrival is what counts. Other chunks, and late lists, are bound when they come.
        """
        entry.ahead = None
        if entry.indices is None or entry.complete or entry.faulted:
            return
        rest = Chunk(entry.next_token, entry.indices.prompt.tokens, True)
        late = any(space not in entry.indices.src for space in meeting.pairing.needed.src)
        if not late and rest.stop - rest.start <= min(self._longest_chunk, MAX_AHEAD_TOKENS):
            entry.ahead = _Bound.of(self._rank, rest, entry.indices, meeting)

    def _write(self, entry: _Room, meeting: Meeting, ready: Ready) -> None:
        chunk = ready.chunk
        if entry.indices is None or chunk.start != entry.next_token or entry.complete:
            raise RoomError(
                "chunks come in order, touch, and end with the last",
                code="illegal_transition",
                where="send",
                expected=f"start {entry.next_token}" if not entry.complete else "nothing after the last chunk",
                actual=chunk,
            )
        if chunk.last:
            entry.indices = entry.indices.completed(meeting.pairing.needed, ready.lists or {})
        bound, entry.ahead = entry.ahead, None
        if bound is None or not bound.serves(chunk, entry.indices, meeting):
            bound = _Bound.of(self._rank, chunk, entry.indices, meeting)
        flight = _Flight(chunk, [])
        entry.flights.append(flight)  # before posting: what was posted is drained even if a later post raises
        for dst_rank, batch in bound.batches:
            peer = meeting.peers[dst_rank]
            transfer = self._backend.write(peer, batch, after=ready.after, deadline_s=self._deadline_s)
            flight.transfers.append((peer, transfer))
            self.bytes_written += transfer.nbytes
            self.descriptors_written += len(batch)
            for kind, nbytes, count in meeting.moved(dst_rank, batch):
                before = flight.moved.get(kind, (0, 0))
                flight.moved[kind] = before[0] + nbytes, before[1] + count
        self._longest_chunk = max(self._longest_chunk, chunk.stop - chunk.start)
        entry.next_token, entry.complete = chunk.stop, chunk.last

    def step(self) -> bool:
        """Poll what flies and report news. True while anything is in flight or a fence is owed."""
        busy = self.meetings.step(self._in_flight_to)
        for room, entry in list(self._rooms.items()):
            if entry.flights or (entry.halted and entry.said is not True):
                self._advance(room, entry)
                busy = busy or bool(entry.flights) or (entry.halted and entry.said is not True)
        return busy

    def _advance(self, room: int, entry: _Room) -> None:
        for flight in entry.flights:
            states = flight.states()
            bad = next((i for i, s in enumerate(states) if s in (TransferState.FAILED, TransferState.UNKNOWN)), None)
            if bad is not None:
                self._transfer_failed(room, entry, *flight.transfers[bad])
        self._report_progress(room, entry)
        self._check_fence(room, entry)
        if entry.orphan and not entry.flights:
            del self._rooms[room]

    def _report_progress(self, room: int, entry: _Room) -> None:
        """Report chunks that are DONE, oldest first, then the handoff once nothing of this rank is left."""
        while entry.flights and not entry.faulted and not entry.halted:
            flight = entry.flights[0]
            if any(state is not TransferState.DONE for state in flight.states()):
                return
            if entry.begun is not None and self.meetings.approaching(entry.begun.peer_epoch):
                return  # its records need the meeting: `step` comes again
            entry.flights.popleft()
            try:
                self._report_records(room, entry, flight)
            except Exception as error:
                self._fault(room, entry, info_of(error))
        if entry.complete and entry.handoff and not entry.flights and not entry.faulted and not entry.halted:
            covered, record = entry.handoff
            entry.handoff = None
            self._report(HandedOff(room=room, covered_tokens=covered, record=record))

    def _report_records(self, room: int, entry: _Room, flight: _Flight) -> None:
        if entry.begun is None or entry.indices is None:
            return
        meeting = self.meetings.get(entry.begun.peer_epoch)
        if meeting is None:
            self._fault(room, entry, _no_peer(entry.begun.peer_epoch))
            return
        for record in meeting.pairing.records(self._rank, entry.indices.prompt, flight.chunk):
            nbytes, descriptors = flight.moved.get(record.kind, (0, 0))
            digests = self._digests(entry, entry.indices, meeting, record)
            wrote = Wrote(
                room=room,
                generation=entry.begun.generation,
                writer=Writer(pp=self._rank.pp_rank, tp=self._rank.tp_rank),
                component=record.kind,
                layer_start=record.layer_start,
                layer_stop=record.layer_stop,
                token_start=record.start,
                token_stop=record.stop,
                last=record.last,
                nbytes=nbytes,
                digests=digests,
            )
            self._report(WroteRange(record=wrote, descriptors=descriptors))

    def _digests(self, entry: _Room, indices: RoomIndices, meeting: Meeting, record: Record) -> bytes:
        if entry.begun is None or not entry.begun.verify or record.layer_start == record.layer_stop:
            return b""
        pairing, totals = meeting.pairing, dict[int, int]()
        own = pairing.prefill.rank(self._rank)
        for dst_rank in meeting.peers:
            plan = pairing.plan(self._rank, dst_rank)
            part = (record.kind, Elements(record.start, record.stop))
            for layer, value in layer_digests(plan, (own, "source"), indices, part, self._digest).items():
                totals[layer] = (totals.get(layer, 0) + value) % 2**64
        return b"".join(totals[layer].to_bytes(8, "little") for layer in sorted(totals))

    # --- failure and fences ------------------------------------------------------------------------------------------

    def _transfer_failed(self, room: int, entry: _Room, peer: Peer, transfer: Transfer) -> None:
        info = _cause(transfer)
        begun = entry.begun
        meeting = self.meetings.get(begun.peer_epoch) if begun else None
        self._fault(room, entry, info)
        if begun and meeting and not meeting.fault and peer in meeting.peers.values() and peer.lost is not None:
            meeting.fault = True
            self._report(PeerFault(peer_epoch=begun.peer_epoch, error=peer.lost.info()))

    def _fault(self, room: int, entry: _Room, info: ErrorInfo) -> None:
        if entry.faulted:
            return
        entry.faulted = True
        self._drop_waiting(entry)
        generation = entry.begun.generation if entry.begun else 0
        self._report(RoomFault(room=room, generation=generation, error=info))

    def _check_fence(self, room: int, entry: _Room) -> None:
        if not entry.halted or entry.begun is None or entry.said is True:
            return
        flying = [flight for flight in entry.flights if not flight.quiesced]
        unknown = [t for flight in flying for _, t in flight.transfers if _state(t) is TransferState.UNKNOWN]
        if flying and not unknown:
            return  # it will be DONE, FAILED or UNKNOWN by its deadline
        proven = not flying or all(self._backend.fence(peer) for peer in _peers_of(flying))
        transfers = [t for flight in flying for _, t in flight.transfers]
        free = proven or all(t.source_free for t in transfers)
        if free and not proven:  # the last may have ended between the two looks: that is the proof, and comes but once
            proven = all(_quiesced(t) for t in transfers)
        if proven or entry.said is None or free is not entry.source_free:
            entry.said, entry.source_free = proven, free
            reason = "" if proven else str(_cause(unknown[0]))
            generation = entry.begun.generation
            self._report(
                Fenced(room=room, generation=generation, fenced=proven, source_free=free, reason=reason[:2000])
            )
        if proven:
            entry.flights.clear()

    @property
    def in_flight(self) -> int:
        """Transfers not yet DONE or FAILED."""
        flights = [flight for entry in list(self._rooms.values()) for flight in list(entry.flights)]
        return sum(not _quiesced(transfer) for flight in flights for _, transfer in list(flight.transfers))

    @property
    def rooms(self) -> int:
        """Rooms kept."""
        return len(self._rooms)


def _peers_of(flights: list[_Flight]) -> list[Peer]:
    """Peers of transfers that may still land, each once."""
    return list({id(peer): peer for flight in flights for peer, t in flight.transfers if not _quiesced(t)}.values())


def _no_peer(epoch: int) -> ErrorInfo:
    return ErrorInfo(code="peer_unknown", message="this rank is not connected to the peer", actual=f"{epoch:016x}")


def _state(transfer: Transfer) -> TransferState:
    """A backend that breaks its word and raises costs this one room: nothing is known of that transfer."""
    try:
        return transfer.poll()
    except Exception:
        return TransferState.UNKNOWN


def _quiesced(transfer: Transfer) -> bool:
    return _state(transfer) in (TransferState.DONE, TransferState.FAILED)


def _cause(transfer: Transfer) -> ErrorInfo:
    """Why a transfer is FAILED or UNKNOWN."""
    try:
        transfer.poll()
        error = transfer.error
    except Exception as defect:
        return info_of(defect)
    return error.info() if error else ErrorInfo(code="transfer_unknown", message="the transport gave no reason")
