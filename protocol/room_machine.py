"""What both machines of a room share: judging an event, ending once with the first cause, settling the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.messages import Message, RoomMessage, Writer
from sglang_pd.protocol.peers import Peer
from sglang_pd.protocol.room import Kind, Limits, Memory, Role, RoomState, State, Trigger
from sglang_pd.protocol.room_events import Effect, Ended, LocalEvent, Releasable, Send

Handler = Callable[[Any, Any, float], None]
"""A method that carries out one judged event at a given time; it raises before it changes anything."""


class RoomMachine:
    """One room on one side. `handle` takes an event or a message and returns the effects to carry out, in order.

    A refused event (LocalProtocolError: this side's fault; RemoteProtocolError: the peer's) changes nothing. All times
    are seconds of one monotonic clock of this side, given by the caller and never going back.
    """

    role: ClassVar[Role]
    HANDLERS: ClassVar[dict[type[Any], tuple[Trigger, Handler]]]
    """Event or message class -> the trigger that must be legal, and what to do."""

    def __init__(self, room: int, generation: int, peer: Peer | None, limits: Limits, now_s: float) -> None:
        self.room = room
        self.generation = generation
        self.peer = peer
        self.limits = limits
        self.state = RoomState(self.role)
        self.error: ErrorInfo | None = None
        self.created_s = now_s
        self.unfenced: set[Writer] = set()
        """Writers without a fence yet; meaningful once the memory is quarantined."""
        self._alarm_s = float("inf")
        self._released = False
        self._sender: Peer | None = None
        self._out: list[Effect] = []

    def handle(self, event: LocalEvent | Message, now_s: float, peer: Peer | None = None) -> list[Effect]:
        """Take one event. `peer`: who sent it, needed for messages that may claim a room without a peer."""
        entry = self.HANDLERS.get(type(event))
        if entry is None:
            raise LocalProtocolError(f"a {self.role.value} room knows no {type(event).__name__}", where="room")
        trigger, handler = entry
        self._judge(trigger, event, peer)
        self._out = []
        self._sender = peer if peer is not None else self.peer
        handler(self, event, now_s)
        self._settle()
        out, self._out = self._out, []
        return out

    def _judge(self, trigger: Trigger, event: LocalEvent | Message, peer: Peer | None) -> None:
        if isinstance(event, RoomMessage):
            key = (event.room, event.generation)
            if event.room != self.room or (self.generation and key != (self.room, self.generation)):
                raise RemoteProtocolError(
                    "the message is of another room or generation",
                    code="room_unknown",
                    expected=f"{self.room}/{self.generation}",
                    actual=f"{event.room}/{event.generation}",
                )
            if peer is not None and self.peer is not None and peer.epoch != self.peer.epoch:
                raise RemoteProtocolError(
                    "the message is of another incarnation than the room's peer",
                    code="epoch_stale",
                    expected=f"{self.peer.epoch:016x}",
                    actual=f"{peer.epoch:016x}",
                )
        try:
            self.state.require(trigger)
        except LocalProtocolError as error:
            if trigger.kind is not Kind.REMOTE:
                raise
            raise RemoteProtocolError(
                error.message, code=error.code, where=error.where, expected=error.expected, actual=error.actual
            ) from error

    # --- what both do ------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self.peer is not None:
            self._out.append(Send(self.peer.epoch, message))

    def _go(self, trigger: Trigger) -> None:
        self.state.process(trigger)

    def _finish(self, trigger: Trigger, error: ErrorInfo | None, now_s: float) -> None:
        """Enter the terminal state, once, with its cause."""
        self._go(trigger)
        self.error = error
        self._alarm_s = now_s + self.limits.fence_alarm_s
        self._out.append(Ended(self.room, self.generation, self.state.state.value, error))

    def _fence_proven(self) -> bool:
        return not self.unfenced

    def _settle(self) -> None:
        if self.state.memory is Memory.QUARANTINED and self._fence_proven():
            self.state.fenced()
        if self.state.memory is Memory.RELEASABLE and not self._released:
            self._released = True
            self._out.append(Releasable(self.room, self.generation))

    def _overdue(self, now_s: float) -> bool:
        """True when the quarantine alarm is due; winds it up again."""
        if self.state.memory is not Memory.QUARANTINED or now_s < self._alarm_s:
            return False
        self._alarm_s = now_s + self.limits.fence_alarm_s
        return True

    # --- what the owner asks -----------------------------------------------------------------------------------------

    @property
    def now_in(self) -> State:
        """The room machine's state."""
        return self.state.state

    @property
    def settled(self) -> bool:
        """True when the room can be forgotten: ended, and its memory releasable."""
        return self.state.settled

    def deadline_s(self) -> float | None:
        """When the wait ends (a quarantine: alarms) if nothing is heard; None when nothing is waited for."""
        raise NotImplementedError

    def next_timer_s(self) -> float | None:
        """When `TimerFired` is due next, at the latest the deadline; None when nothing is waited for."""
        raise NotImplementedError
