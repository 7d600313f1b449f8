"""`/v1/completions` and `/v1/chat/completions`, in OpenAI's shapes."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_pd.protocol.errors import RoomError
from sglang_pd.server.asgi import EventStream, while_connected
from sglang_pd.server.batch import Worker, gather, merged, started
from sglang_pd.server.bodies import ChatBody, CompletionBody, OpenAIBody, Part, SamplingParams, decode
from sglang_pd.server.generate import token_prompts
from sglang_pd.server.rooms import places
from sglang_pd.server.sequences import Ask, Sequence

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Wanted:
    """A request as sequences, and the shape of its answer."""

    asks: list[Ask]
    chat: bool
    logprobs: bool
    usage: bool
    answers: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


async def completions(request: Request, worker: Worker) -> Response:
    """`/v1/completions`."""
    async with worker.bodies.taken(request.scope, request.receive) as raw:
        body = decode(raw, CompletionBody)
        del raw
    if isinstance(body.prompt, str):
        prompts = [worker.tokenizer.encode(body.prompt)]
    elif body.prompt and all(isinstance(text, str) for text in body.prompt):
        prompts = [worker.tokenizer.encode(str(text)) for text in body.prompt]
    else:
        prompts, _ = token_prompts(body.prompt)
    shape = _Shape(body.max_tokens or DEFAULT_COMPLETION_TOKENS, body.logprobs or 0)
    asks = _asks(request, worker, body, prompts, shape)
    wanted = Wanted(asks, False, body.logprobs is not None, _usage_wanted(body), body.n or 1)
    return await _answer(request, worker, wanted, stream=body.stream)


async def chat(request: Request, worker: Worker) -> Response:
    """`/v1/chat/completions`. Raises `RoomError` (400) where the tokenizer has no chat template."""
    async with worker.bodies.taken(request.scope, request.receive) as raw:
        body = decode(raw, ChatBody)
        del raw
    messages = [{"role": message.role, "content": _text(message.content)} for message in body.messages]
    prompt = worker.tokenizer.chat(messages)
    if body.top_logprobs and not body.logprobs:
        raise RoomError("top_logprobs needs logprobs", code="request_rejected", where="body.top_logprobs")
    shape = _Shape(body.max_completion_tokens or body.max_tokens, body.top_logprobs or 0)
    asks = _asks(request, worker, body, [prompt], shape)
    wanted = Wanted(asks, True, bool(body.logprobs), _usage_wanted(body), body.n or 1)
    return await _answer(request, worker, wanted, stream=body.stream)


def _usage_wanted(body: OpenAIBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _text(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise RoomError(
                "only text is understood",
                code="request_rejected",
                where="messages.content",
                actual=(part.type or "nothing")[:80],
            )
    return "".join(part.text or "" for part in content)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the two forms of a request say in ways of their own. top: likeliest tokens told in each place."""

    max_tokens: int | None
    top: int


