"""All rooms of a decode instance: mints generations, and answers what comes for rooms that are over."""

from __future__ import annotations

from typing import ClassVar

from sglang_pd.protocol.errors import ErrorInfo, RemoteProtocolError, RoomError
from sglang_pd.protocol.messages import (
    Abort,
    AbortAck,
    Admitted,
    Draining,
    Failed,
    Handoff,
    Heartbeat,
    Message,
    Queued,
    Refusal,
    RoomAccepted,
    RoomEnd,
    RoomMessage,
    RoomRefused,
    StatusReply,
    Wrote,
)
from sglang_pd.protocol.peers import Peer
from sglang_pd.protocol.room import Limits, Role
from sglang_pd.protocol.room_decode import DecodeRoom
from sglang_pd.protocol.room_events import Begin, Effect, Send
from sglang_pd.protocol.room_table import RoomTable, TableLimits

_OF_A_LIVE_ROOM = (RoomAccepted, Queued, Wrote, Handoff, RoomEnd)
"""Messages of a prefill that still works on the room; if decode is through with it, prefill must be told."""

_ANSWERS = (RoomRefused, Failed, AbortAck, StatusReply)


class DecodeRooms(RoomTable[DecodeRoom]):
    """The rooms of one decode instance.

    Generations rise by one. Where they start follows from the epoch, which is random, so that no incarnation mints what
    another one did.
    """

    role: ClassVar[Role] = Role.DECODE

    def __init__(self, epoch: int, limits: Limits | None = None, bounds: TableLimits | None = None) -> None:
        super().__init__(epoch, limits, bounds)
        self._first_generation = 1 + epoch % 2**31 * 2**31
        self._next_generation = self._first_generation

    def begin(self, room: int, peer_epoch: int, now_s: float) -> tuple[int, list[Effect]]:
        """The decode leg of a room arrived, for that prefill incarnation. Gives the generation minted for it.

        Raises RoomError: `room_duplicate`, `draining`, `queue_full`, `peer_unknown`, `epoch_stale`.
        """
        peer = self._agreed(room, peer_epoch)
        if self.draining:
            raise RoomError("the worker is stopping", code="draining")
        if len(self.rooms) >= self.bounds.rooms or len(self._by_peer[peer_epoch]) >= self.bounds.rooms_per_peer:
            raise RoomError("too many rooms", code="queue_full")
        generation = self._mint()
        found = DecodeRoom(room, generation, peer, self.limits, now_s)
        out = found.handle(Begin(), now_s)
        self.rooms[room] = found
        self._track(found)
        self._schedule(found)
        return generation, out

    def decline(self, room: int, peer_epoch: int, error: ErrorInfo) -> list[Effect]:
        """The decode leg of a room was refused (it can never fit, say): its prefill fails it with this cause instead
        of waiting. Said once, also while draining; nothing is kept, since nothing was exposed.

        Raises RoomError: `room_duplicate`, `peer_unknown`, `epoch_stale`.
        """
        peer = self._agreed(room, peer_epoch)
        return [Send(peer.epoch, Abort(room=room, generation=self._mint(), error=error))]

    def _agreed(self, room: int, peer_epoch: int) -> Peer:
        peer = self.peers.get(peer_epoch)
        if peer is None or peer.lost is not None:
            code = "epoch_stale" if peer is not None or peer_epoch in self._lost else "peer_unknown"
            raise RoomError("no verdict stands for that incarnation", code=code, actual=f"{peer_epoch:016x}")
        if room in self.rooms:
            raise RoomError("the room has begun already", code="room_duplicate", actual=room)
        return peer

    def _mint(self) -> int:
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        return generation

    def receive(self, peer_epoch: int, message: Message, now_s: float) -> list[Effect]:
        """A message from that incarnation. RemoteProtocolError: refuse it to its sender; nothing changed."""
        peer = self._peer(peer_epoch, now_s)
        if isinstance(message, Heartbeat | Draining):
            self._on_liveness(peer, message, now_s)
            return []
        if isinstance(message, Refusal):
            return self._on_refusal(peer, message, now_s)
        if not isinstance(message, _OF_A_LIVE_ROOM + _ANSWERS):
            raise RemoteProtocolError("a decode does not take this message", where=type(message).__name__)
        found = self.rooms.get(message.room)
        if found is not None and (found.generation, found.peer.epoch) == (message.generation, peer_epoch):
            return self._feed(found, message, now_s, peer)
        return self._late(peer, message)

    def _late(self, peer: Peer, message: RoomMessage) -> list[Effect]:
        """The room is over here, or never was. A prefill that still works on it is told, so that it ends as well."""
        stone = self._grave(peer.epoch).get(message.room, message.generation)
        self.counts["late" if stone is not None else "unknown_room"] += 1
        minted = self._first_generation <= message.generation < self._next_generation
        if not isinstance(message, _OF_A_LIVE_ROOM) or not minted:
            # Another incarnation's generation is between prefill and that one, which prefill will find lost.
            return []
        if stone is not None and stone.error is None:
            if not isinstance(message, RoomEnd):
                return []
            return [Send(peer.epoch, Admitted(room=message.room, generation=message.generation))]
        error = stone.error if stone is not None else None
        if error is None:
            error = ErrorInfo(code="room_unknown", message="decode does not know that room (any more)")
        return [Send(peer.epoch, Abort(room=message.room, generation=message.generation, error=error))]
