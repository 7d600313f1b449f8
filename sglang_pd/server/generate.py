"""`/generate`, in SGLang's shapes."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_pd.protocol.errors import RoomError
from sglang_pd.protocol.room import Role
from sglang_pd.server.asgi import EventStream, while_connected
from sglang_pd.server.batch import Worker, gather, merged, started
from sglang_pd.server.bodies import GenerateBody, SamplingParams, decode
from sglang_pd.server.rooms import places
from sglang_pd.server.sequences import Ask, Sequence
from sglang_pd.server.tokenizer import Tokenizer

Value = TypeVar("Value")
NULL: Final = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A `/generate` request as sequences. single: it asked for one answer to one prompt, which is answered bare.
    logprobs, start: by prompt, whether log-probabilities are told, and from which prompt token (-1: none)."""

    asks: list[Ask]
    answers: int
    single: bool
    logprobs: list[bool]
    start: list[int]
    token_text: bool
    stream: bool


async def generate(request: Request, worker: Worker) -> Response:
    """Answer one request."""
    async with worker.bodies.taken(request.scope, request.receive) as raw:
        # Nothing of the body outlives this: an undecoded field would keep all of it.
        wanted = plan(decode(raw, GenerateBody), worker, request.headers.get("traceparent", "")[:128])
        del raw
    if wanted.stream:
        return EventStream(_events(worker, wanted), lambda failure: failure.body(worker.leg))
    sequences = await while_connected(request.receive, gather(worker, wanted.asks))
    answers = [answer(worker, wanted, sequence) for sequence in sequences]
    return JSONResponse(answers[0] if wanted.single else answers)


async def _events(worker: Worker, wanted: Wanted) -> AsyncIterator[bytes]:
    with started(worker, wanted.asks) as sequences:
        async for sequence, _ in merged(worker, sequences):
            event = answer(worker, wanted, sequence)
            if not wanted.single:
                event["index"] = sequence.ask.number
            yield msgspec.json.encode(event)


