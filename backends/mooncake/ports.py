"""Ports at which peers may still write: those of engines that have ended, for as long as this process lives.

A stopped writer that wakes up connects again to the port that it knows, with descriptors queued for the memory that was
there; another backend of this process may have its memory at the same addresses by then (measured). Nothing of this
process listens there any more; a process that comes after it shuns them by itself (`library.lives`).
"""

from __future__ import annotations

import socket
import threading

from sglang_pd.backends.library.sockets import reserve_all

_lock = threading.Lock()
_former: set[int] = set()
_held: dict[int, socket.socket] = {}


def former() -> frozenset[int]:
    """What no engine may listen on."""
    with _lock:
        return frozenset(_former)


def retire(ports: frozenset[int]) -> None:
    """The engine there is about to end: no other one may have them."""
    with _lock:
        _former.update(ports)


def hold(ports: frozenset[int]) -> None:
    """It has ended: keep the ports from everything else in this process and on this host. Raises `OSError` where no
    descriptor is free; held are none then.
    """
    with _lock:
        _held.update((one.getsockname()[1], one) for one in reserve_all(ports - _held.keys()))
