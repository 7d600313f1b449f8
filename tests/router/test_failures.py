"""What the router does when a leg, a worker or a client fails: one cause, both legs ended. The workers are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from support.fake_workers import Cluster, Cut, FakeWorker, Stream, cluster, event, until

from sglang_pd.config import Address
from sglang_pd.http.terms import CANCELLABLE
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.router import Router, Target

NO_RETRY: dict[str, Any] = {"retries": 0}
BROKEN = {"error": {"code": "transfer_failed", "message": "the cable is out", "retryable": True}}
FACTS = {"where": "prompt", "expected": "at most 9 tokens", "actual": "10 tokens", "hint": "shorten it"}
TOO_LONG = {"error": {"code": "prompt_too_long", "message": "never fits", "retryable": False, **FACTS}}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 50))


def leg(cluster: Cluster, name: str) -> tuple[FakeWorker, FakeWorker]:
    """The worker of that leg, and the other one."""
    return (cluster.prefill, cluster.decode) if name == "prefill" else (cluster.decode, cluster.prefill)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert {"type", "code", "message", "leg", "room", "retryable"} <= set(error)
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_first_failure_ends_both_legs(name: str, stream: bool) -> None:  # RT-03, RT-04
    async def test() -> None:
        async with cluster(**NO_RETRY) as c:
            failing, other = leg(c, name)
            other.hold = asyncio.Event()  # for ever: only a cancelled leg ends the request

            async def fail(worker: FakeWorker, body: Any, request: Any) -> Any:
                await until(lambda: bool(other.asked))
                worker.fail = (500, BROKEN, {})
                worker._finish([body["bootstrap_room"]])
                return JSONResponse(BROKEN, 500)

            failing.script = fail
            answer = await c.generate(stream=stream)
            room = failing.asked[0][1]["bootstrap_room"]
            error = error_of(answer)
            assert answer.status_code == 502
            assert error["code"] == "transfer_failed" and "the cable is out" in error["message"]
            assert error["leg"] == name and error["room"] == room and error["retryable"] is True
            await other.settle()
            assert other.aborted == [room]

    run(test())


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_connection_that_breaks_is_a_failure(name: str) -> None:
    async def test() -> None:
        async with cluster(**NO_RETRY) as c:
            failing, other = leg(c, name)
            other.hold = asyncio.Event()
            waiting = asyncio.create_task(c.generate())
            failing.hold = asyncio.Event()
            await until(lambda: bool(failing.asked and other.asked))
            await c.kill(failing)
            answer = await waiting
            assert answer.status_code == 502 and error_of(answer)["leg"] == name
            assert error_of(answer)["code"] == "worker_failed"
            await other.settle()
            assert len(other.aborted) == 1

    run(test())


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_refused_connection_is_told_at_once(name: str) -> None:  # RT-06
    async def test() -> None:
        async with cluster(timeouts={"probe_s": 60}) as c:
            failing, other = leg(c, name)
            other.hold = asyncio.Event()
            await c.kill(failing)
            answer = await c.generate()
            error = error_of(answer)
            assert answer.status_code == 502 and error["leg"] == name and error["retryable"]
            assert failing.url in error["message"] and "Connect" in error["message"]
            await other.settle()
            assert c.router.metrics.value("attempts_total", "/generate") == 1  # there was nobody else to try

    run(test())


def test_a_prefill_that_does_not_accept_connections_is_told() -> None:  # RT-06
    async def test() -> None:
        async with cluster(timeouts={"connect_s": 0.3, "probe_s": 60}) as c:
            worker = next(iter(c.router.fleet.of("prefill")))
            c.decode.hold = asyncio.Event()
            with socket.socket() as full:  # a backlog that is full drops what comes
                full.bind(("127.0.0.1", 0))
                full.listen(0)
                port = full.getsockname()[1]
                held = [await _half_open(port) for _ in range(4)]
                worker.target = Target("prefill", Address("127.0.0.1", port), "127.0.0.1", 8998)
                answer = await c.generate()
                assert answer.status_code == 502 and "ConnectTimeout" in error_of(answer)["message"]
                for sock in held:
                    sock.close()
            await c.decode.settle()

    run(test())


async def _half_open(port: int) -> Any:
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.connect(("127.0.0.1", port))
    return sock


def test_dispatch_is_never_serial() -> None:  # RT-06: there is no such setting, and both legs have the request
    with pytest.raises(ConfigError, match="no such key"):
        Router({"prefill": ["http://127.0.0.1:1"], "decode": ["http://127.0.0.1:2"], "dispatch": "serial"})


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_client_error_is_passed_on_and_not_tried_again(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with cluster() as c:
            failing, other = leg(c, name)
            failing.fail, other.hold = (400, TOO_LONG, {}), asyncio.Event()
            answer = await c.generate()
            error = error_of(answer)
            assert answer.status_code == 400 and error["code"] == "prompt_too_long" and not error["retryable"]
            assert error["type"] == "invalid_request_error" and error["leg"] == name
            assert {name: error[name] for name in FACTS} == FACTS
            assert "never fits (at prompt, expected at most 9 tokens, got 10 tokens)" in caplog.text
            assert len(failing.asked) == 1
            await other.settle()

    run(test())


FOREIGN: dict[str, tuple[int, Any, str, int]] = {
    "openai": (422, {"error": {"message": "bad field", "type": "x", "code": None}}, "bad field", 422),
    "old": (400, {"object": "error", "message": "too long", "code": 400}, "too long", 400),
    "fastapi": (404, {"detail": "Not Found"}, "Not Found", 404),
    "text": (503, "overloaded", "overloaded", 503),
    "bare": (500, {}, "answered 500", 502),
    "timeout": (504, {"error": "late"}, "late", 504),
}


def test_errors_of_other_servers_are_understood() -> None:
    async def test() -> None:
        async with cluster(breaker={"failures": 1000}, **NO_RETRY) as c:
            for name, (status, document, words, shown) in FOREIGN.items():
                c.prefill.fail = (status, document, {})
                answer = await c.generate()
                assert answer.status_code == shown and words in error_of(answer)["message"], name
                assert isinstance(error_of(answer)["code"], str), name

    run(test())


def test_the_room_list_of_a_batch_is_told() -> None:
    async def test() -> None:
        async with cluster(**NO_RETRY) as c:
            c.prefill.fail = (500, BROKEN, {})
            answer = await c.generate(text=["a", "b"])
            assert error_of(answer)["room"] == c.prefill.asked[0][1]["bootstrap_room"]

    run(test())


# Streams


def stream_of(*chunks: bytes | None, gate: asyncio.Event | None = None) -> Any:
    """A decode that says these; None: the connection breaks there."""

    async def script(worker: FakeWorker, body: Any, request: Any) -> Any:
        async def said() -> Any:
            for chunk in chunks:
                if chunk is None:
                    if gate is not None:
                        await gate.wait()
                    raise Cut
                yield chunk
                await asyncio.sleep(0)
            worker._finish([body["bootstrap_room"]])

        worker.bridge.event("decode", body["bootstrap_room"]).set()
        return Stream(said(), lambda: worker._abort([body["bootstrap_room"]]))

    return script


def last_events(answer: httpx.Response) -> tuple[list[Any], Any]:
    """The documents of a stream but the last, and the last; which ends in `[DONE]`. Every event must be valid."""
    *events, done, rest = answer.content.split(b"\n\n")
    assert done == b"data: [DONE]" and rest == b""
    found = [json.loads(event.removeprefix(b"data: ")) for event in events]
    return found[:-1], found[-1]


def test_a_stream_that_breaks_ends_with_one_valid_event() -> None:
    async def test() -> None:
        async with cluster() as c:
            c.decode.script = stream_of(event({"t": 1}), event({"t": 2}), b'data: {"t": 3, "te', None)
            answer = await c.generate(stream=True)
            assert answer.status_code == 200
            said, last = last_events(answer)
            assert said == [{"t": 1}, {"t": 2}]  # the torn event is not passed on
            assert last["error"]["leg"] == "decode" and last["error"]["code"] == "worker_failed"
            assert last["error"]["room"] == c.decode.asked[0][1]["bootstrap_room"]
            assert len(c.decode.asked) == 1  # never again after the first byte

    run(test())


def test_an_event_that_was_too_long_to_hold_is_ended_before_the_error() -> None:
    async def test() -> None:
        async with cluster(limits={"hold_bytes": 100}) as c:
            c.decode.script = stream_of(event({"t": 1}), b"data: " + b"x" * 500, None)
            answer = await c.generate(stream=True)
            first, torn, error, done, rest = answer.content.split(b"\n\n")
            assert first + b"\n\n" == event({"t": 1}) and torn == b"data: " + b"x" * 500
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "worker_failed"
            assert done == b"data: [DONE]" and rest == b""

    run(test())


def test_prefill_that_fails_after_the_first_byte_ends_the_stream() -> None:
    async def test() -> None:
        async with cluster() as c:
            gate = asyncio.Event()
            c.decode.script = stream_of(event({"t": 1}), None, gate=asyncio.Event())

            async def fail(worker: FakeWorker, body: Any, request: Any) -> Any:
                await gate.wait()
                return JSONResponse(BROKEN, 500)

            c.prefill.script = fail
            async with c.client.stream("POST", "/generate", json={"text": "a", "stream": True}) as answer:
                got = b""
                async for chunk in answer.aiter_raw():
                    got += chunk
                    gate.set()
            assert got.startswith(event({"t": 1})) and got.endswith(b"\n\ndata: [DONE]\n\n")
            error = json.loads(got.split(b"\n\n")[1].removeprefix(b"data: "))["error"]
            assert error["code"] == "transfer_failed" and error["leg"] == "prefill"
            await until(lambda: c.decode.aborted == [error["room"]])
            assert len(c.prefill.asked) == 1

    run(test())


def test_a_stream_whose_first_event_is_an_error_has_its_status() -> None:
    async def test() -> None:
        async with cluster(**NO_RETRY) as c:
            for name in ("prefill", "decode"):
                failing, other = leg(c, name)
                other.hold, failing.hold = asyncio.Event(), None
                failing.script = stream_of(b": hello\n\n", event(TOO_LONG), b"data: [DONE]\n\n")
                other.script = None
                answer = await c.generate(stream=True)
                assert answer.status_code == 400 and error_of(answer)["code"] == "prompt_too_long"
                assert error_of(answer)["leg"] == name
                await other.settle()

    run(test())


def test_decodes_own_error_is_passed_on_as_it_is() -> None:
    async def test() -> None:
        async with cluster() as c:
            said = event({"t": 1}) + event(BROKEN) + b"data: [DONE]\n\n"
            c.decode.script = stream_of(event({"t": 1}), said[len(event({"t": 1})) :])
            answer = await c.generate(stream=True)
            assert answer.content == said
            c.decode.script = stream_of(event({"t": 1}), event(BROKEN), None)
            answer = await c.generate(stream=True)
            assert answer.content == said  # it broke before its end: the end is said for it, the error only once
            await until(lambda: next(iter(c.router.fleet.of("decode"))).failures == 2)

    run(test())


def test_an_error_document_with_status_200_is_an_error() -> None:
    async def test() -> None:
        async with cluster() as c:

            async def say(worker: FakeWorker, body: Any, request: Any) -> Any:
                return JSONResponse(TOO_LONG)

            c.decode.script, c.prefill.hold = say, asyncio.Event()
            answer = await c.generate()
            assert answer.status_code == 400 and error_of(answer)["code"] == "prompt_too_long"

    run(test())


def test_a_large_answer_that_breaks_is_cut_off() -> None:
    async def test() -> None:
        async with cluster(limits={"hold_bytes": 1000}) as c:

            async def say(worker: FakeWorker, body: Any, request: Any) -> Any:
                async def chunks() -> Any:
                    yield b"[" + b"1," * 2000
                    await asyncio.sleep(0.05)
                    raise Cut

                answer = Stream(chunks())
                answer.headers["content-type"] = "application/json"
                worker.bridge.event("decode", body["bootstrap_room"]).set()
                return answer

            c.decode.script = say
            with pytest.raises(httpx.RemoteProtocolError):
                await c.generate()

    run(test())


# Retries


def test_a_retry_has_a_new_room_and_another_worker() -> None:
    async def test() -> None:
        async with cluster(prefills=2, timeouts={"probe_s": 60}) as c:
            await c.kill(c.prefills[0])
            for _ in range(4):
                assert (await c.generate()).status_code == 200
            first = [body["bootstrap_room"] for _, body, _ in c.decode.asked]
            assert len(set(first)) == len(first)
            assert c.router.metrics.value("retries_total", "prefill", "worker_failed") >= 1

    run(test())


def test_a_5xx_is_tried_again_in_a_new_room() -> None:
    async def test() -> None:
        async with cluster() as c:

            async def once(worker: FakeWorker, body: Any, request: Any) -> Any:
                return JSONResponse(BROKEN, 502) if len(worker.asked) == 1 else None

            for failing in (c.decode, c.prefill):
                for worker in c.workers():
                    worker.asked.clear()
                    worker.script = None
                failing.script = once
                assert (await c.generate(stream=True)).status_code == 200
                rooms = [body["bootstrap_room"] for _, body, _ in failing.asked]
                assert len(rooms) == 2 and rooms[0] != rooms[1]

    run(test())


def test_no_retry_in_a_room_of_the_callers() -> None:
    async def test() -> None:
        async with cluster(retries=5) as c:
            c.decode.fail = (500, BROKEN, {})
            answer = await c.generate(bootstrap_room=77)
            assert answer.status_code == 502 and error_of(answer)["room"] == 77 and len(c.decode.asked) == 1

    run(test())


def test_retries_end() -> None:
    async def test() -> None:
        async with cluster(retries=3, breaker={"failures": 100}) as c:
            c.decode.fail = (500, BROKEN, {})
            assert (await c.generate()).status_code == 502
            assert len(c.decode.asked) == 4

    run(test())


# Causes, deadlines, clients


def test_the_first_cause_wins_over_its_consequence() -> None:
    async def test() -> None:
        async with cluster(**NO_RETRY) as c:
            lost = {"error": {"code": "peer_lost", "message": "prefill is gone", "retryable": True}}
            c.decode.fail = (502, lost, {})

            async def later(worker: FakeWorker, body: Any, request: Any) -> Any:
                await until(lambda: bool(c.decode.asked))
                await asyncio.sleep(0.03)  # decode has said so first
                return JSONResponse(BROKEN, 500)

            c.prefill.script = later
            error = error_of(await c.generate())
            assert error["leg"] == "prefill" and error["code"] == "transfer_failed"
            c.prefill.script, c.prefill.hold = None, asyncio.Event()
            error = error_of(await c.generate())
            assert error["leg"] == "decode" and error["code"] == "peer_lost"  # nobody knew better
            assert next(iter(c.router.fleet.of("decode"))).failures == 0  # it only said what it saw

    run(test())


def test_a_request_has_a_deadline() -> None:
    async def test() -> None:
        async with cluster(timeouts={"request_s": 0.3, "connect_s": 0.2}) as c:
            c.decode.hold = c.prefill.hold = asyncio.Event()
            answer = await c.generate()
            assert answer.status_code == 504 and error_of(answer)["code"] == "room_expired"
            await c.decode.settle()
            await c.prefill.settle()
            assert c.decode.aborted and c.prefill.aborted
            assert all(not worker.failures for worker in c.router.fleet.workers)

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_both_legs(stream: bool) -> None:  # LC-07
    async def test() -> None:
        async with cluster() as c:
            if stream:
                c.decode.script = stream_of(event({"t": 1}), None, gate=asyncio.Event())
            else:
                c.decode.hold = asyncio.Event()
            c.prefill.hold = asyncio.Event()
            body = {"text": "a", "stream": stream}
            task = asyncio.create_task(c.client.post("/generate", json=body))
            await until(lambda: bool(c.prefill.asked and c.decode.asked))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait({task})
            await until(lambda: bool(c.prefill.aborted and c.decode.aborted))
            await until(lambda: not len(c.router.dispatcher.rooms) and not c.router.metrics.inflight)
            assert all(not worker.rooms and not worker.failures for worker in c.router.fleet.workers)
            assert c.router.metrics.value("disconnects_total", "/generate") == 1

    run(test())


def test_the_embedded_client_that_stops_reading_ends_both_legs() -> None:
    async def test() -> None:
        async with cluster() as c:
            c.decode.script = stream_of(event({"t": 1}), None, gate=asyncio.Event())
            c.prefill.hold = asyncio.Event()
            async with Router({"prefill": [c.prefill.url], "decode": [c.decode.url]}) as router:
                async with contextlib.aclosing(router.generate_stream({"text": "a"})) as events:  # type: ignore[type-var]
                    assert await anext(events) == {"t": 1}
            await until(lambda: bool(c.prefill.aborted and c.decode.aborted))

    run(test())


def test_a_worker_that_does_not_cancel_keeps_its_load() -> None:  # RT-12
    async def test() -> None:
        declared = {"cancellable": ["transfer", "decode"]}

        def declare(workers: list[FakeWorker]) -> None:
            workers[0].info = declared

        async with cluster(prepare=declare, **NO_RETRY) as c:
            prefill, decode = c.router.fleet.workers
            assert prefill.cancellable == {"transfer", "decode"} and decode.cancellable == set(CANCELLABLE)
            c.prefill.hold = asyncio.Event()
            c.decode.fail = (500, BROKEN, {})
            assert (await c.generate()).status_code == 502
            await until(lambda: not c.router.metrics.inflight)
            assert prefill.rooms == 1 and decode.rooms == 0 and not c.prefill.aborted
            for room in c.prefill.open_rooms:
                c.prefill.bridge.event("decode", room).set()
            c.prefill.hold.set()
            await until(lambda: prefill.rooms == 0)
            assert c.prefill.done and not c.prefill.aborted
            assert c.router.metrics.value("lingering_total") == 1

    run(test())
