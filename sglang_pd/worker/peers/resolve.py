"""Host names to numbers, beside the control thread: libzmq would resolve them on the one thread that moves every
message, and a name server that does not answer would silence all peers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOOKUP_S: Final = 5.0
"""Who waits for a name is told so after so long; the lookup itself cannot be stopped."""
FRESH_S: Final = 30.0
FAILED_S: Final = 5.0
"""How old an answer, or the lack of one, may be before the name is looked up again. The old answer holds meanwhile."""
MAX_THREADS: Final = 4
MAX_NAMES: Final = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """Numeric addresses, best first; or none, and why."""

    addresses: tuple[str, ...] = ()
    error: str = ""


@dataclass(slots=True)
class _Name:
    outcome: Outcome | None = None
    answered_s: float = 0.0
    asked_s: float | None = None


def look_up(host: str) -> Outcome:
    """Ask the system, for as long as it takes."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Outcome(error=str(error))
    return Outcome(tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)))


class Resolver:
    """A bounded cache of names, and a few threads that fill it. `ask` belongs to one thread.

    ring: called by those threads when something was found out.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._names: dict[str, _Name] = {}
        self._lock = threading.Lock()
        self._queue: deque[str] = deque()
        self._threads = 0
        self._done: deque[tuple[str, Outcome]] = deque()

    def ask(self, host: str) -> Outcome | None:
        """What is known of a name; None: not yet, ask again when it rang, or a little later."""
        now_s = time.monotonic()
        self._absorb(now_s)
        name = self._names.get(host)
        if name is None:
            if len(self._names) >= MAX_NAMES and not self._evict():
                return Outcome(error="too many host names wait for their addresses")
            name = self._names[host] = _Name()
        if name.asked_s is None:
            held_s = FAILED_S if name.outcome is None or name.outcome.error else FRESH_S
            if name.outcome is not None and now_s < name.answered_s + held_s:
                return name.outcome
            name.asked_s = now_s
            self._start(host)
        if name.outcome is not None and name.outcome.addresses:
            return name.outcome
        if now_s >= name.asked_s + LOOKUP_S:
            return Outcome(error=f"no name server answered within {LOOKUP_S:g} s")
        return None

    def _evict(self) -> bool:
        """Make room by a name that nothing is being looked up for."""
        idle = next((host for host, name in self._names.items() if name.asked_s is None), None)
        if idle is not None:
            del self._names[idle]
        return idle is not None

    def _absorb(self, now_s: float) -> None:
        while self._done:
            host, outcome = self._done.popleft()
            name = self._names[host]
            name.asked_s, name.answered_s = None, now_s
            if outcome.addresses or name.outcome is None or not name.outcome.addresses:
                name.outcome = outcome  # else the addresses it had serve on: a peer is known by what it says there

    def _start(self, host: str) -> None:
        with self._lock:
            self._queue.append(host)
            if self._threads < MAX_THREADS:
                try:
                    threading.Thread(target=self._run, name="pd-resolve", daemon=True).start()
                    self._threads += 1
                except RuntimeError as error:  # the system has no thread left just now
                    if not self._threads:
                        self._queue.remove(host)
                        self._done.append((host, Outcome(error=str(error))))

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                host = self._queue.popleft()
            self._done.append((host, look_up(host)))
            self._ring()
