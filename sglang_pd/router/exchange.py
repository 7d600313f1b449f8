"""One attempt at a request: one pair of workers, its rooms, both legs.

Both legs are posted at once. The first failure wins: it ends the other leg, whose worker then aborts the room. What
decode says is passed on as it comes, never read ahead, and only once its beginning is known to be an answer: until
then a failure can still become an HTTP status, or another attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import anyio

from sglang_pd.router import sse
from sglang_pd.router.failures import MAX_ERROR_BYTES, Failure, RequestFailed, Rooms, own
from sglang_pd.router.fleet import Pair
from sglang_pd.router.leg import Post, WorkerLeg
from sglang_pd.router.logprobs import InputLogprobs
from sglang_pd.router.worker import Worker

log = logging.getLogger("sglang_pd.router")

T = TypeVar("T")

FIRST_CAUSE_S: Final = 0.1
"""How long a leg that speaks of the other one's end waits for the other to say why."""

_OURS: Final = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"))
"""Header fields of a worker's answer that are its connection's, not the answer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What is tried. rooms: one a sequence. shown: as errors show them. merge: put prefill's input logprobs in."""

    pair: Pair
    rooms: tuple[int, ...]
    shown: Rooms
    post: Post
    merge: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """hold_bytes: of an answer kept back (an unfinished event; a JSON answer until it is whole). merge_bytes: of an
    answer that is merged. deadline_s: of the request, by the loop's clock. cancel_s: for a leg to end."""

    hold_bytes: int
    merge_bytes: int
    deadline_s: float
    cancel_s: float


@dataclass(frozen=True, slots=True)
class Told:
    """Whom an attempt tells. failed: a worker's leg did, with the attempt as the request. lingers: takes over a leg
    that its worker declared not cancellable; False when it holds too many of them."""

    failed: Callable[[Worker, Failure, object], None]
    lingers: Callable[[Coroutine[Any, Any, None]], bool]


