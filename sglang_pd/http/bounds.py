"""Bounds on HTTP bodies, at a worker's server and at a router: each one's bytes and time, and all of them together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio

from sglang_pd.protocol.errors import RoomError

FREE_BYTES: Final = 64 * 1024
"""Bytes of each body that are not counted: whoever fills the rest with large bodies keeps no ordinary request out."""
IDLE_S: Final = 30.0
"""Seconds between two pieces of a body; a client that is slower would hold a place for nothing."""
WHOLE_S: Final = 120.0
"""Seconds for a whole body: a client that sends a byte now and then holds its place no longer."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


class BodyLate(RoomError):
    """The body did not come in time."""


class Bodies:
    """Reads request bodies. most_bytes: of one, which `limits.max_body_bytes` says. held_bytes: of all that are held at
    a time, without the first `FREE_BYTES` of each. In one event loop."""

    def __init__(self, most_bytes: int, held_bytes: int) -> None:
        self.most_bytes, self._most_held_bytes = most_bytes, max(held_bytes, most_bytes)
        self.held_bytes = 0

    @asynccontextmanager
    async def taken(self, scope: Mapping[str, Any], receive: Receive) -> AsyncIterator[bytes]:
        """The whole body; it counts as held to the end of the block.

        Raises `RoomError`: `request_too_large` (413), `pool_exhausted` (503) where too many bytes are held, `BodyLate`;
        and `ClientGone`.
        """
        held = 0
        try:
            declared = dict(scope["headers"]).get(b"content-length", b"")
            if declared.isdigit():
                self._check(int(declared[:20]), held)
            pieces, size, more, end_s = [], 0, True, time.monotonic() + WHOLE_S
            while more:
                piece, more = await _piece(receive, end_s)
                size += len(piece)
                self._check(size, held)
                counted = max(0, size - FREE_BYTES)
                self.held_bytes += counted - held
                held = counted
                pieces.append(piece)
            body = b"".join(pieces)
            pieces.clear()
            yield body
        finally:
            self.held_bytes -= held

    def _check(self, size: int, held: int) -> None:
        if size > self.most_bytes:
            raise RoomError(
                "the body is too large",
                code="request_too_large",
                where="body",
                expected=f"at most limits.max_body_bytes = {self.most_bytes}",
                actual=f"{size} bytes" if size < 2**63 else "more",
            )
        if size > FREE_BYTES and self.held_bytes - held + size - FREE_BYTES > self._most_held_bytes:
            raise RoomError(
                "too many bytes of request bodies are held at once",
                code="pool_exhausted",
                where="body",
                expected=f"at most {self._most_held_bytes} bytes",
                actual=f"{self.held_bytes} bytes, and this one",
            )


async def _piece(receive: Receive, end_s: float) -> tuple[bytes, bool]:
    """The next piece, and whether another one follows."""
    message = None
    with anyio.move_on_after(max(min(IDLE_S, end_s - time.monotonic()), 0)):
        message = await receive()
    if message is None:
        raise BodyLate(
            "the request's body does not come",
            code="request_rejected",
            where="body",
            expected=f"a piece within {IDLE_S:g} s, the whole within {WHOLE_S:g} s",
        )
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)
