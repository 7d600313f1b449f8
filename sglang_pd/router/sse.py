"""Server-sent events, cut at their boundaries and otherwise left as bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

DONE: Final = b"[DONE]"
_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LINE = re.compile(rb"\r\n|\n|\r")


class _Event(msgspec.Struct):
    """What is read of an event: a long answer around it is not decoded."""

    error: Any = None


_events = msgspec.json.Decoder(_Event)


class EventCutter:
    """Passes on whole events and holds back the last, unfinished one, so that a stream that breaks ends between
    events. At most `limit` bytes are held: a larger event passes unfinished, and `torn` says so."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = b""
        self.torn = False
        self.ended = False
        """The stream has said `[DONE]`."""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that may be passed on now, maybe none."""
        data = self._held + chunk if self._held else chunk
        found = ((data.rfind(mark), len(mark)) for mark in _ENDS)
        cut = max((at + length for at, length in found if at >= 0), default=0)
        whole, self._held = data[:cut], data[cut:]
        if whole:
            self.torn = False
            self.ended = self.ended or whole.rstrip().endswith(DONE)
        if len(self._held) > self._limit:
            whole, self._held, self.torn = whole + self._held, b"", True
        return whole

    def rest(self) -> bytes:
        """What is held back, at the end of a stream that is complete."""
        held, self._held = self._held, b""
        return held


def events(data: bytes) -> Iterator[bytes]:
    """The payload of each event with one; comments and other fields are left out."""
    for block in _BOUNDARY.split(data):
        lines = [line for line in _LINE.split(block) if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def documents(data: bytes) -> Iterator[dict[str, Any]]:
    """The events that are JSON objects."""
    for payload in events(data):
        try:
            document = msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(document, dict):
            yield document


def error_in(data: bytes) -> Any:
    """The `error` of the first event that has one, or None. Cheap where there is none."""
    if b'"error"' not in data:
        return None
    return next((error for error in map(_error, events(data)) if error is not None), None)


def _error(payload: bytes) -> Any:
    try:
        return _events.decode(payload).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def event(document: Any) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
