"""One leg of an attempt: the request at one worker, from connecting to the end of its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import httpx

from sglang_pd.http.terms import EPOCH_HEADER, STAGE_DECODE, STAGE_PREFILL, STAGE_TRANSFER
from sglang_pd.router import failures
from sglang_pd.router.failures import Failure, Leg, RequestFailed, own
from sglang_pd.router.worker import Incarnation, Worker


@dataclass(frozen=True, slots=True)
class Post:
    """What is posted to both workers. own_token: the `authorization` in headers is the router's, not the client's."""

    client: httpx.AsyncClient
    path: str
    body: bytes
    headers: Mapping[str, str]
    own_token: bool = False


class WorkerLeg:
    """The request at `worker`. Every method raises `RequestFailed` with the leg, the worker and the first cause."""

    def __init__(self, leg: Leg, worker: Worker, life: Incarnation, post: Post) -> None:
        self.leg, self.worker, self.life = leg, worker, life
        self._post = post
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self.bytes_read = 0
        self.complete = False

    @property
    def response(self) -> httpx.Response:
        """The answer's head. Only after `open`."""
        if self._response is None:
            raise own("internal", "the leg is not open")
        return self._response

    @property
    def stage(self) -> str:
        """Where the request is, as far as the router can tell."""
        if self.leg == "prefill":
            return STAGE_PREFILL
        return STAGE_DECODE if self.bytes_read else STAGE_TRANSFER

    async def open(self) -> None:
        """Post the request and wait for the head of an answer below 400."""
        post, worker = self._post, self.worker
        headers = {**post.headers, "host": worker.host_header}
        if self.life.epoch:
            headers[EPOCH_HEADER] = self.life.epoch
        request = post.client.build_request("POST", worker.base + post.path, content=post.body, headers=headers)
        try:
            self._response = await post.client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise RequestFailed(failures.broken(self.leg, worker.url, _what(error))) from None
        answered = self._response.headers.get(EPOCH_HEADER, "")
        if answered and self.life.epoch and answered.lower() != self.life.epoch:
            raise RequestFailed(self.replaced(f"{worker.url} answered as epoch {answered[:64]}, not {self.life.epoch}"))
        if self._response.status_code >= 300:
            raise RequestFailed(await self._refusal(self._response))
        self._chunks = self._response.aiter_raw()

    async def read(self) -> bytes:
        """The next bytes as they came; empty at the end of a complete answer."""
        if self._chunks is None:
            return b""
        try:
            async for chunk in self._chunks:
                if chunk:
                    self.bytes_read += len(chunk)
                    return chunk
        except httpx.HTTPError as error:
            what = f"the answer broke off after {self.bytes_read} bytes: {_what(error)}"
            raise RequestFailed(failures.broken(self.leg, self.worker.url, what)) from None
        self.complete = True
        return b""

    async def close(self) -> None:
        """Drop the connection unless the answer was complete: the worker sees its client go and aborts the room."""
        if self._response is not None:
            await self._response.aclose()

    def replaced(self, reason: str) -> Failure:
        """The failure of a room whose worker was replaced."""
        return Failure(
            code="epoch_stale",
            message=f"{self.leg}: {reason}",
            status=502,
            retryable=True,
            leg=self.leg,
            worker=self.worker.url,
        )

    def gave(self, error: object) -> RequestFailed:
        """The failure in an event or a document of an answer with status 200."""
        return RequestFailed(failures.in_stream(self.leg, self.worker.url, error))

    async def _refusal(self, response: httpx.Response) -> Failure:
        body = bytearray()
        try:
            async for chunk in response.aiter_raw():
                body += chunk[: failures.MAX_ERROR_BYTES - len(body)]
                if len(body) >= failures.MAX_ERROR_BYTES:
                    break
        except httpx.HTTPError:
            pass  # what came of it says enough: the status is the failure
        finally:
            await response.aclose()
        status, after = response.status_code, response.headers.get("retry-after", "")
        if status < 400:
            status, body[:] = 502, f"answered with a redirection ({status})".encode()
        elif status in (401, 403) and self._post.own_token:
            status, body[:] = 502, f"does not accept the router's worker_bearer_token ({status})".encode()
        return failures.from_response(self.leg, self.worker.url, status, bytes(body), after)


def _what(error: httpx.HTTPError) -> str:
    """The error in words; several of them have no text of their own."""
    text = str(error) or {"ReadError": "connection reset", "WriteError": "connection reset"}.get(
        type(error).__name__, ""
    )
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
