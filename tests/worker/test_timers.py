"""A timer lies in the future, or is absent: one that has passed and stays would spin the control thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from support.local_pair import LocalPair, Side
from support.worker_pair import wait_until

NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    both.start(1)
    both.complete(1)
    yield both
    both.close()


def calling_somebody(pair: LocalPair) -> Side:
    pair.decode.at.connect(NOBODY)
    wait_until(lambda: len(pair.decode.at.peers()) == 2)
    return pair.decode


def draining_while_it_calls(pair: LocalPair) -> Side:
    calling_somebody(pair).at.drain(3_600)
    return pair.decode


def failed_while_it_calls(pair: LocalPair) -> Side:
    calling_somebody(pair).at._loop.submit(lambda: pair.decode.at.control._fail("a rank is gone"))
    return pair.decode


def past_its_drain_deadline(pair: LocalPair) -> Side:
    pair.prefill.at.request(2, list(range(40)), pair.prefill.lists())
    pair.prefill.at.drain(0.2)
    assert "releasable" in pair.prefill.released(2)
    return pair.prefill


@pytest.mark.parametrize("state", [draining_while_it_calls, failed_while_it_calls, past_its_drain_deadline])
def test_no_timer_stays_in_the_past(pair: LocalPair, state: Callable[[LocalPair], Side]) -> None:
    side = state(pair)
    past: list[bool] = []

    def look() -> None:
        due_s = side.at.control.next_timer_s()
        past.append(due_s is not None and due_s <= time.monotonic())

    time.sleep(0.7)  # heartbeats have come due, and the deadline
    for _ in range(20):
        side.at._loop.submit(look)
        time.sleep(0.03)
    wait_until(lambda: len(past) == 20)
    assert not all(past)
