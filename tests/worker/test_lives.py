"""Processes that die, stop, come back and are replaced; others do not notice (FR-01 to FR-04, FR-08, LC-08, FR-14)."""

from __future__ import annotations

import signal
import time

import pytest
from support.worker_pair import finished, hand_over, oracles, start_pair, start_room, wait_until
from support.worker_process import WorkerProcess, free_address

from sglang_pd.protocol.messages import MESSAGES

EVERYTHING = sorted(kind.__name__ for kind in MESSAGES.values())


def agreed(worker: WorkerProcess) -> list[str]:
    """Instances that this one agrees with now."""
    return sorted(peer["instance"] for peer in worker.ask("stats")["peers"] if peer["stage"] == "agreed")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_stopped_past_its_liveness_and_continued_it_serves_again(role: str) -> None:
    """Both processes live, each gave the other up: they speak anew, twice, and no byte of before lands after."""
    prefill, decode = start_pair({"liveness_s": 1.0}, {"liveness_s": 1.0})
    with prefill, decode:
        stopped, other = (prefill, decode) if role == "prefill" else (decode, prefill)
        for turn in range(2):
            p, d = start_room(prefill, decode, 10 * turn + 1, 60, chunks=[10, 20, 30], pause_s=0.3)
            time.sleep(0.4)
            stopped.signal(signal.SIGSTOP)
            try:
                end = other.end_of(d if role == "prefill" else p)
                assert (end["event"], end["code"]) == ("failed", "peer_lost")
                time.sleep(0.3)
            finally:
                stopped.signal(signal.SIGCONT)
            # A decode that finds everything in its socket when it wakes may still use it.
            assert prefill.end_of(p)["event"] == "failed" and decode.end_of(d)["event"] in ("failed", "done")
            decode.released(d)
            prefill.released(p)
            # Whoever was stopped may not know yet that it was given up: one room can meet that, not two.
            p, d = start_room(prefill, decode, 10 * turn + 2, 33)
            if decode.end_of(d)["event"] != "done":
                assert decode.end_of(d)["code"] == "peer_lost"
                prefill.ask("abort", room=10 * turn + 2)
            prefill.released(p)
            hand_over(prefill, decode, 10 * turn + 3, 33)
        assert agreed(prefill) == ["decode-0"] and agreed(decode) == ["prefill-0"]
        oracles(prefill, decode)


def test_one_of_two_prefills_dies_and_the_rooms_of_the_other_finish() -> None:
    """FR-08, and a decode that is busy with both."""
    prefill, decode = start_pair({"pages": 60, "liveness_s": 2.0}, {"pages": 60})
    with prefill, decode, WorkerProcess("prefill", id="prefill-1", pages=60) as other:
        decode.ask("connect", address=other.address)
        p1, d1 = start_room(prefill, decode, 1, 40, chunks=[10, 20, 30], pause_s=0.3)
        p2, d2 = start_room(other, decode, 2, 40, chunks=[10, 20, 30], pause_s=0.4)
        time.sleep(0.3)
        prefill.kill()
        end = decode.end_of(d1)
        assert (end["event"], end["code"]) == ("failed", "peer_lost")
        finished(other, decode, p2, d2)
        decode.released(d1)
        hand_over(other, decode, 3, 20)
        oracles(other, decode)


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_prefill_killed_and_replaced_at_its_address(rounds: int) -> None:
    """FR-01, FR-03: new memory, new epoch, same port; decode is never restarted and keeps nothing of the dead."""
    address = free_address()
    prefill, decode = start_pair({"bind": address, "liveness_s": 2.0})
    with decode:
        hand_over(prefill, decode, 1, 20)
        before = decode.ask("check")
        for turn in range(rounds):
            room = 10 * turn + 2
            _, d = start_room(prefill, decode, room, 60, chunks=[10, 20], pause_s=30)
            if turn % 2:
                wait_until(lambda now=prefill: now.ask("stats")["stats"]["bytes_written"] > 0)
            prefill.kill()
            end = decode.end_of(d)
            assert (end["event"], end["code"]) == ("failed", "peer_lost")
            decode.released(d)
            prefill = WorkerProcess("prefill", pages=20 + turn % 5, bind=address, seed=turn)
            # The first room may meet the old incarnation's end; the second never does.
            hand_over(prefill, decode, room + 1, 33)
        with prefill:
            wait_until(lambda: decode.ask("check")["fds"] <= before["fds"] + 3)
            oracles(prefill, decode)


