"""What both runners share: an engine thread that sleeps until its endpoint or a caller has something for it."""

from __future__ import annotations

import abc
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from sglang_pd.engines.base import PrefillChunk, Request
from sglang_pd.memory.allocator import Allocator
from sglang_pd.protocol.errors import ErrorInfo, PdError, RoomError
from sglang_pd.worker.endpoint import Endpoint
from sglang_pd.worker.events import RoomEvent
from sglang_pd.worker.jobs import Failed, Job, Update
from sglang_pd.worker.serving.parts import Parts
from sglang_pd.worker.watch import Watch

log = logging.getLogger("sglang_pd.runner")

IDLE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a runner takes on. max_queue: jobs that wait. max_running: jobs that hold memory. max_prompt_tokens: 0
    for what engine and pools allow. wait_s: longest wait for memory."""

    max_queue: int = 1024
    max_running: int = 1024
    max_prompt_tokens: int = 0
    wait_s: float = 1800.0


@dataclass(slots=True)
class Waiting:
    """A job in the queue."""

    job: Job
    since_s: float


class Runner(abc.ABC):
    """One engine thread. `submit` and `cancel` may be called by any thread; the rest runs on this one."""

    def __init__(self, parts: Parts, endpoint: Endpoint, bounds: Bounds, watch: Watch, *, name: str) -> None:
        self.parts = parts
        self.bounds = bounds
        self.watch = watch
        self._endpoint = endpoint
        self._calls: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = threading.Lock()
        self._closed = False
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.queued: deque[Waiting] = deque()
        self._held: dict[str, Job] = {}
        """Jobs from their `submit` to the return of their memory, by request id: one id is one request to an engine."""
        self._held_lock = threading.Lock()
        self._rooms: set[int] = set()
        """Rooms of jobs that hold memory."""
        self.draining = False
        self.progress_s = time.monotonic()
        self.tokens_done = 0
        self.most_tokens = min(self._limits().values())
        """Longest prompt and answer together that can ever run here."""

    def _limits(self) -> dict[str, int]:
        """What bounds a request, by name, in tokens."""
        most = self.parts.facts.max_tokens
        return {"model": most, "pools": pool_tokens(self.parts.allocator, most)}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def check(self, job: Job) -> None:
        """Raise `RoomError` for a job that can never run: `prompt_empty`, `prompt_too_long`, `request_rejected`."""
        tokens = self.tokens_needed(job)
        facts = self.parts.facts
        if not len(job.token_ids):
            raise RoomError("the request has no tokens", code="prompt_empty", where="input_ids")
        longest = self.bounds.max_prompt_tokens
        if longest and len(job.token_ids) > longest:
            raise RoomError(
                "the prompt is longer than this worker takes",
                code="prompt_too_long",
                where="limits.max_prompt_tokens",
                expected=f"at most {longest} tokens",
                actual=f"{len(job.token_ids)} tokens",
            )
        if tokens > self.most_tokens:
            limits = ", ".join(f"{name} {tokens}" for name, tokens in self._limits().items())
            raise RoomError(
                "the request can never fit",
                code="prompt_too_long",
                where="input_ids, max_new_tokens",
                expected=f"at most {self.most_tokens} tokens, prompt and answer ({limits})",
                actual=f"{tokens} tokens",
            )
        if int(job.token_ids.min()) < 0 or int(job.token_ids.max()) >= facts.vocab_size:
            raise RoomError(
                "a token outside the vocabulary",
                code="request_rejected",
                where="input_ids",
                expected=f"0 to {facts.vocab_size - 1}",
                actual=f"{int(job.token_ids.min())} to {int(job.token_ids.max())}",
            )

    def submit(self, job: Job) -> None:
        """Take a job. Raises `RoomError`: as `check`, `queue_full`, `draining`, `request_duplicate`; a job that runs
        under the same id, or in the same room, is not harmed by one that is refused."""
        self.check(job)
        if self.draining:
            raise RoomError("the worker is stopping and takes no new requests", code="draining")
        waiting = len(self.queued) + len(self._calls)
        if waiting >= self.bounds.max_queue:
            raise RoomError(
                "the queue is full", code="queue_full", expected=f"< {self.bounds.max_queue} waiting", actual=waiting
            )
        with self._held_lock:
            holder = self._held.get(job.request_id)
            if holder is None:
                self._held[job.request_id] = job
        if holder is not None:
            raise RoomError(
                "a request of that id is queued or running here",
                code="request_duplicate",
                where=f"request {job.request_id}",
                expected="an id that no other job holds",
                actual=f"held in room {holder.room}",
                hint="An id is free again when its request has ended and its memory is back.",
            )
        self.call(lambda: self._enqueue(job))

    def _let_go(self, job: Job) -> None:
        """The job holds nothing any more: its id is free."""
        with self._held_lock:
            if self._held.get(job.request_id) is job:
                del self._held[job.request_id]

    def holds_room(self, room: int) -> bool:
        """Whether a job that is queued or running is of that room. By any thread."""
        with self._held_lock:
            return any(held.room == room for held in self._held.values())

    def cancel(self, job: Job, error: ErrorInfo) -> None:
        """Nobody waits for the job any more. Harmless for one that has ended."""
        self.call(lambda: self._cancel(job, error))

    def cancel_all(self, error: ErrorInfo) -> None:
        """Give up everything that is queued or running."""

        def every() -> None:
            for job in [*(waiting.job for waiting in self.queued), *self.jobs()]:
                try:
                    self._cancel(job, error)
                except Exception:  # the others are to end as well
                    log.exception("a defect when request %s was given up", job.request_id)

        self.call(every)

    def call(self, call: Callable[[], None]) -> None:
        """Run a call on the engine's thread."""
        self._calls.append(call)
        self._ring()

    def _ring(self) -> None:
        with self._bell_lock:  # after the thread's end the bell's number may be somebody else's
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after its step."""
        self._stop = True
        self._ring()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """True when nothing is queued or running."""
        return not self._calls and not self.queued and not self.running

    @property
    @abc.abstractmethod
    def running(self) -> int:
        """Jobs that hold memory."""

    @abc.abstractmethod
    def jobs(self) -> list[Job]:
        """Jobs that hold memory. On the engine's thread."""

    @abc.abstractmethod
    def tokens_needed(self, job: Job) -> int:
        """Token positions the job may come to hold."""

    @abc.abstractmethod
    def _cancel_running(self, job: Job, error: ErrorInfo) -> None: ...

    @abc.abstractmethod
    def _on_event(self, event: RoomEvent) -> None: ...

    @abc.abstractmethod
    def _begin(self, job: Job) -> None:
        """Lease memory and begin the job's room. Raises `PdError`; `pool_exhausted`: not now."""

    @abc.abstractmethod
    def _step(self) -> bool:
        """Compute something. False when there is nothing to compute now."""

    # --- the queue ---------------------------------------------------------------------------------------------------

    def _enqueue(self, job: Job) -> None:
        self.watch.queued(job)
        self.queued.append(Waiting(job, time.monotonic()))

    def _cancel(self, job: Job, error: ErrorInfo) -> None:
        for waiting in [waiting for waiting in self.queued if waiting.job is job]:
            self.queued.remove(waiting)
            self._fail(job, error)
            return
        self._cancel_running(job, error)

    def _begin_queued(self) -> None:
        """Begin queued jobs in order; the first that finds no memory waits, and those behind it."""
        while self.queued and self.running < self.bounds.max_running:
            job = self.queued[0].job
            try:
                if job.room in self._rooms:
                    raise RoomError("that room is already open here", code="room_duplicate", where=f"room {job.room}")
                self._begin(job)
            except PdError as error:
                if error.code == "pool_exhausted" and self.running:
                    self.watch.waits_for_memory([waiting.job for waiting in self.queued])
                    break
                self.queued.popleft()
                self._fail(job, error.info())
            except Exception as error:
                log.exception("a defect when request %s began", job.request_id)
                self.queued.popleft()
                self._fail(job, defect(error))
            else:
                self.queued.popleft()
                self._rooms.add(job.room)
        self._expire()

    def _expire(self) -> None:
        now_s = time.monotonic()
        while self.queued and now_s - self.queued[0].since_s > self.bounds.wait_s:
            waiting = self.queued.popleft()
            error = ErrorInfo(
                code="pool_exhausted",
                message="no memory came free in time",
                where=waiting.job.request_id,
                expected=f"within {self.bounds.wait_s:g} s",
            )
            self._fail(waiting.job, error)

    @abc.abstractmethod
    def decline(self, job: Job, error: ErrorInfo) -> None:
        """A job was refused, or gave up waiting: the other side of its room learns why, if it can be told, and if no
        other job here `holds_room`. By any thread."""

    def _fail(self, job: Job, error: ErrorInfo) -> None:
        """End a job that holds nothing by an error."""
        self._let_go(job)
        self.decline(job, error)
        self.watch.ended(job, error)
        self.tell(job, Failed(error))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            busy = self._guarded_turn()
            if not busy and not self._stop:
                select.select([self._bell, self._endpoint.wakeup_fd()], [], [], IDLE_S)
        with self._bell_lock:
            self._closed = True
            os.close(self._bell)

    def _guarded_turn(self) -> bool:
        try:
            return self.turn()
        except Exception:
            log.exception("a defect in the engine thread; it goes on")
            time.sleep(0.05)  # a defect that repeats must not take the core
            return True

    def turn(self) -> bool:
        """Calls, events, the queue, then one step of the engine."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            pass
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        for event in self._endpoint.poll():
            self.progress_s = time.monotonic()
            try:
                self._on_event(event)
            except Exception:  # the events behind it are of other rooms, and come only once
                log.exception("a defect at the event %s of room %d", event.kind.value, event.room)
        self._begin_queued()
        stepped = self._step()
        if stepped:
            self.progress_s = time.monotonic()
        self.watch.levels(len(self.queued), self.bounds.max_queue, self.parts.allocator)
        return stepped or bool(self._calls)

    def tell_levels(self) -> None:
        """Tell the observer how full queue and pools are. On this thread (`call`)."""
        self.watch.tell_levels(len(self.queued), self.bounds.max_queue, self.parts.allocator)

    def probe(self) -> int:
        """Compute one token on the engine's own memory, with no room: the token. On this thread (`call`).

        Raises `RoomError` where no memory is free, and what the engine raises.
        """
        lease = self.parts.allocator.lease(1, window_stop=0)
        name = f"probe-{time.monotonic_ns()}"
        try:
            lease.advance(1)
            self.parts.engine.start(Request(name, np.zeros(1, dtype=np.int64)), lease.tables())
            try:
                output = self.parts.engine.prefill(PrefillChunk(name, 0, 1, lease.tables()))
            finally:
                self.forget(name)
            return output.token if output is not None else -1
        finally:
            lease.release()

    def forget(self, request_id: str) -> None:
        """Let the engine forget a request. Where it fails to, the request's memory must still come back."""
        try:
            self.parts.engine.release(request_id)
        except Exception:
            log.exception("the engine failed to release request %s", request_id)

    @staticmethod
    def tell(job: Job, update: Update) -> None:
        """Give a job's owner an update; its defect is not ours."""
        try:
            job.sink(update)
        except Exception:
            log.exception("the owner of request %s failed to take an update", job.request_id)


def pool_tokens(allocator: Allocator, most: int) -> int:
    """Tokens of the longest request that an empty pool holds, at most `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if allocator.fits(middle) else (low, middle - 1)
    return low


def defect(error: Exception) -> ErrorInfo:
    """The cause where something broke that should not."""
    if isinstance(error, PdError):
        return error.info()
    return ErrorInfo(code="internal", message=f"{type(error).__name__}: {error}"[:2000])
