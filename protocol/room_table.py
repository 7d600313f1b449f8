"""All rooms of one side: routing by (room, generation, epoch), timers, peers, tombstones, and bounds on each of them.

What the prefill and the decode table add is in `rooms_prefill.py` and `rooms_decode.py`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.messages import Draining, Heartbeat, Message, Refusal
from sglang_pd.protocol.peers import Peer
from sglang_pd.protocol.room import JOINT, Limits, Role
from sglang_pd.protocol.room_events import Effect, Fail, LocalEvent, PeerLost, TimerFired
from sglang_pd.protocol.room_machine import RoomMachine
from sglang_pd.protocol.tombstones import Tombstone, Tombstones, bounded

_MAX_LOST = 65_536
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Bounds of one side's tables.

    rooms, rooms_per_peer: rooms that are open or wait for a fence. tombstones_per_peer: ended ones remembered.
    peers: incarnations known at once. waiting_index_bytes: packed indices of opened rooms that wait for their request.
    tombstone_s: how long an ended room is remembered; at least the liveness duration of any peer.
    """

    rooms: int = 16_384
    rooms_per_peer: int = 4_096
    tombstones_per_peer: int = 4_096
    peers: int = 1_024
    waiting_index_bytes: int = 32 * 2**20
    tombstone_s: float = 60.0


R = TypeVar("R", bound=RoomMachine)


