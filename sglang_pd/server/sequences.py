"""One answer: a job at the runner, its tokens as they come, the text they make, and where it stops."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_pd.engines.base import Sampling
from sglang_pd.protocol.errors import ErrorInfo, RoomError
from sglang_pd.protocol.room import Role
from sglang_pd.server.bodies import SamplingParams
from sglang_pd.server.errors import Failure
from sglang_pd.server.rooms import Place
from sglang_pd.server.tokenizer import Tokenizer
from sglang_pd.worker.jobs import Failed, Finished, Job, Scores, Token, Update
from sglang_pd.worker.serving.service import WorkerService

DEFAULT_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6
"""Temperatures below it are greedy."""

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sequence that is wanted. number: its place in the request. answer: which of a prompt's answers it is.
    score: the prompt's own log-probabilities are wanted. top: likeliest tokens told in each place."""

    number: int
    rid: str
    place: Place
    token_ids: list[int]
    params: SamplingParams
    answer: int = 0
    score: bool = False
    top: int = 0
    traceparent: str = ""


@dataclass(slots=True)
class Progress:
    """What stands of an answer. finish: SGLang's `finish_reason`, None until it ends."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    stages_s: dict[str, float] = field(default_factory=dict)


class Sequence:
    """Runs one `Ask`. `start` first, then iterate; `close` in any case."""

    def __init__(self, service: WorkerService, tokenizer: Tokenizer, ask: Ask) -> None:
        self.ask = ask
        self.progress = Progress()
        self.started_s = time.monotonic()
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._job = self._make_job()
        stops = ask.params.stop
        self._text = _Text(tokenizer, [stops] if isinstance(stops, str) else stops or [])
        self._ended = False

    def _make_job(self) -> Job:
        ask, facts, role = self.ask, self._service.parts.facts, self._service.role
        count = len(ask.token_ids)
        # One that can never fit is counted, which is all that its refusal needs.
        fits = count <= self._service.most_tokens
        prompt = np.asarray(ask.token_ids, np.int64) if fits else np.broadcast_to(np.int64(0), count)
        return Job(
            room=ask.place.room,
            request_id=f"{ask.rid}#{next(_numbers)}",
            token_ids=prompt,
            sink=self._sink,
            sampling=sampling_of(ask.params, ask.answer),
            any_seed=ask.params.sampling_seed is None,
            address=ask.place.address,
            max_new_tokens=_new_tokens(ask, self._service) if role is Role.DECODE else 1,
            stop_tokens=frozenset(ask.params.stop_token_ids or ()),
            ignore_eos=ask.params.ignore_eos or facts.eos_token < 0,
            score=ask.score and role is Role.PREFILL,
            top=ask.top,
            traceparent=ask.traceparent,
        )

    def _sink(self, update: Update) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended, and its loop with it
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    def check(self) -> None:
        """Raise `Failure` where the sequence can never run."""
        try:
            self._service.runner.check(self._job)
        except RoomError as error:
            raise self._declined(error) from None

    def start(self) -> None:
        """Hand the job over. Raises `Failure`: it can never fit, the queue is full, the worker drains."""
        try:
            self._service.runner.submit(self._job)
        except RoomError as error:
            self._ended = True
            raise self._declined(error) from None

    def _declined(self, error: RoomError) -> Failure:
        self._service.runner.decline(self._job, error.info())
        return Failure(error, self.ask.place.room)

    async def __aiter__(self) -> AsyncIterator[Progress]:
        """The progress after each token, the last one with `finish`. Raises `Failure` with the first cause."""
        while self.progress.finish is None:
            update = await self._updates.get()
            if isinstance(update, Failed):
                self._ended = True
                raise Failure.of(update.error, self.ask.place.room)
            if isinstance(update, Scores):
                self.progress.prompt_logprobs = update.logprobs.tolist()
            elif isinstance(update, Token):
                self._take(update)
            else:
                self._ended = True
                self._finish(update)
            if not isinstance(update, Scores) and (self._service.role is Role.DECODE or self.progress.finish):
                yield self.progress

    def _take(self, update: Token) -> None:
        progress = self.progress
        progress.tokens.append(update.token)
        progress.logprobs.append(update.logprob)
        progress.tops.append(update.top)
        params, facts = self.ask.params, self._service.parts.facts
        stops = update.token in (params.stop_token_ids or ())
        if not stops and (update.token != facts.eos_token or params.ignore_eos):
            matched = self._text.add(update.token)
            progress.text = self._text.shown(keep_stop=params.no_stop_trim)
            if matched is not None:
                progress.finish = {"type": "stop", "matched": matched}

    def _finish(self, update: Finished) -> None:
        progress = self.progress
        progress.stages_s = update.stages_s
        matched = self._text.finish()
        progress.text = self._text.shown(keep_stop=self.ask.params.no_stop_trim)
        if matched is not None:
            progress.finish = {"type": "stop", "matched": matched}
        elif update.reason == "stop":
            progress.finish = {"type": "stop", "matched": progress.tokens[-1]}
        else:
            progress.finish = {"type": "length", "length": len(progress.tokens)}

    def close(self, reason: str = "the client went away") -> None:
        """Nobody listens any more: what still runs is aborted. Harmless after the end."""
        if not self._ended:
            self._ended = True
            stopped = self.progress.finish is not None
            message = "a stop string was found" if stopped else reason
            self._service.runner.cancel(self._job, ErrorInfo(code="room_aborted", message=message))

    def expire(self, seconds: float) -> Failure:
        """The request's own deadline passed."""
        self._ended = True
        error = ErrorInfo(code="room_expired", message=f"the request took longer than {seconds:g} s")
        self._service.runner.cancel(self._job, error)
        return Failure.of(error, self.ask.place.room)


