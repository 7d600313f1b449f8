"""A router that stops ends what still runs with an error of ours. The workers are fakes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
from support.fake_workers import Cluster, Stream, cluster, event, until

from sglang_pd.config import load_router
from sglang_pd.router import serve as serving


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 50))


def is_cut_off(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    assert answer.headers["retry-after"] and answer.headers["content-type"] == "application/json"
    return answer.status_code == 503 and error["code"] == "draining" and error["retryable"] is True


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_answer_yet_is_told_to_try_again(stream: bool) -> None:
    async def test() -> None:
        async with cluster() as c:
            c.decode.hold = c.prefill.hold = asyncio.Event()
            waiting = asyncio.create_task(c.generate(stream=stream))
            await until(lambda: bool(c.prefill.asked and c.decode.asked))
            c.router.cut_off()
            assert is_cut_off(await waiting)
            await c.prefill.settle()
            await c.decode.settle()
            assert c.prefill.aborted and c.decode.aborted
            assert is_cut_off(await c.generate())
            assert is_cut_off(await c.client.get("/health_generate"))

    run(test())


def test_a_stream_ends_with_an_error_event() -> None:
    async def test() -> None:
        async with cluster() as c:

            async def endless(worker: Any, body: Any, request: Any) -> Any:
                async def events() -> Any:
                    yield event({"text": "x", "meta_info": {"finish_reason": None}})
                    await asyncio.Event().wait()

                return Stream(events())

            c.decode.script = endless
            body = {"text": "hello", "stream": True}
            said: list[str] = []
            async with c.client.stream("POST", "/generate", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line and not said:
                        c.router.cut_off()
                    said += [line] * bool(line)
            assert said[-1] == "data: [DONE]"
            assert json.loads(said[-2].removeprefix("data: "))["error"]["code"] == "draining"

    run(test())


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_gives_requests_their_time_and_a_second_one_none(
    signals: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "STOP_S", 0.3 if signals == 1 else 40)

    async def test() -> None:
        async with cluster() as c:
            c.decode.hold = c.prefill.hold = asyncio.Event()
            answer = await _stopped(c, signals)
            assert is_cut_off(answer)

    run(test())
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err and "Exception in ASGI" not in said.out + said.err


async def _stopped(c: Cluster, signals: int) -> httpx.Response:
    """The answer to a request that runs when the router is told to stop."""
    config = load_router({"prefill": [c.prefill.url], "decode": [c.decode.url], "port": 0})
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    served = asyncio.create_task(serving.serve(config, lambda address: started.set_result(address.url())))
    async with httpx.AsyncClient(base_url=await started, timeout=40, trust_env=False) as client:
        waiting = asyncio.create_task(client.post("/generate", json={"text": "hello"}))
        await until(lambda: bool(c.prefill.asked and c.decode.asked))
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
        answer = await waiting
    await served
    return answer
