"""What the router must know of a request: how many sequences, whether it streams, what bootstrap its caller set.

Everything else in the body is carried as it is. Rooms: one for each sequence, prompt-major (prompt p's sample s of n
is number p * n + s); a list wherever the request is a batch or has n > 1.
"""

from __future__ import annotations

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
HOST, PORT, ROOM = "bootstrap_host", "bootstrap_port", "bootstrap_room"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request body, read. sequences: prompts times n. listed: rooms travel as a list. caller_rooms: the rooms that
    the caller set, one for each sequence, or None. caller_host, caller_port: likewise, of the one prefill."""

    path: str
    body: dict[str, Any]
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
        return msgspec.json.encode({**self.body, **{k: v for k, v in added.items() if self.body.get(k) is None}})

    def shown(self, rooms: Sequence[int]) -> Rooms:
        """The rooms as an error shows them."""
        return tuple(rooms) if self.listed else rooms[0]


def parse(path: str, raw: bytes, max_batch: int) -> Parsed:
    """Read a body for `path` (one of `PATHS`). Raises `RequestFailed` with 400, or what the caller's rooms deserve."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise own("message_malformed", f"the body is not JSON: {error}"[:300]) from None
    if not isinstance(body, dict):
        raise own("message_malformed", "the body is not a JSON object", actual=type(body).__name__)
    prompts = _prompts(path, body)
    n = _samples(path, body)
    sequences = (1 if prompts is None else prompts) * n
    if not 1 <= sequences <= max_batch:
        raise own(
            "request_rejected",
            "the number of sequences (prompts times n) is not acceptable",
            where="$",
            expected=f"1 to limits.max_batch = {max_batch}",
            actual=str(sequences),
        )
    listed = prompts is not None or n > 1
    flag = body.get("return_logprob")
    return Parsed(
        path=path,
        body=body,
        stream=body.get("stream") is True,
        sequences=sequences,
        listed=listed,
        wants_logprobs=path == GENERATE and (any(flag) if isinstance(flag, list) else flag is True),
        caller_rooms=_caller_rooms(body.get(ROOM), sequences, n),
        caller_host=_one(body.get(HOST), HOST, str),
        caller_port=_one(body.get(PORT), PORT, int),
    )


def _prompts(path: str, body: dict[str, Any]) -> int | None:
    """Number of prompts of a batch; None: a single one."""
    if path == CHAT:
        return None
    if path == COMPLETIONS:
        prompt = body.get("prompt")
        is_batch = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        return len(prompt) if is_batch and isinstance(prompt, list) else None
    text, ids = body.get("text"), body.get("input_ids")
    if isinstance(text, list):
        return len(text)
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    return None


def _samples(path: str, body: dict[str, Any]) -> int:
    where = "$.n"
    if path == GENERATE:
        where = "$.sampling_params.n"
        params = body.get("sampling_params")
        holders = params if isinstance(params, list) else [params]
        values = [holder.get("n") for holder in holders if isinstance(holder, dict)]
    else:
        values = [body.get("n")]
    found = {1 if value is None else value for value in values if not isinstance(value, (list, dict))} or {1}
    if len(found) > 1:
        raise own("request_rejected", "n differs within a batch", where=where, actual=str(sorted(map(str, found)))[:80])
    n = found.pop()
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise own("request_rejected", "n is not acceptable", where=where, expected="a number from 1", actual=repr(n))
    return n


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
    return own("request_rejected", message, where=f"$.{ROOM}", expected=expected, actual=str(actual)[:120])


def _one(value: Any, key: str, kind: type) -> Any:
    """The one prefill that the caller names, be it in a list with one entry for each sequence."""
    values = value if isinstance(value, list) else [value]
    found = list(dict.fromkeys(v for v in values if v is not None and not isinstance(v, (list, dict))))
    if not found:
        return None
    if len(found) > 1:
        raise own("request_rejected", "a batch goes to one prefill", where=f"$.{key}", actual=str(found)[:120])
    if not isinstance(found[0], kind) or isinstance(found[0], bool):
        raise own("request_rejected", f"not a {kind.__name__}", where=f"$.{key}", actual=repr(found[0])[:120])
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
