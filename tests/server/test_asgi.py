"""What all routes share, without a worker behind it."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from sglang_pd.http.bounds import Bodies
from sglang_pd.server.asgi import Guard
from sglang_pd.server.serve import Ending


async def echo(request: Request) -> Response:
    async with Bodies(1000, 1000).taken(request.scope, request.receive) as body:
        return Response(body)


def test_a_client_that_goes_away_within_its_body_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    app = Guard(Router(routes=[Route("/", echo, methods=["POST"])]), leg="decode", epoch="1", bearer_token="")
    asyncio.run(app(scope, receive, send))
    assert not sent and not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("began", [False, True])
def test_a_request_that_outlives_the_worker_is_told_so(began: bool) -> None:
    said: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if began:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        said.append(message)

    async def test() -> None:
        request = asyncio.create_task(Ending(app, "decode")({"type": "http", "path": "/x"}, _never, send))
        await asyncio.sleep(0.01)
        request.cancel()
        await request

    asyncio.run(test())
    if began:
        assert [message["type"] for message in said] == ["http.response.start"]  # cut off: the server drops it
        return
    error = json.loads(said[1]["body"])["error"]
    assert said[0]["status"] == 503 and error["code"] == "draining" and error["leg"] == "decode" and error["retryable"]


async def _never() -> Any:
    await asyncio.Event().wait()