def _asks(request: Request, worker: Worker, body: OpenAIBody, prompts: list[list[int]], shape: _Shape) -> list[Ask]:
    answers = body.n or 1
    params = SamplingParams(
        max_new_tokens=shape.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=-1 if body.top_k is None else body.top_k,
        n=answers,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        no_stop_trim=body.no_stop_trim,
        sampling_seed=body.seed,
    )
    where = places(body, worker.service.role, len(prompts), answers)
    rid = body.rid if isinstance(body.rid, str) else uuid.uuid4().hex
    return [
        Ask(
            number=number,
            rid=f"{rid}_{number}",
            place=where[number],
            token_ids=prompts[number // answers],
            params=params,
            answer=number % answers,
            top=shape.top,
            traceparent=request.headers.get("traceparent", "")[:128],
        )
        for number in range(len(where))
    ]


async def _answer(request: Request, worker: Worker, wanted: Wanted, *, stream: bool) -> Response:
    if stream:
        return EventStream(_events(worker, wanted), lambda failure: failure.body(worker.leg))
    sequences = await while_connected(request.receive, gather(worker, wanted.asks))
    choice = _chat_choice if wanted.chat else _choice
    return JSONResponse(
        {
            **_head(worker, wanted, "chat.completion" if wanted.chat else "text_completion"),
            "choices": [choice(worker, wanted, sequence) for sequence in sequences],
            "usage": _usage(wanted, sequences),
        }
    )


def _head(worker: Worker, wanted: Wanted, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if wanted.chat else "cmpl"
    return {"id": f"{prefix}-{wanted.id}", "object": kind, "created": wanted.created, "model": worker.model}


def _usage(wanted: Wanted, sequences: list[Sequence]) -> dict[str, Any]:
    prompt = sum(len(sequence.ask.token_ids) for sequence in sequences[:: wanted.answers])
    answered = sum(len(sequence.progress.tokens) for sequence in sequences)
    return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}


def _ends(sequence: Sequence) -> dict[str, Any]:
    finish = sequence.progress.finish
    return {
        "finish_reason": None if finish is None else finish["type"],
        "matched_stop": None if finish is None else finish.get("matched"),
    }


@dataclass(slots=True)
class _Sent:
    """How much of one answer a stream has sent. offset: characters of its tokens, each alone."""

    chars: int = 0
    tokens: int = 0
    offset: int = 0
    role: bool = False


def _choice(worker: Worker, wanted: Wanted, sequence: Sequence) -> dict[str, Any]:
    return {
        "index": sequence.ask.number,
        "text": sequence.progress.text,
        "logprobs": _completion_logprobs(worker, sequence, _Sent()) if wanted.logprobs else None,
        **_ends(sequence),
    }


def _chat_choice(worker: Worker, wanted: Wanted, sequence: Sequence) -> dict[str, Any]:
    return {
        "index": sequence.ask.number,
        "message": {"role": "assistant", "content": sequence.progress.text},
        "logprobs": _chat_logprobs(worker, sequence, 0) if wanted.logprobs else None,
        **_ends(sequence),
    }


def _completion_logprobs(worker: Worker, sequence: Sequence, sent: _Sent) -> dict[str, Any]:
    """Of the tokens after those that were sent: each is looked at once, however often a stream speaks."""
    progress, start = sequence.progress, sent.tokens
    texts = [worker.tokenizer.token_text(token) for token in progress.tokens[start:]]
    *offsets, sent.offset = itertools.accumulate(map(len, texts), initial=sent.offset)
    tops = [_by_text(worker, top) for top in progress.tops[start:]]
    return {
        "tokens": texts,
        "token_logprobs": progress.logprobs[start:],
        "top_logprobs": tops if sequence.ask.top else None,
        "text_offset": offsets,
    }


def _by_text(worker: Worker, top: tuple[tuple[int, float], ...]) -> dict[str, float]:
    """Of tokens that read alike the likeliest counts."""
    found: dict[str, float] = {}
    for token, logprob in top:
        found.setdefault(worker.tokenizer.token_text(token), logprob)
    return found


def _chat_logprobs(worker: Worker, sequence: Sequence, start: int) -> dict[str, Any]:
    progress = sequence.progress

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = worker.tokenizer.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    chosen = zip(progress.tokens[start:], progress.logprobs[start:], progress.tops[start:], strict=True)
    return {
        "content": [
            {**one(token, logprob), "top_logprobs": [one(*likely) for likely in top]} for token, logprob, top in chosen
        ]
    }


async def _events(worker: Worker, wanted: Wanted) -> AsyncIterator[bytes]:
    with started(worker, wanted.asks) as sequences:
        sent = {sequence: _Sent() for sequence in sequences}
        head = _head(worker, wanted, "chat.completion.chunk" if wanted.chat else "text_completion")
        delta: Callable[..., dict[str, Any]] = _chat_delta if wanted.chat else _delta
        async for sequence, progress in merged(worker, sequences):
            choice = delta(worker, wanted, sequence, sent[sequence])
            sent[sequence] = _Sent(len(progress.text), len(progress.tokens), sent[sequence].offset, True)
            yield msgspec.json.encode({**head, "choices": [choice], **({"usage": None} if wanted.usage else {})})
        if wanted.usage:
            yield msgspec.json.encode({**head, "choices": [], "usage": _usage(wanted, sequences)})


def _delta(worker: Worker, wanted: Wanted, sequence: Sequence, sent: _Sent) -> dict[str, Any]:
    return {
        "index": sequence.ask.number,
        "text": sequence.progress.text[sent.chars :],
        "logprobs": _completion_logprobs(worker, sequence, sent) if wanted.logprobs else None,
        **_ends(sequence),
    }


def _chat_delta(worker: Worker, wanted: Wanted, sequence: Sequence, sent: _Sent) -> dict[str, Any]:
    first = {} if sent.role else {"role": "assistant"}
    return {
        "index": sequence.ask.number,
        "delta": {**first, "content": sequence.progress.text[sent.chars :]},
        "logprobs": _chat_logprobs(worker, sequence, sent.tokens) if wanted.logprobs else None,
        **_ends(sequence),
    }
