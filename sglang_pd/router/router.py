"""The router itself: configuration to a running whole, as an ASGI application and as an async client."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp

from sglang_pd.config import RouterConfig, load_router
from sglang_pd.http.bounds import Bodies
from sglang_pd.router import sse
from sglang_pd.router.app import build_app
from sglang_pd.router.dispatch import Answer, Call, Dispatcher, outcome
from sglang_pd.router.failures import RequestFailed
from sglang_pd.router.fleet import Fleet
from sglang_pd.router.metrics import RouterMetrics
from sglang_pd.router.policy import policy_named
from sglang_pd.router.probe import Prober
from sglang_pd.router.request import GENERATE
from sglang_pd.router.resolver import Resolver, resolver_of
from sglang_pd.router.views import Views
from sglang_pd.router.worker import Worker


class Router:
    """Sends each request to one prefill and one decode worker and answers with decode's stream.

    `app` is an ASGI application whose lifespan runs the router. Embedded without that (mounted, or as a client),
    use `async with router:`. All in one event loop, of asyncio.

        async with Router({"prefill": ["http://127.0.0.1:30000"], "decode": ["http://127.0.0.1:30001"]}) as router:
            answer = await router.generate({"text": "hello", "sampling_params": {"max_new_tokens": 8}})

    config: a `RouterConfig`, or the mapping of one. resolver: where workers are, instead of the configuration's.
    """

    def __init__(self, config: RouterConfig | Mapping[str, Any], resolver: Resolver | None = None) -> None:
        self.config = config if isinstance(config, RouterConfig) else load_router(config)
        limits, timeouts = self.config.limits, self.config.timeouts
        self.fleet = Fleet((policy_named(self.config.policy), policy_named(self.config.policy)), self.config.breaker)
        self.metrics = RouterMetrics(self.fleet, limits.max_inflight)
        # Two legs a request, as many that linger, and those that are being closed.
        self._client = _client(4 * limits.max_inflight + 64, timeouts.connect_s)
        self._looks = _client(1024, timeouts.connect_s)
        self._prober = Prober(
            self.fleet,
            resolver if resolver is not None else resolver_of(self.config),
            self._looks,
            timeouts,
            self.config.worker_bearer_token,
        )
        self._prober.replaced = self._replaced
        self.dispatcher = Dispatcher(self.config, self.fleet, self._client, self.metrics, self._prober.poke)
        self.app: ASGIApp = build_app(
            self.dispatcher,
            Views(self.config, self.fleet, self.dispatcher, self._looks),
            self._running,
            bodies=Bodies(limits.max_body_bytes, limits.bodies_bytes),
            token=self.config.bearer_token,
        )

    async def __aenter__(self) -> Router:
        """Look at every worker once, and begin to watch them."""
        await self._prober.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop watching and drop all connections. A router is not started again."""
        await self._prober.stop()
        await self.dispatcher.close()
        await self._client.aclose()
        await self._looks.aclose()

    def cut_off(self) -> None:
        """End every request that runs or comes, with `draining`. For a server that stops and has waited for them."""
        self.dispatcher.cut_off.cut()

    async def request(
        self, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The whole answer to `body` at `path` (`/generate`, `/v1/completions`, `/v1/chat/completions`).

        Raises `RequestFailed`, whose `failure` says leg, room, status and whether to retry.
        """
        return b"".join([chunk async for chunk in self.stream(path, body, headers)])

    async def stream(
        self, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """The answer's bytes as decode sends them; of a stream, whole events. Raises `RequestFailed`, also midway.

        Leaving the loop early needs `aclose()` on the iterator (or `contextlib.aclosing`) for both legs to end at
        once.
        """
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        fields = {name.lower(): value for name, value in (headers or {}).items()}
        arrived_s, result = time.monotonic(), "cancelled"
        try:
            with self.dispatcher.admitted():
                answer: Answer = await self.dispatcher.dispatch(Call(path, raw, fields, arrived_s))
                try:
                    while chunk := await answer.next():
                        yield chunk
                finally:
                    await answer.close()
            result = "ok"
        except RequestFailed as failed:
            result = outcome(failed.failure)
            raise
        finally:
            self.metrics.add("requests_total", path, result)
            self.metrics.observe("request_seconds", time.monotonic() - arrived_s, path, result)

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """The decoded answer of `/generate`. Raises `RequestFailed`."""
        return msgspec.json.decode(await self.request(GENERATE, {**body, "stream": False}))

    async def generate_stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of `/generate` as they come. Raises `RequestFailed`, also midway."""
        async for chunk in self.stream(GENERATE, {**body, "stream": True}):
            for document in sse.documents(chunk):
                yield document

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        async with self:
            yield

    def _replaced(self, worker: Worker) -> None:
        self.metrics.add("worker_replaced_total", worker.role, worker.url)


def _client(connections: int, connect_s: float) -> httpx.AsyncClient:
    """A client that follows no proxy of the environment and no redirection. Idle connections end before those of
    common servers do (5 s), so that a request seldom meets one that is just being closed. It trusts no certificate:
    workers are `http` alone, and reading the system's authorities takes longer than all the rest of a start."""
    return httpx.AsyncClient(
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=256, keepalive_expiry=2.0),
        timeout=httpx.Timeout(None, connect=connect_s, pool=connect_s),
        headers={"user-agent": "sglang-pd-router"},
        follow_redirects=False,
        trust_env=False,
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
