"""The routes of a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_pd.http.bounds import Bodies
from sglang_pd.protocol.errors import RoomError
from sglang_pd.server import generate, openai, status
from sglang_pd.server.asgi import Guard
from sglang_pd.server.batch import Worker
from sglang_pd.server.errors import Failure
from sglang_pd.server.tokenizer import tokenizer_of
from sglang_pd.worker.serving.service import WorkerService

Answer = Callable[[Request, Worker], Awaitable[Response]]

DEFAULT_BODY_BYTES: Final = 4 * 2**20
TOKEN_BYTES: Final = 16
"""Bytes of one token in a body, generously: the longest request that can run here passes."""
HELD_BODIES: Final = 8

ROUTES: Final[tuple[tuple[str, tuple[str, ...], Answer], ...]] = (
    ("/generate", ("POST", "PUT"), generate.generate),
    ("/v1/completions", ("POST",), openai.completions),
    ("/v1/chat/completions", ("POST",), openai.chat),
    ("/v1/models", ("GET",), status.models),
    ("/health", ("GET",), status.health),
    ("/health_generate", ("GET",), status.health_generate),
    ("/ready", ("GET",), status.ready),
    ("/server_info", ("GET",), status.server_info),
    ("/get_server_info", ("GET",), status.server_info),
    ("/model_info", ("GET",), status.model_info),
    ("/get_model_info", ("GET",), status.model_info),
    ("/flush_cache", ("GET", "POST"), status.flush_cache),
    ("/metrics", ("GET",), status.metrics),
    ("/peers", ("GET",), status.peers),
)
"""Path, methods, and what answers. The `get_` forms are SGLang's older names."""


def build_app(service: WorkerService) -> ASGIApp:
    """The ASGI application of a worker. Raises `ConfigError` for a checkpoint's tokenizer that cannot be read."""
    config = service.config
    tokenizer = tokenizer_of(config.engine.options, service.parts.facts)
    worker = Worker(service, tokenizer, model_name(service), Bodies(*body_bounds(service)))
    routes = [MethodRoute(path, _bound(answer, worker), methods=list(methods)) for path, methods, answer in ROUTES]
    return Guard(
        Router(routes, default=_nowhere),
        leg=worker.leg,
        epoch=worker.epoch,
        bearer_token=config.security.bearer_token,
    )


def body_bounds(service: WorkerService) -> tuple[int, int]:
    """Most bytes of one body, and of all that are held at a time: held ones are only those that are being read."""
    given = service.config.limits.max_body_bytes
    most = given if given is not None else max(DEFAULT_BODY_BYTES, TOKEN_BYTES * service.most_tokens)
    return most, HELD_BODIES * most


def model_name(service: WorkerService) -> str:
    """What clients call the model: its checkpoint folder, its class, or its engine."""
    options = service.config.engine.options
    random = options.get("random")
    name = options.get("path") or (random.get("class") if isinstance(random, dict) else None)
    return str(name or service.config.engine.name)


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    known = " ".join(path for path, _, _ in ROUTES)
    raise RoomError("no such path", code="path_unknown", where=str(scope.get("path", ""))[:200], expected=known)


class MethodRoute(Route):
    """A route whose refusal of a method is an error of ours; starlette's is plain text."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, once the path is this one."""
        methods = sorted(self.methods or ())
        if scope["method"] not in methods:
            expected = [method for method in methods if method != "HEAD"]
            error = RoomError(
                "the path does not have this method",
                code="request_rejected",
                where=str(scope["path"]),
                expected=" or ".join(expected),
                actual=str(scope["method"])[:32],
            )
            raise Failure(error, allow=", ".join(methods))
        await super().handle(scope, receive, send)


def _bound(answer: Answer, worker: Worker) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await answer(request, worker)

    return endpoint