class _Text:
    """Text so far; what could still become a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str]) -> None:
        self._stream = tokenizer.detokenizer()
        self._stops = stops
        self._whole = ""
        self._end: int | None = None
        self._matched = ""
        self._done = False

    def add(self, token: int) -> str | None:
        """One more token. The stop string that it completed, if any."""
        return self._append(self._stream.add(token))

    def finish(self) -> str | None:
        """No more tokens come."""
        self._done = True
        return self._append(self._stream.finish())

    def _append(self, text: str) -> str | None:
        if self._end is not None or not text:
            return self._matched if self._end is not None else None
        longest = max((len(stop) for stop in self._stops), default=1)
        start = max(0, len(self._whole) - longest + 1)
        self._whole += text
        found = [(at, stop) for stop in self._stops if (at := self._whole.find(stop, start)) >= 0]
        if not found:
            return None
        self._end, self._matched = min(found)
        return self._matched

    def shown(self, *, keep_stop: bool) -> str:
        """The text that may be shown now."""
        if self._end is not None:
            return self._whole[: self._end + (len(self._matched) if keep_stop else 0)]
        if self._done:
            return self._whole
        held = max((_overlap(self._whole, stop) for stop in self._stops), default=0)
        return self._whole[: len(self._whole) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def sampling_of(params: SamplingParams, answer: int) -> Sampling:
    """What the engine is told. answer: of several for one prompt, each draws its own numbers.

    Without a seed every request has a random one; it travels with the state, so that decode goes on where prefill
    stopped.
    """
    seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
    if params.temperature < GREEDY_BELOW:
        return Sampling()
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        seed=(seed + answer) % 2**63,
    )


def _new_tokens(ask: Ask, service: WorkerService) -> int:
    """What was asked for, or the default as far as it fits."""
    if ask.params.max_new_tokens is not None:
        return ask.params.max_new_tokens
    left = service.most_tokens - len(ask.token_ids) + 1
    return max(1, min(DEFAULT_NEW_TOKENS, left))
