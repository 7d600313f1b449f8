"""How a request ends badly: one failure with its first cause, as JSON, as an SSE line, as an HTTP status.

A worker's own error is kept (code, message, facts) and gains the leg and the room. Which failures count against a
worker, and which may be tried again in a new room, is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import msgspec

from sglang_pd.protocol.errors import CODES, MAX_TEXT, PdError

Leg = Literal["prefill", "decode", ""]
Rooms = int | tuple[int, ...] | None
"""One room, the rooms of a batch, or none yet."""

SATURATED: Final = frozenset({"queue_full", "pool_exhausted"})
"""The worker is full: well, and not for now."""

ELSEWHERE: Final = frozenset({"peer_lost", "peer_unknown", "peer_incompatible", "epoch_stale", "room_aborted"})
"""What a worker says of the other one: never counted against it, and rarely the first cause."""

MAX_ERROR_BYTES: Final = 64 * 1024
"""Most bytes of a worker's error that are read."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FACTS: Final = ("where", "expected", "actual", "hint", "param")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request, or one attempt at it, ended.

    status: HTTP status for the client. leg: whose failure; empty: the router's own. worker: its URL. blamed: counts
    against that worker. elsewhere: pointless to repeat with the same worker. retry_after_s: for 429 and 503.
    """

    code: str
    message: str
    status: int
    retryable: bool
    leg: Leg = ""
    room: Rooms = None
    worker: str = ""
    blamed: bool = False
    elsewhere: bool = False
    retry_after_s: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def secondary(self) -> bool:
        """True where the other leg probably knows the first cause."""
        return self.code in ELSEWHERE

    @property
    def type(self) -> str:
        """The family, in the words of the OpenAI API."""
        if self.status in _TYPES:
            return _TYPES[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The error document."""
        room = list(self.room) if isinstance(self.room, tuple) else self.room
        return {
            "error": {
                "type": self.type,
                "code": self.code,
                "message": self.message,
                "leg": self.leg or None,
                "room": room,
                "retryable": self.retryable,
                "param": self.facts.get("where"),
                **self.facts,
            }
        }

    def __str__(self) -> str:
        """The message with what was expected and found, for logs: a worker's error has these apart."""
        names = {"where": "at", "expected": "expected", "actual": "got"}
        known = [f"{word} {self.facts[name]}" for name, word in names.items() if name in self.facts]
        return self.message + (f" ({', '.join(known)})" if known else "")

    def json(self) -> bytes:
        """`body`, encoded."""
        return msgspec.json.encode(self.body())

    def sse(self) -> bytes:
        """One valid event, then the end of the stream."""
        return b"data: " + self.json() + b"\n\ndata: [DONE]\n\n"

    def headers(self) -> list[tuple[str, str]]:
        """Header lines that belong to it."""
        if self.retry_after_s is None and self.status not in (429, 503):
            return []
        return [("retry-after", str(self.retry_after_s if self.retry_after_s is not None else 1))]

    def within(self, room: Rooms) -> Failure:
        """The same failure, of this room."""
        return replace(self, room=room)


class RequestFailed(PdError):
    """A request ended by `failure`. `code` is the failure's, or `worker_failed` for a code that is not ours."""

    def __init__(self, failure: Failure) -> None:
        code = failure.code if failure.code in CODES else "worker_failed"
        details = {"leg": failure.leg, "room": failure.room, "worker": failure.worker}
        shown = {name: value for name, value in details.items() if value not in ("", None)}
        facts = {name: text for name, text in failure.facts.items() if name != "param"}
        super().__init__(failure.message, code=code, **facts, **shown)  # type: ignore[arg-type]
        self.failure = failure


def own(code: str, message: str, *, leg: Leg = "", **facts: str) -> RequestFailed:
    """A failure that the router itself found; status and retryability are those of the code."""
    about = CODES[code]
    return RequestFailed(
        Failure(code=code, message=message, status=about.http_status, retryable=about.retryable, leg=leg, facts=facts)
    )


def broken(leg: Leg, worker: str, what: str) -> Failure:
    """The connection to a worker could not be made, or broke."""
    return Failure(
        code="worker_failed",
        message=f"{leg} {worker}: {what}",
        status=502,
        retryable=True,
        leg=leg,
        worker=worker,
        blamed=True,
        elsewhere=True,
    )


def from_response(leg: Leg, worker: str, status: int, body: bytes, retry_after: str = "") -> Failure:
    """The failure in a worker's answer. Understood: our errors, OpenAI's, SGLang's, and plain text."""
    said = _said(body)
    code = said.get("code")
    code = code[:64] if isinstance(code, str) and code else ""
    message = said.get("message")
    message = message[:MAX_TEXT] if isinstance(message, str) and message else f"answered {status}"
    facts = {name: said[name][:MAX_TEXT] for name in _FACTS if isinstance(said.get(name), str) and said[name]}
    if code in SATURATED or status == 429:
        code, blamed = code or "queue_full", False
    else:
        blamed = status >= 500 and code not in ELSEWHERE and code != "draining"
    code = code or _code_of(status)
    retryable = said.get("retryable")
    if not isinstance(retryable, bool):
        known = CODES.get(code)
        retryable = known.retryable if known is not None else status in (429, 500, 502, 503, 504)
    return Failure(
        code=code,
        message=f"{leg} {worker}: {message}",
        status=_status(status),
        retryable=retryable,
        leg=leg,
        worker=worker,
        blamed=blamed,
        elsewhere=code in SATURATED or code == "draining" or status == 429,
        retry_after_s=int(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else None,
        facts=facts,
    )


def in_stream(leg: Leg, worker: str, error: Any) -> Failure:
    """The failure in an event or a document that came with status 200."""
    code = error.get("code") if isinstance(error, dict) else None
    known = CODES.get(code) if isinstance(code, str) else None
    status = known.http_status if known else code if isinstance(code, int) and 400 <= code < 600 else 502
    return from_response(leg, worker, status, msgspec.json.encode({"error": error}))


def _said(body: bytes) -> dict[str, Any]:
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"message": body.decode("utf-8", "replace").strip()}
    if isinstance(parsed, dict):
        for key in ("error", "detail"):
            if isinstance(parsed.get(key), dict):
                return dict(parsed[key])
            if isinstance(parsed.get(key), str):
                return {"message": parsed[key]}
        return parsed
    return {"message": str(parsed)[:MAX_TEXT]}


def _code_of(status: int) -> str:
    if status < 500:
        return "request_rejected"
    return "worker_failed"


def _status(status: int) -> int:
    """A gateway's answer for a worker's: a worker's own defect is 502; what says when to come back stays."""
    if status in (503, 504) or status < 500:
        return status
    return 502
