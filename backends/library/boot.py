"""Time since boot as the host counts it.

A process in a time namespace is shown another time by its clocks, and /proc shows it the start of every process shifted
alike. What two processes tell each other, or leave in files for each other, has to be in the host's terms.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""Of the clock by which /proc says when a process started."""


def shift_ns() -> int | None:
    """By how many nanoseconds this process is shown a later time since boot than the host counts; None: not known.

    A whole number of clock ticks: by any other the start of a process would be rounded otherwise here than elsewhere.
    Raises `OSError` where no descriptor is free.
    """
    try:
        here, children = (os.stat(f"/proc/self/ns/{name}").st_ino for name in ("time", "time_for_children"))
        if here != children:  # what can be read is of the children's
            return None
        lines = Path("/proc/self/timens_offsets").read_text().splitlines()
        shown = next(line.split()[1:3] for line in lines if line.startswith("boottime"))
        seconds, nanoseconds = map(int, shown)
    except FileNotFoundError:  # a kernel without
        return 0
    except (PermissionError, StopIteration, ValueError):
        return None
    shift = seconds * 1_000_000_000 + nanoseconds
    return shift if shift % TICK_NS == 0 else None


def since_boot_s() -> float | None:
    """Seconds since the host booted; None where that is not known. Raises `OSError` as `shift_ns` does."""
    shift = shift_ns()
    return None if shift is None else (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - shift) / 1e9
