"""A server whose clients hold connections: a real one, on a socket, with a bound of a few."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from sglang_pd.http import connections as http_server
from sglang_pd.http.connections import ACCEPTS, Connections, Seldom, most_connections

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\n"
WHOLE = HEAD + b"content-length: 2\r\n\r\nab"


class Served:
    def __init__(self, port: int, connections: Connections) -> None:
        self.port, self.connections = port, connections
        self.running = 0
        self.gate = asyncio.Event()
        self.clients: list[asyncio.StreamWriter] = []

    async def open(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(writer)
        writer.write(sent)
        await writer.drain()
        await asyncio.sleep(0.02)
        return reader, writer

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        self.running += 1
        await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served(most: int) -> AsyncIterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        it = Served(listener.getsockname()[1], Connections(most))
        http: Any = it.connections.protocol
        config = uvicorn.Config(it.app, http=http, interface="asgi3", lifespan="off", log_config=None, backlog=ACCEPTS)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield it
        finally:
            it.gate.set()
            server.should_exit = server.force_exit = True
            await task
            for client in it.clients:
                client.close()
            await asyncio.gather(*(client.wait_closed() for client in it.clients), return_exceptions=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the other side has closed, within a moment."""
    try:
        return not await asyncio.wait_for(reader.read(1), 0.2)
    except asyncio.TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"content-length: 9\r\n\r\na"], ids=["nothing", "a head", "a body"])
def test_whoever_has_waited_longest_for_its_client_makes_room(sent: bytes) -> None:
    async def test() -> None:
        async with served(4) as it:
            it.gate.set()
            idle = [await it.open(sent) for _ in range(4)]
            idle[0][1].write(b"GET" if not sent else b"a")  # heard of again: it is not the first to go
            await idle[0][1].drain()
            reader, _ = await it.open(WHOLE)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert [await closed(reader) for reader, _ in idle] == [False, True, False, False]
            assert len(it.connections) == 4

    run(test)


def test_a_request_that_runs_keeps_its_place_and_who_finds_none_is_told() -> None:
    async def test() -> None:
        async with served(3) as it:
            busy = [await it.open(WHOLE) for _ in range(3)]
            assert it.running == 3
            reader, _ = await it.open()
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 429") and b'"queue_full"' in answer and b"retry-after" in answer
            it.gate.set()
            for reader, _ in busy:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            reader, _ = await it.open(WHOLE)  # their turn has come: one of them goes
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    run(test)


def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    monkeypatch.setattr(http_server, "SWEEP_S", 0.05)

    async def test() -> None:
        async with served(10) as it:
            slow, slow_writer = await it.open(HEAD)
            busy, _ = await it.open(WHOLE)

            async def drip() -> None:  # a byte now and then is no head
                while True:
                    slow_writer.write(b"x")
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            assert await asyncio.wait_for(slow.read(), 5) == b""
            dripping.cancel()
            it.gate.set()
            assert (await busy.readline()).startswith(b"HTTP/1.1 200"), "a request that runs has no such time"
            while len(it.connections):
                await asyncio.sleep(0.05)
            assert not it.connections._sweeping

    run(test)


def test_descriptors_that_are_out_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """An idle minute at the limit once wrote 180,000 tracebacks."""

    async def test() -> None:
        async with served(10) as it:
            loop = asyncio.get_running_loop()
            it.connections.guard(loop)
            idle = [await it.open() for _ in range(5)]
            context = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "full")}
            for _ in range(1000):
                loop.call_exception_handler(context)
            assert [await closed(reader) for reader, _ in idle] == [True] * 5, "what is idle gives its descriptors back"
            loop.call_exception_handler({"message": "another defect"})

    run(test)
    texts = [record.getMessage() for record in caplog.records]
    assert 1 <= sum("no descriptor" in text for text in texts) <= 3 and len(texts) < 20
    assert any("another defect" in text for text in texts)


def test_a_bound_leaves_descriptors_to_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, each, most in ((1024, 1, 768), (1024, 3, 256), (65_536, 1, 65_280), (64, 3, 16), (-1, 1, 2**20 - 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        assert most_connections(each) == most


def test_what_strangers_bring_about_is_said_seldom() -> None:
    seldom = Seldom()

    def passes(text: str, level: int = logging.WARNING, at_s: float = 0.0) -> bool:
        record = logging.LogRecord("uvicorn.error", level, "", 0, text, (), None)
        record.created = at_s
        return seldom.filter(record)

    assert passes("Invalid HTTP request received.") and not passes("Invalid HTTP request received.", at_s=9)
    assert passes("Invalid HTTP request received.", at_s=11) and passes("something else", at_s=9)
    assert passes("a defect", logging.ERROR) and passes("a defect", logging.ERROR)
