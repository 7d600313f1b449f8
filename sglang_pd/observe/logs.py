"""Logs: levels from the configuration, and a bound on repetition."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_KEYS = 1024
"""Most keys that one `RateLimited` remembers; the one unused for longest goes first."""


def configure_logging(level: str, prefix: str = "") -> None:
    """Send this package's log to standard error. For the owner of the process; the library never calls it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(name)s: %(message)s"))
    root = logging.getLogger("sglang_pd")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


@dataclass
class _Window:
    since_s: float
    said: int = 0
    held: int = 0


class RateLimited:
    """Logs at most `burst` messages a key in each `interval_s` seconds, then says how many it held back.

    The first message of a key is never held back. Keys should be few; any number of them costs bounded memory.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = 30.0,
        burst: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._interval_s, self._burst, self._clock = logger, interval_s, burst, clock
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def log(self, level: int, key: str, message: str, *values: object) -> bool:
        """Log `message % values` unless `key` has said enough lately. Returns whether it was said."""
        now_s = self._clock()
        window = self._windows.get(key)
        if window is None or now_s - window.since_s >= self._interval_s:
            held = window.held if window is not None else 0
            window = self._windows[key] = _Window(now_s)
            if held:
                self._logger.log(level, "%s: %d more like the last one were not shown", key, held)
        self._windows.move_to_end(key)
        while len(self._windows) > MAX_KEYS:
            self._windows.popitem(last=False)
        if window.said >= self._burst:
            window.held += 1
            return False
        window.said += 1
        self._logger.log(level, message, *values)
        return True

    def warning(self, key: str, message: str, *values: object) -> bool:
        """`log` at level WARNING."""
        return self.log(logging.WARNING, key, message, *values)
