"""Serves a worker over HTTP until it is told to stop; then drains."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_pd.config.address import Address
from sglang_pd.http.connections import ACCEPTS, BACKLOG, Connections, most_connections
from sglang_pd.protocol.errors import ConfigError, RoomError
from sglang_pd.server.app import build_app
from sglang_pd.server.errors import Failure
from sglang_pd.worker.serving.service import WorkerService

log = logging.getLogger("sglang_pd.server")

POLL_S: Final = 0.1
OBSERVE_TURNS: Final = 10
"""The observer is told what only shows when somebody looks once in so many polls."""


def listen(address: Address) -> socket.socket:
    """A listening socket. Raises `ConfigError` naming the port that is taken, and its key."""
    host, port = address.host, address.port or 0
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"not an address of this host: {error}", where="$.network.bind", actual=host) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno != errno.EADDRNOTAVAIL
        raise ConfigError(
            f"cannot listen: {error.strerror}",
            where="$.network.http_port" if taken else "$.network.bind",
            expected="a free port, or 0 for any" if taken else "an address of this host, as `ip addr` shows them",
            actual=str(address) if taken else host,
        ) from None
    return listener


class Ending:
    """Answers a request whose task is cancelled, which in a process of ours only its end does: with an error of ours
    instead of uvicorn's plain text and traceback."""

    def __init__(self, app: ASGIApp, leg: str) -> None:
        self._app, self._leg = app, leg

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        began = False

        async def sending(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            log.warning("%s: cut off, the worker ends", scope.get("path", ""))
            if not began:
                error = RoomError("the worker ends and has cut the request off", code="draining")
                await Failure(error).response(self._leg)(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn without its own idea of signals: who drains decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        yield


def serve(service: WorkerService, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once. on_ready: called once it accepts."""
    asyncio.run(_serve(service, listener, on_ready))


async def _serve(service: WorkerService, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    app = Ending(build_app(service), service.role.value)
    connections = Connections(most_connections(1))
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # it is called, and need not be a class
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=ACCEPTS,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    told: list[int] = []
    loop = asyncio.get_running_loop()
    connections.guard(loop)

    def stop(number: int) -> None:
        told.append(number)
        if len(told) == 1:
            service.drain(f"told to by {signal.Signals(number).name}")
        else:
            server.should_exit = server.force_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        listener.listen(BACKLOG)
        on_ready()
    watching = asyncio.ensure_future(_end_when_drained(service, server, told))
    try:
        await serving
    finally:
        watching.cancel()


async def _end_when_drained(service: WorkerService, server: Any, told: list[int]) -> None:
    for turn in itertools.count():
        await asyncio.sleep(POLL_S)
        if turn % OBSERVE_TURNS == 0:
            try:
                service.observe()
            except Exception:  # who watches must not keep the worker from ending
                log.exception("a defect of the observer")
        if not told:
            continue
        if service.drained or service.overdue:
            if not service.drained:
                log.error("the drain is overdue: ending with memory that no fence covers: %s", service.stats())
            server.should_exit = True
            return
