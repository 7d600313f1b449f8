"""The router's HTTP face: an ASGI application over the dispatcher and the fleet."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_pd.http.bounds import Bodies, BodyLate, ClientGone
from sglang_pd.protocol.errors import RoomError
from sglang_pd.router.cutoff import CutOff
from sglang_pd.router.dispatch import Answer, Call, Dispatcher, outcome
from sglang_pd.router.failures import Failure, RequestFailed, own
from sglang_pd.router.request import PATHS
from sglang_pd.router.views import Views

log = logging.getLogger("sglang_pd.router")

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})
"""What probes and scrapers read, at workers too: it needs no token."""


class Completion:
    """The endpoint of one path in `PATHS`: reads the body, dispatches, passes the answer on as fast as the client
    takes it, and ends both legs when the client goes away."""

    def __init__(self, dispatcher: Dispatcher, bodies: Bodies) -> None:
        self._dispatcher, self._bodies = dispatcher, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        arrived_s, path = time.monotonic(), scope["path"]
        result = "failed"
        try:
            with self._dispatcher.admitted():
                failure = await self._serve(scope, receive, send, arrived_s)
            result = outcome(failure)
        except (RequestFailed, RoomError) as error:
            failed = error if isinstance(error, RequestFailed) else refused(error)
            result = outcome(failed.failure)
            await respond(send, failed.failure)
        except ClientGone:
            result = "cancelled"
            self._dispatcher.metrics.add("disconnects_total", path)
        finally:
            metrics = self._dispatcher.metrics
            metrics.add("requests_total", path, result)
            metrics.observe("request_seconds", time.monotonic() - arrived_s, path, result)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, arrived_s: float) -> Failure | None:
        answer: Answer | None = None
        began = False

        async def sending(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        with self._dispatcher.cut_off.scope() as present:
            async with self._bodies.taken(scope, receive) as body:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                watch = asyncio.create_task(_until_gone(receive, present))
                try:
                    answer = await self._dispatcher.dispatch(Call(scope["path"], body, headers, arrived_s))
                    try:
                        return await relay(answer, sending)
                    finally:
                        await answer.close()
                finally:
                    watch.cancel()
        if not self._dispatcher.cut_off.done:
            raise ClientGone
        if answer is None or not began:
            raise CutOff.failure()
        return await end(answer, CutOff.failure(), send)


async def _until_gone(receive: Receive, present: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    present.cancel()


def refused(error: RoomError) -> RequestFailed:
    """A body that was not taken, as a failure of the router's own."""
    failed = own(error.code, error.message, where=error.where, expected=str(error.expected), actual=str(error.actual))
    if isinstance(error, BodyLate):
        return RequestFailed(replace(failed.failure, status=408, retryable=True))
    return failed


async def relay(answer: Answer, send: Send) -> Failure | None:
    """Pass the answer on; returns the failure that ended it, if one did.

    A stream that fails ends with an error event; anything else that fails after its beginning is cut off, which is
    all that HTTP leaves: the client sees an incomplete answer.
    """
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    try:
        while chunk := await answer.next():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except RequestFailed as failed:
        return await end(answer, failed, send)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return None


async def end(answer: Answer, failed: RequestFailed, send: Send) -> Failure:
    """End an answer that has begun and cannot go on."""
    if not answer.is_stream:
        log.warning("an answer was cut off: %s", failed)
        return failed.failure  # without an end: the server drops the connection
    await send({"type": "http.response.body", "body": answer.tail(failed.failure), "more_body": False})
    return failed.failure


async def respond(send: Send, failure: Failure) -> None:
    """Answer with a failure before anything was sent."""
    body = failure.json()
    fields = [("content-type", "application/json"), ("content-length", str(len(body))), *failure.headers()]
    headers = [(name.encode(), value.encode()) for name, value in fields]
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Guard:
    """Lets requests with the right bearer token through, and everybody to `OPEN_PATHS`. Without a token: all."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        scope = at_root(scope)
        if scope["type"] == "http" and self._expected and scope["path"] not in OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                await respond(send, own("unauthorized", "a bearer token is needed", where="authorization").failure)
                return
        await self._app(scope, receive, send)


def at_root(scope: Scope) -> Scope:
    """The scope of a request as if nothing were mounted: paths name endpoints here, metrics and calls to workers."""
    prefix = scope.get("root_path", "").rstrip("/")
    if not prefix or not scope.get("path", "").startswith(f"{prefix}/"):
        return scope
    return {**scope, "path": scope["path"][len(prefix) :], "root_path": ""}


def build_app(
    dispatcher: Dispatcher,
    views: Views,
    running: Callable[[], AbstractAsyncContextManager[None]],
    *,
    bodies: Bodies,
    token: str,
) -> ASGIApp:
    """The application. running: what its lifespan holds open."""
    completion = Completion(dispatcher, bodies)
    routes = [Route(path, completion, methods=["POST"]) for path in PATHS]
    routes += [
        Route(path, _guarded(view, dispatcher.cut_off), methods=methods) for path, view, methods in views.routes()
    ]
    app = Starlette(
        routes=routes,
        lifespan=lambda app: running(),
        exception_handlers={HTTPException: _no_route},
    )
    return Guard(app, token)


def _guarded(
    view: Callable[[Request], Awaitable[Response]], cut_off: CutOff
) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        try:
            with cut_off.scope():
                return await view(request)
            raise CutOff.failure()
        except RequestFailed as failed:
            failure = failed.failure
            return Response(failure.json(), failure.status, dict(failure.headers()), "application/json")

    return guarded


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"{request.method} {request.url.path[:200]}: {getattr(error, 'detail', 'failed')}"
    facts = {"where": request.url.path[:200]}
    headers = dict(getattr(error, "headers", None) or {})
    if status == 404:
        facts["expected"] = " ".join(route.path for route in request.app.routes)
    if "Allow" in headers:
        facts |= {"expected": " or ".join(_methods(headers["Allow"])), "actual": request.method[:32]}
    code = "path_unknown" if status == 404 else "request_rejected"
    failure = Failure(code=code, message=text, status=status, retryable=False, facts=facts)
    return Response(failure.json(), status, headers, media_type="application/json")


def _methods(allow: str) -> list[str]:
    return sorted({method.strip() for method in allow.split(",")} - {"HEAD"})
