"""A router as a process: listens, says so, serves until a signal, lets running requests end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn

from sglang_pd.config import Address, RouterConfig
from sglang_pd.config.address import is_loopback
from sglang_pd.http.connections import ACCEPTS, BACKLOG, Connections, most_connections
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.router.router import Router

log = logging.getLogger("sglang_pd.router")

DESCRIPTORS: Final = 3
"""Of one request: its client's connection and one for each leg."""
STOP_S: Final = 10
"""Seconds for running requests to end after a signal; then they are cut off. A second signal cuts them off at once."""
CUT_S: Final = 3
"""Seconds for the last word to reach those that were cut off."""


async def serve(config: RouterConfig, started: Callable[[Address], None]) -> None:
    """Serve until SIGTERM or SIGINT. started: told the address once requests are taken.

    Raises `ConfigError` when the port is taken or the host is not this one's.
    """
    with contextlib.closing(listen(config.address)) as listener:
        address = Address(config.address.host, listener.getsockname()[1])
        if not is_loopback(address.host) and not config.bearer_token:
            text = "the router listens on %s without a bearer_token: whoever reaches it may use the workers behind it"
            log.warning(text, address)
        router = Router(config)
        connections = Connections(most_connections(DESCRIPTORS))
        if connections.most < config.limits.max_inflight:
            text = "ulimit -n leaves %d connections of clients, fewer than limits.max_inflight = %d"
            log.info(text, connections.most, config.limits.max_inflight)
        settings = uvicorn.Config(
            router.app,
            http=connections.protocol,  # type: ignore[arg-type]  # it is called, and need not be a class
            backlog=ACCEPTS,
            log_level="warning",
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=STOP_S + CUT_S,
        )

        def ready() -> None:
            listener.listen(BACKLOG)
            started(address)

        server = _Server(settings, ready)
        loop = asyncio.get_running_loop()
        connections.guard(loop)

        def stop() -> None:
            if server.should_exit:
                router.cut_off()
                loop.call_later(CUT_S, server.force)
            server.should_exit = True
            loop.call_later(STOP_S, router.cut_off)  # uvicorn's own way is to cancel tasks: a traceback, and no answer

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Leaves signals to its owner, and tells when it serves."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    def force(self) -> None:
        """End without waiting for anybody."""
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The owner has handlers of its own."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()


def listen(address: Address) -> socket.socket:
    """A listening TCP socket. Raises `ConfigError` naming the port and its key."""
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _no_listener("$.bind", address, error) from None
    family, kind, proto, _, where = infos[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _no_listener("$.bind" if error.errno == errno.EADDRNOTAVAIL else "$.port", address, error) from None
    return sock


def _no_listener(key: str, address: Address, error: OSError) -> ConfigError:
    return ConfigError(
        f"the router cannot listen there: {error.strerror or error}",
        where=key,
        expected="a free port, or 0 for any" if key == "$.port" else "an address of this host",
        actual=str(address),
    )