def test_a_link_that_is_dead_for_a_while_parts_one_pair_alone() -> None:
    """FR-04: both processes live and give each other up; others do not notice; then the pair shakes hands anew."""
    quick = {"liveness_s": 1.0, "bad_link": True, "pages": 60}
    prefill, decode = start_pair(quick, quick)
    with prefill, decode, WorkerProcess("decode", id="decode-1", pages=60, liveness_s=10.0) as other:
        other.ask("connect", address=prefill.address)
        p, d = start_room(prefill, decode, 1, 40, chunks=[10, 20, 30], pause_s=0.4)
        p2, d2 = start_room(prefill, other, 2, 40, chunks=[10, 20, 30], pause_s=0.4)
        wait_until(lambda: prefill.ask("stats")["stats"]["bytes_written"] > 0)
        decode.ask("frames", rules=[{"types": EVERYTHING, "drop": 1.0}])
        assert prefill.end_of(p)["code"] == "peer_lost"
        finished(prefill, other, p2, d2)
        decode.ask("frames", rules=[])
        decode.released(d)
        wait_until(lambda: agreed(prefill) == ["decode-0", "decode-1"])
        hand_over(prefill, decode, 3, 20)
        oracles(prefill, decode, other)


def test_a_decode_that_dies_frees_prefills_memory_and_a_slow_one_keeps_it() -> None:
    """LC-08: what follows liveness is not the queue: ten liveness durations of waiting cost nothing."""
    prefill, decode = start_pair({"liveness_s": 0.6}, {"liveness_s": 0.6})
    with prefill, decode:
        p, d = start_room(prefill, decode, 1, 40, chunks=[10, 20, 30], pause_s=1.5)
        finished(prefill, decode, p, d)
        before = prefill.ask("stats")["stats"]["bytes_written"]
        p, d = start_room(prefill, decode, 2, 40, chunks=[10, 20, 30], pause_s=1.5)
        wait_until(lambda: prefill.ask("stats")["stats"]["bytes_written"] > before)
        decode.kill()
        assert prefill.end_of(p)["code"] in ("peer_lost", "transfer_failed")
        prefill.released(p)
        oracles(prefill)


@pytest.mark.parametrize("offset_s", [-1e6, 1e6])
def test_clocks_far_apart_that_run_unequally(offset_s: float) -> None:
    """FR-14: only durations cross the wire. A lease lives as long as it should on the clock of who keeps it."""
    own = {"TEST_CLOCK_OFFSET_S": str(offset_s), "TEST_CLOCK_DRIFT": "1.01"}
    prefill, decode = start_pair(None, {"env": own})
    with prefill, decode:
        p, d = start_room(prefill, decode, 1, 60, chunks=[10, 20, 30], pause_s=0.7)
        finished(prefill, decode, p, d)
        p, d = start_room(prefill, decode, 2, 60, chunks=[10, 20, 30], pause_s=0.7)
        time.sleep(0.2)
        decode.ask("abort", room=2)
        decode.released(d)
        oracles(prefill, decode)


@pytest.mark.slow
def test_a_peer_that_nobody_wants_any_more_is_not_called_for_ever() -> None:
    """CF-13 in small: addresses of the dead leave no sockets behind."""
    with WorkerProcess("decode", pages=30, peer_wait_s=0.3) as decode:
        start = decode.ask("check")["fds"]
        for room in range(1, 9):
            d = decode.ask("open", room=room, tokens=8, seed=room, address=f"tcp://127.0.0.1:{room}")["handle"]
            assert decode.end_of(d)["code"] == "peer_unknown"
            decode.released(d)
        assert decode.ask("check")["fds"] > start
        wait_until(lambda: decode.ask("check")["fds"] <= start + 2, timeout_s=50)
        oracles(decode)


def test_drain_finishes_what_runs_refuses_what_comes_and_fences_the_rest() -> None:
    """FR-10: twenty rooms in flight; some end within the deadline, the rest is failed and fenced before it is over."""
    prefill, decode = start_pair({"pages": 200, "rows": 24, "slots": 24}, {"pages": 200, "rows": 24, "slots": 24})
    with prefill, decode:
        quick = [start_room(prefill, decode, room, 40, chunks=[10, 20], pause_s=0.2) for room in range(1, 11)]
        slow = [start_room(prefill, decode, room, 40, chunks=[10, 20], pause_s=30) for room in range(11, 21)]
        over = lambda: sum("done" in decode.events(d) for _, d in quick)  # noqa: E731 - on a slow machine some are
        wait_until(lambda: decode.ask("stats")["stats"]["rooms"] + over() >= 20)
        prefill.ask("drain", deadline_s=2.0)
        p = prefill.ask("serve", room=30, tokens=10, seed=30)["handle"]
        assert prefill.end_of(p)["code"] == "draining"
        d = decode.ask("open", room=30, tokens=10, seed=30, address=prefill.address)["handle"]
        assert decode.end_of(d)["code"] == "draining"
        for p, d in quick:
            finished(prefill, decode, p, d)
        for p, d in slow:
            assert prefill.end_of(p)["code"] == "draining" and decode.end_of(d)["code"] == "draining"
            decode.released(d)
            prefill.released(p)
        wait_until(lambda: prefill.ask("stats")["drained"])
        oracles(prefill, decode)
