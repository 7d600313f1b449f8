"""What a worker says of itself: health, facts, metrics, peers."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_pd.config.package import package_version
from sglang_pd.http.terms import CANCELLABLE
from sglang_pd.protocol.errors import PdError, RoomError
from sglang_pd.protocol.room import Role
from sglang_pd.protocol.version import PROTOCOL_VERSION
from sglang_pd.server.batch import Worker
from sglang_pd.server.errors import Failure
from sglang_pd.worker.serving.service import WorkerService

PROBE_S: Final = 20.0
"""How long `/health_generate` waits for the engine."""
MAX_FLUSH_WAIT_S: Final = 600.0


async def health(request: Request, worker: Worker) -> Response:
    """200 while this process can serve; 503 says what is gone. Draining and waiting are no illness."""
    broken = worker.service.broken
    return JSONResponse({"status": "broken" if broken else "ok", "reason": broken}, 503 if broken else 200)


async def ready(request: Request, worker: Worker) -> Response:
    """200 while new requests should come here; 503 while it starts, drains, is stalled or broken, with the reason."""
    state, broken = worker.service.recorder.health(), worker.service.broken
    good = state.is_ready and not broken
    status = "broken" if broken else state.condition.value
    body = {"status": status, "reason": broken or state.reason, "idle_s": state.idle_s}
    return JSONResponse(body, 200 if good else 503)


async def health_generate(request: Request, worker: Worker) -> Response:
    """The engine computes a token on its own pools, with no hand-over; 503 where it cannot."""
    runner = worker.service.runner
    result: Future[int] = Future()

    def probe() -> None:
        try:
            result.set_result(runner.probe())
        except Exception as error:
            result.set_exception(error)

    before_s, began_s = runner.progress_s, time.monotonic()
    runner.call(probe)
    try:
        token = await asyncio.wait_for(asyncio.wrap_future(result), PROBE_S)
    except PdError as error:
        if error.code != "pool_exhausted" or runner.progress_s <= before_s:
            raise Failure(error) from None
        token = -1  # full of requests, and they move on
    except asyncio.TimeoutError:
        raise Failure(
            RoomError("the engine does not answer", code="pool_exhausted", where="engine", expected=f"{PROBE_S:g} s")
        ) from None
    return JSONResponse({"status": "ok", "token": token, "seconds": time.monotonic() - began_s})


async def server_info(request: Request, worker: Worker) -> Response:
    """Facts that routers and people ask for, SGLang's names among them."""
    service = worker.service
    config, topology = service.config, service.planned.manifest.topology
    return JSONResponse(
        {
            "model_path": worker.model,
            "served_model_name": worker.model,
            "tokenizer_path": worker.tokenizer.name,
            "disaggregation_mode": service.role.value,
            "disaggregation_bootstrap_port": service.bootstrap_port,
            "disaggregation_transfer_backend": config.backend.name,
            "tp_size": topology.tp,
            "pp_size": topology.pp,
            "dp_size": topology.dp_size,
            "page_size": config.pools.page_tokens,
            "max_total_num_tokens": service.planned.budget.capacity.tokens,
            "max_req_input_len": service.most_tokens,
            "max_running_requests": _most_running(service),
            "max_queued_requests": config.limits.queue_requests,
            "chunked_prefill_size": config.engine.chunk_tokens,
            "cancellable": list(CANCELLABLE),
            "status": service.recorder.health().condition.value,
            "draining": service.draining,
            "instance": service.name,
            "epoch": worker.epoch,
            "engine": config.engine.name,
            "fingerprint": service.parts.facts.fingerprint,
            "kinds": list(service.planned.manifest.kinds),
            "bootstrap_address": service.endpoint.address,
            "protocol": ".".join(map(str, PROTOCOL_VERSION)),
            "version": package_version(),
            "stats": service.stats(),
            "internal_states": [{}],
        }
    )


async def model_info(request: Request, worker: Worker) -> Response:
    """Facts of the model."""
    facts = worker.service.parts.facts
    return JSONResponse(
        {
            "model_path": worker.model,
            "tokenizer_path": worker.tokenizer.name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "fingerprint": facts.fingerprint,
            "vocab_size": facts.vocab_size,
            "eos_token_id": facts.eos_token,
            "max_model_len": worker.service.most_tokens,
        }
    )


async def models(request: Request, worker: Worker) -> Response:
    """`/v1/models`."""
    entry = {
        "id": worker.model,
        "object": "model",
        "created": int(worker.service.started_at),
        "owned_by": "sglang-pd",
        "root": worker.model,
        "max_model_len": worker.service.most_tokens,
    }
    return JSONResponse({"object": "list", "data": [entry]})


async def flush_cache(request: Request, worker: Worker) -> Response:
    """No prefix outlives its request, so there is nothing to flush; succeeds once nothing runs, as SGLang's does.
    timeout: seconds to wait for that."""
    try:
        wait_s = min(max(float(request.query_params.get("timeout", "0")), 0.0), MAX_FLUSH_WAIT_S)
    except ValueError:
        raise RoomError("not a number of seconds", code="request_rejected", where="timeout") from None
    end_s = time.monotonic() + wait_s
    while not worker.service.runner.idle and time.monotonic() < end_s:
        await asyncio.sleep(0.02)
    idle = worker.service.runner.idle
    message = "Nothing runs and nothing is cached." if idle else "Requests are queued or running; nothing was done."
    return JSONResponse({"success": idle, "message": message}, 200 if idle else 400)


async def metrics(request: Request, worker: Worker) -> Response:
    """Prometheus' exposition format."""
    if not worker.service.config.observe.metrics:
        raise RoomError("metrics are switched off", code="path_unknown", where="observe.metrics")
    worker.service.observe()
    content = worker.service.recorder.metrics.text()
    return Response(content, media_type="text/plain; version=0.0.4")


async def peers(request: Request, worker: Worker) -> Response:
    """The instances of the other role that this one talks with, and the verdict on each pair."""
    service = worker.service
    other = Role.DECODE if service.role is Role.PREFILL else Role.PREFILL
    found = [{**peer, "accepted": peer["stage"] == "agreed"} for peer in service.endpoint.peers()]
    return JSONResponse(
        {"instance": service.name, "role": service.role.value, "peer_role": other.value, "peers": found}
    )  # fmt: skip


def _most_running(service: WorkerService) -> int:
    """Requests that can run at once: each holds a room and at least one unit of every pool."""
    counts = service.parts.allocator.counts().values()
    return min(service.config.limits.max_rooms, *(count.free + count.held + count.withheld for count in counts))
