"""A whole worker where something goes wrong: one request pays, nobody waits for ever."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.serving import Oracle, Pair, document, pair_of

from sglang_pd.cli.app import run
from sglang_pd.config import Address
from sglang_pd.observe import ask
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.protocol.messages import RoomOpen
from sglang_pd.server.serve import listen
from sglang_pd.worker.serving.service import WorkerService

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("error", {}).get("code", "")


async def many(pair: Pair, bodies: list[dict[str, Any]]) -> list[tuple[httpx.Response, httpx.Response]]:
    async with pair.client("prefill") as one, pair.client("decode") as other:
        posts = [(one.post("/generate", json=body), other.post("/generate", json=body)) for body in bodies]
        answers = await asyncio.gather(*(call for both in posts for call in both))
        return list(zip(answers[::2], answers[1::2], strict=True))


def bodies_of(pair: Pair, number: int, **body: Any) -> list[dict[str, Any]]:
    given = {"input_ids": [5] * 10, "sampling_params": GREEDY, **body}
    return [{**pair.place(), "rid": f"r{n}", **given} for n in range(number)]


def test_decode_tells_prefill_the_request_and_its_trace(pair: Pair, monkeypatch: Any) -> None:
    told: list[RoomOpen] = []
    desk = pair.prefill.endpoint.control.desk
    assert desk is not None
    real = desk.receive

    def receive(peer_epoch: int, message: Any, **more: Any) -> None:
        told.extend([message] if isinstance(message, RoomOpen) else [])
        real(peer_epoch, message, **more)

    monkeypatch.setattr(desk, "receive", receive)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def one() -> None:
        async with pair.client("prefill") as prefill, pair.client("decode", traceparent=trace) as decode:
            (body,) = bodies_of(pair, 1, rid="r" * 256)
            await asyncio.gather(prefill.post("/generate", json=body), decode.post("/generate", json=body))

    pair.ask(one())
    assert [message.traceparent for message in told] == [trace]
    assert told[0].request_id.startswith("r" * 256) and len(told[0].request_id) <= 512
    assert pair.settled()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_an_engine_that_fails_to_release_costs_no_memory(pair: Pair, monkeypatch: Any, leg: str) -> None:
    """Its rows were lost, and with them the events of the rooms that were polled with its own."""
    engine = getattr(pair, leg).parts.engine
    real = engine.release

    def broken(request_id: str) -> None:
        real(request_id)
        raise KeyError(request_id)

    monkeypatch.setattr(engine, "release", broken)
    answers = pair.ask(many(pair, bodies_of(pair, 8)))
    assert [(p.status_code, d.status_code) for p, d in answers] == [(200, 200)] * 8
    assert pair.settled()


def test_a_defect_of_the_engine_costs_its_own_room(pair: Pair, oracle: Oracle, monkeypatch: Any) -> None:
    engine = pair.prefill.parts.engine
    real = engine.prefill

    def broken(chunk: Any) -> Any:
        if chunk.request_id.startswith("r3#"):
            raise ZeroDivisionError("a defect")
        return real(chunk)

    monkeypatch.setattr(engine, "prefill", broken)
    began_s = time.monotonic()
    answers = pair.ask(many(pair, bodies_of(pair, 8)))
    assert time.monotonic() - began_s < 20
    for number, (prefill, decode) in enumerate(answers):
        if number == 3:
            assert code(prefill) == code(decode) == (500, "internal") and "ZeroDivisionError" in prefill.text
        else:
            assert decode.json()["output_ids"] == oracle.tokens([5] * 10, 4)
    assert pair.settled()


def test_a_defect_in_a_decode_step_ends_the_batch_and_no_more(pair: Pair, monkeypatch: Any) -> None:
    engine, calls = pair.decode.parts.engine, []
    real = engine.decode

    def broken(batch: Any) -> Any:
        calls.append(len(batch))
        if len(calls) == 3:
            raise ZeroDivisionError("a defect")
        return real(batch)

    monkeypatch.setattr(engine, "decode", broken)
    answers = pair.ask(many(pair, bodies_of(pair, 4)))
    codes = {code(decode) for _, decode in answers}
    assert codes <= {(200, ""), (500, "internal")} and (500, "internal") in codes
    assert {prefill.status_code for prefill, _ in answers} == {200}
    assert pair.settled()
    assert pair.post("/generate", {"input_ids": [5], "sampling_params": GREEDY})[1].status_code == 200


def test_nobody_waits_for_memory_for_ever_and_prefill_learns_it() -> None:
    small = document("decode", pools={"tokens": 256}, liveness={"alloc_wait_s": 0.5})
    with pair_of(decode=small) as tight:
        holder, waiter = bodies_of(tight, 2)
        holder["sampling_params"] = {**GREEDY, "max_new_tokens": 240}
        (_, held), (prefill, decode) = tight.ask(many(tight, [holder, waiter]))
        assert code(held) == (200, "")
        assert code(prefill) == code(decode) == (503, "pool_exhausted") and decode.headers["retry-after"]
        assert tight.settled()


def test_a_leg_that_waits_for_another_one_leaves_its_worker_ready() -> None:
    """Either role: the room waits for somebody else, the worker for nothing."""
    quick = {"stall_s": 2.0}
    with pair_of(document("prefill", liveness=quick), document("decode", liveness=quick)) as pair:

        async def alone(leg: str, stage: str) -> None:
            service = getattr(pair, leg)
            body = {**pair.place(), "input_ids": [5] * 10, "sampling_params": GREEDY}
            async with pair.client(leg) as client:
                request = asyncio.create_task(client.post("/generate", json=body))
                while [room.stage for room in service.recorder.dump().rooms] != [stage]:
                    await asyncio.sleep(0.02)
                for _ in range(30):
                    await asyncio.sleep(0.1)
                    assert (await client.get("/ready")).status_code == 200
                assert not request.done()
                request.cancel()
                await asyncio.wait({request})

        pair.ask(alone("prefill", "handshake"))
        pair.ask(alone("decode", "queue"))


def test_a_request_has_a_deadline() -> None:
    live = {"request_s": 1.5, "request_wait_s": 1.5, "alloc_wait_s": 1.5, "transfer_s": 1.5, "liveness_s": 1.5}
    live |= {"heartbeat_s": 0.2, "status_interval_s": 0.5, "status_max_s": 1.0}
    with pair_of(decode=document("decode", liveness=live)) as hasty:
        body = {"input_ids": [5], "sampling_params": {**GREEDY, "max_new_tokens": 900}}
        _, decode = hasty.post("/generate", body)
        assert code(decode) == (504, "room_expired") and "1.5 s" in decode.text
        assert hasty.settled()


def test_too_much_quarantine_drains_the_worker() -> None:
    with pair_of(decode=document("decode", limits={"quarantine_bytes": 1})) as full:
        assert full.post("/generate", {"input_ids": [5], "sampling_params": GREEDY})[1].status_code == 200
        allocator, done = full.decode.parts.allocator, []

        def withhold() -> None:
            lease = allocator.lease(10)
            lease.quarantine("a test", time.monotonic())
            done.append(lease.generation)

        full.decode.runner.call(withhold)

        async def drained() -> httpx.Response:
            async with full.client("decode") as client:
                while (answer := await client.get("/ready")).status_code == 200:
                    await asyncio.sleep(0.02)
                return answer

        body = full.ask(drained()).json()
        assert body["status"] == "draining" and "quarantine" in body["reason"]
        late = full.post("/generate", {"input_ids": [5], "sampling_params": GREEDY})
        assert code(late[1]) == (503, "draining")
        assert code(late[0]) in ((503, "draining"), (499, "room_aborted"))  # prefill is told, and does not wait
        assert not full.decode.drained  # memory waits for its fence
        full.decode.runner.call(lambda: allocator.fenced(done[0]))
        assert full.settled() and full.decode.drained


def test_certificates_protect_the_control_plane(tmp_path: Path) -> None:
    for name in ("prefill", "decode", "stranger"):
        assert run(["keygen", name, "--folder", str(tmp_path)]) == 0

    def curve(own: str) -> dict[str, Any]:
        keys = {"secret_key_file": str(tmp_path / f"{own}.key_secret")}
        if own == "prefill":
            keys |= {"allowed_key_files": [str(tmp_path / "decode.key")]}  # type: ignore[dict-item]
        else:
            keys |= {"server_key_file": str(tmp_path / "prefill.key")}
        return {"curve": keys}

    prefill = document("prefill", security=curve("prefill"))
    for own, expected in (("decode", (200, "")), ("stranger", (404, "peer_unknown"))):
        with pair_of(prefill=prefill, decode=document("decode", security=curve(own))) as secured:
            body = {"input_ids": [5], "sampling_params": GREEDY}

            async def decode_leg(secured: Pair = secured, body: dict[str, Any] = body) -> httpx.Response:
                place = secured.place()
                async with secured.client("prefill") as one, secured.client("decode") as other:
                    held = asyncio.create_task(one.post("/generate", json={**place, **body}))
                    answer = await other.post("/generate", json={**place, **body})
                    held.cancel()
                    return answer

            assert code(secured.ask(decode_leg())) == expected


def test_an_ipv6_worker() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    sides = [document(role, network={"bind": "::1"}) for role in ("prefill", "decode")]
    with pair_of(*sides) as six:
        assert six.prefill.endpoint.address.startswith("tcp://[::1]:")
        assert six.post("/generate", {"input_ids": [5], "sampling_params": GREEDY})[1].status_code == 200


def test_the_admin_socket_answers(tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    with pair_of(prefill=document("prefill", observe={"admin_socket": path})) as watched:
        watched.post("/generate", {"input_ids": [5], "sampling_params": GREEDY})
        assert watched.settled()
        dump = msgspec.json.decode(ask(path, "dump"))
        assert dump["role"] == "prefill" and dump["ended"][-1]["result"] == "done"
        assert [decision[1] for decision in dump["decisions"]["control"]][:2] == ["peer ready", "opened"]
        with pytest.raises(ConfigError, match="another process serves"):
            WorkerService(watched.prefill.config)


def test_two_workers_on_any_port_have_names_of_their_own(pair: Pair) -> None:
    with pair_of() as other:
        names = {service.name for one in (pair, other) for service in (one.prefill, one.decode)}
    assert len(names) == 4


def test_an_address_of_another_host_is_named_by_its_key() -> None:
    with pytest.raises(ConfigError) as refused:
        listen(Address("192.0.2.1", 0))
    assert refused.value.where == "$.network.bind" and "address of this host" in str(refused.value.expected)
