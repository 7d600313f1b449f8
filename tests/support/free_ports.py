"""Ports of this host that nobody has."""

from __future__ import annotations

import socket


def free_range(count: int) -> int:
    """The first of `count` free ports in a row."""
    for low in range(30_000, 60_000, count):
        held = []
        try:
            for port in range(low, low + count):
                held.append(socket.socket())
                held[-1].bind(("0.0.0.0", port))
            return low
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise AssertionError("no free ports")