def plan(body: GenerateBody, worker: Worker, traceparent: str) -> Wanted:
    """The sequences of a request. Raises `RoomError` (400) for one that contradicts itself."""
    prompts, is_list = prompts_of(body, worker.tokenizer)
    params = _spread(_params(body.sampling_params), len(prompts), "sampling_params")
    answers = params[0].n
    if any(one.n != answers for one in params):
        raise _rejected("all prompts of a request have the same number of answers", "sampling_params.n")
    logprobs = _spread(body.return_logprob or False, len(prompts), "return_logprob")
    start = _spread(
        -1 if body.logprob_start_len is None else body.logprob_start_len, len(prompts), "logprob_start_len"
    )  # fmt: skip
    tops = _spread(body.top_logprobs_num or 0, len(prompts), "top_logprobs_num")
    if any(top and (not wanted or at >= 0) for top, wanted, at in zip(tops, logprobs, start, strict=True)):
        raise _rejected(
            "the likeliest tokens are told of answers, with return_logprob and without logprob_start_len",
            "top_logprobs_num",
        )
    rids = _rids(body.rid, len(prompts), answers)
    where = places(body, worker.service.role, len(prompts), answers)
    asks = [
        Ask(
            number=number,
            rid=rids[number],
            place=where[number],
            token_ids=prompts[number // answers],
            params=params[number // answers],
            answer=number % answers,
            score=logprobs[number // answers] and start[number // answers] >= 0,
            top=tops[number // answers],
            traceparent=traceparent,
        )
        for number in range(len(prompts) * answers)
    ]
    single = not is_list and answers == 1
    return Wanted(asks, answers, single, logprobs, start, body.return_text_in_logprobs, body.stream)


def prompts_of(body: GenerateBody, tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether a list of prompts was given."""
    if (body.text is None) == (body.input_ids is None):
        raise _rejected("one of text and input_ids", "text, input_ids")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts, is_list = [tokenizer.encode(text) for text in texts], not isinstance(body.text, str)
    else:
        prompts, is_list = token_prompts(body.input_ids or [])
    if not prompts:
        raise RoomError("the request has no prompts", code="prompt_empty", where="text, input_ids")
    return prompts, is_list


def token_prompts(given: list[Any]) -> tuple[list[list[int]], bool]:
    """One list of tokens, or a list of them. Raises `RoomError` for a mixture."""
    kinds = set(map(type, given))
    if list in kinds and len(kinds) > 1:
        raise _rejected("tokens and lists of tokens in one list", "input_ids")
    if str in kinds:
        raise _rejected("tokens and texts in one list", "prompt")
    return (given, True) if list in kinds else ([given], False)


def _params(given: msgspec.Raw) -> SamplingParams | list[SamplingParams]:
    """One for all prompts, or one for each."""
    where, first = "sampling_params", bytes(memoryview(given)[:1])
    if first == b"[":
        return [decode(one, SamplingParams, where=where) for one in msgspec.json.decode(given, type=list[msgspec.Raw])]
    return SamplingParams() if given == NULL else decode(given, SamplingParams, where=where)


def answer(worker: Worker, wanted: Wanted, sequence: Sequence) -> dict[str, Any]:
    """The answer as far as it is."""
    progress, ask = sequence.progress, sequence.ask
    prompt = ask.number // wanted.answers
    meta: dict[str, Any] = {
        "id": ask.rid,
        "finish_reason": progress.finish,
        "prompt_tokens": len(ask.token_ids),
        "completion_tokens": len(progress.tokens),
        "cached_tokens": 0,
        "weight_version": "default",
        "bootstrap_room": ask.place.room,
    }
    if progress.finish is not None:
        meta["e2e_latency"] = time.monotonic() - sequence.started_s
        meta["stages_s"] = progress.stages_s
    if wanted.logprobs[prompt]:
        meta["output_token_logprobs"] = [
            _logprob(worker, wanted, logprob, token)
            for logprob, token in zip(progress.logprobs, progress.tokens, strict=True)
        ]
        if ask.top:
            meta["output_top_logprobs"] = [
                [_logprob(worker, wanted, logprob, token) for token, logprob in top] for top in progress.tops
            ]
        meta["input_token_logprobs"] = _input_logprobs(worker, wanted, sequence, wanted.start[prompt])
    return {"text": progress.text, "output_ids": list(progress.tokens), "meta_info": meta}


def _input_logprobs(worker: Worker, wanted: Wanted, sequence: Sequence, start: int) -> list[Any]:
    """Prefill knows them; decode says none, and a router joins the two."""
    scores, ids = sequence.progress.prompt_logprobs, sequence.ask.token_ids
    if start < 0 or start >= len(ids) or worker.service.role is Role.DECODE or sequence.progress.finish is None:
        return []
    values = [None, *scores[start:]]
    return [_logprob(worker, wanted, value, token) for value, token in zip(values, ids[start:], strict=True)]


def _logprob(worker: Worker, wanted: Wanted, logprob: float | None, token: int) -> list[Any]:
    return [logprob, token, worker.tokenizer.token_text(token) if wanted.token_text else None]


def _rids(given: str | list[str] | None, prompts: int, answers: int) -> list[str]:
    total = prompts * answers
    if given is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(given, str):
        return [given] if total == 1 else [f"{given}_{number}" for number in range(total)]
    if len(given) == total:
        return given
    if len(given) == prompts:
        return [f"{rid}_{number}" for rid in given for number in range(answers)]
    raise _rejected("not one for each prompt", "rid")


def _spread(given: Value | list[Value], count: int, where: str) -> list[Value]:
    """One value for all prompts, or one for each."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise RoomError(
            "not one for each prompt", code="request_rejected", where=where, expected=count, actual=len(given)
        )  # fmt: skip
    return given


def _rejected(message: str, where: str) -> RoomError:
    return RoomError(message, code="request_rejected", where=where)
