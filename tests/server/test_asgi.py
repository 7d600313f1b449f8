"""What all routes share, without a worker behind it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from sglang_pd.server.asgi import Guard, read_body


async def echo(request: Request) -> Response:
    return Response(await read_body(request))


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
