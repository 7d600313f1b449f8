"""What other threads ask of the engine's thread, and what that thread sleeps on until they do."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_pd.backends.nixl.link import Link
from sglang_pd.protocol.errors import TransferError

CALL_S = 120.0
"""Longest wait in seconds for a call into the thread: at start (registration), and by threads that connect. An owner
that serves others makes none."""


@dataclass(slots=True)
class Call:
    """A call into the thread. `awaited`: somebody waits for its answer, and is told what it raised."""

    function: Callable[[], Any]
    awaited: bool = True
    _done: threading.Event = field(default_factory=threading.Event)
    _result: Any = None
    _error: Exception | None = None

    def run(self) -> Exception | None:
        """Carry it out, in the thread. Returns what it raised where nobody else is told."""
        try:
            self._result = self.function()
        except Exception as error:
            self._error = error
        self.function = nothing
        self._done.set()
        return None if self.awaited else self._error

    def refuse(self, error: Exception) -> None:
        """It is not carried out."""
        self._error = error
        self._done.set()

    def answer(self) -> Any:
        """Wait for it, in another thread. Raises what it raised, or `TransferError` after `CALL_S` seconds."""
        if not self._done.wait(CALL_S):
            raise TransferError(f"no answer within {CALL_S:g} s", code="transfer_timeout", where="nixl's thread")
        if self._error is not None:
            raise self._error
        return self._result


class Bell:
    """Wakes the thread: somebody rings, or a process that is watched for a link ends. All but `ring` is its own."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self.fd, select.POLLIN)
        self._watching: dict[int, Link] = {}

    def ring(self) -> None:
        """End the sleep, from any thread."""
        os.eventfd_write(self.fd, 1)

    def sleep(self, pause_ms: int | None) -> list[Link]:
        """Sleep until the pause is over or something happens. Returns the links whose watch has ended."""
        ended = []
        for fd, _ in self._poller.poll(pause_ms):
            if fd == self.fd:
                os.eventfd_read(fd)
            else:
                self._poller.unregister(fd)
                ended.append(self._watching.pop(fd))
        return ended

    def watch(self, link: Link) -> None:
        """Wake when that link's process ends."""
        if link.watch.fd >= 0:
            self._watching[link.watch.fd] = link
            self._poller.register(link.watch.fd, select.POLLIN)

    def unwatch(self, link: Link) -> None:
        """No longer, and give its descriptor back."""
        if self._watching.pop(link.watch.fd, None) is not None:
            self._poller.unregister(link.watch.fd)
        link.watch.close()


def nothing() -> None:
    """A call that only wakes the thread."""
