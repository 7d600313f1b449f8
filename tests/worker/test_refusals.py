"""What cannot be handed over ends with its reason, at once, on both sides; what runs beside it is unharmed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.worker_pair import finished, hand_over, oracles, start_pair, start_room
from support.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    quick = {"limits": {"lease_s": 1.0, "request_wait_s": 1.0}, "peer_wait_s": 1.0, "pages": 40}
    prefill, decode = start_pair(quick, quick)
    with prefill, decode:
        hand_over(prefill, decode, 1, 20)
        yield prefill, decode


@pytest.fixture(autouse=True)
def good_at_the_end(pair: tuple[WorkerProcess, WorkerProcess]) -> Iterator[None]:
    beside = start_room(*pair, 10_000 + good_at_the_end.turn, 30, chunks=[10, 20], pause_s=0.1)
    good_at_the_end.turn += 1
    yield
    finished(*pair, *beside)
    oracles(*pair)


good_at_the_end.turn = 0  # type: ignore[attr-defined]


def test_a_prompt_of_no_tokens(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    p = prefill.ask("serve", room=2, tokens=0, seed=2)
    d = decode.ask("open", room=2, tokens=0, seed=2, address=prefill.address)
    for worker, handle in ((prefill, p["handle"]), (decode, d["handle"])):
        assert worker.end_of(handle)["code"] in ("prompt_empty", "count_mismatch", "plan_invalid"), worker.lines[-1]
        worker.released(handle)


def test_a_prompt_longer_than_the_pool(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    """The side that lacks the memory never opens; the other one is told, or its lease ends."""
    prefill, decode = pair
    assert decode.ask("open", room=3, tokens=500, seed=3, address=prefill.address)["error"] in (
        "pool_exhausted",
        "prompt_too_long",
    )
    p = prefill.ask("serve", room=3, tokens=60, seed=3)
    assert prefill.end_of(p["handle"])["code"] == "lease_expired"
    prefill.released(p["handle"])


def test_a_room_that_prefill_was_never_asked_for(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    d = decode.ask("open", room=4, tokens=10, seed=4, address=prefill.address)
    assert decode.end_of(d["handle"])["code"] == "room_expired"
    decode.released(d["handle"])


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "not an address", "tcp://127.0.0.1:notaport", "ipc://"])
def test_a_room_at_an_instance_that_is_not_there(pair: tuple[WorkerProcess, WorkerProcess], address: str) -> None:
    _, decode = pair
    d = decode.ask("open", room=5, tokens=10, seed=5, address=address)
    assert decode.end_of(d["handle"])["code"] in ("peer_unknown", "config_invalid")
    decode.released(d["handle"])


def test_a_record_that_covers_another_length(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    """LC-18: nothing is admitted whose record speaks of one token where decode expects forty."""
    prefill, decode = pair
    p, d = start_room(prefill, decode, 6, 40, record_tokens=1)
    for worker, handle in ((prefill, p), (decode, d)):
        assert worker.end_of(handle)["code"] == "prompt_mismatch"
        worker.released(handle)
    assert "admitted" not in decode.events(d)


def test_a_decode_that_never_comes_costs_prefill_one_lease(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    """LC-07, LC-10, LC-12: nothing new arrives, and all of them are reaped."""
    prefill, _ = pair
    handles = [prefill.ask("serve", room=room, tokens=10, seed=room)["handle"] for room in range(70, 74)]
    for handle in handles:
        assert prefill.end_of(handle)["code"] == "lease_expired"
        prefill.released(handle)


def test_an_abort_before_it_is_opened_and_after_its_end(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    p = prefill.ask("serve", room=80, tokens=10, seed=80)["handle"]
    prefill.ask("abort", room=80)  # before decode opened it
    assert prefill.end_of(p)["event"] == "aborted"
    d = decode.ask("open", room=80, tokens=10, seed=80, address=prefill.address)["handle"]
    assert decode.end_of(d)["event"] in ("aborted", "failed")
    for worker, handle in ((prefill, p), (decode, d)):
        worker.released(handle)
        worker.ask("abort", room=80)  # and after


def test_a_room_id_twice_after_its_end_is_refused_by_name(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    """SE-01, FR-17."""
    prefill, decode = pair
    hand_over(prefill, decode, 90, 10)
    p = prefill.ask("serve", room=90, tokens=10, seed=91)["handle"]
    d = decode.ask("open", room=90, tokens=10, seed=91, address=prefill.address)["handle"]
    assert prefill.end_of(p)["code"] == "room_duplicate"
    assert decode.end_of(d)["code"] == "room_duplicate"
