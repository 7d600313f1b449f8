"""What keeps the HTTP servers of workers and routers alive when strangers hold connections: fewer than the process has
descriptors, those that wait for nothing first to go, a time for a request's head, and a log that cannot be filled.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
from collections import OrderedDict
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_pd.observe import RateLimited
from sglang_pd.protocol.errors import CODES

log = logging.getLogger("sglang_pd.http")

BACKLOG: Final = 2048
"""Connections that the kernel completes before they are accepted."""
ACCEPTS: Final = 16
"""uvicorn's `backlog`: connections accepted in one turn of the loop. asyncio tries as often when descriptors are out,
and reports each failure. It is the listener's backlog too, so whoever starts a server listens again with `BACKLOG`."""
OWN_DESCRIPTORS: Final = 256
"""Left to everything that is no client: peers, memory, files, logs."""
HEAD_S: Final = 30.0
"""Seconds for a request's line and headers, from the connection or the last answer."""
SWEEP_S: Final = 1.0

OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})


def most_connections(each: int) -> int:
    """Connections that this process has descriptors for. each: descriptors that a request may take in all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 2**20
    return max((soft - min(OWN_DESCRIPTORS, soft // 4)) // each, 1)


class Seldom(logging.Filter):
    """For `uvicorn.error`, whose warnings any stranger's bytes bring about: each is let through once in a while."""

    EVERY_S: Final = 10.0

    def __init__(self) -> None:
        super().__init__()
        self._said_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        if record.levelno != logging.WARNING:
            return True
        last_s = self._said_s.get(record.msg)
        if last_s is not None and record.created - last_s < self.EVERY_S:
            return False
        self._said_s[record.msg] = record.created  # uvicorn's own texts: a few
        return True


class Connections:
    """The clients' connections of one server. most: at a time. The one that has waited longest for its client makes
    room for a new one; where all have a request that runs, the new one is 429. In one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: OrderedDict[Connection, None] = OrderedDict()
        """The one that was heard of longest ago first."""
        self._sweeping = False
        self._say = RateLimited(log)

    def __len__(self) -> int:
        return len(self._held)

    def guard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep this process's log from being filled by what strangers do to its server."""
        loop.set_exception_handler(self.failed)
        logger = logging.getLogger("uvicorn.error")
        if not any(isinstance(known, Seldom) for known in logger.filters):
            logger.addFilter(Seldom())

    def protocol(self, **server: Any) -> Connection:
        """For `uvicorn.Config(http=...)`. It is h11: the other parsers bound no header."""
        return Connection(self, **server)

    def enter(self, connection: Connection) -> bool:
        """A new one. False where there is no place for it."""
        if len(self._held) >= self.most and not self._make_room():
            self._say.warning("full", "all %d connections are in use (ulimit -n bounds them); refusing", self.most)
            return False
        self._held[connection] = None
        if not self._sweeping:
            self._sweeping = True
            connection.loop.call_later(SWEEP_S, self._sweep, connection.loop)
        return True

    def heard(self, connection: Connection) -> None:
        """Its client sent something."""
        if connection in self._held:
            self._held.move_to_end(connection)

    def leave(self, connection: Connection) -> None:
        """It is gone. Harmless again."""
        self._held.pop(connection, None)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler: descriptors that are out are said once in a while, and idle ones closed."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
            self._say.warning("descriptors", "no descriptor is free for a connection (ulimit -n): %s", error.strerror)
            self._make_room()
            return
        loop.default_exception_handler(context)

    def _make_room(self) -> bool:
        idle = next((connection for connection in self._held if connection.waits_for_client), None)
        if idle is None:
            return False
        self._say.warning("evicted", "of %d connections, the one idle longest is closed for a new one", len(self._held))
        self._close(idle)
        return True

    def _close(self, connection: Connection) -> None:
        self.leave(connection)
        connection.transport.close()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        late_s = loop.time() - HEAD_S
        for connection in [held for held in self._held if held.waits_for_head and held.since_s < late_s]:
            self._close(connection)
        self._sweeping = bool(self._held)
        if self._sweeping:
            loop.call_later(SWEEP_S, self._sweep, loop)


class Connection(H11Protocol):
    """One connection: uvicorn's, which knows its place among the others. since_s: when its client's turn began."""

    def __init__(self, held: Connections, **server: Any) -> None:
        super().__init__(**server)
        self._held = held
        self.since_s = self.loop.time()

    @property
    def waits_for_head(self) -> bool:
        """No request runs: the client has not sent one yet, or not another one."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """The same, or a request whose body is not all here."""
        return self.waits_for_head or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        if self._held.enter(self):
            super().connection_made(transport)
            return
        self.transport = transport
        transport.write(REFUSAL)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._held.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._held.heard(self)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """uvicorn's: the client's turn begins again."""
        self.since_s = self.loop.time()
        super().on_response_complete()


def _refusal() -> bytes:
    code = "queue_full"
    error = {"type": "rate_limit_error", "code": code, "message": "all connections are in use", "retryable": True}
    body = json.dumps({"error": error}).encode()
    lines = [
        f"HTTP/1.1 {CODES[code].http_status} Too Many Requests",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "retry-after: 1",
        "connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


REFUSAL: Final = _refusal()
