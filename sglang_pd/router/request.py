"""What the router must know of a request: how many sequences, whether it streams, what bootstrap its caller set.

Everything else in the body is carried as it is. Rooms: one for each sequence, prompt-major (prompt p's sample s of n
is number p * n + s); a list wherever the request is a batch or has n > 1.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from sglang_pd.router.failures import RequestFailed, Rooms, own

GENERATE: Final = "/generate"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
PATHS: Final = (GENERATE, COMPLETIONS, CHAT)

MAX_ROOM: Final = 2**63 - 1
MAX_PARAMS_BYTES: Final = 2**20
MAX_ENTRY_BYTES: Final = 320
"""Bytes for each sequence in the other fields that the router decodes: a host's name is the longest of them."""
HOST, PORT, ROOM = "bootstrap_host", "bootstrap_port", "bootstrap_room"


Body = dict[str, msgspec.Raw]
"""A request body whose fields are not decoded."""
NULL: Final = msgspec.Raw(b"null")


class _Params(msgspec.Struct):
    """What the router reads of sampling parameters."""

    n: bool | int | float | str | None = None


_params = msgspec.json.Decoder(_Params | list[_Params] | None)
_fields = msgspec.json.Decoder(Body)
_LIST = re.compile(rb"\[")
_LISTS = re.compile(rb"\[\s*\[")
_NUMBERS = re.compile(rb"\[\s*[-\d]")
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request body, read. sequences: prompts times n. listed: rooms travel as a list. caller_rooms: the rooms that
    the caller set, one for each sequence, or None. caller_host, caller_port: likewise, of the one prefill."""

    path: str
    body: Body
    stream: bool
    sequences: int
    listed: bool
    wants_logprobs: bool
    caller_rooms: tuple[int, ...] | None
    caller_host: str | None
    caller_port: int | None

    def encode(self, rooms: Sequence[int], host: str, port: int) -> bytes:
        """The body for both legs: what the caller did not set is added."""
        count = len(rooms)
        added = {
            HOST: [host] * count if self.listed else host,
            PORT: [port] * count if self.listed else port,
            ROOM: list(rooms) if self.listed else rooms[0],
        }
        return msgspec.json.encode({**self.body, **{k: v for k, v in added.items() if self.body.get(k, NULL) == NULL}})

    def shown(self, rooms: Sequence[int]) -> Rooms:
        """The rooms as an error shows them."""
        return tuple(rooms) if self.listed else rooms[0]


def parse(path: str, raw: bytes, max_batch: int) -> Parsed:
    """Read a body for `path` (one of `PATHS`). Raises `RequestFailed` with 400, or what the caller's rooms deserve.

    Only the few fields that the router needs are decoded; of prompts it counts no more than it takes.
    """
    try:
        body = _fields.decode(raw)
        raw.decode()  # what is carried undecoded would be passed on as it is
    except msgspec.ValidationError as error:
        actual = str(error).rpartition("got ")[2].strip("`")
        raise own("message_malformed", "the body is not a JSON object", actual=actual) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise own("message_malformed", f"the body is not JSON: {error}"[:300]) from None
    read = _Reader(body, max_batch)
    prompts = _prompts(path, body, max_batch)
    n = _samples(path, read)
    sequences = (1 if prompts is None else prompts) * n
    if not 1 <= sequences <= max_batch:
        raise own(
            "request_rejected",
            "the number of sequences (prompts times n) is not acceptable",
            where="$",
            expected=f"1 to limits.max_batch = {max_batch}",
            actual=str(sequences) if prompts is None or prompts <= max_batch else f"more than {max_batch}",
        )
    listed = prompts is not None or n > 1
    flag = read.value("return_logprob") if path == GENERATE else None
    return Parsed(
        path=path,
        body=body,
        stream=read.value("stream") is True,
        sequences=sequences,
        listed=listed,
        wants_logprobs=any(flag) if isinstance(flag, list) else flag is True,
        caller_rooms=_caller_rooms(read.value(ROOM), sequences, n),
        caller_host=_one(read.value(HOST), HOST, str),
        caller_port=_one(read.value(PORT), PORT, int),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Decodes fields of a body that the router reads. Raises `RequestFailed` for one too long to be meant."""

    body: Body
    max_batch: int

    def value(self, key: str) -> Any:
        return msgspec.json.decode(self._bounded(key, MAX_ENTRY_BYTES * (self.max_batch + 1)))

    def params(self) -> list[_Params]:
        """What is read of `sampling_params`; what does not fit is a worker's to refuse."""
        raw = self._bounded("sampling_params", MAX_PARAMS_BYTES)
        try:
            found = _params.decode(raw)
        except msgspec.ValidationError:
            return []
        return found if isinstance(found, list) else [found or _Params()]

    def _bounded(self, key: str, most: int) -> msgspec.Raw:
        value = self.body.get(key, NULL)
        if len(value) > most:
            actual = f"{len(value)} bytes"
            raise own("request_rejected", "too long", where=f"$.{key}", expected=f"<= {most} bytes", actual=actual)
        return value


