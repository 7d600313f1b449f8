"""What a worker says of itself, and how it refuses."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.serving import Pair, document, pair_of

from sglang_pd.config import load_worker
from sglang_pd.router.leg import STAGE_DECODE, STAGE_PREFILL, STAGE_TRANSFER
from sglang_pd.server.app import body_bounds

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    known = {"type", "code", "message", "param", "leg", "room", "retryable"}
    assert known <= set(error) <= known | {"where", "expected", "actual", "hint", "details"}
    return error


def test_health_and_readiness(pair: Pair) -> None:
    for leg in ("prefill", "decode"):
        assert pair.get(leg, "/health").json() == {"status": "ok", "reason": ""}
        assert pair.get(leg, "/ready").json()["status"] == "ready"
        generated = pair.get(leg, "/health_generate")
        assert generated.status_code == 200 and generated.json()["token"] >= 0
    assert pair.settled()


def test_facts(pair: Pair) -> None:
    for leg in ("prefill", "decode"):
        info = pair.get(leg, "/server_info").json()
        assert info == {**pair.get(leg, "/get_server_info").json(), "stats": info["stats"]}
        assert info["max_running_requests"] == 4, "as many as there are rows"
        assert info["disaggregation_mode"] == leg and info["model_path"] == "reference" and info["status"] == "ready"
        service = getattr(pair, leg)
        assert info["epoch"] == f"{service.backend.epoch:016x}" and info["page_size"] == 16
        assert set(info["cancellable"]) == {STAGE_PREFILL, STAGE_TRANSFER, STAGE_DECODE}
        model = pair.get(leg, "/model_info").json()
        assert model["is_generation"] and (model["vocab_size"], model["eos_token_id"]) == (251, 2)
        (entry,) = pair.get(leg, "/v1/models").json()["data"]
        assert entry["id"] == "reference" and entry["max_model_len"] == model["max_model_len"] == 1024


def test_a_request_for_another_incarnation_is_refused(pair: Pair) -> None:
    for leg in ("prefill", "decode"):
        epoch = pair.get(leg, "/server_info").json()["epoch"]
        assert pair.get(leg, "/health").headers["x-sglang-pd-epoch"] == epoch
        other = f"{int(epoch, 16) ^ 1:016x}"
        for path in ("/generate", "/v1/completions"):
            answer = pair.get(leg, path, "POST", **{"x-sglang-pd-epoch": other})
            error = error_of(answer)
            assert (answer.status_code, error["code"], error["retryable"]) == (409, "epoch_stale", True)
            assert error["expected"] == epoch and error["actual"] == other
            assert answer.headers["x-sglang-pd-epoch"] == epoch
        meant = {"x-sglang-pd-epoch": epoch.upper()}
        assert pair.get(leg, "/health", **meant).status_code == 200


def test_peers_show_the_verdict(pair: Pair) -> None:
    pair.post("/generate", {"input_ids": [5], "sampling_params": GREEDY})
    for leg, other in (("prefill", pair.decode), ("decode", pair.prefill)):
        (peer,) = pair.get(leg, "/peers").json()["peers"]
        assert peer["accepted"] and peer["instance"] == other.name and peer["mismatches"] == []
        info = pair.get("decode" if leg == "prefill" else "prefill", "/server_info").json()
        assert peer["epoch"] == info["epoch"], "a router matches a verdict with the worker that it is about by that"


def test_metrics_tell_of_rooms_and_bytes(pair: Pair) -> None:
    pair.post("/generate", {"input_ids": [5] * 20, "sampling_params": GREEDY})
    assert pair.settled()
    texts = {leg: pair.get(leg, "/metrics").text for leg in ("prefill", "decode")}
    for leg, direction in (("prefill", "sent"), ("decode", "received")):
        lines = [line for line in texts[leg].splitlines() if not line.startswith("#")]
        done = [line for line in lines if line.startswith("sglang_pd_rooms_total") and 'result="done"' in line]
        assert done and float(done[0].rpartition(" ")[2]) >= 1
        moved = [line for line in lines if line.startswith("sglang_pd_bytes_total") and f'"{direction}"' in line]
        kinds = {line.partition('component="')[2].partition('"')[0] for line in moved}
        assert kinds == {"KV", "SWA", "MLA", "INDEX_K", "MAMBA", "PLE", "QSA_PENDING", "QSA_COMPRESSED"}
    assert "sglang_pd_room_descriptors" in texts["prefill"] and "sglang_pd_room_descriptors" not in texts["decode"]


def test_both_sides_count_the_same_bytes(pair: Pair) -> None:
    """What prefill says it sent, decode says it received, and the transport moved."""
    before = pair.prefill.endpoint.agent.source.bytes_written
    pair.post("/generate", {"input_ids": [5] * 150, "sampling_params": GREEDY, "bootstrap_room": 9_000_001})
    assert pair.settled()
    moved = pair.prefill.endpoint.agent.source.bytes_written - before
    records = []
    for service in (pair.prefill, pair.decode):
        ended = service.recorder.dump().ended
        records.append(next(record for record in ended if record["room"] == 9_000_001))
    assert records[0]["bytes"] == records[1]["bytes"] and sum(records[0]["bytes"].values()) == moved > 0
    assert records[0]["generation"] == records[1]["generation"] > 0
    assert records[1]["pages"] == {"VirtualTok": 10, "SwaTok": 2, "RequestRow": 1, "RecurrentSlot": 1}
    for record in records:
        assert sum(record["stage_s"].values()) == pytest.approx(record["total_s"], abs=1e-3)
        assert record["total_s"] > 0 and record["result"] == "done"
    assert all(records[0]["stage_s"][stage] > 0 for stage in ("queue", "wire"))
    assert all(records[1]["stage_s"][stage] > 0 for stage in ("handshake", "queue", "wire", "verify", "admit"))
    assert records[1]["verified_layers"] > 0


def test_flush_waits_until_nothing_runs(pair: Pair) -> None:
    assert pair.get("decode", "/flush_cache?timeout=5", "POST").json()["success"]
    assert error_of(pair.get("decode", "/flush_cache?timeout=soon"))["param"] == "timeout"


def test_a_request_that_can_never_fit_names_the_limit(pair: Pair) -> None:
    for body in ({"input_ids": [5] * 1100}, {"input_ids": [5], "sampling_params": {"max_new_tokens": 1025}}):
        began_s = time.monotonic()
        prefill, decode = pair.post("/generate", body)
        assert time.monotonic() - began_s < 20
        for leg, response in (("prefill", prefill), ("decode", decode)):
            error = error_of(response)
            assert response.status_code == 400 and error["code"] == "prompt_too_long" and not error["retryable"]
            assert "at most 1024 tokens" in error["expected"] and error["leg"] == leg and error["actual"]
    assert pair.settled()


def test_tokens_that_are_wrong_are_named_by_the_clients_field(pair: Pair) -> None:
    for tokens in ([], [10**6]):
        for response in pair.post("/generate", {"input_ids": tokens}):
            assert response.status_code == 400 and error_of(response)["param"] == "input_ids"


def test_no_room_no_path_no_method(pair: Pair) -> None:
    async def plain() -> list[httpx.Response]:
        async with pair.client("decode") as client:
            return [
                await client.post("/generate", json={"text": "a"}),
                await client.get("/nowhere"),
                await client.get("/generate"),
                await client.post("/generate", content=b"\xff"),
            ]

    no_room, nowhere, method, garbage = pair.ask(plain())
    assert no_room.status_code == 400 and "bootstrap_room" in error_of(no_room)["where"]
    assert nowhere.status_code == 404 and "/generate" in error_of(nowhere)["expected"]
    assert error_of(nowhere)["code"] == "path_unknown"
    assert method.status_code == 405 and garbage.status_code == 400
    refused = error_of(method)
    assert refused["code"] == "request_rejected" and refused["expected"] == "POST or PUT" and refused["actual"] == "GET"
    assert refused["where"] == "/generate" and method.headers["allow"] == "POST, PUT"


def test_a_number_that_is_out_of_range_is_told_back(pair: Pair) -> None:
    for response in pair.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": -8}}):
        error = error_of(response)
        assert response.status_code == 400 and error["where"].endswith("sampling_params.max_new_tokens")
        assert error["expected"] == "int >= 1" and error["actual"] == "-8"
    for response in pair.post("/generate", {"input_ids": [5], "rid": ["a", {"b": 1}]}):
        error = error_of(response)
        assert error["where"] == "body.rid[1]" and error["expected"] == "str" and error["actual"] == '{"b":1}'


def test_a_body_has_a_bound(pair: Pair) -> None:
    for response in pair.post("/generate", {"text": "a" * (5 << 20)}):
        error = error_of(response)
        assert response.status_code == 413 and error["code"] == "request_too_large"
        assert error["expected"] == f"at most limits.max_body_bytes = {4 << 20}"


def test_the_longest_request_fits_the_default_bound_and_a_configuration_may_narrow_it() -> None:
    def service(most_tokens: int, given: int | None) -> Any:
        config = SimpleNamespace(limits=SimpleNamespace(max_body_bytes=given))
        return SimpleNamespace(config=config, most_tokens=most_tokens)

    assert body_bounds(service(1 << 20, None))[0] == 16 << 20
    assert body_bounds(service(1 << 10, None))[0] == 4 << 20
    assert body_bounds(service(1 << 20, 1000))[0] == 1000
    assert load_worker({"role": "decode", "limits": {"max_body_bytes": "1MiB"}}).limits.max_body_bytes == 1 << 20


def test_a_prompt_that_can_never_fit_is_only_counted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    runner = type(pair.prefill.runner)
    real = runner.check
    monkeypatch.setattr(runner, "check", lambda self, job: (seen.append(job.token_ids), real(self, job)))
    prefill, decode = pair.post("/generate", {"input_ids": [5] * 200_000})
    for response in (prefill, decode):
        assert response.status_code == 400 and error_of(response)["code"] == "prompt_too_long"
    assert "200000" in error_of(prefill)["actual"] and seen[0].strides == (0,)
    assert pair.settled()


def test_another_prompt_under_one_room_is_refused_on_both_legs(pair: Pair) -> None:
    async def both() -> Any:
        place = pair.place()
        async with pair.client("prefill") as one, pair.client("decode") as other:
            return await asyncio.gather(
                one.post("/generate", json={**place, "input_ids": [5, 6], "sampling_params": GREEDY}),
                other.post("/generate", json={**place, "input_ids": [5, 7], "sampling_params": GREEDY}),
            )

    for response in pair.ask(both()):
        assert response.status_code == 409 and error_of(response)["code"] == "prompt_mismatch"
    assert pair.settled()


def test_a_second_request_in_a_room_harms_nobody(pair: Pair) -> None:
    async def three() -> Any:
        body = {**pair.place(), "input_ids": [5] * 100, "sampling_params": GREEDY}
        async with pair.client("prefill") as one, pair.client("decode") as other:
            first = asyncio.create_task(other.post("/generate", json=body))
            await asyncio.sleep(0.1)
            second = await other.post("/generate", json=body)
            await one.post("/generate", json=body)
            return await first, second

    first, second = pair.ask(three())
    assert (
        'sglang_pd_duplicate_room_total{backend="local",role="decode"} 0.0' not in pair.get("decode", "/metrics").text
    )
    assert first.status_code == 200 and len(first.json()["output_ids"]) == 4
    assert second.status_code == 409 and error_of(second)["code"] == "room_duplicate"
    assert pair.settled()


def test_a_decode_that_is_too_small_tells_its_prefill(pair: Pair) -> None:
    """Prefill could take the prompt; it learns the reason instead of waiting out its lease."""
    with pair_of(decode=document("decode", pools={"tokens": 128})) as small:
        began_s = time.monotonic()
        prefill, decode = small.post("/generate", {"input_ids": [5] * 300, "sampling_params": GREEDY})
        assert time.monotonic() - began_s < 20
        for response in (prefill, decode):
            error = error_of(response)
            assert (
                response.status_code == 400 and error["code"] == "prompt_too_long" and "pools 128" in error["expected"]
            )
        assert small.settled()
        assert small.post("/generate", {"input_ids": [5] * 100, "sampling_params": GREEDY})[1].status_code == 200


def test_a_limit_of_the_configuration_is_named() -> None:
    with pair_of(decode=document("decode", limits={"max_prompt_tokens": 50})) as limited:
        _, decode = limited.post("/generate", {"input_ids": [5] * 51, "sampling_params": GREEDY})
        assert decode.status_code == 400 and "limits.max_prompt_tokens" in str(error_of(decode))
        long_answer = {**GREEDY, "max_new_tokens": 60}
        assert limited.post("/generate", {"input_ids": [5], "sampling_params": long_answer})[1].status_code == 200


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    limits = {"queue_requests": 1, "max_rooms": 1}
    with pair_of(decode=document("decode", limits=limits)) as busy:

        async def flood() -> list[httpx.Response]:
            async with busy.client("prefill") as one, busy.client("decode") as other:
                bodies = [{**busy.place(), "input_ids": [5] * 200, "sampling_params": GREEDY} for _ in range(6)]
                held = [asyncio.create_task(one.post("/generate", json=body)) for body in bodies]
                answers = await asyncio.gather(*(other.post("/generate", json=body) for body in bodies))
                await asyncio.gather(*held)
                return answers

        answers = busy.ask(flood())
        full = [answer for answer in answers if answer.status_code == 429]
        assert full and all(answer.status_code in (200, 429) for answer in answers)
        assert sum(answer.status_code == 200 for answer in answers) >= 1
        assert all(answer.headers["retry-after"] == "1" for answer in full)
        assert error_of(full[0])["code"] == "queue_full" and error_of(full[0])["retryable"]
        assert busy.settled()


def test_a_bearer_token_guards_everything_but_probes() -> None:
    secured = document("prefill", security={"bearer_token": "secret"})
    with pair_of(prefill=secured) as guarded:
        assert guarded.get("prefill", "/health").status_code == 200
        assert guarded.get("prefill", "/ready").status_code == 200
        assert guarded.get("prefill", "/metrics").status_code == 200
        for path in ("/server_info", "/peers", "/v1/models", "/health_generate"):
            refused = guarded.get("prefill", path)
            assert refused.status_code == 401 and error_of(refused)["code"] == "unauthorized"
            assert guarded.get("prefill", path, authorization="Bearer wrong").status_code == 401
            assert guarded.get("prefill", path, authorization="Bearer secret").status_code == 200


def test_a_draining_worker_is_unready_refuses_and_lets_rooms_end() -> None:
    with pair_of() as ending:
        assert ending.post("/generate", {"input_ids": [5], "sampling_params": GREEDY})[1].status_code == 200

        async def run() -> Any:
            body = {**ending.place(), "input_ids": [5] * 10, "sampling_params": {**GREEDY, "max_new_tokens": 200}}
            async with ending.client("prefill") as one, ending.client("decode") as other:
                prefill = asyncio.create_task(one.post("/generate", json=body))
                running = asyncio.create_task(other.post("/generate", json=body))
                while not ending.decode.runner.tokens_done:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                ending.decode.drain("a test")
                late = await other.post("/generate", json={**ending.place(), "input_ids": [5]})
                ready = await other.get("/ready")
                return await prefill, await running, late, ready

        prefill, running, late, ready = ending.ask(run())
        assert (prefill.status_code, running.status_code) == (200, 200) and len(running.json()["output_ids"]) == 200
        assert late.status_code == 503 and error_of(late)["code"] == "draining" and late.headers["retry-after"]
        assert ready.status_code == 503 and ready.json() == {**ready.json(), "status": "draining", "reason": "a test"}
        assert ending.get("decode", "/health").status_code == 200
        assert ending.settled() and ending.decode.drained
