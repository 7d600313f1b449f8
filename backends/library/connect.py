"""Connecting through a library that may take long: on a thread of its own, while the owner serves others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from sglang_pd.backends.base import Connecting, Peer
from sglang_pd.backends.home import Home
from sglang_pd.backends.shortage import start_thread
from sglang_pd.protocol.errors import TransferError

T = TypeVar("T")


class ThreadedConnecting(Connecting, Generic[T]):
    """What `reach` finds on a thread becomes a peer on the owner's.

    reach: the slow part; raises `PdError`. finish: by the owner, from what was found. abandon: for what was found when
    nobody wants it any more; from either thread. news: from the thread, when there is something to poll for.
    """

    def __init__(
        self,
        reach: Callable[[], T],
        finish: Callable[[T], Peer],
        abandon: Callable[[T], None],
        news: Callable[[], None],
    ) -> None:
        self._reach, self._finish, self._abandon, self._news = reach, finish, abandon, news
        self._home = Home("the connection", "connect")
        self._lock = threading.Lock()
        self._found: list[T] = []
        self._failed: Exception | None = None
        self._cancelled = False
        self._within_s, self._until_s, self._where = float("inf"), float("inf"), ""
        self._peer: Peer | None = None

    def start(self, name: str, *, within_s: float = float("inf"), where: str = "") -> ThreadedConnecting[T]:
        """Begin, on a thread of that name. After `within_s` seconds the owner waits no longer: `peer_lost`.

        Raises `BackendUnavailable` where the system has no thread.
        """
        self._within_s, self._until_s, self._where = within_s, time.monotonic() + within_s, where
        start_thread(self._run, name, where or "connect")
        return self

    def _run(self) -> None:
        try:
            found = self._reach()
        except Exception as error:
            self._failed = error
        else:
            with self._lock:
                unwanted = self._cancelled
                if not unwanted:
                    self._found.append(found)
            if unwanted:
                self._abandon(found)
                return
        self._news()

    def poll(self) -> Peer | None:
        """See `Connecting`."""
        self._home.check()
        if self._peer is None and self._failed is None:
            if self._found:
                self._peer = self._finish(self._found[0])
            elif time.monotonic() > self._until_s:
                self.cancel()
                self._failed = self._failed or TransferError(
                    "the peer's library did not answer in time",
                    code="peer_lost",
                    where=self._where,
                    expected=f"within {self._within_s:g} s",
                )
        if self._failed is not None:
            raise self._failed
        return self._peer

    def cancel(self) -> None:
        """See `Connecting`. The thread goes on until the library answers."""
        if not self._home.here:
            return  # it is the parent's
        with self._lock:
            first, self._cancelled = not self._cancelled, True
            found = self._found[0] if self._found and self._peer is None else None
            self._found = []
        if first and found is not None:
            self._abandon(found)
