"""Errors as clients of SGLang and OpenAI know them, with our code, room and whether to try again."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import JSONResponse

from sglang_pd.protocol.errors import ErrorInfo, PdError, from_info

RETRY_AFTER_S: Final = 1
"""What `Retry-After` says: the queue and the pools move on within seconds."""

_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}


class Failure(Exception):
    """A request that failed, with its first cause."""

    def __init__(self, error: PdError, room: int | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.room = room

    @classmethod
    def of(cls, info: ErrorInfo, room: int | None = None) -> Failure:
        """From an error that travelled."""
        return cls(from_info(info), room)

    def body(self, leg: str) -> dict[str, Any]:
        """The error object. leg: the role of this worker."""
        error = self.error
        status = error.http_status
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {
            "error": {
                "type": kind,
                "code": error.code,
                "message": str(error).removeprefix(f"[{error.code}] "),
                "param": error.where or None,
                "leg": leg,
                "room": self.room,
                "retryable": error.retryable,
            }
        }

    def response(self, leg: str) -> JSONResponse:
        """The whole answer."""
        status = self.error.http_status
        headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else None
        return JSONResponse(self.body(leg), status, headers)
