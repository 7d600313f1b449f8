"""All rooms of a prefill instance: who may open what, and what late, repeated and foreign messages are answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from sglang_pd.protocol.errors import CODES, MAX_TEXT, ErrorInfo, LocalProtocolError, RemoteProtocolError, RoomError
from sglang_pd.protocol.messages import (
    Abort,
    AbortAck,
    Admitted,
    Draining,
    Failed,
    Heartbeat,
    LeaseRenew,
    Message,
    Refusal,
    RoomOpen,
    RoomRefused,
    StatusQuery,
    StatusReply,
    Writer,
)
from sglang_pd.protocol.peers import Peer
from sglang_pd.protocol.room import Limits, Role, State
from sglang_pd.protocol.room_events import Effect, Request, Send, TimerFired
from sglang_pd.protocol.room_prefill import UNCLAIMED, PrefillRoom
from sglang_pd.protocol.room_table import RoomTable, TableLimits
from sglang_pd.protocol.tickets import Ticket, decode_ticket, encode_ticket
from sglang_pd.protocol.tombstones import Tombstone, bounded

MAX_OWED: Final = 65_536
"""Rooms remembered that are over and not proven fenced; of one that is forgotten the proof never comes."""


@dataclass(slots=True)
class _Owed:
    room: int
    peer: Peer
    writers: set[Writer]


class PrefillRooms(RoomTable[PrefillRoom]):
    """The rooms of one prefill instance, opened by any number of decode peers; one open generation a room."""

    role: ClassVar[Role] = Role.PREFILL

    def __init__(
        self, epoch: int, instance: str = "prefill", limits: Limits | None = None, bounds: TableLimits | None = None
    ) -> None:
        super().__init__(epoch, limits, bounds)
        self.instance = instance
        # Rooms by id whose tombstone still stands: ended ones, and ones aborted before their open came.
        self._ended: dict[int, Tombstone] = {}
        self._aborted_early: dict[int, Tombstone] = {}
        self._owed: dict[int, _Owed] = {}
        """By generation, rooms that are over while a writer's fence is not proven: its source was freed without."""
        self._waiting_bytes: dict[int, int] = {}
        self._waiting_total_bytes = 0

    # --- from the own side -------------------------------------------------------------------------------------------

    def request(self, room: int, request: Request, now_s: float) -> list[Effect]:
        """The prefill leg of a room arrived.

        Raises RoomError: `room_duplicate` for a room that has its request or has ended (`details` name the first
        cause), `room_aborted` for one that decode gave up before, or decode's cause where the request itself is wrong,
        `draining`, `queue_full`.
        """
        found = self.rooms.get(room)
        if found is not None and found.now_in is State.AWAIT_REQUEST:
            return self._feed(found, request, now_s)
        stone = self._ended.get(room)
        if found is not None or stone is not None:
            cause = stone.error.code if stone is not None and stone.error is not None else ""
            raise RoomError("the room has its request already", code="room_duplicate", actual=room, cause=cause)
        if (early := self._aborted_early.get(room)) is not None:
            raise _given_up(room, early.error)
        if self.draining:
            raise RoomError("the worker is stopping", code="draining")
        if len(self.rooms) >= self.bounds.rooms:
            raise RoomError("too many rooms", code="queue_full", expected=f"<= {self.bounds.rooms}")
        found = PrefillRoom(room, self.limits, now_s)
        out = found.handle(request, now_s)
        self.rooms[room] = found
        self._schedule(found)
        return out

    def ticket(self, room: int) -> str:
        """Opaque text that lets any decode peer claim this room. LocalProtocolError: nobody may claim it."""
        found = self.rooms.get(room)
        if found is None or found.now_in not in UNCLAIMED:
            raise LocalProtocolError("only an unclaimed room has a ticket", code="room_unknown", actual=room)
        return encode_ticket(Ticket(self.instance, self.epoch, room))

    # --- from peers --------------------------------------------------------------------------------------------------

    def receive(self, peer_epoch: int, message: Message, now_s: float) -> list[Effect]:
        """A message from that incarnation. RemoteProtocolError: refuse it to its sender; nothing changed."""
        peer = self._peer(peer_epoch, now_s)
        if isinstance(message, RoomOpen):
            return self._open(peer, message, now_s)
        if isinstance(message, Abort):
            return self._abort(peer, message, now_s)
        if isinstance(message, StatusQuery):
            return self._status(peer, message, now_s)
        if isinstance(message, LeaseRenew):
            return self._lease(peer, message, now_s)
        if isinstance(message, Admitted):
            found = self.rooms.get(message.room)
            if found is not None and self._is_of(found, peer, message.generation):
                return self._feed(found, message, now_s, peer)
            self.counts["late"] += 1
            return []
        if isinstance(message, Heartbeat | Draining):
            self._on_liveness(peer, message, now_s)
            return []
        if isinstance(message, Refusal):
            return self._on_refusal(peer, message, now_s)
        raise RemoteProtocolError("a prefill does not take this message", where=type(message).__name__)

    @staticmethod
    def _is_of(room: PrefillRoom, peer: Peer, generation: int) -> bool:
        return room.peer is not None and room.peer.epoch == peer.epoch and room.generation == generation

    def _open(self, peer: Peer, message: RoomOpen, now_s: float) -> list[Effect]:
        found = self.rooms.get(message.room)
        if found is not None and self._is_of(found, peer, message.generation):
            return self._feed(found, message, now_s, peer)
        grave = self._grave(peer.epoch)
        stone = grave.get(message.room, message.generation)
        if stone is not None:
            self.counts["late"] += 1
            return self._repeat(peer, message, stone)
        ticket = decode_ticket(message.ticket) if message.ticket else None
        if message.generation <= grave.floor:
            return self._forgotten_open(peer, message, proven=message.generation > grave.unproven_floor)
        if message.to_epoch != peer.own_epoch or peer.lost is not None:
            # Another incarnation was meant; this one can never open the generation, so nothing need be remembered.
            return self._refusal(peer, message, ErrorInfo(code="epoch_stale", message="that incarnation is gone"))
        out: list[Effect] = []
        if found is not None and found.now_in in UNCLAIMED and (found.deadline_s() or 0) <= now_s:
            self.counts["expired_then_opened"] += 1
            out += self._feed(found, TimerFired(), now_s)
            found = None
        error = self._why_not(peer, message, found)
        if ticket is not None and (ticket.epoch, ticket.room) != (self.epoch, message.room):
            error = ErrorInfo(code="epoch_stale", message="the ticket is of another incarnation or room")
        if error is not None:
            return out + self._refuse(peer, message, error, now_s)
        if found is None:
            found = PrefillRoom(message.room, self.limits, now_s)
            found_out = found.handle(message, now_s, peer)
            self.rooms[message.room] = found
            self._track(found)
            self._schedule(found)
            return out + found_out
        return out + self._feed(found, message, now_s, peer)

    def _forgotten_open(self, peer: Peer, message: RoomOpen, *, proven: bool) -> list[Effect]:
        """A refusal is a fence, so what was forgotten without proof is not refused but failed, unfenced."""
        error = ErrorInfo(code="room_expired", message="that generation is long over")
        if proven:
            return self._refusal(peer, message, error)
        room, generation = message.room, message.generation
        return [
            Send(peer.epoch, Failed(room=room, generation=generation, error=error)),
            Send(peer.epoch, AbortAck(room=room, generation=generation, writer=None, fenced=False)),
        ]

    def _why_not(self, peer: Peer, message: RoomOpen, found: PrefillRoom | None) -> ErrorInfo | None:
        """Why a new generation may not open, or None."""
        stone = self._ended.get(message.room)
        if found is not None and found.now_in not in UNCLAIMED:
            return ErrorInfo(code="room_duplicate", message="that room is already open", where=f"room {message.room}")
        if stone is not None:
            # A room that ended before anyone claimed it says why; any other one was used up.
            unclaimed = stone.generation == 0 and stone.error is not None
            return stone.error if unclaimed else ErrorInfo(code="room_duplicate", message="that room has ended")
        if self.draining and found is None:
            return ErrorInfo(code="draining", message="the worker is stopping and takes no new rooms")
        waiting = self._waiting_total_bytes + message.index_bytes if found is None else 0
        full = found is None and len(self.rooms) >= self.bounds.rooms
        if full or len(self._by_peer[peer.epoch]) >= self.bounds.rooms_per_peer:
            return ErrorInfo(code="queue_full", message="too many rooms are open")
        if waiting > self.bounds.waiting_index_bytes:
            return ErrorInfo(code="queue_full", message="too many opened rooms wait for their request")
        return None

    def _refusal(self, peer: Peer, message: RoomOpen, error: ErrorInfo) -> list[Effect]:
        self.counts[f"refused_{error.code}"] += 1
        answer = RoomRefused(room=message.room, generation=message.generation, error=error)
        return [Send(peer.epoch, answer)]

    def _refuse(self, peer: Peer, message: RoomOpen, error: ErrorInfo, now_s: float) -> list[Effect]:
        """Refuse a generation for ever: a repeated open of it must not succeed after decode reused its memory."""
        self._remember(peer, message.room, message.generation, error, now_s)
        return self._refusal(peer, message, error)

    def _remember(self, peer: Peer, room: int, generation: int, error: ErrorInfo, now_s: float) -> Tombstone:
        keep_s = self._grave(peer.epoch).keep_s
        state = "aborted" if error.code == "room_aborted" else "failed"
        stone = Tombstone(room, generation, state, bounded(error), True, True, now_s + keep_s)
        self._bury(peer.epoch, stone)
        return stone

    def _repeat(self, peer: Peer, message: RoomOpen, stone: Tombstone) -> list[Effect]:
        if stone.error is None:
            return []
        room, generation = message.room, message.generation
        if stone.refused:
            return [Send(peer.epoch, RoomRefused(room=room, generation=generation, error=stone.error))]
        return [
            Send(peer.epoch, Failed(room=room, generation=generation, error=stone.error)),
            Send(peer.epoch, AbortAck(room=room, generation=generation, writer=None, fenced=stone.proven)),
        ]

    def _abort(self, peer: Peer, message: Abort, now_s: float) -> list[Effect]:
        found = self.rooms.get(message.room)
        grave = self._grave(peer.epoch)
        stone = grave.get(message.room, message.generation)
        if stone is None and found is not None:
            if self._is_of(found, peer, message.generation):
                return self._feed(found, message, now_s, peer)
            # An unclaimed room may be given up by a decode that waits for memory, not by one that knows nothing of it.
            wanted = message.error.code != "room_unknown" and message.generation > grave.floor
            if found.now_in in UNCLAIMED and peer.lost is None and wanted:
                return self._feed(found, message, now_s, peer)
        proven = True
        if stone is not None:
            proven = stone.proven
        elif message.generation <= grave.floor:
            proven = message.generation > grave.unproven_floor
        else:
            # Never seen: its open may be behind. From here on it is refused, so the fence holds.
            self.counts["aborted_early"] += 1
            early = self._remember(peer, message.room, message.generation, message.error, now_s)
            if message.error.code != "room_unknown":
                self._aborted_early[message.room] = early
        ack = AbortAck(room=message.room, generation=message.generation, writer=None, fenced=proven)
        return [Send(peer.epoch, ack)]

    def _status(self, peer: Peer, message: StatusQuery, now_s: float) -> list[Effect]:
        found = self.rooms.get(message.room)
        if found is not None and self._is_of(found, peer, message.generation):
            return self._feed(found, message, now_s, peer)
        room, generation = message.room, message.generation
        stone = self._grave(peer.epoch).get(room, generation)
        if stone is None:
            self.counts["unknown_room"] += 1
            reply = StatusReply(room=room, generation=generation, nonce=message.nonce, known=False, state="unknown")
            return [Send(peer.epoch, reply)]
        reply = StatusReply(
            room=room,
            generation=generation,
            nonce=message.nonce,
            known=True,
            state=stone.state,
            error=stone.error,
            acks=(AbortAck(room=room, generation=generation, writer=None, fenced=stone.proven),),
        )
        return [Send(peer.epoch, reply)]

    def _lease(self, peer: Peer, message: LeaseRenew, now_s: float) -> list[Effect]:
        found = self.rooms.get(message.room)
        if found is None:
            self.counts["unknown_room"] += 1
            return []
        if found.now_in in UNCLAIMED and (found.deadline_s() or 0) <= now_s:
            return self._feed(found, TimerFired(), now_s)
        return self._feed(found, message, now_s)

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    def _track(self, room: PrefillRoom) -> None:
        super()._track(room)
        waits = room.now_in is State.AWAIT_REQUEST and room.open is not None
        self._count_waiting(room.room, room.open.index_bytes if waits and room.open is not None else 0)

    def _count_waiting(self, room: int, size_bytes: int) -> None:
        self._waiting_total_bytes += size_bytes - self._waiting_bytes.pop(room, 0)
        if size_bytes:
            self._waiting_bytes[room] = size_bytes

    def _retire(self, room: PrefillRoom, now_s: float) -> None:
        self._count_waiting(room.room, 0)
        if not room.proven and room.peer is not None:
            writers = {writer for writer, ack in room.acks.items() if not ack.fenced}
            self._owed[room.generation] = _Owed(room.room, room.peer, writers)
            if len(self._owed) > MAX_OWED:
                self._owed.pop(next(iter(self._owed)))
        super()._retire(room, now_s)

    def owes(self, generation: int) -> bool:
        """Whether a proof of that room, which is over, is still missing."""
        return generation in self._owed

    def owed_by(self, writer: Writer) -> list[tuple[int, int]]:
        """Generation and id of rooms that are over and lack that writer's proof."""
        return [(generation, owed.room) for generation, owed in self._owed.items() if writer in owed.writers]

    def awaited(self, dead: frozenset[Writer]) -> bool:
        """Whether a peer that is there lacks a proof that may yet come: a writer that is dead gives none."""
        owed = list(self._owed.values())
        return any(one.peer.lost is None and not one.writers & dead for one in owed)

    def late_fence(self, room: int, generation: int, writer: Writer) -> list[Effect]:
        """A writer's fence is proven after its source had been freed without it, and the room was over. With the last
        one the peer is told; where it is lost, the next handshake can say so.
        """
        owed = self._owed.get(generation)
        if owed is None or owed.room != room:
            return []
        owed.writers.discard(writer)
        if owed.writers:
            return []
        del self._owed[generation]
        owed.peer.unproven.discard(generation)
        for grave in (self._graves.get(owed.peer.epoch), self._graves.get(0)):
            stone = grave.prove(room, generation) if grave is not None else None
            if stone is not None and (known := self._ended.get(room)) and known.generation == generation:
                self._ended[room] = stone
        if owed.peer.lost is not None:
            return []
        return [Send(owed.peer.epoch, AbortAck(room=room, generation=generation, writer=None, fenced=True))]

    def _bury(self, epoch: int, stone: Tombstone) -> None:
        if not stone.refused:
            self._ended[stone.room] = stone
        super()._bury(epoch, stone)

    def _proven(self, room: PrefillRoom) -> bool:
        return room.proven

    def _forgotten(self, stone: Tombstone) -> None:
        for index in (self._ended, self._aborted_early):
            if index.get(stone.room) is stone:
                del index[stone.room]

    def check_integrity(self) -> None:
        """See `RoomTable.check_integrity`."""
        super().check_integrity()
        waiting = {
            key: room.open.index_bytes
            for key, room in self.rooms.items()
            if room.now_in is State.AWAIT_REQUEST and room.open is not None and room.open.index_bytes
        }
        standing = sum(len(grave) for grave in self._graves.values())
        if waiting != self._waiting_bytes or sum(waiting.values()) != self._waiting_total_bytes:
            raise LocalProtocolError("the bytes of waiting opens are miscounted", code="internal", where="room table")
        if len(self._ended) > standing or len(self._aborted_early) > standing:
            raise LocalProtocolError("an ended room is indexed without tombstone", code="internal", where="room table")


def _given_up(room: int, error: ErrorInfo | None) -> RoomError:
    """A request comes too late. Decode's own cause where that says what is wrong with the request itself."""
    facts = CODES.get(error.code) if error is not None else None
    if error is None or facts is None or facts.http_status != 400 or facts.retryable:
        why = f": {error.message}" if error is not None else ""
        text = f"decode gave the room up before its request came{why}"[:MAX_TEXT]
        return RoomError(text, code="room_aborted", actual=room)
    return RoomError(
        error.message,
        code=error.code,
        where=error.where,
        expected=error.expected,
        actual=error.actual,
        hint=error.hint,
    )
