"""Everything the router answers besides requests: of itself, of its workers, and through them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sglang_pd.config import RouterConfig
from sglang_pd.router.dispatch import Dispatcher
from sglang_pd.router.failures import Leg, broken, own
from sglang_pd.router.fleet import Fleet
from sglang_pd.router.worker import Worker

View = Callable[[Request], Awaitable[Response]]

MAX_BYTES: Final = 16 * 2**20
"""Most bytes of one worker's answer."""
FAN_OUT: Final = 64
"""Workers asked at once."""
ASK_S: Final = 10.0
"""Seconds for a worker's answer, on top of a `timeout` that the client gave."""
MAX_TIMEOUT_S: Final = 600.0


class Views:
    """The views, as functions from request to response."""

    def __init__(self, config: RouterConfig, fleet: Fleet, dispatcher: Dispatcher, client: httpx.AsyncClient) -> None:
        self._config, self._fleet, self._dispatcher, self._client = config, fleet, dispatcher, client
        self._asking = asyncio.Semaphore(FAN_OUT)

    def routes(self) -> list[tuple[str, View, list[str]]]:
        """Path, view, methods."""
        return [
            ("/health", self.health, ["GET"]),
            ("/ready", self.ready, ["GET"]),
            ("/health_generate", self.health_generate, ["GET"]),
            ("/workers", self.workers, ["GET"]),
            ("/metrics", self.metrics, ["GET"]),
            ("/v1/models", self.through_decode, ["GET"]),
            ("/model_info", self.through_decode, ["GET"]),
            ("/get_model_info", self.through_decode, ["GET"]),
            ("/server_info", self.server_info, ["GET"]),
            ("/get_server_info", self.server_info, ["GET"]),
            ("/flush_cache", self.flush_cache, ["GET", "POST"]),
        ]

    async def health(self, request: Request) -> Response:
        """The router lives, whatever its workers do."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while some pair takes requests, else 503 and why."""
        if (failed := self._fleet.ready()) is not None:
            raise failed
        return _json({"status": "ready"})

    async def workers(self, request: Request) -> Response:
        """Every worker with what is held against it, and the verdict of each pair."""
        return _json(
            {
                "policy": self._config.policy,
                "inflight": self._dispatcher.metrics.inflight,
                "rooms": len(self._dispatcher.rooms),
                "workers": [worker.describe() for worker in self._fleet.workers],
                "pairs": self._fleet.pairs(),
            }
        )

    async def metrics(self, request: Request) -> Response:
        """The exposition format."""
        text = self._dispatcher.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def through_decode(self, request: Request) -> Response:
        """What a decode worker answers: the first that is well. 503 when none is up."""
        workers = sorted(self._fleet.of("decode"), key=lambda worker: bool(worker.obstacle))
        for worker in workers:
            if worker.sight.up:
                status, body, kind = await self._ask(worker, "GET", request.url.path, request)
                return Response(body, status, media_type=kind)
        raise own("worker_unavailable", "no decode worker is up", leg="decode")

    async def server_info(self, request: Request) -> Response:
        """Every worker's `/server_info`, by role; null for one that does not answer."""
        prefill, decode = await asyncio.gather(self._infos("prefill", request), self._infos("decode", request))
        states = [state for info in decode if isinstance(info, dict) for state in info.get("internal_states") or []]
        return _json({"role": "router", "prefill": prefill, "decode": decode, "internal_states": states})

    async def health_generate(self, request: Request) -> Response:
        """200 when every worker that is up passes its own `/health_generate`, and some pair takes requests."""
        if (failed := self._fleet.ready()) is not None:
            raise failed
        workers = [worker for worker in self._fleet.workers if worker.sight.up]
        answers = await self._ask_all(workers, "GET", "/health_generate", request)
        return _json({"workers": _by_url(workers, answers)}, _worst(answers))

    async def flush_cache(self, request: Request) -> Response:
        """`/flush_cache` at every worker, with the client's query (its `timeout`, say). The worst status is the
        answer's; the body tells each worker's."""
        workers = self._fleet.workers
        answers = await self._ask_all(workers, "POST", "/flush_cache", request)
        status = _worst(answers)
        return _json({"success": status == 200, "workers": _by_url(workers, answers)}, status)

    async def _infos(self, role: str, request: Request) -> list[Any]:
        answers = await self._ask_all(self._fleet.of(role), "GET", "/server_info", request)
        return [_decoded(body) if status == 200 else None for status, body, _ in answers]

    async def _ask_all(
        self, workers: Sequence[Worker], method: str, path: str, request: Request
    ) -> list[tuple[int, bytes, str]]:
        async def ask(worker: Worker) -> tuple[int, bytes, str]:
            async with self._asking:
                return await self._ask(worker, method, path, request)

        return list(await asyncio.gather(*(ask(worker) for worker in workers)))

    async def _ask(self, worker: Worker, method: str, path: str, request: Request) -> tuple[int, bytes, str]:
        """Status, body and media type; a worker that cannot be asked answers 502 with our error."""
        headers = {"host": worker.host_header, "accept-encoding": "identity"}
        if self._config.worker_bearer_token:
            headers["authorization"] = f"Bearer {self._config.worker_bearer_token}"
        elif not self._config.bearer_token and "authorization" in request.headers:
            headers["authorization"] = request.headers["authorization"]
        timeout = httpx.Timeout(ASK_S + _timeout_of(request), connect=self._config.timeouts.connect_s)
        url, query = worker.base + path, request.url.query
        body = bytearray()
        try:
            async with self._client.stream(
                method, f"{url}?{query}" if query else url, headers=headers, timeout=timeout
            ) as response:
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise httpx.ReadError(f"an answer of more than {MAX_BYTES} bytes")
        except httpx.HTTPError as error:
            failure = broken(_leg(worker), worker.url, f"{type(error).__name__}: {error}".removesuffix(": "))
            return failure.status, failure.json(), "application/json"
        return response.status_code, bytes(body), response.headers.get("content-type", "application/json")


def _leg(worker: Worker) -> Leg:
    return worker.role


def _timeout_of(request: Request) -> float:
    """Seconds of the query's `timeout`: the workers get it as it is; here it only lengthens the wait."""
    try:
        value = float(request.query_params.get("timeout", "0"))
    except ValueError:
        return 0.0
    return min(value, MAX_TIMEOUT_S) if value > 0 else 0.0


def _worst(answers: Sequence[tuple[int, bytes, str]]) -> int:
    return max((status for status, _, _ in answers), default=200)


def _by_url(workers: Sequence[Worker], answers: Sequence[tuple[int, bytes, str]]) -> list[dict[str, Any]]:
    return [
        {"role": worker.role, "url": worker.url, "status": status, "answer": _decoded(body)}
        for worker, (status, body, _) in zip(workers, answers, strict=True)
    ]


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:4096].decode("utf-8", "replace")


def _json(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")
