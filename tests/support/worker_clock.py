"""A worker process whose monotonic clock is its own: imported before anything keeps a reference to the real one."""

from __future__ import annotations

import os
import time

real_monotonic = time.monotonic
OFFSET_S = float(os.environ.get("TEST_CLOCK_OFFSET_S", "0"))
DRIFT = float(os.environ.get("TEST_CLOCK_DRIFT", "1"))


def _other_clock() -> float:
    return real_monotonic() * DRIFT + OFFSET_S


if OFFSET_S or DRIFT != 1:
    time.monotonic = _other_clock
