"""Small workers that imitate the HTTP contract of ours, for tests of the router: no model, no transfer.

A prefill holds a room from its request until decode has asked for it, answers, and forgets it. A decode waits for the
hand-over and then says tokens. Both abort the room when their client goes away. What they are told to do instead is an
attribute. Everything runs in the test's own event loop, on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sglang_pd.config import Address
from sglang_pd.http.terms import CANCELLABLE
from sglang_pd.router import Router
from sglang_pd.router.serve import listen

Script = Callable[["FakeWorker", dict[str, Any], Request], Awaitable[Response | None]]


class Bridge:
    """The hand-over between fakes: prefill waits for decode to open a room, decode for prefill to be done."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, int], asyncio.Event] = {}

    def event(self, kind: str, room: int) -> asyncio.Event:
        return self._events.setdefault((kind, room), asyncio.Event())


@dataclass(eq=False)
class FakeWorker:
    """script: answers instead of the contract; returning None falls back to it. fail: (status, document, headers)
    for every request. hold: requests wait for it before anything is said. peers: of `/peers`."""

    role: str
    bridge: Bridge
    instance: str = "worker"
    epoch: str = "00000000000000aa"
    tokens: int = 3
    script: Script | None = None
    fail: tuple[int, Any, dict[str, str]] | None = None
    hold: asyncio.Event | None = None
    ready_status: tuple[int, dict[str, Any]] = (200, {"status": "ready"})
    health_status: tuple[int, dict[str, Any]] = (200, {"status": "ok"})
    info: dict[str, Any] = field(default_factory=dict)
    peers: list[dict[str, Any]] = field(default_factory=list)
    token: str = ""
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    flushed: list[str] = field(default_factory=list)
    open_rooms: set[int] = field(default_factory=set)
    aborted: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    looks: int = 0
    url: str = ""
    server: Any = None

    # what the contract says

    def app(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/health_generate", self._health),
                Route("/ready", self._ready),
                Route("/server_info", self._info),
                Route("/model_info", self._model),
                Route("/v1/models", self._models),
                Route("/peers", self._peers),
                Route("/flush_cache", self._flush, methods=post),
                *(Route(p, self.serve, methods=post) for p in ("/generate", "/v1/completions", "/v1/chat/completions")),
            ]
        )

    async def _health(self, request: Request) -> Response:
        self.looks += 1
        return JSONResponse(self.health_status[1], self.health_status[0])

    async def _ready(self, request: Request) -> Response:
        return JSONResponse(self.ready_status[1], self.ready_status[0])

    async def _info(self, request: Request) -> Response:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({}, 401)
        facts = {"instance": self.instance, "epoch": self.epoch, "disaggregation_mode": self.role}
        facts["cancellable"] = list(CANCELLABLE)
        return JSONResponse({**facts, "internal_states": [{}], **self.info})

    async def _model(self, request: Request) -> Response:
        return JSONResponse({"model_path": "fake", "is_generation": True})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _peers(self, request: Request) -> Response:
        return JSONResponse({"instance": self.instance, "peers": self.peers})

    async def _flush(self, request: Request) -> Response:
        self.flushed.append(request.query_params.get("timeout", ""))
        return JSONResponse({"success": True})

    async def serve(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((request.url.path, body, dict(request.headers)))
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": {"code": "unauthorized", "message": "no"}}, 401)
        rooms = body["bootstrap_room"]
        rooms = rooms if isinstance(rooms, list) else [rooms]
        self.open_rooms.update(rooms)
        ended = asyncio.ensure_future(self._work(request, body, rooms))
        gone = asyncio.ensure_future(_gone(request))
        await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if ended.done():
            return ended.result()
        ended.cancel()
        self._abort(rooms)
        return Response(status_code=499)

    def _abort(self, rooms: list[int]) -> None:
        self.aborted += rooms
        self.open_rooms.difference_update(rooms)

    async def _work(self, request: Request, body: dict[str, Any], rooms: list[int]) -> Response:
        if self.fail is not None:
            self.open_rooms.difference_update(rooms)
            return JSONResponse(self.fail[1], self.fail[0], self.fail[2])
        if self.hold is not None:
            await self.hold.wait()
        if self.script is not None and (answer := await self.script(self, body, request)) is not None:
            return answer
        mine, theirs = ("prefill", "decode") if self.role == "prefill" else ("decode", "prefill")
        for room in rooms:
            self.bridge.event(mine, room).set()
        for room in rooms:
            await self.bridge.event(theirs, room).wait()
        if body.get("stream"):
            return Stream(self._events(body, rooms), lambda: self._abort(rooms))
        self._finish(rooms)
        answers = [document(self, body, number, self.tokens) for number in range(len(rooms))]
        is_list = isinstance(body["bootstrap_room"], list)
        return JSONResponse(answers if is_list else answers[0])

    async def _events(self, body: dict[str, Any], rooms: list[int]) -> AsyncIterator[bytes]:
        for said in range(1, (1 if self.role == "prefill" else self.tokens) + 1):
            for number in range(len(rooms)):
                yield event({**document(self, body, number, said), "index": number})
        yield b"data: [DONE]\n\n"
        self._finish(rooms)

    def _finish(self, rooms: list[int]) -> None:
        self.done += rooms
        self.open_rooms.difference_update(rooms)

    async def settle(self) -> None:
        """Wait until no room is open here."""
        await until(lambda: not self.open_rooms)


def document(worker: FakeWorker, body: dict[str, Any], number: int, said: int) -> dict[str, Any]:
    """An answer of `/generate`: prefill knows input logprobs, decode says none."""
    meta: dict[str, Any] = {"completion_tokens": said, "finish_reason": None if said < worker.tokens else "length"}
    if body.get("return_logprob"):
        inputs = [[None, 7, None], [-0.5, 8 + number, None]] if worker.role == "prefill" else []
        meta |= {"input_token_logprobs": inputs, "output_token_logprobs": [[-0.25, t, None] for t in range(said)]}
    return {"text": f"{worker.role}{number}:" + "x" * said, "meta_info": meta}


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


class Stream(Response):
    """Events as they come. `gone` is called when the client leaves before their end. When they raise `Cut`, the
    connection is dropped without an end."""

    def __init__(self, chunks: AsyncIterator[bytes], gone: Callable[[], None] = lambda: None) -> None:
        self.chunks, self.gone = chunks, gone
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream"})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        leaving = asyncio.ensure_future(_left(receive))
        sending = asyncio.ensure_future(self._send(send))
        await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not sending.done():
            sending.cancel()
            self.gone()
            return
        try:
            sending.result()
        except Cut:
            scope["extensions"] = {}
            raise ConnectionResetError from None

    async def _send(self, send: Any) -> None:
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Cut(Exception):
    """Raised by a stream's chunks: the connection drops."""


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait until it holds; generous, for a busy machine."""
    end = asyncio.get_running_loop().time() + within_s
    while not condition():
        if asyncio.get_running_loop().time() > end:
            raise TimeoutError("what was waited for did not come true")
        await asyncio.sleep(0.005)


class _Server(uvicorn.Server):
    """Ends when it is told, not at its next tick."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.told.wait()


@dataclass(eq=False)
class Served:
    """An application on a port."""

    url: str
    server: _Server
    task: asyncio.Task[None]
    port: int

    async def stop(self) -> None:
        """End it at once: open connections are dropped."""
        self.server.told.set()
        for connection in list(self.server.server_state.connections):
            with contextlib.suppress(Exception):
                connection.transport.abort()
        await self.task


async def serve_app(app: Any, *, host: str = "127.0.0.1", port: int = 0, lifespan: str = "off") -> Served:
    listener = listen(Address(host, port))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan=lifespan)  # type: ignore[arg-type]
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started or task.done())
    port = listener.getsockname()[1]
    return Served(Address(host, port).url(), server, task, port)