class Exchange:
    """Use: `begin`, then `next` until it returns nothing, then `close`, which must run in any case."""

    def __init__(self, attempt: Attempt, bounds: Bounds, told: Told) -> None:
        self._attempt, self._bounds, self._told = attempt, bounds, told
        pair = attempt.pair
        self.prefill = WorkerLeg("prefill", pair.prefill, pair.prefill_life, attempt.post)
        self.decode = WorkerLeg("decode", pair.decode, pair.decode_life, attempt.post)
        self._logprobs = InputLogprobs(len(attempt.rooms)) if attempt.merge else None
        self.failure: Failure | None = None
        self._scope: anyio.CancelScope | None = None
        self._held: deque[bytes] = deque()
        self._cutter: sse.EventCutter | None = None
        self._relayed_error = False
        self._tasks: dict[WorkerLeg, asyncio.Task[None]] = {}
        self._watches: list[tuple[WorkerLeg, Callable[[str], None]]] = []
        self._counted: set[WorkerLeg] = set()

    @property
    def status(self) -> int:
        """HTTP status of decode's answer. Only after `begin`."""
        return self.decode.response.status_code

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Header fields of decode's answer that are the client's to see."""
        fields = self.decode.response.headers
        found = [(name, value) for name, value in fields.multi_items() if name not in _OURS]
        if "content-length" in fields and self._logprobs is None:
            found.append(("content-length", fields["content-length"]))
        return found

    @property
    def is_stream(self) -> bool:
        """Whether decode answers in server-sent events."""
        return self._cutter is not None

    async def begin(self) -> None:
        """Post both legs and wait until decode's answer has begun well. Raises `RequestFailed`, the first cause."""
        for leg in (self.prefill, self.decode):
            self._count(leg)
            leg.worker.breaker.begin(self)
            self._watch(leg)
        self._tasks[self.prefill] = asyncio.create_task(self._run_prefill())
        self._tasks[self.decode] = asyncio.create_task(self.decode.open())
        await self._guard(self._begin_answer)
        self.decode.worker.breaker.progress(self)

    async def next(self) -> bytes:
        """The next bytes of the answer, whole events of a stream; empty at its end. Raises `RequestFailed`."""
        if self._held:
            return self._held.popleft()
        return b"" if self.decode.complete else await self._guard(self._more)

    def tail(self, failure: Failure) -> bytes:
        """What ends a stream that has begun and fails: one event with the error unless one went out, and `[DONE]`."""
        if self._cutter is None or self._cutter.ended:
            return b""
        prefix = b"\n\n" if self._cutter.torn else b""
        return prefix + (b"data: [DONE]\n\n" if self._relayed_error else failure.sse())

    def fail(self, failure: Failure) -> None:
        """The first failure ends the attempt; later ones are its consequences."""
        if self.failure is not None:
            return
        self.failure = failure.within(self._attempt.shown)
        for leg in (self.prefill, self.decode):
            if failure.leg == leg.leg:
                self._told.failed(leg.worker, failure, self)
        if self._scope is not None:
            self._scope.cancel()

    async def close(self) -> None:
        """End both legs, within `cancel_s`."""
        ended_well = self.decode.complete and self.failure is None and not self._relayed_error
        if ended_well:
            self.decode.worker.breaker.success(self)
        with anyio.CancelScope(shield=True):
            if ended_well:
                await asyncio.wait({self._tasks[self.prefill]}, timeout=self._bounds.cancel_s)
            for leg, watcher in self._watches:
                leg.life.watchers.discard(watcher)
            await asyncio.gather(*(self._end(leg) for leg in self._tasks))

    # The answer

    async def _guard(self, step: Callable[[], Awaitable[T]]) -> T:
        """A step of decode's leg, unless the attempt fails elsewhere meanwhile or passes its deadline."""
        if self.failure is not None:
            raise RequestFailed(self.failure)
        with anyio.CancelScope(deadline=self._bounds.deadline_s) as scope:
            self._scope = scope
            try:
                return await step()
            except RequestFailed as failed:
                if failed.failure.secondary:
                    await asyncio.wait({self._tasks[self.prefill]}, timeout=FIRST_CAUSE_S)
                self._scope = None
                self.fail(failed.failure)
            finally:
                self._scope = None
        if self.failure is None:
            self.fail(own("room_expired", "the request passed the router's deadline, timeouts.request_s").failure)
        raise RequestFailed(self.failure or own("internal", "an attempt ended without a cause").failure)

    async def _begin_answer(self) -> None:
        await _done(self._tasks[self.decode])
        if self._logprobs is not None:
            await _done(self._tasks[self.prefill])
        if self.decode.response.headers.get("content-type", "").startswith("text/event-stream"):
            self._cutter = sse.EventCutter(self._bounds.hold_bytes)
            await self._begin_stream(self._cutter)
        else:
            await self._whole_answer()

    async def _begin_stream(self, cutter: sse.EventCutter) -> None:
        """Hold until there is an event, which must not be an error."""
        while chunk := await self.decode.read():
            if whole := cutter.feed(chunk):
                if (error := sse.error_in(whole)) is not None:
                    raise self.decode.gave(error)
                self._held.append(self._merged(whole))
                if cutter.torn or next(sse.events(whole), None) is not None:
                    return
        if rest := cutter.rest():
            self._held.append(rest)

    async def _whole_answer(self) -> None:
        """Hold a JSON answer until it is whole, so that one that breaks off is an error; a large one is passed on."""
        limit = self._bounds.hold_bytes if self._logprobs is None else self._bounds.merge_bytes
        size = 0
        while chunk := await self.decode.read():
            self._held.append(chunk)
            size += len(chunk)
            if size > limit:
                if self._logprobs is not None:
                    raise _too_long("decode", limit)
                return
        body = b"".join(self._held)
        if (error := _error_document(body)) is not None:
            raise self.decode.gave(error)
        if self._logprobs is not None:
            self._held = deque([self._logprobs.merge(body)])

    async def _more(self) -> bytes:
        while True:
            try:
                chunk = await self.decode.read()
            except RequestFailed as failed:
                if self._cutter is None or not (self._cutter.ended or self._relayed_error):
                    raise
                self.decode.complete = True  # all was said before the connection broke
                return self.tail(failed.failure)
            if self._cutter is None:
                return chunk
            if not chunk:
                return self._cutter.rest()
            if whole := self._cutter.feed(chunk):
                self._note_error(whole)
                return self._merged(whole)

    def _merged(self, whole: bytes) -> bytes:
        return whole if self._logprobs is None else self._logprobs.merge_events(whole)

    def _note_error(self, whole: bytes) -> None:
        """Decode ends its stream with an error of its own: it is passed on as it is, and remembered."""
        if (error := sse.error_in(whole)) is not None and not self._relayed_error:
            self._relayed_error = True
            self._told.failed(self.decode.worker, self.decode.gave(error).failure, self)

    # Prefill

    async def _run_prefill(self) -> None:
        try:
            await self.prefill.open()
            await self._drain_prefill()
        except RequestFailed as failed:
            if failed.failure.secondary:
                await asyncio.sleep(FIRST_CAUSE_S)
            self.fail(failed.failure)
        except Exception as error:
            log.exception("a defect in a prefill leg")
            self.fail(own("internal", f"{type(error).__name__}: {error}"[:300]).failure)
        else:
            self.prefill.worker.breaker.success(self)

    async def _drain_prefill(self) -> None:
        """Read the answer to its end; it is kept only to be merged."""
        is_stream = self.prefill.response.headers.get("content-type", "").startswith("text/event-stream")
        cutter = sse.EventCutter(self._bounds.hold_bytes)
        keep = MAX_ERROR_BYTES if self._logprobs is None else self._bounds.merge_bytes
        body = bytearray()
        while chunk := await self.prefill.read():
            if is_stream and (error := sse.error_in(cutter.feed(chunk))) is not None:
                raise self.prefill.gave(error)
            if self._logprobs is not None and len(body) + len(chunk) > keep:
                raise _too_long("prefill", keep)
            body += chunk[: keep - len(body)]
        if not is_stream and (error := _error_document(bytes(body))) is not None:
            raise self.prefill.gave(error)
        if self._logprobs is not None:
            self._logprobs.take(bytes(body), stream=is_stream)

    # The legs' ends

    def _watch(self, leg: WorkerLeg) -> None:
        """A room is pinned to the lives of its workers: a leg that still runs when its worker is replaced fails."""

        def ended(reason: str) -> None:
            if not leg.complete:
                self.fail(leg.replaced(reason))

        leg.life.watchers.add(ended)
        self._watches.append((leg, ended))

    def _count(self, leg: WorkerLeg) -> None:
        self._counted.add(leg)
        leg.worker.rooms += len(self._attempt.rooms)

    def _uncount(self, leg: WorkerLeg) -> None:
        if leg in self._counted:
            self._counted.discard(leg)
            leg.worker.rooms -= len(self._attempt.rooms)

    async def _end(self, leg: WorkerLeg) -> None:
        leg.worker.breaker.neutral(self)
        task = self._tasks[leg]
        stages = leg.worker.cancellable
        running = not leg.complete and (not task.done() or task.exception() is None)
        if running and stages is not None and leg.stage not in stages:
            rest = self._rest(leg, task)
            if self._told.lingers(rest):
                return
            rest.close()
        task.cancel()
        await asyncio.wait({task}, timeout=self._bounds.cancel_s)
        with anyio.move_on_after(self._bounds.cancel_s):
            await leg.close()
        self._uncount(leg)

    async def _rest(self, leg: WorkerLeg, task: asyncio.Task[None]) -> None:
        """A leg that its worker would not cancel anyway: its load stays counted until it ends."""
        try:
            await asyncio.wait({task})
            if leg is self.decode and task.exception() is None:
                while await leg.read():
                    pass
        except RequestFailed:
            pass  # nobody waits for it
        finally:
            task.cancel()
            await leg.close()
            self._uncount(leg)


async def _done(task: asyncio.Task[None]) -> None:
    """Wait for a task without owning it: whoever waits may be cancelled, the task goes on."""
    await asyncio.wait({task})
    task.result()


def _error_document(body: bytes) -> Any:
    return sse.error_in(b"data: " + body) if body[:64].lstrip().startswith(b'{"error"') else None


def _too_long(leg: str, limit: int) -> RequestFailed:
    return own(
        "worker_failed",
        f"{leg}'s answer is too long to merge input logprobs",
        expected=f"at most limits.merge_bytes = {limit}",
    )
