"""Prefill's engine thread: computes prompts chunk by chunk and sends each chunk while the next one computes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sglang_pd.engines.base import Output, PrefillChunk, Request
from sglang_pd.memory.lease import Lease
from sglang_pd.protocol.errors import PdError, RoomError
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.worker.endpoint import PrefillEndpoint
from sglang_pd.worker.events import EventKind, RoomEvent
from sglang_pd.worker.jobs import Failed, Finished, Job, Token
from sglang_pd.worker.parts import Parts
from sglang_pd.worker.runner import Runner, gone


@dataclass(slots=True)
class _Running:
    """A prompt that holds memory, from its lease to its release."""

    job: Job
    lease: Lease
    handle: int
    started_s: float
    done: int = 0
    computed_s: float = 0.0
    output: Output | None = None
    stopped: bool = False
    """Computes no more: handed over, failed or given up."""
    ended: bool = False
    released: bool = False
    whole_pinned: bool = False
    stages_s: dict[str, float] = field(default_factory=dict)


class PrefillRunner(Runner):
    """Runs prompts one after another, oldest first; several may wait for their transfers."""

    def __init__(
        self, parts: Parts, endpoint: PrefillEndpoint, *, chunk_tokens: int = 256, max_queue: int = 1024
    ) -> None:
        super().__init__(parts, endpoint, max_queue=max_queue, name="pd-prefill-engine")
        self._prefill_endpoint = endpoint
        self._chunk_tokens = chunk_tokens
        self._jobs: dict[int, _Running] = {}

    @property
    def running(self) -> int:
        """See `Runner`."""
        return len(self._jobs)

    def tokens_needed(self, job: Job) -> int:
        """See `Runner`."""
        return len(job.token_ids)

    def _cancel(self, room: int, reason: str) -> None:
        for job in [job for job in self.queued if job.room == room]:
            self.queued.remove(job)
            self.tell(job, Failed(gone(reason)))
        if any(entry.job.room == room for entry in self._jobs.values()):
            self._endpoint.abort(room, reason)

    # --- events ------------------------------------------------------------------------------------------------------

    def _on_event(self, event: RoomEvent) -> None:
        entry = self._jobs.get(event.handle)
        if entry is None:
            return
        if event.kind is EventKind.DONE:
            entry.ended = True
            entry.stages_s["hand_over"] = time.monotonic() - entry.computed_s
            tokens = len(entry.job.token_ids)
            self.tell(entry.job, Finished("handed_over", tokens, 1, entry.stages_s))
        elif event.kind in (EventKind.FAILED, EventKind.ABORTED):
            entry.ended = entry.stopped = True
            if event.error is not None:
                self.tell(entry.job, Failed(event.error))
        elif event.kind is EventKind.RELEASABLE:
            entry.released = True
        self._settle(entry)

    def _settle(self, entry: _Running) -> None:
        """Give memory back once nobody computes into it and no transfer reads it."""
        if not (entry.stopped and entry.released):
            return
        if entry.lease.pins:
            entry.lease.unpin(whole=entry.whole_pinned)
            self.parts.engine.release(entry.job.request_id)
            entry.lease.release()
        if entry.ended:
            self._jobs.pop(entry.handle, None)

    # --- computing ---------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        self._admit()
        entry = next((e for e in self._jobs.values() if not e.stopped), None)
        if entry is None:
            return False
        try:
            self._compute(entry)
        except PdError as error:
            entry.stopped = True
            self._endpoint.abort(entry.job.room, error.message, code=error.code)
            self._settle(entry)
        return True

    def _admit(self) -> None:
        """Lease memory for queued prompts, in order; the first that finds none waits, and those behind it."""
        while self.queued:
            job = self.queued[0]
            try:
                lease = self.parts.allocator.lease(len(job.token_ids), window_stop=0)
            except RoomError as error:
                if error.code == "pool_exhausted":
                    return
                self.queued.popleft()
                self.refuse(job, error)
                continue
            self.queued.popleft()
            self._begin(job, lease)

    def _begin(self, job: Job, lease: Lease) -> None:
        request = Request(job.request_id, job.token_ids, job.sampling)
        try:
            self.parts.engine.start(request, lease.tables())
            lists = lease.lists(Prompt(len(job.token_ids)), windows=False)
            handle = self._prefill_endpoint.request(job.room, job.token_ids, lists, request_id=job.request_id)
        except PdError as error:
            self.parts.engine.release(job.request_id)
            lease.release()
            self.refuse(job, error)
            return
        lease.pin()
        self._jobs[handle] = _Running(job, lease, handle, time.monotonic())

    def _compute(self, entry: _Running) -> None:
        tokens = len(entry.job.token_ids)
        start, stop = entry.done, min(entry.done + self._chunk_tokens, tokens)
        entry.lease.advance(stop)
        output = self.parts.engine.prefill(
            PrefillChunk(entry.job.request_id, start, stop, entry.lease.tables())
        )  # fmt: skip
        entry.done = stop
        self.tokens_done += stop - start
        if stop < tokens:
            entry.lease.settle(stop)
            self._prefill_endpoint.send(entry.job.room, start, stop, last=False)
            return
        self._finish(entry, output, start)

    def _finish(self, entry: _Running, output: Output | None, start: int) -> None:
        job, tokens = entry.job, len(entry.job.token_ids)
        record = self.parts.engine.handoff(job.request_id).encode()
        entry.lease.unpin()
        entry.lease.pin(whole=True)
        entry.whole_pinned = True
        self._prefill_endpoint.send(
            job.room, start, tokens, last=True, lists=entry.lease.lists(Prompt(tokens))
        )  # fmt: skip
        self._prefill_endpoint.finish(job.room, tokens, record)
        entry.output, entry.stopped = output, True
        entry.computed_s = time.monotonic()
        entry.stages_s["compute"] = entry.computed_s - entry.started_s
        if output is not None:
            logits = output.logits if job.keep_logits else None
            self.tell(job, Token(output.token, output.logprob, tokens, logits))
        self._settle(entry)