@dataclass(eq=False)
class Cluster:
    """A router over fakes, and a client of it."""

    prefills: list[FakeWorker]
    decodes: list[FakeWorker]
    router: Router
    client: httpx.AsyncClient
    url: str
    served: dict[FakeWorker, Served]

    @property
    def prefill(self) -> FakeWorker:
        return self.prefills[0]

    @property
    def decode(self) -> FakeWorker:
        return self.decodes[0]

    def workers(self) -> list[FakeWorker]:
        return [*self.prefills, *self.decodes]

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.client.post("/generate", json={"text": "hi", **body})

    async def looked(self, times: int = 2) -> None:
        """Wait until the router has looked at every worker that answers again."""
        before = {worker: worker.looks for worker in self.workers() if worker in self.served}
        await until(lambda: all(worker.looks >= seen + times for worker, seen in before.items()))

    async def kill(self, worker: FakeWorker) -> None:
        await self.served.pop(worker).stop()

    async def revive(self, worker: FakeWorker) -> None:
        """Serve it again at the same address."""
        address = httpx.URL(worker.url)
        self.served[worker] = await serve_app(worker.app(), host=address.host, port=address.port or 80)


@contextlib.asynccontextmanager
async def cluster(
    prefills: int = 1, decodes: int = 1, host: str = "127.0.0.1", **config: Any
) -> AsyncIterator[Cluster]:
    """A running router over so many fakes, all in this thread, which a busy machine may hold up for a second.

    config: of the router; probes are quick unless it says otherwise.
    """
    bridge = Bridge()
    workers = {
        "prefill": [FakeWorker("prefill", bridge, f"p{i}", f"{0xA0 + i:016x}") for i in range(prefills)],
        "decode": [FakeWorker("decode", bridge, f"d{i}", f"{0xD0 + i:016x}") for i in range(decodes)],
    }
    served: dict[FakeWorker, Served] = {}
    everybody = [*workers["prefill"], *workers["decode"]]
    for worker, running in zip(
        everybody, await asyncio.gather(*(serve_app(worker.app(), host=host) for worker in everybody)), strict=True
    ):
        served[worker], worker.url = running, running.url
    prepare = config.pop("prepare", None)
    if prepare is not None:
        prepare(everybody)
    config["timeouts"] = {"probe_s": 0.05, "connect_s": 5.0, **config.get("timeouts", {})}
    lists = {role: [worker.url for worker in found] for role, found in workers.items()}
    router = Router({**lists, **config})
    front = await serve_app(router.app, host=host, lifespan="on")
    try:
        async with httpx.AsyncClient(base_url=front.url, timeout=30, trust_env=False, verify=False) as client:
            yield Cluster(workers["prefill"], workers["decode"], router, client, front.url, served)
    finally:
        await front.stop()
        await asyncio.gather(*(running.stop() for running in served.values()))
