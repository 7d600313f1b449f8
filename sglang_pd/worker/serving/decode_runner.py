"""Decode's engine thread: leases memory, opens rooms, admits what arrived, decodes all that is admitted in a batch."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field

from sglang_pd.engines.base import DecodeItem, HandoffRecord, Output
from sglang_pd.engines.sampling import likeliest
from sglang_pd.memory.lease import Lease
from sglang_pd.protocol.errors import ErrorInfo, PdError, RoomError
from sglang_pd.protocol.indices import prompt_digest
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.room import Role
from sglang_pd.worker.endpoint import DecodeEndpoint
from sglang_pd.worker.events import EventKind, RoomEvent
from sglang_pd.worker.jobs import Failed, Finished, Job, Token
from sglang_pd.worker.serving.parts import Parts
from sglang_pd.worker.serving.runner import Bounds, Runner, defect
from sglang_pd.worker.setup import Trace
from sglang_pd.worker.watch import Watch

log = logging.getLogger("sglang_pd.runner")


@dataclass(slots=True)
class _Running:
    """A request that holds memory. Its lease is armed until RELEASABLE, the engine's from then on."""

    job: Job
    lease: Lease
    handle: int
    opened_s: float
    record: bytes | None = None
    admitted: bool = False
    failed: bool = False
    cancelled: ErrorInfo | None = None
    """Asked for before it was admitted; the room may have ended well in the same moment."""
    next_token: int = 0
    position: int = 0
    """Where `next_token` goes in the sequence."""
    produced: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)


