"""Which workers get requests: health, breakers, drains, replacements, verdicts, saturation. The workers are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from support.fake_workers import Cluster, FakeWorker, Stream, cluster, event, serve_app, until

from sglang_pd.router import Router
from sglang_pd.router.worker import Worker

NO_RETRY: dict[str, Any] = {"retries": 0}
BROKEN = {"error": {"code": "transfer_failed", "message": "the cable is out", "retryable": True}}
FULL = {"error": {"code": "queue_full", "message": "the queue is full", "retryable": True}}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 50))


def known(cluster: Cluster, fake: FakeWorker) -> Worker:
    return next(worker for worker in cluster.router.fleet.workers if worker.url == fake.url)


def asked(cluster: Cluster) -> int:
    return sum(len(worker.asked) for worker in cluster.workers())


# Up, ready, draining


def test_without_healthy_workers_it_lives_and_is_not_ready() -> None:  # RT-13
    async def test() -> None:
        router = {"prefill": ["http://127.0.0.1:9"], "decode": ["http://127.0.0.1:9", "http://127.0.0.1:10"]}

        front = await serve_app(Router(router).app, lifespan="on")
        async with httpx.AsyncClient(base_url=front.url, trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            ready = await client.get("/ready")
            assert ready.status_code == 503 and ready.json()["error"]["leg"] == "prefill"
            answer = await client.post("/generate", json={"text": "a"})
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "worker_unavailable" and answer.json()["error"]["retryable"]
            assert (await client.get("/v1/models")).status_code == 503
            assert (await client.get("/metrics")).status_code == 200
        await front.stop()

    run(test())


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_leg_that_is_down_is_503_before_any_dispatch(name: str) -> None:  # RT-01
    async def test() -> None:
        async with cluster() as c:
            down, other = (c.prefill, c.decode) if name == "prefill" else (c.decode, c.prefill)
            await c.kill(down)
            await until(lambda: not known(c, down).sight.up)
            answer = await c.generate()
            error = answer.json()["error"]
            assert answer.status_code == 503 and error["leg"] == name and down.url in error["message"]
            assert not other.asked
            assert (await c.client.get("/ready")).status_code == 503
            assert (await c.client.get("/health")).status_code == 200
            await c.revive(down)
            await until(lambda: known(c, down).sight.ready)
            assert (await c.generate()).status_code == 200 and (await c.client.get("/ready")).status_code == 200

    run(test())


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "starting": ({"ready_status": (503, {"status": "starting", "reason": "not started yet"})}, "not started"),
    "stalled": ({"ready_status": (503, {"condition": "stalled"})}, "stalled"),
    "draining": ({"ready_status": (503, {"status": "draining", "reason": "told to"})}, "draining"),
    "sick": ({"health_status": (503, {"status": "broken", "reason": "the engine died"})}, "the engine died"),
    "other role": ({"info": {"disaggregation_mode": "decode"}}, "is a decode worker"),
}


def test_a_worker_that_is_not_ready_gets_nothing() -> None:
    async def test() -> None:
        async with cluster(prefills=2) as c:
            fake, rest = c.prefills
            for name, (change, words) in STATES.items():
                kept = {key: getattr(fake, key) for key in change}
                for key, value in change.items():
                    setattr(fake, key, value)
                await until(lambda: bool(known(c, fake).obstacle))
                assert words in known(c, fake).obstacle, name
                fake.asked.clear()
                for _ in range(3):
                    assert (await c.generate()).status_code == 200
                assert not fake.asked and rest.asked, name
                for key, value in kept.items():
                    setattr(fake, key, value)
                await until(lambda: not known(c, fake).obstacle)

    run(test())


def test_draining_said_in_an_answer_counts_at_once() -> None:
    async def test() -> None:
        async with cluster(prefills=2, timeouts={"probe_s": 60}) as c:
            fake = c.prefills[0]
            fake.ready_status = (503, {"status": "draining"})  # which nobody has looked at yet
            fake.fail = (503, {"error": {"code": "draining", "message": "stopping", "retryable": True}}, {})
            for _ in range(6):
                assert (await c.generate()).status_code == 200
            assert len(fake.asked) == 1
            worker = known(c, fake)
            assert worker.describe()["draining"] and not worker.failures

    run(test())


def test_a_worker_without_ready_or_epoch_is_used() -> None:
    """As of other makers: no `/ready`, no `/peers`, no epoch."""

    async def test() -> None:
        def strip(workers: Sequence[FakeWorker]) -> None:
            for worker in workers:
                worker.ready_status = (404, {"detail": "Not Found"})
                worker.info = {"epoch": None, "instance": None}

        async with cluster(prepare=strip) as c:
            assert (await c.generate()).status_code == 200

    run(test())


# Breakers


def test_the_breaker_opens_on_5xx_and_a_trial_closes_it() -> None:  # RT-01, RT-02
    async def test() -> None:
        async with cluster(breaker={"failures": 5, "open_s": 0.4}, **NO_RETRY) as c:
            worker = known(c, c.prefill)
            c.prefill.fail = (500, BROKEN, {})
            for _ in range(4):
                assert (await c.generate()).status_code == 502
            c.prefill.fail = None
            assert (await c.generate()).status_code == 200  # the row is broken
            await until(lambda: worker.breaker.consecutive == 0)
            c.prefill.fail = (500, BROKEN, {})
            for _ in range(5):
                assert (await c.generate()).status_code == 502
            assert worker.breaker.state.value == "open"
            before = asked(c)
            answer = await c.generate()
            assert answer.status_code == 503 and "5 failures in a row" in answer.json()["error"]["message"]
            assert asked(c) == before
            await until(lambda: worker.breaker.state.value == "half_open")
            assert (await c.generate()).status_code == 502  # the trial fails
            assert (await c.generate()).status_code == 503
            c.prefill.fail = None
            await until(lambda: worker.breaker.state.value == "half_open")
            assert (await c.generate()).status_code == 200
            await until(lambda: worker.breaker.state.value == "closed")
            assert (await c.generate()).status_code == 200 and worker.describe()["failures"] == 10

    run(test())


def test_half_open_lets_one_request_through() -> None:
    async def test() -> None:
        async with cluster(breaker={"failures": 1, "open_s": 0.1}, **NO_RETRY) as c:
            worker = known(c, c.decode)
            c.decode.fail = (500, BROKEN, {})
            assert (await c.generate()).status_code == 502
            c.decode.fail, c.decode.hold = None, asyncio.Event()
            await until(lambda: worker.breaker.state.value == "half_open")
            trial = asyncio.create_task(c.generate())
            await until(lambda: len(c.decode.asked) == 2)
            assert (await c.generate()).status_code == 503 and len(c.decode.asked) == 2
            c.decode.hold.set()
            assert (await trial).status_code == 200 and worker.breaker.state.value == "closed"

    run(test())


def test_connect_errors_open_the_breaker() -> None:  # RT-02
    async def test() -> None:
        async with cluster(timeouts={"probe_s": 60}, breaker={"failures": 5, "open_s": 60}, **NO_RETRY) as c:
            c.router._prober.poke = lambda worker: None  # type: ignore[method-assign]
            c.router.dispatcher._poke = lambda worker: None
            await c.kill(c.prefill)
            for _ in range(5):
                assert (await c.generate()).status_code == 502
            before = len(c.decode.asked)
            assert (await c.generate()).status_code == 503 and len(c.decode.asked) == before

    run(test())


def test_client_errors_never_count() -> None:  # RT-02
    async def test() -> None:
        async with cluster(breaker={"failures": 2, "open_s": 60}) as c:
            for status in (400, 404, 409, 413, 422, 429, 499):
                c.decode.fail = (status, {"error": {"message": "no"}}, {})
                for _ in range(8):
                    assert (await c.generate()).status_code == status
            assert known(c, c.decode).breaker.state.value == "closed" and not known(c, c.decode).failures
            c.decode.fail = None
            assert (await c.generate()).status_code == 200

    run(test())


def test_failures_are_remembered_over_requests_and_for_each_worker() -> None:  # RT-13
    async def test() -> None:
        async with cluster(decodes=2, breaker={"failures": 3, "open_s": 60}) as c:
            bad, good = c.decodes
            bad.fail = (500, BROKEN, {})
            for _ in range(12):
                await c.generate()
            assert len(bad.asked) == 3 and len(good.asked) >= 9
            rows = {row["url"]: row for row in (await c.client.get("/workers")).json()["workers"]}
            assert rows[bad.url]["breaker"] == "open" and "cable" in rows[bad.url]["last_failure"]
            assert rows[good.url]["eligible"] and not rows[bad.url]["eligible"]

    run(test())


def test_a_row_of_broken_streams_opens_the_breaker() -> None:
    async def test() -> None:
        async with cluster(breaker={"failures": 3, "open_s": 60}) as c:

            async def broken(worker: FakeWorker, body: Any, request: Any) -> Any:
                async def said() -> Any:
                    yield event({"t": 1})
                    yield event(BROKEN)
                    yield b"data: [DONE]\n\n"

                worker.bridge.event("decode", body["bootstrap_room"]).set()
                return Stream(said())

            c.decode.script = broken
            for _ in range(3):
                assert (await c.generate(stream=True)).status_code == 200
            assert (await c.generate(stream=True)).status_code == 503

    run(test())


# Saturation


def test_a_full_worker_is_not_unhealthy() -> None:  # RT-08
    async def test() -> None:
        async with cluster(decodes=2, breaker={"failures": 2, "open_s": 60}) as c:
            full, free = c.decodes
            full.fail = (429, FULL, {"retry-after": "7"})
            for _ in range(10):
                assert (await c.generate()).status_code == 200
            assert not known(c, full).failures and known(c, full).breaker.state.value == "closed"
            assert len(full.asked) <= 3 and known(c, full).saturated  # asked again only when it must be
            free.fail = (503, {"error": {"code": "pool_exhausted", "message": "no pages"}}, {})
            answer = await c.generate()
            assert answer.status_code in (429, 503) and answer.json()["error"]["retryable"]
            assert not known(c, free).failures

    run(test())


def test_full_queues_are_429_with_retry_after() -> None:  # RT-05
    async def test() -> None:
        async with cluster(limits={"max_inflight": 2}) as c:
            c.prefill.fail = (429, FULL, {"retry-after": "7"})
            answer = await c.generate()
            assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
            assert answer.json()["error"]["leg"] == "prefill"
            await c.decode.settle()
            c.prefill.fail, c.decode.hold = None, asyncio.Event()
            running = [asyncio.create_task(c.generate()) for _ in range(2)]
            await until(lambda: c.router.metrics.inflight == 2)
            answer = await c.generate()
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full" and "max_inflight" in str(answer.json())
            c.decode.hold.set()
            assert [(await task).status_code for task in running] == [200, 200]
            await until(lambda: c.router.metrics.inflight == 0)
            assert (await c.generate()).status_code == 200

    run(test())


def test_a_slow_client_holds_decode_back() -> None:  # RT-05: nothing is read ahead
    async def test() -> None:
        async with cluster() as c:
            sent = 0

            async def much(worker: FakeWorker, body: Any, request: Any) -> Any:
                async def said() -> Any:
                    nonlocal sent
                    piece = event("x" * 65_000)
                    for _ in range(4000):
                        yield piece
                        sent += len(piece)

                worker.bridge.event("decode", body["bootstrap_room"]).set()
                return Stream(said())

            c.decode.script = much
            async with c.client.stream("POST", "/generate", json={"text": "a", "stream": True}) as answer:
                chunks = answer.aiter_raw(1000)
                await anext(chunks)
                seen = -1
                while seen != sent:  # until it stands still
                    seen = sent
                    await asyncio.sleep(0.3)
            assert 0 < sent < 30_000_000  # the sockets' buffers, of 260 MB

    run(test())


# Replacement


def test_a_prefill_replaced_behind_its_url_is_noticed() -> None:  # RT-14
    async def test() -> None:
        async with cluster(breaker={"failures": 2, "open_s": 60}, **NO_RETRY) as c:
            worker = known(c, c.prefill)
            for fake in c.workers():
                fake.hold = asyncio.Event()
            pinned = asyncio.create_task(c.generate())
            await until(lambda: bool(c.prefill.asked and c.decode.asked))
            assert c.prefill.asked[0][2]["x-sglang-pd-epoch"] == "00000000000000a0"
            c.prefill.epoch = "00000000000000ff"
            answer = await pinned
            error = answer.json()["error"]
            assert answer.status_code == 502 and error["code"] == "epoch_stale" and error["retryable"]
            assert error["leg"] == "prefill" and "00000000000000ff" in error["message"]
            await c.decode.settle()
            assert c.decode.aborted == [error["room"]]
            assert worker.replaced == 1 and worker.incarnation.epoch == "00000000000000ff"
            assert c.router.metrics.value("worker_replaced_total", "prefill", c.prefill.url) == 1
            for fake in c.workers():
                fake.hold = None
            assert (await c.generate()).status_code == 200
            assert c.prefill.asked[-1][2]["x-sglang-pd-epoch"] == "00000000000000ff"

    run(test())


def test_a_new_incarnation_is_judged_anew() -> None:
    async def test() -> None:
        async with cluster(breaker={"failures": 1, "open_s": 60}, **NO_RETRY) as c:
            c.prefill.fail = (500, BROKEN, {})
            assert (await c.generate()).status_code == 502 and (await c.generate()).status_code == 503
            c.prefill.fail, c.prefill.epoch = None, "b"
            await until(lambda: not known(c, c.prefill).obstacle)
            assert (await c.generate()).status_code == 200

    run(test())


@pytest.mark.parametrize("status", [200, 409])
def test_an_answer_of_another_epoch_is_not_believed(status: int) -> None:
    async def test() -> None:
        async with cluster(timeouts={"probe_s": 60}, **NO_RETRY) as c:

            async def other(worker: FakeWorker, body: Any, request: Any) -> Any:
                return JSONResponse({}, status, headers={"x-sglang-pd-epoch": "1"})

            c.decode.script, c.prefill.hold = other, asyncio.Event()
            answer = await c.generate()
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "epoch_stale"

    run(test())


def test_a_stream_outlives_the_prefill_that_began_it() -> None:
    async def test() -> None:
        async with cluster() as c:
            go = asyncio.Event()

            async def said(worker: FakeWorker, body: Any, request: Any) -> Any:
                async def chunks() -> Any:
                    yield event({"t": 1})
                    await go.wait()
                    yield event({"t": 2}) + b"data: [DONE]\n\n"

                room = body["bootstrap_room"]
                worker.bridge.event("decode", room).set()
                await worker.bridge.event("prefill", room).wait()
                return Stream(chunks())

            c.decode.script = said
            task = asyncio.create_task(c.generate(stream=True))
            await until(lambda: bool(c.prefill.done))
            await until(lambda: known(c, c.prefill).rooms == 1)
            await asyncio.sleep(0.05)
            c.prefill.epoch = "b"
            await until(lambda: known(c, c.prefill).replaced == 1)
            await c.kill(c.prefill)
            go.set()
            assert (await task).content == event({"t": 1}) + event({"t": 2}) + b"data: [DONE]\n\n"

    run(test())


# Its own views


def test_views() -> None:
    async def test() -> None:
        async with cluster(prefills=2) as c:
            await c.generate()
            assert (await c.client.get("/v1/models")).json()["data"][0]["id"] == "fake"
            assert (await c.client.get("/model_info")).json()["model_path"] == "fake"
            info = (await c.client.get("/server_info")).json()
            assert [i["instance"] for i in info["prefill"]] == ["p0", "p1"] and info["decode"][0]["instance"] == "d0"
            assert info["internal_states"] == [{}]
            flushed = await c.client.post("/flush_cache", params={"timeout": 12.5})
            assert flushed.status_code == 200 and flushed.json()["success"]
            assert [worker.flushed for worker in c.workers()] == [["12.5"]] * 3
            assert (await c.client.get("/health_generate")).status_code == 200
            missing = await c.client.get("/nothing")
            assert missing.status_code == 404 and missing.json()["error"]["code"] == "path_unknown"
            assert "/generate" in missing.json()["error"]["expected"].split()
            method = await c.client.get("/generate")
            assert method.status_code == 405 and method.json()["error"]["expected"] == "POST"
            await c.kill(c.prefill)
            answer = await c.client.post("/flush_cache")
            assert answer.status_code == 502 and not answer.json()["success"]

    run(test())


def test_metrics_have_samples_and_no_rooms() -> None:
    async def test() -> None:
        async with cluster(**NO_RETRY) as c:
            await c.generate(bootstrap_room=123456789)
            c.prefill.fail = (500, BROKEN, {})
            await c.generate()
            await until(lambda: not c.router.metrics.inflight)
            text = (await c.client.get("/metrics")).text
            for line in (
                'requests_total{path="/generate",result="ok"} 1.0',
                'requests_total{path="/generate",result="failed"} 1.0',
                f'leg_failures_total{{code="transfer_failed",role="prefill",worker="{c.prefill.url}"}} 1.0',
                f'worker_eligible{{role="decode",worker="{c.decode.url}"}} 1.0',
                f'breaker{{role="prefill",state="closed",worker="{c.prefill.url}"}} 1.0',
                'first_byte_seconds_count{path="/generate"} 1.0',
                "inflight 0.0",
                "ready 1.0",
            ):
                assert f"\nsglang_pd_router_{line}\n" in text, line
            assert "123456789" not in text

    run(test())
