"""What all routes share: bounded bodies, streams that notice a client that went away, errors, tokens, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_pd.http.bounds import ClientGone
from sglang_pd.http.terms import EPOCH_HEADER
from sglang_pd.protocol.errors import PdError, RoomError
from sglang_pd.server.errors import Failure

log = logging.getLogger("sglang_pd.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""What probes and scrapers read carries no token."""
MAX_SHOWN = 200
"""Characters of a path that are logged."""
Value = TypeVar("Value")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value:
    """Do `work` unless the client goes away first: then it is cancelled. Raises `ClientGone`."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})  # raises nothing of theirs, and lets our own cancellation through


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The first one is awaited before the status is sent, so that an early failure has its own.

    events: payloads without `data:`; it is closed when the client goes away, at any moment.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], failed: Callable[[Failure], dict[str, Any]]) -> None:
        self.background = None
        self.status_code = 200
        self._events = events
        self._failed = failed
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when nobody reads."""
        try:
            first = await while_connected(receive, _next(self._events))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._send_all(first, send))
        except ClientGone:
            pass
        finally:
            await _close(self._events)

    async def _send_all(self, first: bytes | None, send: Send) -> None:
        async def event(payload: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + payload + b"\n\n", "more_body": True})

        payload = first
        try:
            while payload is not None:
                await event(payload)
                payload = await _next(self._events)
        except Failure as failure:
            await event(msgspec.json.encode(self._failed(failure)))
        await event(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)


async def _close(events: AsyncIterator[bytes]) -> None:
    close: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
    if close is not None:
        await close()


class Guard:
    """Outermost layer: the bearer token, the epoch a request is meant for, and every error as JSON."""

    def __init__(self, app: ASGIApp, *, leg: str, epoch: str, bearer_token: str) -> None:
        self._app, self._leg, self._epoch, self._token = app, leg, epoch, bearer_token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._token and scope["path"] not in OPEN_PATHS and not self._may(scope):
            error = RoomError(
                "a bearer token is needed", code="unauthorized", where="authorization", expected="Bearer TOKEN"
            )
            await Failure(error).response(self._leg)(scope, receive, send)
            return
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[EPOCH_HEADER] = self._epoch
            await send(message)

        try:
            self._check_epoch(scope)
            await self._app(scope, receive, sending)
        except ClientGone:
            log.info("%s: the client went away", scope["path"][:MAX_SHOWN])
        except Exception as error:
            failure = self._failure(error, scope["path"][:MAX_SHOWN])
            if not started:
                await failure.response(self._leg)(scope, receive, sending)

    def _check_epoch(self, scope: Scope) -> None:
        """A room is pinned to one life of a worker: another one must not take its request. Raises `RoomError`."""
        meant = Headers(scope=scope).get(EPOCH_HEADER, self._epoch)
        if meant.lower() != self._epoch:
            raise RoomError(
                "the request is meant for another incarnation of this worker",
                code="epoch_stale",
                where=EPOCH_HEADER,
                expected=self._epoch,
                actual=meant[:64],
                hint="Ask /server_info for the epoch; a router does so by itself.",
            )

    def _may(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "")
        kind, _, token = given.partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)

    def _failure(self, error: Exception, path: str) -> Failure:
        if isinstance(error, Failure):
            return error
        if isinstance(error, PdError):
            return Failure(error)
        log.error("a defect answering %s", path, exc_info=error)
        return Failure(RoomError(f"{type(error).__name__}: {error}"[:500], code="internal", where=path))
