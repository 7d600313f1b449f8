"""Ports at which peers may still write: those of engines of this process that have ended.

A writer that was stopped, or that still has the description of an engine that a revocation closed, connects to the port
that it knows; the memory is where it was, or another backend of this process has its own there (measured with both
libraries). So for `HOLD_S` nothing of this process listens there any more; a process that comes after it shuns them by
itself (`library.lives`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sglang_pd.backends.library.lives import HOLD_S, lives
from sglang_pd.backends.library.sockets import reserve_all
from sglang_pd.backends.shortage import is_shortage, no_descriptor
from sglang_pd.protocol.errors import BackendUnavailable

T = TypeVar("T")

_STARTS = 256

_lock = threading.Lock()
_former: dict[int, float] = {}
"""Port -> until when it is nobody's, on the monotonic clock."""
_held: dict[int, int] = {}
"""Port -> descriptor of the socket that is bound to it."""


def former() -> frozenset[int]:
    """What no engine may listen on."""
    now = time.monotonic()
    with _lock:
        for port in [port for port, until in _former.items() if now > until]:
            del _former[port]
            held = _held.pop(port, None)
            if held is not None:
                os.close(held)
        return frozenset(_former)


def retire(ports: frozenset[int]) -> None:
    """The engine there is about to end: no other one may have them."""
    with _lock:
        _former.update(dict.fromkeys(ports, time.monotonic() + HOLD_S))


def hold(ports: frozenset[int]) -> None:
    """It has ended: keep the ports from everything else in this process and on this host. Raises `OSError` where no
    descriptor is free; held are none then.
    """
    with _lock:
        _held.update((one.getsockname()[1], one.detach()) for one in reserve_all(ports - _held.keys()))


class Exposure:
    """Whether peers of a backend know where its engine listens. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ports: frozenset[int] = frozenset()
        self.exposed = False
        """Somebody was admitted."""

    def admit(self) -> None:
        """Peers may know it from now on. Raises `BackendUnavailable` where that cannot be kept for who comes later."""
        with self._lock:
            lives.keep_ports(self._ports)
            self.exposed = True

    def listens(self, ports: frozenset[int]) -> None:
        """The engine listens there, and peers will be told if somebody was admitted. Raises as `admit`."""
        with self._lock:
            if self.exposed:
                lives.keep_ports(ports)
            self._ports = ports

    def leaves(self, ports: frozenset[int]) -> None:
        """The engine is about to end: nobody of this process may have its ports, if peers know them."""
        if self.exposed:
            retire(ports)

    def left(self, ports: frozenset[int]) -> None:
        """It has ended. Without a descriptor other libraries may listen there; engines do not."""
        if self.exposed:
            with contextlib.suppress(OSError):
                hold(ports)


def start_elsewhere(start: Callable[[], T], ports_of: Callable[[T], frozenset[int]], stop: Callable[[T], object]) -> T:
    """What `start` makes, once it listens nowhere where a former engine of this process or another worker did.

    The library takes any port that is free: those that it shall not have are taken as it finds them. Raises
    `BackendUnavailable` where it finds no others.
    """
    shunned: frozenset[int] = frozenset()
    taken: list[socket.socket] = []
    try:
        for _ in range(_STARTS):
            made = start()
            # Only now: who was there and let go of a port has said before that it was there.
            shunned = former() | lives.former_ports()
            clash = ports_of(made) & shunned
            if not clash:
                return made
            stop(made)
            taken += reserve_all(clash)
        raise BackendUnavailable("the library goes on finding the same ports")
    except BackendUnavailable as error:
        if not taken:
            raise
        raise BackendUnavailable(
            "the library finds no port that peers of an earlier engine do not still know",
            where="$.network.ports",
            expected="ports that no worker had which peers wrote to and which ended within the hour",
            actual=f"{len(shunned)} such ports; {error.message}",
            hint="Give it a wider range: each start of a worker that peers write to takes one or two",
        ) from error
    except OSError as error:
        if is_shortage(error):
            raise no_descriptor(error, "a port that is not to be used") from error
        raise
    finally:
        for one in taken:
            one.close()
