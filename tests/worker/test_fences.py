"""Abort, failure and death with writes in flight: no byte lands in memory that somebody else owns (LC-01 to LC-05)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.worker_pair import finished, hand_over, oracles, start_pair, start_room, wait_until
from support.worker_process import WorkerProcess


@contextlib.contextmanager
def faulty_pair(
    *faults: dict[str, Any], decode: dict[str, Any] | None = None, **prefill: Any
) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """A prefill whose writes are struck by faults."""
    options = {"inner": "local", "faults": list(faults)}
    source, target = start_pair({"backend": "faulty", "options": options, "liveness_s": 2.0, **prefill}, decode)
    with source, target:
        yield source, target


@pytest.mark.parametrize("aborter", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["delay", "late"])
def test_abort_while_a_write_is_in_flight_under_reuse_pressure(aborter: str, kind: str) -> None:
    """LC-01. The pool holds one room: the next can only have the memory of the one whose write is on its way."""
    with faulty_pair({"kind": kind, "at": 1, "every": 2, "seconds": 0.6}, decode={"pages": 9}) as (prefill, decode):
        for turn in range(3):
            p, d = start_room(prefill, decode, 10 * turn + 1, 60)
            wait_until(lambda turn=turn: prefill.ask("stats")["struck"] > turn)
            (decode if aborter == "decode" else prefill).ask("abort", room=10 * turn + 1)
            end = decode.end_of(d)["event"]
            assert end == "aborted" or kind == "late"
            # While unfenced the memory is nobody's: not even a full pool gives it away.
            if "releasable" not in decode.events(d):
                refused = decode.ask("open", room=10 * turn + 2, tokens=60, seed=1, address=prefill.address)
                assert refused.get("error") == "pool_exhausted" or "releasable" in decode.events(d)
                if "handle" in refused:
                    decode.ask("abort", room=10 * turn + 2)
                    decode.released(refused["handle"])
            decode.released(d)
            prefill.released(p)
            hand_over(prefill, decode, 10 * turn + 3, 60)  # in the same memory; the odd write, untouched
        time.sleep(0.7)  # a late write would show in wiped memory
        oracles(prefill, decode)


def test_a_fence_that_is_not_proven_withholds_memory_and_alerts() -> None:
    """LC-02: the alarm is an alert, never a release; the proof by the writer's death is one."""
    limits = {"fence_alarm_s": 0.4}
    with faulty_pair({"kind": "late", "at": 1, "seconds": 1000}, decode={"limits": limits}) as (prefill, decode):
        p, d = start_room(prefill, decode, 1, 60)
        assert decode.end_of(d)["code"] in ("transfer_unknown", "transfer_failed")
        wait_until(lambda: decode.ask("stats") and decode.events(d).count("alert") >= 2)
        assert "releasable" not in decode.events(d) and "releasable" not in prefill.events(p)
        assert decode.ask("check")["quarantined"] == 1
        hand_over(prefill, decode, 2, 33)  # others go on
        prefill.kill()  # LC-05
        decode.released(d)
        oracles(decode)


def test_one_acknowledgement_a_room_and_no_post_after_the_abort() -> None:
    """LC-03, LC-04: chunks keep coming from an engine that has not heard yet; at most the one under way is posted."""
    with faulty_pair({"kind": "delay", "at": 1, "every": 1, "seconds": 0.15}) as (prefill, decode):
        p, d = start_room(prefill, decode, 1, 60, chunks=[6, 12, 18, 24, 30, 36, 42, 48, 54], pause_s=0.1)
        wait_until(lambda: prefill.ask("stats")["struck"] >= 1)
        decode.ask("abort", room=1)
        prefill.end_of(p)
        after = prefill.ask("stats")["struck"]
        decode.released(d)
        prefill.released(p)
        assert after <= 4 and prefill.ask("stats")["struck"] == after
        oracles(prefill, decode)


@pytest.mark.parametrize("kind", ["fail", "partial", "drop"])
def test_a_write_that_fails_ends_its_room_with_the_cause_and_no_other(kind: str) -> None:
    """FR-06, FR-09: the k-th write of many fails; every other room is right."""
    fault = {"kind": kind, "at": 4, "fraction": 0.5}
    with faulty_pair(fault, deadline_s=0.5, pages=60, decode={"pages": 60}) as (prefill, decode):
        rooms = [start_room(prefill, decode, room, 20) for room in range(1, 8)]
        ends = [decode.end_of(d) for _, d in rooms]
        failed = [end for end in ends if end["event"] != "done"]
        code = {"fail": "transfer_failed", "partial": "transfer_failed", "drop": "transfer_timeout"}[kind]
        assert [end["code"] for end in failed] == [code] and len(ends) == 7
        for p, d in rooms:
            decode.released(d)
            prefill.released(p)
        oracles(prefill, decode)


def test_memory_over_its_quarantine_budget_turns_the_worker_draining() -> None:
    """It says so, takes no more rooms, and frees nothing by a timer; the writers' death is the proof."""
    with faulty_pair(
        {"kind": "late", "at": 1, "every": 1, "seconds": 1000},
        decode={"quarantine_bytes": 10_000, "pages": 60, "drain_s": 0.5},
        pages=60,
    ) as (prefill, decode):
        handles = [start_room(prefill, decode, room, 40)[1] for room in range(1, 4)]
        for handle in handles:
            decode.end_of(handle)
        late = decode.ask("open", room=9, tokens=10, seed=9, address=prefill.address)
        assert decode.end_of(late["handle"])["code"] == "draining"
        time.sleep(0.8)  # past its drain deadline
        stats = decode.ask("stats")
        # The first may go over the budget before the others have opened: those are refused, and hold nothing.
        held = [handle for handle in handles if "releasable" not in decode.events(handle)]
        assert not stats["drained"] and stats["quarantined"] == len(held) >= 1
        prefill.kill()
        for handle in handles:
            decode.released(handle)
        oracles(decode)


def test_many_rooms_cancelled_in_the_middle_leave_nothing() -> None:
    """LC-13, LC-16: one in two is aborted at a random step; the others finish; then everything is free."""
    with faulty_pair(
        {"kind": "delay", "at": 1, "every": 3, "seconds": 0.02},
        decode={"pages": 200, "rows": 24, "slots": 24, "order": "random"},
        pages=200, rows=24, slots=24,
    ) as (prefill, decode):  # fmt: skip
        for round_ in range(6):
            rooms = [start_room(prefill, decode, 100 * round_ + i, 40, chunks=[10, 20]) for i in range(20)]
            for number in range(0, 20, 2):
                (prefill if number % 4 else decode).ask("abort", room=100 * round_ + number)
            for number, (p, d) in enumerate(rooms):
                if number % 2:
                    finished(prefill, decode, p, d)
                decode.released(d)
                prefill.released(p)
        hand_over(prefill, decode, 5_000, 40)
        oracles(prefill, decode)