class DecodeRunner(Runner):
    """Runs requests from their open to their last token."""

    def __init__(
        self,
        parts: Parts,
        endpoint: DecodeEndpoint,
        *,
        max_batch: int = 64,
        bounds: Bounds | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(parts, endpoint, bounds or Bounds(), watch or Watch(Role.DECODE), name="pd-decode-engine")
        self._decode_endpoint = endpoint
        self._max_batch = max_batch
        self._jobs: dict[int, _Running] = {}

    @property
    def running(self) -> int:
        """See `Runner`."""
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        """See `Runner`."""
        return [entry.job for entry in self._jobs.values()]

    def tokens_needed(self, job: Job) -> int:
        """See `Runner`. The last token's own position is never computed."""
        return len(job.token_ids) + max(0, job.max_new_tokens - 1)

    def decline(self, job: Job, error: ErrorInfo) -> None:
        """See `Runner`."""
        if self.holds_room(job.room):
            return  # prefill would fail the room of a job that waits here
        with contextlib.suppress(RoomError):  # the endpoint is closing: prefill will miss it anyway
            self._decode_endpoint.decline(job.room, job.address, error)

    def _cancel_running(self, job: Job, error: ErrorInfo) -> None:
        for entry in [entry for entry in self._jobs.values() if entry.job is job]:
            if entry.admitted:
                self._give_up(entry, error)
            else:
                entry.cancelled = error
                self._endpoint.abort(entry.handle, error.message, code=error.code)

    # --- events ------------------------------------------------------------------------------------------------------

    def _on_event(self, event: RoomEvent) -> None:
        entry = self._jobs.get(event.handle)
        if entry is None:
            return
        if event.kind is EventKind.ADMITTED:
            entry.record = event.record
            entry.stages_s["hand_over"] = time.monotonic() - entry.opened_s
        elif event.kind in (EventKind.FAILED, EventKind.ABORTED):
            entry.failed = True
            entry.lease.quarantine(event.error.code if event.error else "failed", time.monotonic())
            if event.error is not None:
                self.tell(entry.job, Failed(event.error))
        elif event.kind is EventKind.RELEASABLE:
            self._memory_is_ours(entry)

    def _memory_is_ours(self, entry: _Running) -> None:
        """No peer writes into the lease any more: the request is admitted, or its memory goes back."""
        self.parts.pools.disarm(entry.lease.generation)
        if entry.failed:
            del self._jobs[entry.handle]
            self._rooms.discard(entry.job.room)
            self._let_go(entry.job)
            self.parts.allocator.fenced(entry.lease.generation)
            return
        entry.lease.disarm()
        if entry.cancelled is not None:
            self._give_up(entry, entry.cancelled)
            return
        try:
            self._admit(entry)
        except Exception as error:
            if not isinstance(error, PdError):
                log.exception("a defect when request %s was admitted", entry.job.request_id)
            self._give_up(entry, defect(error))

    def _admit(self, entry: _Running) -> None:
        if entry.record is None:
            raise RoomError("a room was released before it was admitted", code="internal", where=entry.job.request_id)
        record = HandoffRecord.decode(entry.record)
        tokens = len(entry.job.token_ids)
        expected = tokens, prompt_digest(entry.job.token_ids), self.parts.facts.fingerprint
        actual = record.prompt_tokens, record.prompt_digest, record.model
        if actual != expected:
            # The room compared what both sides were asked; this is what prefill's engine computed.
            raise RoomError(
                "the handoff record is of another prompt or model",
                code="prompt_mismatch",
                where=entry.job.request_id,
                expected="{} tokens, digest {:016x}, of {}".format(*expected),
                actual="{} tokens, digest {:016x}, of {}".format(*actual),
                hint="The state that came with it is of another request: look at prefill's engine.",
            )
        top = _check_answer(entry.job, record, self.parts.facts.vocab_size)
        self.parts.engine.admit(entry.job.request_id, record, entry.lease.tables())
        entry.admitted = True
        self.watch.ended(entry.job, None)
        self._produce(entry, Token(record.first_token, record.first_logprob, tokens, top=top))

    # --- decoding ----------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        batch = [entry for entry in self._jobs.values() if entry.admitted][: self._max_batch]
        if not batch:
            return False
        items, ready = [], []
        for entry in batch:
            try:
                entry.lease.advance(entry.position + 1)
            except Exception as error:  # costs this request, not the batch
                self._give_up(entry, defect(error))
                continue
            items.append(DecodeItem(entry.job.request_id, entry.next_token, entry.lease.tables()))
            ready.append(entry)
        if items:
            self._decode(ready, items)
        return True

    def _decode(self, ready: list[_Running], items: list[DecodeItem]) -> None:
        try:
            outputs = self.parts.engine.decode(items) or []
            _check_outputs(items, outputs)
        except Exception as error:
            # Nobody knows which of the batch's states moved on, so none of them can be trusted.
            log.exception("a decode step of %d requests failed", len(ready))
            for entry in ready:
                self._give_up(entry, defect(error))
            return
        broken: list[tuple[_Running, Exception]] = []
        for entry, output in zip(ready, outputs, strict=True):
            try:
                self._take(entry, output)
            except Exception as error:  # the engine has moved all of them on: each one behind must take its token
                log.exception("a token of request %s could not be taken", entry.job.request_id)
                broken.append((entry, error))
        for entry, cause in broken:
            self._give_up(entry, defect(cause))

    def _take(self, entry: _Running, output: Output) -> None:
        entry.lease.settle(entry.position + 1)
        logits = output.logits if entry.job.keep_logits else None
        top = likeliest(output.logits, entry.job.top)
        self._produce(entry, Token(output.token, output.logprob, entry.position + 1, logits, top))

    def _produce(self, entry: _Running, token: Token) -> None:
        """A token was chosen: tell, and end the request where it ends."""
        job = entry.job
        entry.next_token, entry.position = token.token, token.position
        entry.produced += 1
        self.tokens_done += 1
        self.tell(job, token)
        ends = token.token in job.stop_tokens or (token.token == self.parts.facts.eos_token and not job.ignore_eos)
        if ends or entry.produced >= job.max_new_tokens:
            reason = "stop" if ends else "length"
            entry.stages_s["decode"] = time.monotonic() - entry.opened_s - entry.stages_s.get("hand_over", 0.0)
            self.tell(job, Finished(reason, len(job.token_ids), entry.produced, entry.stages_s))
            self._drop(entry)

    def _give_up(self, entry: _Running, error: ErrorInfo) -> None:
        """End a request whose memory is the engine's own by an error."""
        self.watch.ended(entry.job, error)
        self.tell(entry.job, Failed(error))
        self._drop(entry)

    def _drop(self, entry: _Running) -> None:
        """The request is over and its memory the engine's own: give it back."""
        self._jobs.pop(entry.handle, None)
        self._rooms.discard(entry.job.room)
        if entry.admitted:
            self.forget(entry.job.request_id)
        self._let_go(entry.job)
        entry.lease.release()

    def _begin(self, job: Job) -> None:
        tokens = len(job.token_ids)
        lease = self.parts.allocator.lease(self.tokens_needed(job), window_stop=tokens)
        try:
            lease.arm()
            self.parts.pools.arm(lease.tables())
            handle = self._decode_endpoint.open(
                job.room,
                job.address,
                job.token_ids,
                lease.lists(Prompt(tokens)),
                trace=Trace(job.request_id, job.traceparent),
            )
        except BaseException:
            self.parts.pools.disarm(lease.generation)
            if lease.is_armed:
                lease.disarm()
            lease.release()
            raise
        queue_s = time.monotonic() - self.queued[0].since_s
        self._jobs[handle] = _Running(job, lease, handle, time.monotonic(), stages_s={"queue": queue_s})


def _check_outputs(items: list[DecodeItem], outputs: list[Output]) -> None:
    """One token for each request, in order; else one request's would be told as another's. Raises `RoomError`."""
    wanted, got = [item.request_id for item in items], [output.request_id for output in outputs]
    if wanted != got:
        raise RoomError(
            "the engine's tokens are not those of its batch", code="internal", where="engine.decode", expected=wanted,
            actual=got,
        )  # fmt: skip


def _check_answer(job: Job, record: HandoffRecord, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens in the first one's place, as many as the job wants. Raises `RoomError` for a record that
    cannot be, and (`request_mismatch`) where prefill chose by other rules than decode would go on by."""
    if record.sampled != 1 or any(token >= vocab_size for token, _ in record.first_top):
        raise RoomError("the record is not possible", code="request_rejected", where=job.request_id)
    wanted = min(job.top, vocab_size)
    if not record.sampling.chooses_as(job.sampling, any_seed=job.any_seed) or len(record.first_top) < wanted:
        raise RoomError(
            "prefill and decode were asked for different answers",
            code="request_mismatch",
            where=job.request_id,
            expected=f"{job.sampling}{', any seed' if job.any_seed else ''}, top {wanted} at least",
            actual=f"{record.sampling}, top {len(record.first_top)}",
            hint="Both legs of a room get the same request.",
        )
    return record.first_top[:wanted]  # the likeliest come first
