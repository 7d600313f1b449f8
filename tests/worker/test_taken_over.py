"""Ranks that outlive their control: that another one has them says that nothing lands of what they wrote before.

Here decode's transport proves a writer's death and nothing else, as over process memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.held_writes import HeldWrites
from support.local_pair import IDS, LocalPair
from support.two_ranks import SECOND, TwoRanks, until

from sglang_pd.backends.base import TransferState
from sglang_pd.protocol.errors import BackendUnavailable
from sglang_pd.protocol.manifest import RankId
from sglang_pd.worker.peers.link import Caller
from sglang_pd.worker.peers.seeking import Seeking
from sglang_pd.worker.ranks.connections import RankConnections
from sglang_pd.worker.ranks.destination import DestinationSide, _Writers
from sglang_pd.worker.ranks.orders import Begin, Joined, Pair, Rejoin, Revoked, Seek, decode_order
from sglang_pd.worker.ranks.settled import leave, settled


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPair]:
    both = LocalPair(verify="off")
    yield both
    both.close()


@pytest.fixture
def two(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRanks]:
    found = TwoRanks(pair)
    monkeypatch.setattr(pair.decode.backend, "revoke", lambda epoch: epoch in found.dead)
    yield found
    found.close()


def half_sent(two: TwoRanks, room: int) -> None:
    """A room of which both ranks have written some."""
    handle = two.begin(room)
    for rank in (two.at, two.rank):
        before = rank.agent.source.bytes_written
        rank.send(handle, 0, 16, last=False)
        until(lambda rank=rank, before=before: rank.agent.source.bytes_written > before)


def test_decode_has_its_memory_back_and_the_ranks_serve_on(two: TwoRanks) -> None:
    for room in (1, 3):
        half_sent(two, room)
        two.replace_control()
        assert two.pair.decode.released(room, timeout_s=20)[-1] == "releasable"
        two.start(room + 1)  # in the same pages
        assert two.ends(room + 1) == ["admitted", "done", "releasable"]


@pytest.mark.parametrize("state", [TransferState.PENDING, TransferState.UNKNOWN])
def test_not_while_something_of_a_rank_may_land(
    two: TwoRanks, state: TransferState, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = two.begin(1)
    with monkeypatch.context() as patch:
        writes = HeldWrites(two.rank.agent.backend, patch, state)
        two.rank.send(handle, 0, 16, last=False)
        until(lambda: writes.held)
        two.replace_control(wait=False)
        time.sleep(3.0)  # it is lost, and some handshakes
        assert not two.at.ready and "releasable" not in two.pair.decode.of(1)
        writes.end()
        assert two.pair.decode.released(1, timeout_s=20)[-1] == "releasable"


def test_not_where_an_agent_before_it_left_something_under_way(two: TwoRanks) -> None:
    half_sent(two, 1)
    two.rank.agent._settled = False
    two.replace_control()
    time.sleep(3.0)
    assert "releasable" not in two.pair.decode.of(1)
    two.dead.add(two.rank.agent.backend.epoch)
    assert two.pair.decode.released(1)[-1] == "releasable"


def test_what_an_endpoint_leaves_under_way_is_remembered_of_its_backend(pair: LocalPair) -> None:
    one, other = pair.prefill.backend, pair.decode.backend
    leave(other, 0)
    assert settled(one) and settled(other)
    leave(one, 1)
    leave(one, 0)
    assert not settled(one) and settled(other)


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


def of_ranks(*epochs: int) -> Any:
    return SimpleNamespace(ranks=[SimpleNamespace(epoch=epoch) for epoch in epochs])


def test_of_whom_another_control_may_say_so() -> None:
    seeking = Seeking()
    for peer, control in ((5, 50), (6, 60), (7, 0), (8, 50)):
        seeking.add(peer, room=peer)
        seeking.lost(peer, of_ranks(21, 22, peer), control)
    assert seeking.taken_over(of_ranks(31, 22), 0) == []
    assert seeking.taken_over(of_ranks(31, 32), 60) == []
    assert seeking.taken_over(of_ranks(31, 22), 60) == [5, 8], "of its own conversations it knows better, by `fenced`"
    assert seeking.taken_over(of_ranks(31, 22), 60) == []
    assert seeking.taken_over(of_ranks(21, 31), 61) == [5, 6, 8]
    assert [seeking.fenced(peer) for peer in (5, 6, 7)] == [{21, 22}, {21}, set()]
    seeking.drop(5)
    assert seeking.fenced(5) == set() and seeking._controls.keys() == {6, 7, 8}


def test_the_others_are_proven_by_the_transport_which_may_be_busy() -> None:
    asked: list[int] = []
    said: list[Any] = []
    state = SimpleNamespace(rebuilding=True, proves=False)

    def describe() -> bytes:
        if state.rebuilding:
            raise BackendUnavailable("just now", code="backend_unavailable")
        return b""

    backend: Any = SimpleNamespace(revoke=lambda epoch: asked.append(epoch) or state.proves, describe=describe)
    side = DestinationSide(RankId(0, 0), backend, said.append, digest=lambda *rows: None)  # type: ignore[arg-type,return-value]
    side._writers[9] = _Writers(SimpleNamespace(), open_epochs={1, 2})  # type: ignore[arg-type]
    side.seek(9, frozenset({2, 3}))
    side.step()
    assert asked == [1] and not said and side.seeking
    state.proves = True
    side.step()
    assert not said, "a transport in the middle of its proof cannot be met"
    state.rebuilding = False
    side.step()
    assert said == [Revoked(peer_epoch=9)] and side.idle and asked == [1, 1]


def test_a_rank_that_missed_the_order_is_told_again_of_whom_it_need_not_ask(pair: LocalPair) -> None:
    desk: Any = pair.decode.at.control.desk
    ordered: list[Any] = []
    desk._outside = SimpleNamespace(order=lambda order, rank=None: ordered.append(order))
    desk.seeking.add(5, room=1)
    desk.seeking.lost(5, of_ranks(21, 22), 50)
    desk.taken_over(of_ranks(31, 22), 60)
    desk.repeat_orders(SECOND)
    wanted = Seek(peer_epoch=5, fenced=(22,))
    assert [order for order in ordered if isinstance(order, Seek)] == [wanted, wanted]
    assert len(IDS) > 16
