"""Whether this worker serves. It is not ready while work of its own waits and nothing moves, however well its process
feels. What waits for somebody else (a computed room for the decode that opens it, a decode's room for prefill) says
nothing about it: one client that sends half a request would take it, and the whole service, out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_pd.observe.stages import Nanoseconds


class Condition(Enum):
    """What to tell a load balancer. Only READY is ready."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class HealthState:
    """The worker's condition, why, and for how many seconds nothing has moved while own work waited (0: it moves)."""

    condition: Condition
    reason: str
    idle_s: float

    @property
    def is_ready(self) -> bool:
        """Whether new requests should come here."""
        return self.condition is Condition.READY


class Health:
    """Fed by the worker: work that waits, and progress. Draining wins over stalled, stalled over ready."""

    def __init__(self, stall_s: float, clock: Nanoseconds) -> None:
        self._stall_ns, self._clock = int(stall_s * 1e9), clock
        self._waiting = 0
        self._since_ns = clock()
        self._is_ready = False
        self._draining = ""

    def ready(self) -> None:
        """The worker has started."""
        self._is_ready = True

    def drain(self, reason: str) -> None:
        """The worker stops taking rooms."""
        self._draining = self._draining or reason or "asked to"

    def waiting(self, work: int) -> None:
        """Requests and rooms that this worker could move. The stall clock starts when work first waits."""
        if work and not self._waiting:
            self._since_ns = self._clock()
        self._waiting = work

    def progress(self) -> None:
        """Something moved: a stage, bytes, an end."""
        self._since_ns = self._clock()

    def state(self) -> HealthState:
        """The condition now."""
        idle_ns = max(self._clock() - self._since_ns, 0) if self._waiting else 0
        idle_s = idle_ns / 1e9
        if self._draining:
            return HealthState(Condition.DRAINING, self._draining, idle_s)
        if not self._is_ready:
            return HealthState(Condition.STARTING, "not started yet", idle_s)
        if self._waiting and idle_ns >= self._stall_ns:
            reason = f"{self._waiting} requests and rooms wait for this worker and nothing has moved for {idle_s:.1f} s"
            return HealthState(Condition.STALLED, reason, idle_s)
        return HealthState(Condition.READY, "", idle_s)
