"""Request bodies: decoded strictly, and what is asked for but cannot be done is refused by name, never ignored."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from sglang_pd.engines.base import MAX_TOP
from sglang_pd.protocol.errors import RoomError

MAX_BODY_BYTES: Final = 32 * 2**20
MAX_SEQUENCES: Final = 1024
MAX_STOPS: Final = 64
MAX_ROOM: Final = 2**63 - 1

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Room = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Host = Annotated[str, Meta(min_length=1, max_length=300)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Top = Annotated[int, Meta(ge=0, le=MAX_TOP)]
Choices = Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]

NO_MATTER: Final = frozenset(
    {
        "model", "user", "metadata", "store", "service_tier", "background", "log_metrics", "no_logs", "priority",
        "separate_reasoning", "stream_reasoning", "skip_special_tokens", "spaces_between_special_tokens",
        "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "safety_identifier", "prompt_cache_key",
        "extra_key", "cache_salt",
    }
)  # fmt: skip
"""Fields that change no answer of ours: any value is taken."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are not supported: only these values, and null, false and empty ones, are taken."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What every request may carry: its room, or rooms, as a router injects them."""

    bootstrap_host: Host | list[Host | None] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room] | None = None
    rid: str | list[str] | None = None
    stream: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as SGLang names it. max_new_tokens: default 128, or what fits."""

    max_new_tokens: Count | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    n: Choices = 1
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    sampling_seed: Seed | None = None


class GenerateBody(Body, frozen=True, kw_only=True):
    """Body of `/generate`. logprob_start_len: first prompt token whose log-probability is wanted, -1 for none.
    top_logprobs_num: how many of the likeliest tokens are told in the place of each answered one."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: Top | list[Top] | None = None
    return_text_in_logprobs: bool = False


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIBody(Body, frozen=True, kw_only=True):
    """What completions and chats share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    seed: Seed | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None


class CompletionBody(OpenAIBody, frozen=True, kw_only=True):
    """Body of `/v1/completions`. logprobs: of the chosen tokens, and of so many of the likeliest in their places."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Top | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation: text, or parts that are text."""

    role: Annotated[str, Meta(max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions`. top_logprobs: how many of the likeliest tokens `logprobs` tells."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None


AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)


def decode(raw: bytes, schema: type[AnyBody]) -> AnyBody:
    """A body as its struct. Raises `RoomError` (`request_rejected`, 400) naming the field."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _rejected("the body is not JSON", "body", actual=str(error)) from None
    if not isinstance(data, dict):
        raise _rejected("the body is not an object", "body", expected="{...}", actual=type(data).__name__)
    return convert(data, schema, where="body")


def convert(data: Mapping[str, Any], schema: type[AnyBody], *, where: str) -> AnyBody:
    """The same for a part of one. where: its path."""
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    for key, value in data.items():
        if key not in known:
            _check_unknown(key, value, known, where)
    try:
        return msgspec.convert({key: value for key, value in data.items() if key in known}, schema)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`")
        wanted = re.fullmatch(r"Expected (.*?)(, got .*)?", text)
        if wanted is None:
            raise _rejected(text.replace("`", "'"), where + place) from None
        raise _rejected(
            "not acceptable", where + place, expected=wanted[1].replace("`", ""), actual=_found(data, place)
        ) from None


def _found(data: Any, place: str) -> str:
    """What stands at a path of the body, as its client wrote it."""
    for key, number in re.findall(r"\.([^.\[]+)|\[(\d+)\]", place):
        if isinstance(data, Mapping):
            data = data.get(key)
        elif isinstance(data, list) and number and int(number) < len(data):
            data = data[int(number)]
    return msgspec.json.encode(data).decode()[:80]


def _check_unknown(key: str, value: Any, known: set[str], where: str) -> None:
    empty = value is None or value is False or value in ("", [], {})
    if key in NO_MATTER or empty or value in NEUTRAL.get(key, ()):
        return
    if key in NEUTRAL:
        raise _rejected("not supported here", f"{where}.{key}", expected=NEUTRAL[key][0], actual=str(value)[:80])
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Leave it out."
    raise _rejected("no such field, or not supported here", f"{where}.{key[:64]}", actual=str(value)[:80], hint=hint)


def _rejected(message: str, where: str, **facts: Any) -> RoomError:
    return RoomError(message, code="request_rejected", where=where, **facts)
