"""Request bodies: decoded strictly, and what is asked for but cannot be done is refused by name, never ignored."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from sglang_pd.engines.base import MAX_TOP
from sglang_pd.protocol.errors import RoomError

MAX_FIELD_BYTES: Final = 2**20
"""Of one field that is no prompt."""
LOOKED_AT_BYTES: Final = 64 * 1024
"""Most bytes of a value in which a wrong element is looked for, to be told back."""
MAX_NAME: Final = 64
"""Characters of a key that are told back."""
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
Rid = Annotated[str, Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
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


LONG: Final = frozenset({"text", "input_ids", "prompt", "messages"})
"""Fields that may be as long as the whole body."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What every request may carry: its room, or rooms, as a router injects them."""

    bootstrap_host: Host | list[Host | None] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room] | None = None
    rid: Rid | list[Rid] | None = None
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
    top_logprobs_num: how many of the likeliest tokens are told in the place of each answered one.
    sampling_params: one `SamplingParams`, or one for each prompt, not yet decoded."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: msgspec.Raw = msgspec.Raw(b"null")
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


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message; only text is understood."""

    type: str | None = None
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation: text, or parts that are text."""

    role: Annotated[str, Meta(max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions`. top_logprobs: how many of the likeliest tokens `logprobs` tells."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None


AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode(raw: bytes | msgspec.Raw, schema: type[AnyBody], *, where: str = "body") -> AnyBody:
    """A body, or a part of one, as its struct. where: its path. Raises `RoomError` (`request_rejected`, 400) naming the
    field.

    Fields that the schema lacks are looked at but never decoded: a body's bytes cost what it takes to skip them.
    """
    try:
        fields = _fields.decode(raw)
    except msgspec.ValidationError as error:
        found = re.search(r"got `(\w+)`", str(error))
        actual = found[1] if found else ""
        raise _rejected(f"the {where} is not an object", where, expected="{...}", actual=actual) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _rejected("the body is not JSON", where, actual=str(error)) from None
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    for key, value in fields.items():
        if key not in known:
            _check_unknown(key, value, known, where)
        elif len(value) > MAX_FIELD_BYTES and key not in LONG:
            raise _rejected(
                "too long", f"{where}.{key}", expected=f"at most {MAX_FIELD_BYTES} bytes", actual=len(value)
            )
    try:
        body: AnyBody = _decoder(schema).decode(raw)
        return body
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        raise _unfit(text, fields, where, place.rstrip("`")) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _rejected("the body is not JSON", where, actual=str(error)) from None


@functools.cache
def _decoder(schema: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(schema)


def _unfit(text: str, fields: Mapping[str, msgspec.Raw], where: str, place: str) -> RoomError:
    """The library's words taken apart: what was expected at `place`, and what stands there."""
    wanted = re.fullmatch(r"Expected (.*?)(, got .*)?", text, re.DOTALL)
    if wanted is None:
        return _rejected(text.replace("`", "'"), where + place)
    expected = wanted[1].replace("`", "")
    if "matching regex" in expected:
        expected = "no control characters"
    return _rejected("not acceptable", where + place, expected=expected, actual=_found(fields, place))


def _found(fields: Mapping[str, msgspec.Raw], place: str) -> str:
    """What stands at a path of the body, as its client wrote it; nothing where finding it would cost too much."""
    at: Any = fields
    for key, number in re.findall(r"\.([^.\[]+)|\[(\d+)\]", place):
        if isinstance(at, msgspec.Raw):
            if len(at) > LOOKED_AT_BYTES:
                return ""
            at = msgspec.json.decode(at, type=list[msgspec.Raw] if number else dict[str, msgspec.Raw])
        at = at[int(number)] if number else at.get(key)
    return _shown(at) if isinstance(at, msgspec.Raw) else ""


def _shown(value: msgspec.Raw) -> str:
    """The beginning of a value."""
    return bytes(memoryview(value)[:80]).decode("utf-8", "replace")


def _check_unknown(key: str, value: msgspec.Raw, known: set[str], where: str) -> None:
    if key in NO_MATTER or _changes_nothing(key, value):
        return
    neutral = NEUTRAL.get(key, ())
    name, shown = key[:MAX_NAME], _shown(value)
    if neutral:
        raise _rejected("not supported here", f"{where}.{name}", expected=neutral[0], actual=shown)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Leave it out."
    raise _rejected("no such field, or not supported here", f"{where}.{name}", actual=shown, hint=hint)


def _changes_nothing(key: str, value: msgspec.Raw) -> bool:
    """Null, false, empty or neutral. All of these are short, so nothing longer is decoded."""
    try:
        small = msgspec.json.decode(value) if len(value) <= MAX_NAME else ...
    except msgspec.DecodeError:  # text that is no UTF-8
        return False
    return small is None or small is False or small in ("", [], {}) or small in NEUTRAL.get(key, ())


def _rejected(message: str, where: str, **facts: Any) -> RoomError:
    return RoomError(message, code="request_rejected", where=where, **facts)
