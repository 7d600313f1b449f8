"""Errors as clients of SGLang and OpenAI know them, with our code, room and whether to try again."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import JSONResponse

from sglang_pd.protocol.errors import ErrorInfo, PdError, from_info

RETRY_AFTER_S: Final = 1
"""What `Retry-After` says: the queue and the pools move on within seconds."""

FACTS: Final = ("where", "expected", "actual", "hint", "details")
"""What an error says beside its message, where it is known."""

_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}


class Failure(Exception):
    """A request that failed, with its first cause."""

    def __init__(self, error: PdError, room: int | None = None, allow: str = "") -> None:
        """allow: the methods that the path has, where the request's is another one: answered 405."""
        super().__init__(str(error))
        self.error = error
        self.room = room
        self.status = 405 if allow else error.http_status
        self._headers = {"allow": allow} if allow else {}
        if self.status in (429, 503):
            self._headers["retry-after"] = str(RETRY_AFTER_S)
        if self.status == 401:
            self._headers["www-authenticate"] = "Bearer"

    @classmethod
    def of(cls, info: ErrorInfo, room: int | None = None) -> Failure:
        """From an error that travelled."""
        return cls(from_info(info), room)

    def body(self, leg: str) -> dict[str, Any]:
        """The error object. leg: the role of this worker."""
        info = self.error.info()
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        known = {name: value for name in FACTS if (value := getattr(info, name))}
        return {
            "error": {
                "type": kind,
                "code": info.code,
                "message": info.message,
                "param": info.where or None,
                "leg": leg,
                "room": self.room,
                "retryable": self.error.retryable,
                **known,
            }
        }

    def response(self, leg: str) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(leg), self.status, self._headers)
