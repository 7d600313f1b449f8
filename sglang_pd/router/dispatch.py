"""A request's way through the router: admitted, given rooms and a pair, tried, tried again in new rooms, answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx

from sglang_pd.config import RouterConfig
from sglang_pd.observe import RateLimited
from sglang_pd.router.cutoff import CutOff
from sglang_pd.router.exchange import Attempt, Bounds, Exchange, Told
from sglang_pd.router.failures import Failure, RequestFailed, own
from sglang_pd.router.fleet import Fleet, Wanted
from sglang_pd.router.leg import Post
from sglang_pd.router.metrics import RouterMetrics
from sglang_pd.router.request import Parsed, RoomBook, parse
from sglang_pd.router.worker import Worker

log = logging.getLogger("sglang_pd.router")

FORWARDED: Final = ("traceparent", "tracestate", "baggage", "x-request-id")
"""Header fields of the client that both workers get as they are."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request. headers: names in lower case. arrived_s: by the monotonic clock."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    arrived_s: float


class Answer:
    """Decode's answer on its way to the client. `close` in any case."""

    def __init__(self, exchange: Exchange, release: Callable[[], None]) -> None:
        self._exchange, self._release = exchange, release
        self.status = exchange.status
        self.headers = exchange.headers
        self.is_stream = exchange.is_stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[bytes]:
        while chunk := await self.next():
            yield chunk

    async def next(self) -> bytes:
        """The next bytes; empty at the end. Raises `RequestFailed`."""
        chunk = await self._exchange.next()
        if not chunk:
            self._release()  # before the client learns of the end, and may use its room again
        return chunk

    def tail(self, failure: Failure) -> bytes:
        """What ends a stream that fails after its beginning."""
        return self._exchange.tail(failure)

    async def close(self) -> None:
        """End both legs and give the rooms back."""
        try:
            await self._exchange.close()
        finally:
            self._release()


class Dispatcher:
    """Dispatches requests to pairs of `fleet`. poke: asks for a look at a worker that failed."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        client: httpx.AsyncClient,
        metrics: RouterMetrics,
        poke: Callable[[Worker], None],
    ) -> None:
        self._config, self._fleet, self._client, self._poke = config, fleet, client, poke
        self.metrics = metrics
        self.rooms = RoomBook()
        self.cut_off = CutOff()
        self._lingering: set[asyncio.Task[None]] = set()
        self._say = RateLimited(log, burst=10)
        self._told = Told(self._failed, self._lingers)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Holds one of `limits.max_inflight` places. Raises `RequestFailed` with 429 when there is none."""
        limit = self._config.limits.max_inflight
        if self.metrics.inflight >= limit:
            raise own("queue_full", "the router is at its limit", expected=f"limits.max_inflight = {limit}")
        self.metrics.inflight += 1
        try:
            yield
        finally:
            self.metrics.inflight -= 1

    async def dispatch(self, call: Call) -> Answer:
        """The answer, once it has begun well. Raises `RequestFailed`: the first cause of the last attempt."""
        parsed = parse(call.path, call.body, self._config.limits.max_batch)
        wanted = Wanted(host=parsed.caller_host, port=parsed.caller_port)
        deadline_s = asyncio.get_running_loop().time() + self._config.timeouts.request_s
        last: RequestFailed | None = None
        for _ in range(1 + self._config.retries):
            try:
                answer = await self._try(call, parsed, wanted, deadline_s)
            except RequestFailed as failed:
                if last is not None and not failed.failure.worker:
                    raise last from None  # nobody else is there to ask: the first cause stands
                last = failed
                if not self._again(failed.failure, parsed, wanted):
                    break
                self.metrics.add("retries_total", failed.failure.leg, failed.failure.code)
            else:
                self.metrics.observe("first_byte_seconds", time.monotonic() - call.arrived_s, call.path)
                return answer
        raise last or own("internal", "a request was not tried")

    async def close(self) -> None:
        """End what lingers."""
        for task in self._lingering:
            task.cancel()
        if self._lingering:
            await asyncio.wait(self._lingering)

    async def _try(self, call: Call, parsed: Parsed, wanted: Wanted, deadline_s: float) -> Answer:
        pair = self._fleet.choose(wanted)
        held = self.rooms.take(parsed.caller_rooms, parsed.sequences)
        rooms = held.rooms
        control = pair.prefill.target.bootstrap_host, pair.prefill.bootstrap_port
        headers, own_token = self._headers(call, parsed)
        post = Post(self._client, parsed.path, parsed.encode(rooms, *control), headers, own_token)
        limits, timeouts = self._config.limits, self._config.timeouts
        bounds = Bounds(
            hold_bytes=limits.hold_bytes,
            merge_bytes=limits.merge_bytes,
            deadline_s=deadline_s,
            cancel_s=timeouts.cancel_s,
        )
        attempt = Attempt(pair=pair, rooms=rooms, shown=parsed.shown(rooms), post=post, merge=parsed.wants_logprobs)
        exchange = Exchange(attempt, bounds, self._told)
        self.metrics.add("attempts_total", parsed.path)
        try:
            await exchange.begin()
        except BaseException:
            try:
                await exchange.close()
            finally:
                self.rooms.release(held)
            raise
        return Answer(exchange, partial(self.rooms.release, held))

    def _again(self, failure: Failure, parsed: Parsed, wanted: Wanted) -> bool:
        """Whether another attempt may help: in new rooms, which rules out the caller's own."""
        if not failure.retryable or not failure.leg or parsed.caller_rooms is not None:
            return False
        if failure.elsewhere:
            wanted.avoided |= {worker for worker in self._fleet.of(failure.leg) if worker.url == failure.worker}
        return True

    def _headers(self, call: Call, parsed: Parsed) -> tuple[dict[str, str], bool]:
        """The header fields for both workers, and whether their token is the router's own."""
        fields = {
            "content-type": "application/json",
            "accept": "text/event-stream" if parsed.stream else "application/json",
            "accept-encoding": "identity",
        }
        fields |= {name: call.headers[name] for name in FORWARDED if name in call.headers}
        if self._config.worker_bearer_token:
            fields["authorization"] = f"Bearer {self._config.worker_bearer_token}"
            return fields, True
        if "authorization" in call.headers and not self._config.bearer_token:
            fields["authorization"] = call.headers["authorization"]
        return fields, False

    def _failed(self, worker: Worker, failure: Failure, request: object) -> None:
        opened = worker.judge(failure, request)
        self.metrics.add("leg_failures_total", worker.role, worker.url, failure.code)
        label = f"{worker.role} {worker.url}: "
        note = "; its breaker opens" if opened else ""
        said = str(failure).removeprefix(label)  # most failures name their worker already
        self._say.warning(worker.url, "%s%s (%s)%s", label, said, failure.code, note)
        if opened:
            self.metrics.add("breaker_opened_total", worker.role, worker.url)
        if failure.status >= 500:
            self._poke(worker)

    def _lingers(self, rest: Coroutine[Any, Any, None]) -> bool:
        if len(self._lingering) >= self._config.limits.max_inflight:
            return False

        async def bounded() -> None:
            try:
                await asyncio.wait_for(rest, self._config.timeouts.request_s)
            except asyncio.TimeoutError:
                pass  # closed by its end

        task = asyncio.create_task(bounded())
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)
        self.metrics.add("lingering_total")
        return True


def outcome(failure: Failure | None) -> str:
    """A failure as a metric's `result`."""
    if failure is None:
        return "ok"
    if failure.status == 429:
        return "saturated"
    if failure.status == 503 and not failure.worker:
        return "unavailable"
    return "rejected" if failure.status < 500 else "failed"
