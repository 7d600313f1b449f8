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
from typing import Final

from sglang_pd.protocol.errors import ErrorInfo, PdError, RoomError
from sglang_pd.worker.endpoint import Endpoint
from sglang_pd.worker.events import RoomEvent
from sglang_pd.worker.jobs import Failed, Job, Update
from sglang_pd.worker.parts import Parts

log = logging.getLogger("sglang_pd.runner")

IDLE_S: Final = 1.0


class Runner(abc.ABC):
    """One engine thread. `submit` and `cancel` may be called by any thread; the rest runs on this one."""

    def __init__(self, parts: Parts, endpoint: Endpoint, *, max_queue: int, name: str) -> None:
        self.parts = parts
        self._endpoint = endpoint
        self._max_queue = max_queue
        self._calls: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.queued: deque[Job] = deque()
        self.progress_s = time.monotonic()
        self.tokens_done = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Take a job. Raises `RoomError`: `prompt_empty`, `prompt_too_long` (it can never fit), `queue_full`."""
        tokens = self.tokens_needed(job)
        if not len(job.token_ids):
            raise RoomError("the request has no tokens", code="prompt_empty", where=job.request_id)
        most = self.parts.facts.max_tokens
        if tokens > most or not self.parts.allocator.fits(tokens):
            raise RoomError(
                "the request can never fit",
                code="prompt_too_long",
                where=job.request_id,
                expected=f"at most {most} tokens, prompt and answer, and what the pools hold",
                actual=f"{tokens} tokens",
            )
        if len(self.queued) + len(self._calls) >= self._max_queue:
            raise RoomError("the queue is full", code="queue_full", expected=f"<= {self._max_queue} waiting")
        self._call(lambda: self.queued.append(job))

    def cancel(self, room: int, reason: str) -> None:
        """The client went away."""
        self._call(lambda: self._cancel(room, reason))

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._bell, 1)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after its step."""
        self._stop = True
        os.eventfd_write(self._bell, 1)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """True when nothing is queued or running."""
        return not self._calls and not self.queued and not self.running

    @property
    @abc.abstractmethod
    def running(self) -> int:
        """Jobs that hold memory."""

    @abc.abstractmethod
    def tokens_needed(self, job: Job) -> int:
        """Token positions the job may come to hold."""

    @abc.abstractmethod
    def _cancel(self, room: int, reason: str) -> None: ...

    @abc.abstractmethod
    def _on_event(self, event: RoomEvent) -> None: ...

    @abc.abstractmethod
    def _step(self) -> bool:
        """Compute something. False when there is nothing to compute now."""

    def _run(self) -> None:
        while not self._stop:
            busy = self._guarded_turn()
            if not busy and not self._stop:
                select.select([self._bell, self._endpoint.wakeup_fd()], [], [], IDLE_S)
        os.close(self._bell)

    def _guarded_turn(self) -> bool:
        try:
            return self.turn()
        except Exception:
            log.exception("a defect in the engine thread; it goes on")
            time.sleep(0.05)  # a defect that repeats must not take the core
            return True

    def turn(self) -> bool:
        """Calls, events, then one step of the engine."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            pass
        while self._calls:
            self._calls.popleft()()
        for event in self._endpoint.poll():
            self.progress_s = time.monotonic()
            self._on_event(event)
        stepped = self._step()
        if stepped:
            self.progress_s = time.monotonic()
        return stepped

    @staticmethod
    def tell(job: Job, update: Update) -> None:
        """Give a job's owner an update; its defect is not ours."""
        try:
            job.sink(update)
        except Exception:
            log.exception("the owner of request %s failed to take an update", job.request_id)

    def refuse(self, job: Job, error: PdError) -> None:
        """End a job by an error."""
        self.tell(job, Failed(error.info()))


def gone(reason: str) -> ErrorInfo:
    """The cause when a client went away."""
    return ErrorInfo(code="room_aborted", message=reason)
