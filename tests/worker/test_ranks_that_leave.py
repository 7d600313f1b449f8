"""Ranks that outlive their control: what they were told by the former one is void, and to that one they are others."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_pair import LocalPair
from support.two_ranks import TwoRanks, until

from sglang_pd.worker.peers.link import Caller
from sglang_pd.worker.ranks.connections import RankConnections
from sglang_pd.worker.ranks.orders import Begin, Joined, Pair, Rejoin, decode_order


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair(verify="off")
    yield both
    both.close()


@pytest.fixture
def two(pair: LocalPair) -> Iterator[TwoRanks]:
    found = TwoRanks(pair)
    yield found
    found.close()


def test_a_rank_that_leaves_takes_no_room_of_its_former_control(two: TwoRanks) -> None:
    """Orders that were on their way when another control asked for it."""
    handle = two.begin(1)
    until(lambda: two.rank.agent.source.begun)
    agent, orders = two.rank.agent, two.orders
    paired = next(order for order in orders if isinstance(order, Pair))
    begin = next(order for order in orders if isinstance(order, Begin))
    told: list[Any] = []
    done: list[int] = []

    def late() -> None:
        agent._report, agent.source.meetings._report = told.append, told.append
        agent.rejoin(agent.control_epoch + 1)
        agent.order(paired)
        agent.order(Begin(**{name: getattr(begin, name) for name in begin.__struct_fields__} | {"handle": handle + 1}))
        done.append(agent.source.rooms)

    two.rank._loop.submit(late)
    until(lambda: done)
    assert done == [0] and [report.error.code for report in told if getattr(report, "error", None)] == [
        "draining",
        "peer_unknown",
    ]


def test_chunks_that_came_before_any_control_are_kept_for_it(two: TwoRanks) -> None:
    agent = two.rank.agent
    done: list[tuple[int, int]] = []

    def early() -> None:
        agent.control_epoch = 0
        two.rank.send(99, 0, 16, last=False)
        agent.step(lambda call: call())
        agent.rejoin(5)
        done.append((agent.control_epoch, agent.source.rooms))

    two.rank._loop.submit(early)
    until(lambda: done)
    assert done == [(5, 1)]


def test_a_control_takes_a_rank_only_by_its_answer_to_this_control(two: TwoRanks) -> None:
    """One that was sent before may come late, when the rank has long begun to serve another one."""
    control, party, sent = two.at.control, Caller("ranks", b"late"), list[Any]()
    control.connections = RankConnections(
        SimpleNamespace(send=lambda where, frame: sent.append(decode_order(frame))),  # type: ignore[arg-type]
        control.epoch,
        1.0,
    )
    said: Joined = two.rank.agent.joined()
    assert said.control_epoch == control.epoch
    fields = {name: getattr(said, name) for name in said.__struct_fields__}
    for other in (0, control.epoch ^ 1):
        control._join_remote(party, Joined(**fields | {"control_epoch": other}))
        assert sent.pop() == Rejoin(control_epoch=control.epoch) and control.connections.rank_at(party) is None


def test_a_rank_that_comes_back_to_a_control_is_another_one_to_it(two: TwoRanks) -> None:
    """That control lived on, and had a room begun by what it had agreed with the rank it was."""
    agent = two.rank.agent
    first, seen = agent.control_epoch, list[tuple[int, int]]()

    def flap() -> None:
        for control in (first, first, first + 1, first):
            agent.rejoin(control)
            agent.step(lambda call: call())
            joined = agent.joined()
            seen.append((joined.control_epoch - first, joined.term))

    two.rank._loop.submit(flap)
    until(lambda: len(seen) == 4)
    assert [control for control, _ in seen] == [0, 0, 1, 0]
    same, again, elsewhere, back = (term for _, term in seen)
    assert same == again and elsewhere.ended(same) and back.ended(elsewhere)
    assert two.at.control.ranks.refuses(agent.joined(), serving=True, now_s=0.0)
