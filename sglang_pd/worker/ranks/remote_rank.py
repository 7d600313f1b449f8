"""A rank in a process of its own: its agent, and the connection to its instance's control."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from sglang_pd.worker.peers.link import CurveKeys, Link, Party
from sglang_pd.worker.ranks.agent import RankAgent
from sglang_pd.worker.ranks.orders import Alive, AnyReport, Rejoin, Welcome, decode_order, encode

LIVENESS_S: Final = 5.0
"""Until a control says what its own is."""
FIRST_ANSWER_S: Final = 30.0
"""A connection that never answered may still be on its way through the addresses of a name."""


class RemoteRank:
    """What the loop drives in a rank's process: orders in, reports out, a heartbeat that the control answers."""

    def __init__(self, address: str, *, curve: CurveKeys | None, heartbeat_s: float) -> None:
        self.link = Link(curve)
        self._address = address
        self._control = self.link.call(address)
        self._heartbeat_s = heartbeat_s
        self._next_s = float("-inf")
        self._liveness_s = LIVENESS_S
        self._dropped = False
        self._answered = False
        """Something was heard over this connection."""
        self._unanswered = 0
        """Heartbeats since. Time would not do: a process that was stopped did not listen meanwhile."""
        self.agent: RankAgent | None = None

    def report(self, report: AnyReport) -> None:
        """Send a report. Where one is lost, this rank connects anew: no report is repeated by itself."""
        self.link.send(self._control, encode(report))

    def on_frame(self, party: Party, frame: bytes) -> None:
        """One order. What does not decode is dropped and counted."""
        try:
            order = decode_order(frame)
        except (msgspec.MsgspecError, RecursionError):
            self.link.counts["malformed_orders"] += 1
            return
        self._answered, self._unanswered = True, 0
        if self.agent is None:
            return
        if isinstance(order, Welcome):
            self._liveness_s = order.liveness_s
            # Another control than it joined takes it for its own: to that one, too, it must introduce itself.
            self._dropped = self._dropped or order.control_epoch != self.agent.control_epoch
        elif isinstance(order, Rejoin):
            self._dropped = False  # what was reported before is void
            self.agent.rejoin(order.control_epoch)
        else:
            self.agent.order(order)

    def wake(self) -> None:
        """Reports of the last turn may not have left."""
        self._dropped = self._dropped or self._control in self.link.dropped

    def turn(self) -> None:
        """Say that this rank lives."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._heartbeat_s
        try:
            if self._broken:
                self._connect_anew()
        finally:
            self.report(Alive())
            self._unanswered += 1

    @property
    def _broken(self) -> bool:
        """Whether something that was sent there is lost, or what should come back: one direction may stop alone."""
        silent_s = self._unanswered * self._heartbeat_s
        if not self._answered:
            return silent_s > max(FIRST_ANSWER_S, self._liveness_s)
        return self._dropped or (self._unanswered > 1 and silent_s > self._liveness_s)

    def _connect_anew(self) -> None:
        """The control does not know who speaks there, has this rank join again, and both begin anew. Raises `RoomError`
        where no socket is left; the old one stays until the next heartbeat.
        """
        former, self._control = self._control, self.link.call(self._address)
        self.link.hang_up(former)
        self._dropped = self._answered = False
        self._unanswered = 0
        self.link.counts["connected_anew"] += 1

    def next_timer_s(self) -> float | None:
        """When the next heartbeat is due."""
        return self._next_s
