"""The source side of one rank: takes chunks from its engine, writes them to every destination rank, proves fences.

The engine names a room by its handle, which stands for one use of the room's id: what comes late is never taken for the
next use. A chunk may come before the room is begun: it waits. Chunks of a room are written in the order they came;
several may be in flight. Nothing is reported before its bytes are visible at all destinations.
"""

from __future__ import annotations

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
from sglang_pd.worker.ranks.flights import Flight, cause_of, peers_of, quiesced, source_free, state_of
from sglang_pd.worker.ranks.meetings import Meeting, Meetings, info_of
from sglang_pd.worker.ranks.orders import (
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
"""Handles remembered as over, so that what an engine sends late does not wait for nothing."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A computed chunk. after: device event its bytes depend on. lists: source lists that came late, with the last."""

    chunk: Chunk
    after: Any = None
    lists: IndexLists | None = None


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
    handle: int
    waiting: deque[Ready] = field(default_factory=deque)
    flights: deque[Flight] = field(default_factory=deque)
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
    """It is over, or its control is gone: forget it once nothing is in flight."""
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
        """By handle."""
        self._forgotten: OrderedDict[int, None] = OrderedDict()
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
        for handle in list(self._rooms):
            self._close(handle)
        self.meetings.unpair_all()

    def _met(self, peer_epoch: int) -> None:
        """Connecting to an instance has ended: what waited for it is posted, or fails."""
        for entry in list(self._rooms.values()):
            if entry.waiting and entry.begun is not None and entry.begun.peer_epoch == peer_epoch:
                self._post(entry)

    def _in_flight_to(self) -> set[int]:
        """`id` of each peer that something may still land at."""
        return {id(p) for e in self._rooms.values() for f in e.flights if not f.quiesced for p, _ in f.transfers}

    # --- the engine --------------------------------------------------------------------------------------------------

    def chunk(self, handle: int, ready: Ready) -> None:
        """A chunk is computed; its bytes are ready once `after` (a device event, or None) has happened."""
        if handle in self._forgotten:
            return
        entry = self._entry(handle)
        if entry.faulted:
            return
        entry.waiting.append(ready)
        self._waiting += 1
        self._post(entry)

    def handoff(self, handle: int, covered_tokens: int, record: bytes) -> None:
        """The facts that travel with the state; reported after this rank's transfers are DONE."""
        if handle not in self._forgotten:
            entry = self._entry(handle)
            entry.handoff = (covered_tokens, record)
            self._report_progress(entry)

    def _entry(self, handle: int) -> _Room:
        """A room's entry. Where too much waits, the one that has waited longest gives way: rooms that nobody asked for,
        or that ended long ago, must not use up the place of those to come.
        """
        entry = self._rooms.setdefault(handle, _Room(handle))
        while self._waiting >= MAX_WAITING_CHUNKS or len(self._rooms) > MAX_WAITING_ROOMS:
            oldest = next((waits for waits in self._rooms.values() if waits.begun is None), entry)
            error = RoomError("too many chunks wait for their rooms", code="queue_full", where=f"rank {self._rank}")
            self._fault(oldest, error.info())
            if oldest.begun is None:
                self._close(oldest.handle)
            if oldest is entry:
                break
        return entry

    # --- orders ------------------------------------------------------------------------------------------------------

    def begin(self, order: Begin, indices: RoomIndices) -> None:
        """Both sides' lists are known: write what waits, and what will come. `RoomError`: it is over."""
        if order.handle in self._forgotten:
            raise RoomError(
                "the room is over at this rank; what its engine sent is lost",
                code="room_duplicate",
                where=f"room {order.room}, rank {self._rank}",
                hint="Give every request a handle of its own.",
            )
        entry = self._rooms.setdefault(order.handle, _Room(order.handle))
        if entry.begun is not None:
            raise RoomError(
                "another room goes by that handle", code="room_duplicate", where=f"room {order.room}",
                expected="a handle of its own", actual=f"that of room {entry.begun.room}",
            )  # fmt: skip
        entry.begun, entry.indices = order, indices
        self._post(entry)

    def halt(self, order: Halt) -> None:
        """Post nothing more; the fence is reported by `step`."""
        entry = self._rooms.get(order.handle)
        if entry is None or entry.begun is None or entry.begun.generation != order.generation:
            self._report(Fenced(room=order.room, generation=order.generation, fenced=True))
            return
        entry.halted, entry.said = True, None  # a repeated order is answered again
        self._give_up(entry)
        self._check_fence(entry)

    def forget(self, order: Forget) -> None:
        """Drop a room. What comes late under its handle is ignored from now on."""
        if order.handle:
            self._close(order.handle)

    def keep(self, generations: frozenset[int], peers: frozenset[int]) -> None:
        """Drop rooms that have begun, and instances, that are not among these."""
        self.meetings.keep(peers)
        for entry in list(self._rooms.values()):
            if entry.begun is not None and entry.begun.generation not in generations:
                self._close(entry.handle)

    def _close(self, handle: int) -> None:
        """The room is over here. What is still in flight is kept until it is not: it is what a fence asks about."""
        entry = self._rooms.get(handle)
        if entry is not None:
            self._give_up(entry)
            entry.faulted = entry.halted = entry.orphan = True  # halted: its fence is sought
            if all(flight.quiesced for flight in entry.flights):
                self._drop(entry)
        self._forgotten[handle] = None
        self._forgotten.move_to_end(handle)
        if len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def _give_up(self, entry: _Room) -> None:
        """Neither what waits for its order is posted, nor what waits behind its event."""
        self._waiting -= len(entry.waiting)
        entry.waiting.clear()
        for flight in entry.flights:
            flight.cancel()

    # --- writing -----------------------------------------------------------------------------------------------------

    def _post(self, entry: _Room) -> None:
        if entry.begun is None or entry.halted or entry.faulted:
            return
        if self.meetings.approaching(entry.begun.peer_epoch):
            return  # `_met` calls again
        meeting = self.meetings.get(entry.begun.peer_epoch)
        if meeting is None:
            self._fault(entry, _no_peer(entry.begun.peer_epoch))
            return
        while entry.waiting:
            ready = entry.waiting.popleft()
            self._waiting -= 1
            try:
                self._write(entry, meeting, ready)
            except Exception as error:
                self._fault(entry, info_of(error))
                return
        if entry.complete:
            self.on_posted(entry.begun.room)
        self._report_progress(entry)
        try:
            self._bind_ahead(entry, meeting)
        except Exception as error:  # it could not be bound later either
            self._fault(entry, info_of(error))

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
        flight = Flight(chunk, [])
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
        for entry in list(self._rooms.values()):
            if entry.flights or (entry.halted and entry.said is not True):
                self._advance(entry)
                busy = busy or bool(entry.flights) or (entry.halted and entry.said is not True)
        return busy

    def _advance(self, entry: _Room) -> None:
        for flight in () if entry.orphan else entry.flights:
            states = flight.states()
            bad = next((i for i, s in enumerate(states) if s in (TransferState.FAILED, TransferState.UNKNOWN)), None)
            if bad is not None:
                self._transfer_failed(entry, *flight.transfers[bad])
        self._report_progress(entry)
        self._check_fence(entry)
        if entry.orphan and all(flight.quiesced for flight in entry.flights):
            self._drop(entry)

    def _drop(self, entry: _Room) -> None:
        """Nothing of it is in flight. A fence that was owed is told first: nobody can ask for it afterwards."""
        if entry.said is False:
            self._check_fence(entry)
        del self._rooms[entry.handle]

    def _report_progress(self, entry: _Room) -> None:
        """Report chunks that are DONE, oldest first, then the handoff once nothing of this rank is left."""
        begun = entry.begun
        if begun is None:
            return
        while entry.flights and not entry.faulted and not entry.halted:
            flight = entry.flights[0]
            if any(state is not TransferState.DONE for state in flight.states()):
                return
            if self.meetings.approaching(begun.peer_epoch):
                return  # its records need the meeting: `step` comes again
            entry.flights.popleft()
            try:
                self._report_records(entry, flight)
            except Exception as error:
                self._fault(entry, info_of(error))
        if entry.complete and entry.handoff and not entry.flights and not entry.faulted and not entry.halted:
            covered, record = entry.handoff
            entry.handoff = None
            self._report(HandedOff(room=begun.room, generation=begun.generation, covered_tokens=covered, record=record))

    def _report_records(self, entry: _Room, flight: Flight) -> None:
        if entry.begun is None or entry.indices is None:
            return
        meeting = self.meetings.get(entry.begun.peer_epoch)
        if meeting is None:
            self._fault(entry, _no_peer(entry.begun.peer_epoch))
            return
        for record in meeting.pairing.records(self._rank, entry.indices.prompt, flight.chunk):
            nbytes, descriptors = flight.moved.get(record.kind, (0, 0))
            digests = self._digests(entry, entry.indices, meeting, record)
            wrote = Wrote(
                room=entry.begun.room,
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

    def _transfer_failed(self, entry: _Room, peer: Peer, transfer: Transfer) -> None:
        info = cause_of(transfer)
        begun = entry.begun
        meeting = self.meetings.get(begun.peer_epoch) if begun else None
        self._fault(entry, info)
        if begun and meeting and not meeting.fault and peer in meeting.peers.values() and peer.lost is not None:
            meeting.fault = True
            self._report(PeerFault(peer_epoch=begun.peer_epoch, error=peer.lost.info()))

    def _fault(self, entry: _Room, info: ErrorInfo) -> None:
        if entry.faulted:
            return
        entry.faulted = True
        self._give_up(entry)
        room, generation = (entry.begun.room, entry.begun.generation) if entry.begun else (0, 0)
        self._report(RoomFault(room=room, generation=generation, handle=entry.handle, error=info))

    def _check_fence(self, entry: _Room) -> None:
        if not entry.halted or entry.begun is None or entry.said is True:
            return
        flying = [flight for flight in entry.flights if not flight.quiesced]
        unknown = [t for flight in flying for _, t in flight.transfers if state_of(t) is TransferState.UNKNOWN]
        if flying and not unknown:
            return  # it will be DONE, FAILED or UNKNOWN by its deadline
        proven = not flying or all(self._backend.fence(peer) for peer in peers_of(flying))
        transfers = [t for flight in flying for _, t in flight.transfers]
        free = proven or all(source_free(t) for t in transfers)
        if free and not proven:  # the last may have ended between the two looks: that is the proof, and comes but once
            proven = all(quiesced(t) for t in transfers)
        if proven or entry.said is None or free is not entry.source_free:
            entry.said, entry.source_free = proven, free
            reason = "" if proven else str(cause_of(unknown[0]))
            room, generation = entry.begun.room, entry.begun.generation
            self._report(
                Fenced(room=room, generation=generation, fenced=proven, source_free=free, reason=reason[:2000])
            )
        if proven:
            entry.flights.clear()

    @property
    def in_flight(self) -> int:
        """Transfers not yet DONE or FAILED."""
        return sum(not quiesced(transfer) for transfer in self._transfers())

    @property
    def reads(self) -> bool:
        """Whether a transfer may still read this rank's memory."""
        return any(not source_free(transfer) for transfer in self._transfers())

    def _transfers(self) -> list[Transfer]:
        flights = [flight for entry in list(self._rooms.values()) for flight in list(entry.flights)]
        return [transfer for flight in flights for _, transfer in list(flight.transfers)]

    @property
    def begun(self) -> bool:
        """Whether a room is under way, or something of one that is over may still land. Chunks that wait for their room
        do not count: any control may begin it.
        """
        return any(entry.begun is not None for entry in self._rooms.values())

    @property
    def rooms(self) -> int:
        """Rooms kept."""
        return len(self._rooms)


def _no_peer(epoch: int) -> ErrorInfo:
    return ErrorInfo(code="peer_unknown", message="this rank is not connected to the peer", actual=f"{epoch:016x}")
