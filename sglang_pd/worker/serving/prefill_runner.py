"""Prefill's engine thread: computes prompts chunk by chunk and sends each chunk while the next one computes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import msgspec

from sglang_pd.engines.base import Output, PrefillChunk, PromptScorer, Request
from sglang_pd.engines.sampling import likeliest
from sglang_pd.memory.lease import Lease
from sglang_pd.protocol.errors import ErrorInfo, PdError, RoomError
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.room import Role
from sglang_pd.worker.endpoint import PrefillEndpoint
from sglang_pd.worker.events import EventKind, RoomEvent
from sglang_pd.worker.jobs import Failed, Finished, Job, Scores, Token
from sglang_pd.worker.serving.parts import Parts
from sglang_pd.worker.serving.runner import Bounds, Runner, defect
from sglang_pd.worker.setup import Trace
from sglang_pd.worker.watch import Watch

log = logging.getLogger("sglang_pd.runner")


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
        self,
        parts: Parts,
        endpoint: PrefillEndpoint,
        *,
        chunk_tokens: int = 256,
        bounds: Bounds | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(
            parts, endpoint, bounds or Bounds(), watch or Watch(Role.PREFILL), name="pd-prefill-engine"
        )  # fmt: skip
        self._prefill_endpoint = endpoint
        self._chunk_tokens = chunk_tokens
        self._jobs: dict[int, _Running] = {}

    @property
    def running(self) -> int:
        """See `Runner`."""
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        """See `Runner`."""
        return [entry.job for entry in self._jobs.values()]

    def tokens_needed(self, job: Job) -> int:
        """See `Runner`."""
        return len(job.token_ids)

    def check(self, job: Job) -> None:
        """See `Runner`."""
        super().check(job)
        if job.score and not isinstance(self.parts.engine, PromptScorer):
            raise RoomError(
                "this engine does not tell the log-probabilities of prompt tokens",
                code="request_rejected",
                where="return_logprob",
                hint="Ask with logprob_start_len -1.",
            )

    def decline(self, job: Job, error: ErrorInfo) -> None:
        """See `Runner`. Prefill does not know who will open the room, so that nobody can be told."""

    def _cancel_running(self, job: Job, error: ErrorInfo) -> None:
        for entry in [entry for entry in self._jobs.values() if entry.job is job]:
            self._endpoint.abort(entry.handle, error.message, code=error.code)

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
            self.forget(entry.job.request_id)
            entry.lease.release()
        if entry.ended:
            self._jobs.pop(entry.handle, None)
            self._rooms.discard(entry.job.room)
            self._let_go(entry.job)

    # --- computing ---------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        entry = next((e for e in self._jobs.values() if not e.stopped), None)
        if entry is None:
            return False
        try:
            self._compute(entry)
        except Exception as error:  # costs this room, not those behind it
            if not isinstance(error, PdError):
                log.exception("a defect when request %s was computed", entry.job.request_id)
            cause = defect(error)
            entry.stopped = True
            self._endpoint.abort(entry.handle, cause.message, code=cause.code)
            self._settle(entry)
        return True

    def _begin(self, job: Job) -> None:
        tokens = len(job.token_ids)
        lease = self.parts.allocator.lease(tokens, window_stop=0)
        started = False
        try:
            request = Request(job.request_id, job.token_ids, job.sampling, score=job.score)
            self.parts.engine.start(request, lease.tables())
            started = True
            lists = lease.lists(Prompt(tokens), windows=False)
            handle = self._prefill_endpoint.request(
                job.room, job.token_ids, lists, trace=Trace(job.request_id, job.traceparent)
            )
        except BaseException:
            if started:  # else the engine knows that id, if at all, for another request
                self.forget(job.request_id)
            lease.release()
            raise
        lease.pin()
        queue_s = time.monotonic() - self.queued[0].since_s
        self._jobs[handle] = _Running(job, lease, handle, time.monotonic(), stages_s={"queue": queue_s})

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
            self._prefill_endpoint.send(entry.handle, start, stop, last=False)
            return
        self._finish(entry, output, start)

    def _finish(self, entry: _Running, output: Output | None, start: int) -> None:
        job, tokens = entry.job, len(entry.job.token_ids)
        record = self.parts.engine.handoff(job.request_id)
        top: tuple[tuple[int, float], ...] = ()
        if job.top and output is not None:
            top = likeliest(output.logits, job.top)
            record = msgspec.structs.replace(record, first_top=top)
        entry.lease.unpin()
        entry.lease.pin(whole=True)
        entry.whole_pinned = True
        self._prefill_endpoint.send(
            entry.handle, start, tokens, last=True, lists=entry.lease.lists(Prompt(tokens))
        )  # fmt: skip
        self._prefill_endpoint.finish(entry.handle, tokens, record.encode())
        entry.output, entry.stopped = output, True
        entry.computed_s = time.monotonic()
        entry.stages_s["compute"] = entry.computed_s - entry.started_s
        if job.score and isinstance(self.parts.engine, PromptScorer):
            self.tell(job, Scores(self.parts.engine.prompt_logprobs(job.request_id)))
        if output is not None:
            logits = output.logits if job.keep_logits else None
            self.tell(job, Token(output.token, output.logprob, tokens, logits, top))
        self._settle(entry)
