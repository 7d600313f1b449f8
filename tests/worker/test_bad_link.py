"""Lost, early, doubled and late messages between two controls (FR-05, FR-18): rooms end right, or end failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.worker_pair import finished, hand_over, oracles, start_pair, start_room, wait_until
from support.worker_process import WorkerProcess

TO_DECODE = ["RoomAccepted", "Wrote", "Handoff", "RoomEnd"]
TO_PREFILL = ["RoomOpen", "Admitted"]
QUICK = {"status_interval_s": 0.15, "status_max_s": 0.3}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    conf = {"bad_link": True, "limits": QUICK, "pages": 120, "rows": 16, "slots": 16}
    prefill, decode = start_pair(conf, conf)
    with prefill, decode:
        hand_over(prefill, decode, 1, 20)
        yield prefill, decode


@pytest.fixture(autouse=True)
def good_at_the_end(pair: tuple[WorkerProcess, WorkerProcess]) -> Iterator[None]:
    yield
    for worker in pair:
        worker.ask("frames", rules=[])
    oracles(*pair)


@pytest.mark.parametrize("what", ["drop", "duplicate", "delay"])
@pytest.mark.parametrize("name", TO_DECODE + TO_PREFILL)
def test_one_message_of_a_kind_is_struck(pair: tuple[WorkerProcess, WorkerProcess], what: str, name: str) -> None:
    """The first one of its kind, and once it was recovered every other of its kind comes as usual."""
    prefill, decode = pair
    room = 1_000 + 10 * (TO_DECODE + TO_PREFILL).index(name) + ["drop", "duplicate", "delay"].index(what)
    sender = prefill if name in TO_DECODE else decode
    sender.ask("frames", rules=[{"types": [name], what: 1.0, "first": 1, "seconds": 0.3}])
    hand_over(prefill, decode, room, 40, chunks=[11, 22])
    assert any(name in key for key in sender.ask("frames", rules=[])["counts"])


def test_an_abort_and_its_acknowledgement_are_lost(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    decode.ask("frames", rules=[{"types": ["Abort"], "drop": 1.0, "first": 2}])
    prefill.ask("frames", rules=[{"types": ["AbortAck"], "drop": 1.0, "first": 2}])
    p, d = start_room(prefill, decode, 2_000, 60, chunks=[10, 20], pause_s=0.5)
    wait_until(lambda: prefill.ask("stats")["stats"]["bytes_written"] > 0)
    decode.ask("abort", room=2_000)
    decode.released(d)
    prefill.released(p)
    assert prefill.end_of(p)["event"] == "aborted"


def test_a_failure_that_is_not_heard_is_asked_for(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    prefill, decode = pair
    prefill.ask("frames", rules=[{"types": ["Failed", "AbortAck"], "drop": 1.0, "first": 4}])
    p, d = start_room(prefill, decode, 2_100, 60, chunks=[10, 20], pause_s=0.5)
    prefill.ask("abort", room=2_100)
    assert decode.end_of(d)["event"] == "aborted"
    decode.released(d)
    prefill.released(p)


def test_every_room_of_many_over_a_link_that_loses_one_message_in_five(
    pair: tuple[WorkerProcess, WorkerProcess],
) -> None:
    prefill, decode = pair
    rules = [{"drop": 0.2, "duplicate": 0.1, "delay": 0.1, "seconds": 0.1}]
    for worker in pair:
        worker.ask("frames", rules=rules)
    for batch in range(4):
        rooms = [start_room(prefill, decode, 3_000 + 10 * batch + i, 5 + 7 * i, chunks=[2]) for i in range(8)]
        for p, d in rooms:
            finished(prefill, decode, p, d)


def test_a_message_of_a_room_that_is_over_reaches_no_later_room(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    """Every message of the first room comes a second time while the second one runs."""
    prefill, decode = pair
    prefill.ask("frames", rules=[{"types": ["Wrote", "Handoff", "RoomEnd"], "duplicate": 1.0}])
    for room in range(4_000, 4_006):
        hand_over(prefill, decode, room, 30, chunks=[10, 20])
