"""A circuit breaker for one worker: so many failures in a row open it, one success of a trial closes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    """CLOSED: requests go. OPEN: none. HALF_OPEN: one at a time, to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts consecutive failures of one worker, over all requests. Not for threads.

    threshold: failures in a row that open it. open_s: how long before a trial.
    """

    def __init__(self, threshold: int, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._threshold, self._open_s, self._clock = threshold, open_s, clock
        self._until_s: float | None = None
        self._trial: object | None = None
        self.consecutive = 0
        self.opened = 0

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until_s else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may go to the worker now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def begin(self, request: object) -> None:
        """A request goes; in HALF_OPEN it is the trial."""
        if self.state is BreakerState.HALF_OPEN and self._trial is None:
            self._trial = request

    def progress(self, request: object) -> None:
        """The request's answer has begun well: enough of a trial, but no end to a row of failures."""
        if self._trial is request:
            self.reset()

    def success(self, request: object) -> None:
        """The request went well to its end. While not closed only the trial's word counts."""
        if self._until_s is None:
            self.consecutive = 0
        elif self._trial is request:
            self.reset()

    def failure(self, request: object) -> bool:
        """The request failed by the worker's fault. Returns True when this opened the breaker."""
        self.consecutive += 1
        is_trial = self._trial is request
        if is_trial:
            self._trial = None
        if is_trial or (self._until_s is None and self.consecutive >= self._threshold):
            self._until_s = self._clock() + self._open_s
            self.opened += 1
            return True
        return False

    def neutral(self, request: object) -> None:
        """The request ended without telling anything of the worker."""
        if self._trial is request:
            self._trial = None

    def reset(self) -> None:
        """Closed, with nothing held against the worker."""
        self._until_s, self._trial, self.consecutive = None, None, 0
