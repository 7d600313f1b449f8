"""What the router does with a request that goes well: rooms, both legs, the answer. The workers are fakes."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from support.fake_workers import Cluster, Stream, cluster, until

from sglang_pd.http import bounds as http_bounds
from sglang_pd.router import RequestFailed, Router
from sglang_pd.router.request import parse

MAX_ROOM = 2**63 - 1


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 50))


def rooms_of(cluster: Cluster) -> list[Any]:
    (ours,), (theirs,) = ([body["bootstrap_room"] for _, body, _ in w.asked] for w in cluster.workers())
    assert ours == theirs
    return ours if isinstance(ours, list) else [ours]


def test_a_request_goes_to_both_legs_with_one_room() -> None:
    async def test() -> None:
        async with cluster() as c:
            answer = await c.generate(sampling_params={"max_new_tokens": 3}, custom={"kept": [1, 2.5, None]})
            assert answer.status_code == 200 and answer.json()["text"] == "decode0:xxx"
            (path, prefill, _), (_, decode, _) = c.prefill.asked[0], c.decode.asked[0]
            assert path == "/generate" and prefill == decode
            room = prefill.pop("bootstrap_room")
            assert isinstance(room, int) and 0 < room <= MAX_ROOM
            assert prefill.pop("bootstrap_host") == "127.0.0.1" and prefill.pop("bootstrap_port") == 8998
            assert prefill == {
                "text": "hi", "sampling_params": {"max_new_tokens": 3}, "custom": {"kept": [1, 2.5, None]},
            }  # fmt: skip
            assert c.prefill.done == c.decode.done == [room] and not len(c.router.dispatcher.rooms)

    run(test())


BATCHES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "single": ("/generate", {"text": "a"}, None),
    "tokens": ("/generate", {"input_ids": [1, 2]}, None),
    "texts": ("/generate", {"text": ["a", "b"]}, 2),
    "one text in a list": ("/generate", {"text": ["a"]}, 1),
    "token lists": ("/generate", {"input_ids": [[1], [2], [3]]}, 3),
    "n": ("/generate", {"text": "a", "sampling_params": {"n": 3}}, 3),
    "batch and n": ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 3}}, 6),
    "params each": ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
    "completion": ("/v1/completions", {"prompt": "a"}, None),
    "completion tokens": ("/v1/completions", {"prompt": [1, 2]}, None),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
    "completion token lists": ("/v1/completions", {"prompt": [[1, 2], [3]]}, 2),
    "chat": ("/v1/chat/completions", {"messages": []}, None),
    "chat n": ("/v1/chat/completions", {"messages": [], "n": 2}, 2),
}


def test_a_room_for_each_sequence() -> None:  # RT-10
    async def test() -> None:
        async with cluster() as c:
            for name, (path, body, count) in BATCHES.items():
                for worker in c.workers():
                    worker.asked.clear()
                assert (await c.client.post(path, json=body)).status_code == 200, name
                (_, sent, _) = c.prefill.asked[0]
                rooms = rooms_of(c)
                assert isinstance(sent["bootstrap_room"], int) == (count is None), name
                assert len(set(rooms)) == len(rooms) == (count or 1), name
                for key, value in (("bootstrap_host", "127.0.0.1"), ("bootstrap_port", 8998)):
                    assert sent[key] == (value if count is None else [value] * count), name

    run(test())


def test_what_the_caller_set_is_left_alone() -> None:
    async def test() -> None:
        async with cluster() as c:
            own = {"bootstrap_host": "elsewhere", "bootstrap_port": 17, "bootstrap_room": 5}
            await c.generate(**own)
            await c.generate(text=["a", "b"], bootstrap_room=[9, 8])
            await c.generate(text=["a", "b"], bootstrap_room=MAX_ROOM - 1, bootstrap_port=None)
            await c.generate(text=["a", "b"], bootstrap_room=[10, 20], sampling_params={"n": 3})
            bodies = [body for _, body, _ in c.decode.asked]
            assert bodies[0] == {"text": "hi", **own} == c.prefill.asked[0][1]
            assert bodies[1]["bootstrap_room"] == [9, 8] and bodies[1]["bootstrap_port"] == [8998, 8998]
            assert bodies[2]["bootstrap_room"] == MAX_ROOM - 1 and bodies[2]["bootstrap_host"] == ["127.0.0.1"] * 2
            assert bodies[3]["bootstrap_room"] == [10, 20]

    run(test())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "overlap": ({"text": ["a", "b"], "bootstrap_room": [7, 7]}, "overlap"),
    "overlapping ranges": (
        {"text": ["a", "b"], "sampling_params": {"n": 3}, "bootstrap_room": [7, 9]}, "overlap"
    ),
    "overflow": ({"text": ["a", "b"], "bootstrap_room": MAX_ROOM}, "overflows"),
    "overflow of n": ({"text": "a", "sampling_params": {"n": 3}, "bootstrap_room": MAX_ROOM - 1}, "overflows"),
    "too large": ({"text": "a", "bootstrap_room": MAX_ROOM + 1}, "not a room"),
    "negative": ({"text": "a", "bootstrap_room": -1}, "not a room"),
    "text": ({"text": "a", "bootstrap_room": "1"}, "not a room"),
    "boolean": ({"text": "a", "bootstrap_room": True}, "not a room"),
    "too few": ({"text": ["a", "b", "c"], "bootstrap_room": [1, 2]}, "not one room"),
    "none": ({"text": ["a"], "bootstrap_room": []}, "not one room"),
    "two prefills": ({"text": ["a", "b"], "bootstrap_host": ["x", "y"]}, "one prefill"),
    "n": ({"text": "a", "sampling_params": {"n": 0}}, "n is not"),
    "mixed n": ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n differs"),
    "too many": ({"text": ["a"] * 20, "sampling_params": {"n": 2}}, "number of sequences"),
    "no prompts": ({"text": []}, "number of sequences"),
}  # fmt: skip


def test_bad_rooms_and_batches_are_refused_before_dispatch() -> None:  # RT-10
    async def test() -> None:
        async with cluster(limits={"max_batch": 32}) as c:
            for name, (body, words) in REFUSED.items():
                answer = await c.client.post("/generate", json=body)
                error = answer.json()["error"]
                assert answer.status_code == 400 and words in error["message"], name
                assert error["retryable"] is False and error["type"] == "invalid_request_error", name
            for raw in (b"{", b"[1]", b'{"text": "\xff"}', b"[" * 200_000):
                answer = await c.client.post("/generate", content=raw)
                assert answer.status_code == 400 and answer.json()["error"]["code"] == "message_malformed"
            assert not c.prefill.asked and not c.decode.asked

    run(test())


def test_a_room_that_is_open_is_refused() -> None:
    async def test() -> None:
        async with cluster() as c:
            c.decode.hold = asyncio.Event()
            first = asyncio.create_task(c.generate(text=["a", "b"], bootstrap_room=40))
            while not c.decode.asked:
                await asyncio.sleep(0.01)
            second = await c.generate(bootstrap_room=41)
            assert second.status_code == 409 and second.json()["error"]["code"] == "room_duplicate"
            c.decode.hold.set()
            assert (await first).status_code == 200 and (await c.generate(bootstrap_room=41)).status_code == 200

    run(test())


def test_a_stream_is_passed_on_byte_for_byte_and_as_it_comes() -> None:
    pieces = [
        b": a comment\r\n\r\n", b'data: {"text": "\xc3', b'\xa9"}\n', b"\n", b"event: x\ndata: 1\ndata: 2\n\n" * 3,
        b"data: " + b"y" * 70_000, b"\n\ndata: [DO", b"NE]\n\n", b": after", b"wards",
    ]  # fmt: skip
    gate = asyncio.Event()

    async def test() -> None:
        async def slow(worker: Any, body: Any, request: Any) -> Any:
            worker.bridge.event("decode", body["bootstrap_room"]).set()

            async def chunks() -> Any:
                for piece in pieces[:4]:
                    yield piece
                await gate.wait()
                for piece in pieces[4:]:
                    yield piece
                    await asyncio.sleep(0)
                worker._finish([body["bootstrap_room"]])

            return Stream(chunks())

        async with cluster() as c:
            c.decode.script = slow
            async with c.client.stream("POST", "/generate", json={"text": "hi", "stream": True}) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                got = b""
                async for chunk in answer.aiter_raw():
                    got += chunk
                    if not gate.is_set():
                        assert b"".join(pieces[:4]).startswith(got)  # it came before the rest was written
                        if got == b"".join(pieces[:4]):
                            gate.set()
            assert got == b"".join(pieces)

    run(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_paths_stream(path: str) -> None:
    async def test() -> None:
        async with cluster() as c:
            answer = await c.client.post(path, json={"prompt": "a", "messages": [], "stream": True})
            assert answer.status_code == 200 and answer.content.endswith(b"data: [DONE]\n\n")
            assert c.prefill.asked[0][0] == c.decode.asked[0][0] == path

    run(test())


def test_input_logprobs_of_prefill_are_merged() -> None:
    async def test() -> None:
        async with cluster() as c:
            plain = (await c.generate()).json()
            assert "input_token_logprobs" not in plain["meta_info"]
            answer = (await c.generate(return_logprob=True)).json()
            assert answer["text"] == "decode0:xxx"
            assert answer["meta_info"]["input_token_logprobs"] == [[None, 7, None], [-0.5, 8, None]]
            assert len(answer["meta_info"]["output_token_logprobs"]) == 3
            both = (await c.generate(text=["a", "b"], return_logprob=[False, True])).json()
            assert [a["meta_info"]["input_token_logprobs"][1][1] for a in both] == [8, 9]
            stream = await c.generate(text=["a", "b"], return_logprob=True, stream=True)
            events = [json.loads(e[6:]) for e in stream.text.split("\n\n") if e and "[DONE]" not in e]
            assert len(events) == 6 and stream.content.endswith(b"data: [DONE]\n\n")
            for document in events:
                assert document["meta_info"]["input_token_logprobs"][1][1] == 8 + document["index"]

    run(test())


def test_headers_towards_the_workers() -> None:
    async def test() -> None:
        sent = {"traceparent": "00-aa-bb-01", "tracestate": "x=1", "x-request-id": "r", "cookie": "secret"}
        async with cluster() as c:
            await c.client.post("/generate", json={"text": "a"}, headers={**sent, "authorization": "Bearer theirs"})
            for worker in c.workers():
                headers = worker.asked[0][2]
                assert {name: headers.get(name) for name in sent} == {**sent, "cookie": None}
                assert headers["authorization"] == "Bearer theirs"  # no token of its own: the client's is the worker's

    run(test())


def test_tokens_in_and_towards_workers() -> None:
    async def test() -> None:
        def guard(workers: Any) -> None:
            for worker in workers:
                worker.token = "inner"

        async with cluster(bearer_token="outer", worker_bearer_token="inner", prepare=guard) as c:
            for given in ({}, {"authorization": "Bearer inner"}, {"authorization": "outer"}):
                for path in ("/generate", "/workers", "/flush_cache"):
                    answer = await c.client.post(path, json={"text": "a"}, headers=given)
                    assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
            assert [(await c.client.get(p)).status_code for p in ("/health", "/ready", "/metrics")] == [200] * 3
            mine = {"authorization": "Bearer outer"}
            assert (await c.client.post("/generate", json={"text": "a"}, headers=mine)).status_code == 200
            assert c.decode.asked[0][2]["authorization"] == "Bearer inner"
            workers = (await c.client.get("/workers", headers=mine)).json()["workers"]
            assert [w["epoch"] for w in workers] == [c.prefill.epoch, c.decode.epoch]

    run(test())


def test_the_routers_own_token_goes_no_further() -> None:
    async def test() -> None:
        async with cluster(bearer_token="outer") as c:
            mine = {"authorization": "Bearer outer"}
            assert (await c.client.post("/generate", json={"text": "a"}, headers=mine)).status_code == 200
            assert all("authorization" not in worker.asked[0][2] for worker in c.workers())

    run(test())


def test_a_wrong_token_towards_a_worker_is_the_routers_fault() -> None:
    async def test() -> None:
        def guard(workers: Any) -> None:
            workers[0].token = "inner"

        async with cluster(worker_bearer_token="wrong", prepare=guard) as c:
            answer = await c.generate()
            assert answer.status_code == 503 and "worker_bearer_token" in answer.json()["error"]["message"]

    run(test())


def test_an_ipv6_url() -> None:  # CF-04
    async def test() -> None:
        async with cluster(host="::1") as c:
            assert c.prefill.url.startswith("http://[::1]:")
            assert (await c.generate()).status_code == 200
            assert c.decode.asked[0][1]["bootstrap_host"] == "::1"
            assert c.decode.asked[0][2]["host"] == c.decode.url.removeprefix("http://")
            assert (await c.client.get("/workers")).json()["workers"][0]["url"] == c.prefill.url

    run(test())


def test_the_body_is_bounded() -> None:
    async def test() -> None:
        async with cluster(limits={"max_body_bytes": 1000}) as c:
            answer = await c.generate(text="a" * 2000)
            assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"

            async def pieces() -> Any:
                for _ in range(20):
                    yield b" " * 100

            assert (await c.client.post("/generate", content=pieces())).status_code == 413
            assert not c.prefill.asked

    run(test())


BOMBS = {
    "lists": b'{"text": "a", "x": [' + b"[]," * 300_000 + b"1]}",
    "a key": b'{"text": "a", "' + b"k" * 1_000_000 + b'": 1}',
    "prompts": b'{"text": [' + b'"",' * 300_000 + b'""]}',
    "token lists": b'{"input_ids": [' + b"[]," * 300_000 + b"[1]]}",
    "parameters": b'{"text": "a", "sampling_params": [' + b"{}," * 400_000 + b"{}]}",
    "a flag": b'{"text": "a", "return_logprob": [' + b"[]," * 300_000 + b"1]}",
    "a room": b'{"text": "a", "bootstrap_room": ' + b"9" * 1_000_000 + b"}",
    "hosts": b'{"text": "a", "bootstrap_host": [' + b'"",' * 300_000 + b'""]}',
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_costs_no_more_than_its_bytes(name: str) -> None:
    """Nothing is made of what the router does not need: a body of 32 MiB once held the loop for six seconds."""
    tracemalloc.start()
    try:
        parse("/generate", BOMBS[name], 256)
    except RequestFailed as failed:
        assert failed.failure.status == 400 and len(failed.failure.json()) < 1000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3 * len(BOMBS[name])


def test_bodies_together_are_bounded_and_small_ones_always_pass() -> None:
    async def test() -> None:
        limits = {"max_body_bytes": 300_000, "bodies_bytes": 300_000}
        async with cluster(limits=limits) as c:
            c.decode.hold = asyncio.Event()
            large = asyncio.create_task(c.generate(text="a" * 250_000))
            await until(lambda: bool(c.decode.asked))
            other = await c.generate(text="a" * 250_000)
            error = other.json()["error"]
            assert other.status_code == 503 and error["code"] == "pool_exhausted" and error["retryable"]
            assert other.headers["retry-after"] == "1"
            small = asyncio.create_task(c.generate(text="a"))
            await until(lambda: len(c.decode.asked) == 2)
            c.decode.hold.set()
            assert (await large).status_code == (await small).status_code == 200
            assert (await c.generate(text="a" * 250_000)).status_code == 200

    run(test())


def test_a_body_that_does_not_come_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bounds, "IDLE_S", 0.1)

    async def test() -> None:
        async with cluster(limits={"max_inflight": 1}) as c:

            async def stuck() -> Any:
                yield b"{"
                await asyncio.Event().wait()

            task = asyncio.create_task(c.client.post("/generate", content=stuck()))
            await until(lambda: c.router.metrics.inflight == 1)
            await until(lambda: c.router.metrics.inflight == 0)
            assert (await c.generate()).status_code == 200
            task.cancel()
            await asyncio.wait({task})

    run(test())


def test_the_embedded_client() -> None:
    async def test() -> None:
        async with cluster() as c:
            async with Router({"prefill": [c.prefill.url], "decode": [c.decode.url]}) as router:
                answer = await router.generate({"text": "hi"})
                assert answer["text"] == "decode0:xxx"
                events = [document async for document in router.generate_stream({"text": "hi"})]
                assert [e["text"] for e in events] == ["decode0:x", "decode0:xx", "decode0:xxx"]
                raw = await router.request("/v1/completions", b'{"prompt": "a"}', {"Traceparent": "t"})
                assert json.loads(raw)["text"] == "decode0:xxx"
                assert c.decode.asked[-1][2]["traceparent"] == "t"
                c.prefill.fail = (400, {"error": {"code": "prompt_too_long", "message": "never"}}, {})
                with pytest.raises(RequestFailed) as caught:
                    await router.generate({"text": "hi"})
                assert caught.value.code == "prompt_too_long" and caught.value.failure.leg == "prefill"
                assert isinstance(caught.value.failure.room, int)

    run(test())


def test_a_mounted_router_serves_below_its_prefix() -> None:
    async def test() -> None:
        async with cluster() as c:
            config = {"prefill": [c.prefill.url], "decode": [c.decode.url], "bearer_token": "t"}
            async with Router(config) as router:
                app = Starlette(routes=[Mount("/pd", router.app)])
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://outer/pd") as client:
                    assert (await client.get("/health")).status_code == 200, "it carries no token"
                    assert (await client.get("/v1/models")).status_code == 401
                    client.headers["authorization"] = "Bearer t"
                    answer = await client.post("/generate", json={"text": "a"})
                    assert answer.status_code == 200, answer.text
                    assert router.metrics.value("requests_total", "/generate", "ok") == 1

    run(test())
