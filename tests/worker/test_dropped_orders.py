"""Orders and reports between a control and its rank that could not be sent: a loss is a broken connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_pair import LocalPair
from support.two_ranks import SECOND, TwoRanks, until

from sglang_pd.worker.control import RANKS
from sglang_pd.worker.peers.link import Called, Caller, Link
from sglang_pd.worker.ranks.connections import RankConnections
from sglang_pd.worker.ranks.orders import Begin, Rejoin, Welcome, WroteRange, decode_order, decode_report, encode
from sglang_pd.worker.ranks.remote_rank import RemoteRank


def test_a_link_says_whom_its_last_flush_did_not_send_everything() -> None:
    link = Link(None)
    try:
        link.listen(RANKS, "tcp://127.0.0.1:*")
        unknown, closed = Caller(RANKS, b"nobody"), link.call("tcp://127.0.0.1:9")
        link.hang_up(closed)
        there = link.call("tcp://127.0.0.1:9")
        for party in (unknown, closed, there):
            link.send(party, b"frame")
        link.flush()
        assert link.dropped == {unknown, closed} and link.counts["send_dropped"] == 2
        link.flush()
        assert not link.dropped
    finally:
        link.close()


def test_a_rank_that_missed_orders_is_told_again_once_for_each_time() -> None:
    link: Any = SimpleNamespace(dropped=set(), counts={"ranks_told_again": 0})
    link.send = lambda party, frame: True
    connections = RankConnections(link, 1, 5.0)
    party, other = Caller(RANKS, b"one"), Caller(RANKS, b"two")
    connections.settle(SECOND, party)
    link.dropped = {party, Called(3)}
    for _ in range(2):  # what it is told again is dropped as well
        connections.note_dropped()
        assert connections.missed(SECOND)
        assert not connections.missed(SECOND)
    connections.note_dropped()
    connections.settle(SECOND, other)
    assert not connections.missed(SECOND), "it is told everything when it joins from elsewhere"
    connections.note_dropped()
    assert not connections.missed(SECOND) and link.counts["ranks_told_again"] == 2


class Strikes:
    """Takes frames out of what a link flushes, as a full queue would."""

    def __init__(self, link: Link, strikes: Callable[[bytes], bool]) -> None:
        self.on, self.struck = False, 0
        self._link, self._strikes, self._flush = link, strikes, link._flush
        link._flush = self.flush  # type: ignore[method-assign]

    def flush(self, party: Any, frames: list[bytes]) -> None:
        if self.on and any(self._strikes(frame) for frame in frames):
            self.struck += 1
            self._link.dropped.add(party)
        else:
            self._flush(party, frames)


@pytest.fixture
def instance() -> Iterator[TwoRanks]:
    pair = LocalPair(verify="off")
    one = TwoRanks(pair)
    yield one
    one.close()
    pair.close()


def ended_well(said: list[str]) -> bool:
    return said == ["admitted", "done", "releasable"]


def test_a_dropped_order_fails_the_rooms_of_its_rank_and_no_later_one(instance: TwoRanks) -> None:
    strikes = Strikes(instance.at.link, lambda frame: frame_is(decode_order, frame, (Begin,)))
    instance.start(1)
    assert ended_well(instance.ends(1))
    strikes.on = True
    instance.start(2)
    until(lambda: strikes.struck)
    assert instance.ends(2)[0] == "failed:peer_lost"
    strikes.on = False
    assert instance.at.stats()["count_ranks_told_again"] == 1 and instance.at.ready
    instance.start(3)
    assert ended_well(instance.ends(3))
    until(lambda: not instance.rank.agent.source.rooms)


def test_a_dropped_report_has_its_rank_join_again(instance: TwoRanks) -> None:
    link = instance.rank._remote.link
    strikes = Strikes(link, lambda frame: frame_is(decode_report, frame, (WroteRange,)))
    instance.start(1)
    assert ended_well(instance.ends(1))
    strikes.on = True
    instance.start(2)
    until(lambda: strikes.struck)
    assert instance.ends(2)[0] == "failed:peer_lost"
    strikes.on = False
    assert link.counts["connected_anew"] == 1 and len(link.sockets()) == 1
    instance.start(3)
    assert ended_well(instance.ends(3))


def frame_is(decode: Callable[[bytes], Any], frame: bytes, kinds: tuple[type, ...]) -> bool:
    try:
        return isinstance(decode(frame), kinds)
    except Exception:  # a frame of another socket
        return False


def test_without_a_socket_for_another_connection_the_former_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RemoteRank("tcp://127.0.0.1:9", curve=None, heartbeat_s=0.0)
    try:
        former, rank._answered = rank._control, True
        rank.link.dropped = {former}
        rank.wake()

        def full(address: str) -> Called:
            raise OSError("no descriptor left")

        with monkeypatch.context() as patch:
            patch.setattr(rank.link, "call", full)
            with pytest.raises(OSError):
                rank.turn()
            assert rank._control == former and former in rank.link._out, "its heartbeat is said all the same"
        rank.turn()
        assert rank._control != former and rank.link.counts["connected_anew"] == 1
    finally:
        rank.link.close()


def test_orders_that_stop_while_reports_go_on_make_the_rank_connect_anew(instance: TwoRanks) -> None:
    """The connection stands and one direction of it is dead: the control hears its rank and sees nothing wrong."""
    remote = instance.rank._remote
    deaf, on_frame = remote._control, remote.on_frame
    instance.start(1)
    assert ended_well(instance.ends(1))

    def half(party: Any, frame: bytes) -> None:
        if party != deaf:
            on_frame(party, frame)

    remote.on_frame = half  # type: ignore[method-assign]
    instance.start(2)
    assert instance.ends(2)[0] == "failed:peer_lost"
    assert instance.at.ready and remote.link.counts["connected_anew"] == 1
    instance.start(3)
    assert ended_well(instance.ends(3))


def test_a_rank_that_its_control_has_nothing_to_tell_keeps_its_connection(instance: TwoRanks) -> None:
    time.sleep(2.6)
    assert not instance.rank._remote.link.counts["connected_anew"]


def heartbeats(rank: RemoteRank, count: int) -> None:
    for _ in range(count):
        rank._next_s = float("-inf")
        rank.turn()


def test_a_rank_is_as_patient_as_its_control_says_and_more_with_one_that_never_answered() -> None:
    rank = RemoteRank("tcp://127.0.0.1:9", curve=None, heartbeat_s=1.0)
    try:
        first = rank._control
        heartbeats(rank, 31)
        assert rank._control == first
        heartbeats(rank, 1)
        second = rank._control
        assert second != first and len(rank.link.sockets()) == 1
        rank.agent = SimpleNamespace(control_epoch=7)  # type: ignore[assignment]
        rank.on_frame(second, encode(Welcome(control_epoch=7, liveness_s=3.0)))
        heartbeats(rank, 4)
        assert rank._control == second
        heartbeats(rank, 1)
        assert rank._control != second
        third = rank._control
        rank.on_frame(third, encode(Welcome(control_epoch=7, liveness_s=0.1)))
        heartbeats(rank, 2)
        assert rank._control == third, "two heartbeats at least, whatever the liveness"
        rank.on_frame(third, encode(Welcome(control_epoch=8, liveness_s=30.0)))
        heartbeats(rank, 1)
        assert rank._control != third, "a control that it did not join must ask it first"
    finally:
        rank.link.close()


def test_what_was_dropped_before_a_rank_is_asked_to_join_is_void() -> None:
    rank = RemoteRank("tcp://127.0.0.1:9", curve=None, heartbeat_s=1.0)
    try:
        former = rank._control
        rank.link.dropped = {former}
        rank.wake()
        rank.link.dropped = set()
        heartbeats(rank, 2)
        assert rank._control == former, "nobody answered there: it may not be connected yet"
        asked: list[int] = []
        rank.agent = SimpleNamespace(rejoin=asked.append)  # type: ignore[assignment]
        rank.on_frame(former, encode(Rejoin(control_epoch=7)))
        heartbeats(rank, 1)
        assert asked == [7] and rank._control == former
    finally:
        rank.link.close()