class RoomTable(Generic[R]):
    """The rooms of one instance in one role. Not thread-safe: the control thread owns it.

    Every method that takes an event gives the effects to carry out, in order. Times are monotonic seconds of this side.
    A refused call changes nothing. `counts` counts what was dropped or refused, by reason.
    """

    role: ClassVar[Role]

    def __init__(self, epoch: int, limits: Limits | None = None, bounds: TableLimits | None = None) -> None:
        self.epoch = epoch
        self.limits = limits or Limits()
        self.bounds = bounds or TableLimits()
        self.rooms: dict[int, R] = {}
        self.peers: dict[int, Peer] = {}
        self.counts: Counter[str] = Counter()
        self.draining = False
        self._graves: dict[int, Tombstones] = {}
        self._by_peer: dict[int, set[int]] = {}
        self._lost: dict[int, None] = {}
        self._unproven: dict[int, set[int]] = {}
        """By this side's epoch towards a lost peer: generations of rooms whose fence is not proven. Each stands for
        memory at the peer."""
        self._timers: list[tuple[float, int]] = []
        self._scheduled: dict[int, float] = {}

    # --- peers -------------------------------------------------------------------------------------------------------

    def add_peer(
        self, epoch: int, instance: str, liveness_s: float, now_s: float, *, own_epoch: int | None = None
    ) -> Peer:
        """An incarnation passed the verdict. LocalProtocolError: it is known or was lost, or there are too many.

        own_epoch: what this side calls itself towards that peer; default: the table's epoch. Two processes that lost
        each other and live meet again under new epochs on both sides, since an epoch that was lost never returns.
        """
        if epoch in self.peers or epoch in self._lost or epoch == 0:
            raise LocalProtocolError("an incarnation comes once", code="epoch_stale", actual=f"{epoch:016x}")
        if len(self.peers) >= self.bounds.peers:
            raise LocalProtocolError("too many peers", code="queue_full", expected=f"<= {self.bounds.peers}")
        peer = Peer(
            epoch=epoch,
            own_epoch=self.epoch if own_epoch is None else own_epoch,
            instance=instance,
            liveness_s=liveness_s,
            alive_until_s=now_s + liveness_s,
        )
        self.peers[epoch] = peer
        self._by_peer[epoch] = set()
        self._graves[epoch] = self._new_grave(liveness_s)
        return peer

    def lose_peer(self, epoch: int, error: ErrorInfo, now_s: float) -> list[Effect]:
        """An incarnation is gone for good: fail its rooms with this cause. Unknown or lost ones: no effect."""
        peer = self.peers.get(epoch)
        if peer is None or peer.lost is not None:
            return []
        peer.lost = bounded(error)
        self._lost[epoch] = None
        while len(self._lost) > _MAX_LOST:
            self._lost.pop(next(iter(self._lost)))
        out: list[Effect] = []
        for room_id in sorted(self._by_peer[epoch]):
            out += self._feed(self.rooms[room_id], PeerLost(error), now_s)
        self._drop_if_idle(peer)
        return out

    def fenced(self, own_epoch: int) -> bool:
        """Whether nothing of the rooms under which this side went by that epoch is written any more: none is left, and
        none ended without its proof. Epochs that never had a room, too.
        """
        return not self._unproven.get(own_epoch) and all(peer.own_epoch != own_epoch for peer in self.peers.values())

    def through_with(self, own_epoch: int) -> bool:
        """The same for a side that ends, whose rooms are all releasable: peers may be there still."""
        unproven = any(peer.unproven for peer in self.peers.values() if peer.own_epoch == own_epoch)
        return not unproven and not self._unproven.get(own_epoch)

    def _drop_if_idle(self, peer: Peer) -> None:
        if peer.lost is not None and not self._by_peer.get(peer.epoch):
            self.peers.pop(peer.epoch, None)
            if peer.unproven:
                self._unproven[peer.own_epoch] = peer.unproven
            self._by_peer.pop(peer.epoch, None)
            grave = self._graves.pop(peer.epoch, None)
            # The epoch never returns, so its floor may go; but its rooms are still used up for everyone else.
            for stone in grave.sweep(_NEVER) if grave is not None else ():
                self._forgotten(stone)
                if not stone.refused:
                    self._bury(0, stone)

    def _peer(self, epoch: int, now_s: float) -> Peer:
        peer = self.peers.get(epoch)
        if peer is None:
            code = "epoch_stale" if epoch in self._lost else "peer_unknown"
            self.counts[code] += 1
            raise RemoteProtocolError("no verdict stands for this incarnation", code=code, actual=f"{epoch:016x}")
        peer.heard(now_s)
        return peer

    def _on_liveness(self, peer: Peer, message: Heartbeat | Draining, now_s: float) -> None:
        if isinstance(message, Draining):
            peer.drain_until_s = now_s + message.deadline_ms / 1000
            for room_id in self._by_peer[peer.epoch]:
                self._schedule(self.rooms[room_id])
        elif message.peer_epoch not in (0, peer.own_epoch):
            self.counts["epoch_stale"] += 1
            raise RemoteProtocolError(
                "the heartbeat is meant for another incarnation",
                code="epoch_stale",
                expected=f"{peer.own_epoch:016x}",
                actual=f"{message.peer_epoch:016x}",
            )

    def _on_refusal(self, peer: Peer, message: Refusal, now_s: float) -> list[Effect]:
        """The peer refused something we sent: it gave us up, or the room it speaks of cannot go on."""
        self.counts["refused_by_peer"] += 1
        if message.error.code in ("epoch_stale", "peer_unknown"):
            return self.lose_peer(peer.epoch, message.error, now_s)
        found = self.rooms.get(message.room)
        if found is None or found.peer is not peer or found.generation != message.generation:
            return []
        return self._feed(found, Fail(message.error), now_s)

    # --- rooms -------------------------------------------------------------------------------------------------------

    def rooms_with(self, epoch: int) -> int:
        """How many rooms are shared with that incarnation."""
        return len(self._by_peer.get(epoch, ()))

    def local(self, room: int, event: LocalEvent, now_s: float) -> list[Effect]:
        """An event of this side for one of its rooms. LocalProtocolError: no such room, or illegal there."""
        found = self.rooms.get(room)
        if found is None:
            raise LocalProtocolError("no such room here", code="room_unknown", actual=room)
        return self._feed(found, event, now_s)

    def fail_all(self, error: ErrorInfo, now_s: float) -> list[Effect]:
        """Fail every room that has not ended, as a worker does whose drain deadline passed."""
        out: list[Effect] = []
        for room in list(self.rooms.values()):
            out += self._feed(room, Fail(error), now_s)
        return out

    def _feed(self, room: R, event: LocalEvent | Message, now_s: float, peer: Peer | None = None) -> list[Effect]:
        out = room.handle(event, now_s, peer)
        if room.settled:
            self._retire(room, now_s)
        else:
            self._track(room)
            self._schedule(room)
        return out

    def _track(self, room: R) -> None:
        if room.peer is not None:
            self._by_peer[room.peer.epoch].add(room.room)

    def _retire(self, room: R, now_s: float) -> None:
        del self.rooms[room.room]
        self._scheduled.pop(room.room, None)
        epoch, proven = room.peer.epoch if room.peer is not None else 0, self._proven(room)
        if room.peer is not None:
            self._by_peer[epoch].discard(room.room)
            if not proven:
                room.peer.unproven.add(room.generation)
        self._bury(
            epoch,
            Tombstone(
                room=room.room,
                generation=room.generation,
                state=room.now_in.value,
                error=bounded(room.error),
                proven=proven,
                refused=False,
                expires_s=now_s + self._grave(epoch).keep_s,
            ),
        )
        if room.peer is not None:
            self._drop_if_idle(room.peer)

    def _proven(self, room: R) -> bool:
        return True

    def _new_grave(self, liveness_s: float) -> Tombstones:
        return Tombstones(self.bounds.tombstones_per_peer, max(self.bounds.tombstone_s, liveness_s))

    def _grave(self, epoch: int) -> Tombstones:
        found = self._graves.get(epoch)
        if found is None:
            found = self._graves[epoch] = self._new_grave(0.0)
        return found

    def _bury(self, epoch: int, stone: Tombstone) -> None:
        for gone in self._grave(epoch).add(stone):
            self._forgotten(gone)

    def _forgotten(self, stone: Tombstone) -> None:
        """A tombstone is gone; tables with an index of their own drop it there."""

    # --- time --------------------------------------------------------------------------------------------------------

    def _schedule(self, room: R) -> None:
        due_s = room.next_timer_s()
        if due_s is not None and due_s < self._scheduled.get(room.room, _NEVER):
            self._scheduled[room.room] = due_s
            heapq.heappush(self._timers, (due_s, room.room))
            if len(self._timers) > 4 * len(self.rooms) + 1_024:
                self._timers = [(due_s, room_id) for room_id, due_s in self._scheduled.items()]
                heapq.heapify(self._timers)

    def tick(self, now_s: float) -> list[Effect]:
        """Time passed: fire every timer that is due, give up silent peers, forget old tombstones."""
        out: list[Effect] = []
        for peer in [peer for peer in self.peers.values() if peer.lost is None and peer.deadline_s <= now_s]:
            out += self.lose_peer(peer.epoch, peer.silence(now_s), now_s)
        due: list[R] = []
        while self._timers and self._timers[0][0] <= now_s:
            due_s, room_id = heapq.heappop(self._timers)
            if self._scheduled.get(room_id) != due_s:
                continue
            del self._scheduled[room_id]
            due.append(self.rooms[room_id])
        for room in due:
            timer_s = room.next_timer_s()
            if timer_s is not None and timer_s <= now_s:
                out += self._feed(room, TimerFired(), now_s)
            else:  # it was put off meanwhile, by a heartbeat or a message
                self._schedule(room)
        for grave in self._graves.values():
            for stone in grave.sweep(now_s):
                self._forgotten(stone)
        return out

    def next_timer_s(self) -> float | None:
        """When `tick` is due next; None while nothing waits. It may come out early, never late."""
        times = [self._timers[0][0]] if self._timers else []
        times += [peer.deadline_s for peer in self.peers.values() if peer.lost is None]
        times += [expiry for grave in self._graves.values() if (expiry := grave.next_expiry_s()) is not None]
        return min(times, default=None)

    # --- audit -------------------------------------------------------------------------------------------------------

    def states(self) -> Counter[str]:
        """How many rooms are in each state; ended ones that wait for a fence count as "quarantined"."""
        return Counter("quarantined" if room.state.terminal else room.now_in.value for room in self.rooms.values())

    def check_integrity(self) -> None:
        """Raise LocalProtocolError (`internal`) when the tables contradict themselves. For tests and dumps."""
        problems: list[str] = []
        for key, room in self.rooms.items():
            timer_s = room.next_timer_s()
            if key != room.room or room.settled:
                problems.append(f"room {key} is misplaced or should be gone")
            if (room.now_in, room.state.memory) in JOINT[self.role]:
                problems.append(f"room {key} did not take its joint move")
            if timer_s is None or timer_s == _NEVER or self._scheduled.get(key, _NEVER) > timer_s:
                problems.append(f"room {key} waits in {room.now_in.value} without a timer")
            if room.peer is not None and key not in self._by_peer.get(room.peer.epoch, ()):
                problems.append(f"room {key} is not on its peer's list")
        listed = [room_id for rooms in self._by_peer.values() for room_id in rooms]
        if len(listed) != len(set(listed)) or not set(listed) <= set(self.rooms):
            problems.append("a peer lists a room twice, or one that is gone")
        if set(self._scheduled) != set(self.rooms):
            problems.append("timers and rooms differ")
        if any(len(grave) > grave.limit for grave in self._graves.values()):
            problems.append("too many tombstones")
        if not set(self.peers) == set(self._by_peer) == set(self._graves) - {0}:
            problems.append("peers, their rooms and their tombstones differ")
        if problems:
            raise LocalProtocolError("; ".join(problems[:8]), code="internal", where="room table")