def _prompts(path: str, body: Body, most: int) -> int | None:
    """Number of prompts of a batch, counted up to a few more than `most`; None: a single one."""
    if path == CHAT:
        return None
    if path == COMPLETIONS:
        prompt = bytes(body.get("prompt", NULL))
        return _count(prompt, most) if _LIST.match(prompt) and not _NUMBERS.match(prompt) else None
    text, ids = bytes(body.get("text", NULL)), bytes(body.get("input_ids", NULL))
    if _LIST.match(text):
        return _count(text, most)
    return _count(ids, most) if _LISTS.match(ids) else None


def _count(array: bytes, most: int) -> int:
    """Entries of a JSON array of texts, or of arrays of numbers. Other entries are a worker's to refuse."""
    if _LISTS.match(array):
        return array.count(b"[") - 1
    return sum(1 for _ in itertools.islice(_TEXT.finditer(array), most + 1))


def _samples(path: str, read: _Reader) -> int:
    where = "$.sampling_params.n" if path == GENERATE else "$.n"
    values = [one.n for one in read.params()] if path == GENERATE else [read.value("n")]
    found = {1 if value is None else value for value in values if not isinstance(value, (list, dict))} or {1}
    if len(found) > 1:
        shown = str(sorted(map(_shown, itertools.islice(found, 8))))
        raise own("request_rejected", "n differs within a batch", where=where, actual=shown[:80])
    n = found.pop()
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise own("request_rejected", "n is not acceptable", where=where, expected="a number from 1", actual=_shown(n))
    return n


def _shown(value: Any) -> str:
    """A value as an error tells it: cut before it is written out."""
    if isinstance(value, (list, dict)):
        return f"{len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 256 bits"
    return repr(value[:80] if isinstance(value, str) else value)


def _caller_rooms(value: Any, sequences: int, n: int) -> tuple[int, ...] | None:
    """The caller's rooms, one a sequence: a list of as many, the first of a range, or the first of each prompt's."""
    if value is None:
        return None
    firsts = value if isinstance(value, list) else [value]
    if any(isinstance(room, bool) or not isinstance(room, int) or not 0 <= room <= MAX_ROOM for room in firsts):
        raise _bad_rooms("not a room", "0 to 2**63 - 1", value)
    if not isinstance(value, list):
        each = sequences
    elif len(firsts) in (sequences, sequences // n):
        each = sequences // max(len(firsts), 1)
    else:
        raise _bad_rooms("not one room for each sequence", f"{sequences} rooms", f"{len(firsts)} rooms")
    if max(firsts) > MAX_ROOM - each + 1:
        raise _bad_rooms("the range of rooms overflows", f"at most 2**63 - {each} for its first", value)
    rooms = tuple(first + number for first in firsts for number in range(each))
    if len(set(rooms)) != len(rooms):
        raise _bad_rooms("rooms overlap", "distinct rooms", value)
    return rooms


def _bad_rooms(message: str, expected: str, actual: Any) -> RequestFailed:
    return own("request_rejected", message, where=f"$.{ROOM}", expected=expected, actual=_few(actual))


def _few(value: Any) -> str:
    """A room as it was given, or the first ones of a list."""
    return str([_shown(room) for room in value[:4]])[:120] if isinstance(value, list) else _shown(value)[:120]


def _one(value: Any, key: str, kind: type) -> Any:
    """The one prefill that the caller names, be it in a list with one entry for each sequence."""
    values = value if isinstance(value, list) else [value]
    found = list(dict.fromkeys(v for v in values if v is not None and not isinstance(v, (list, dict))))
    if not found:
        return None
    if len(found) > 1:
        raise own("request_rejected", "a batch goes to one prefill", where=f"$.{key}", actual=_few(found))
    if not isinstance(found[0], kind) or isinstance(found[0], bool):
        raise own("request_rejected", f"not a {kind.__name__}", where=f"$.{key}", actual=_shown(found[0]))
    return found[0]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Rooms that one attempt holds."""

    rooms: tuple[int, ...]


class RoomBook:
    """The rooms of this router that are open. Bounded by its admitted requests and their sequences."""

    def __init__(self) -> None:
        self._open: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._open)

    def take(self, callers: tuple[int, ...] | None, count: int) -> Held:
        """The caller's rooms, or so many new random ones (1 to 2**63 - 1). Raises `RequestFailed` with 409 when one of
        the caller's is open."""
        taken = [room for room in callers or () if room in self._open]
        if taken:
            raise own("room_duplicate", "that room is open already", where=f"$.{ROOM}", actual=str(taken[0]))
        held = Held(callers if callers is not None else self._draw(count))
        self._open.update(dict.fromkeys(held.rooms, held))
        return held

    def release(self, held: Held) -> None:
        """They are over. Once is enough; rooms that others hold by now stay theirs."""
        for room in held.rooms:
            if self._open.get(room) is held:
                del self._open[room]

    def _draw(self, count: int) -> tuple[int, ...]:
        rooms: dict[int, None] = {}
        while len(rooms) < count:
            room = secrets.randbits(63)
            if room and room not in self._open:
                rooms[room] = None
        return tuple(rooms)
