"""Real rooms between two real processes: bytes, ends and conservation, whatever happens to either."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from support.worker_pair import finished, start_pair, start_room
from support.worker_process import WorkerProcess, settled

LENGTHS = [1, 2, 3, 4, 7, 8, 9, 16, 33, 60]


@pytest.fixture
def pair() -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    with (
        WorkerProcess("prefill", pages=24) as prefill,
        WorkerProcess("decode", pages=30) as decode,
    ):
        decode.ask("connect", address=prefill.address)
        yield prefill, decode


def hand_over(prefill: WorkerProcess, decode: WorkerProcess, room: int, tokens: int, **serve: object) -> dict:
    """One room; gives decode's admitted line."""
    p = prefill.ask("serve", room=room, tokens=tokens, seed=room, **serve)
    d = decode.ask("open", room=room, tokens=tokens, seed=room, address=prefill.address)
    end = decode.end_of(d["handle"])
    assert end["event"] == "done", end
    admitted = decode.wait(lambda line: line.get("handle") == d["handle"] and line.get("event") == "admitted")
    decode.released(d["handle"])
    prefill.released(p["handle"])
    return admitted


def test_every_byte_arrives_and_nothing_else(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    for number, tokens in enumerate(LENGTHS):
        chunks = list(range(5, tokens, 5)) if number % 2 else None
        admitted = hand_over(prefill, decode, 100 + number, tokens, chunks=chunks)
        assert admitted["bad"] == [] and admitted["record"] == f"seed {100 + number}"
    for worker in pair:
        assert settled(worker)["dirty"] == 0


def test_a_prefill_that_comes_later_than_its_decode(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    d = decode.ask("open", room=5, tokens=20, seed=5, address=prefill.address)
    time.sleep(0.3)
    prefill.ask("serve", room=5, tokens=20, seed=5)
    assert decode.end_of(d["handle"])["event"] == "done"


def test_another_prompt_under_the_same_room_is_refused_on_both_sides(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    p = prefill.ask("serve", room=6, tokens=20, seed=6)
    d = decode.ask("open", room=6, tokens=20, seed=6, prompt_seed=7, address=prefill.address)
    assert decode.end_of(d["handle"])["code"] == "prompt_mismatch"
    assert prefill.end_of(p["handle"])["code"] == "prompt_mismatch"
    for worker in pair:
        assert settled(worker)["dirty"] == 0


def test_a_duplicate_room_is_refused_and_harms_nobody(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    p = prefill.ask("serve", room=8, tokens=40, seed=8, chunks=[10, 20, 30], pause_s=0.1)
    d = decode.ask("open", room=8, tokens=40, seed=8, address=prefill.address)
    assert prefill.ask("serve", room=8, tokens=40, seed=9)["error"] == "room_duplicate"
    assert decode.ask("open", room=8, tokens=40, seed=9, address=prefill.address)["error"] == "room_duplicate"
    end = decode.end_of(d["handle"])
    assert end["event"] == "done" and prefill.end_of(p["handle"])["event"] == "done"
    late = prefill.ask("serve", room=8, tokens=40, seed=10)
    assert prefill.end_of(late["handle"])["code"] == "room_duplicate"
    for worker in pair:
        answer = settled(worker)
        assert (answer["dirty"], answer["wrong"]) == (0, 0)


def test_abort_in_the_middle_gives_memory_back_after_the_fence(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    for room in range(20, 26):
        p = prefill.ask("serve", room=room, tokens=60, seed=room, chunks=[10, 20, 30, 40, 50], pause_s=0.05)
        d = decode.ask("open", room=room, tokens=60, seed=room, address=prefill.address)
        time.sleep(0.02 * (room - 20))
        (decode if room % 2 else prefill).ask("abort", room=room)
        assert decode.end_of(d["handle"])["event"] == "aborted"
        assert prefill.end_of(p["handle"])["event"] == "aborted"
        decode.released(d["handle"])
        prefill.released(p["handle"])
    for worker in pair:
        assert settled(worker)["dirty"] == 0


def test_a_killed_decode_costs_prefill_its_rooms_and_nothing_else(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    p = prefill.ask("serve", room=60, tokens=60, seed=60, chunks=[10, 20], pause_s=1.0)
    decode.ask("open", room=60, tokens=60, seed=60, address=prefill.address)
    time.sleep(0.3)
    decode.kill()
    assert prefill.end_of(p["handle"])["code"] in ("peer_lost", "transfer_failed", "transfer_unknown")
    prefill.released(p["handle"])
    with WorkerProcess("decode", pages=30, id="decode-1") as other:
        assert hand_over(prefill, other, 61, 33)["bad"] == []
    assert settled(prefill)["dirty"] == 0


def test_a_stopped_prefill_is_lost_after_its_liveness_and_comes_back(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    prefill.ask("serve", room=70, tokens=60, seed=70, chunks=[10, 20], pause_s=0.3)
    d = decode.ask("open", room=70, tokens=60, seed=70, address=prefill.address)
    time.sleep(0.2)
    prefill.signal(signal.SIGSTOP)
    assert decode.end_of(d["handle"])["code"] == "peer_lost"
    time.sleep(0.5)
    assert "releasable" not in decode.events(d["handle"]), "released while the stopped writer could still write"
    prefill.signal(signal.SIGCONT)
    decode.released(d["handle"])
    assert settled(decode)["dirty"] == 0


def test_a_slow_decode_is_merely_slow() -> None:
    prefill, decode = start_pair({"liveness_s": 6.0}, {"liveness_s": 6.0})
    with prefill, decode:
        p, d = start_room(prefill, decode, 80, 60, chunks=[10, 20], pause_s=0.1)
        decode.signal(signal.SIGSTOP)
        time.sleep(2.0)  # the rest of the liveness duration is for the machine's own stalls
        decode.signal(signal.SIGCONT)
        finished(prefill, decode, p, d)
