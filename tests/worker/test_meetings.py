"""Connections of the source side: slow ones hold nobody up, failed and superseded ones leave nothing behind."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.worker_pair import finished as finish_room
from support.worker_pair import oracles, start_pair, start_room

from sglang_pd.backends.base import Connecting
from sglang_pd.protocol.errors import TransferError
from sglang_pd.protocol.manifest import RankId
from sglang_pd.worker.ranks import meetings
from sglang_pd.worker.ranks.meetings import Meetings

RANK = RankId(0, 0)


@pytest.mark.timeout(90)
def test_a_slow_connection_costs_no_peer_and_its_rooms_wait_for_it() -> None:
    """Longer than the silence after which decode gives prefill up."""
    options = {"inner": "local", "connect_s": 3.0}
    prefill, decode = start_pair(
        {"backend": "faulty", "options": options, "liveness_s": 1.0}, {"liveness_s": 1.0, "backend": "local"}
    )
    try:
        p, d = start_room(prefill, decode, 1, 9)
        began_s = time.monotonic()
        finish_room(prefill, decode, p, d)
        assert time.monotonic() - began_s > 1.5, "the connection was not slow: nothing was tried here"
        for room in (2, 3):
            finish_room(prefill, decode, *start_room(prefill, decode, room, 20))
        lost = [line for worker in (prefill, decode) for line in worker.lines if "lost" in str(line.get("error", ""))]
        assert not lost
        oracles(prefill, decode)
    finally:
        prefill.close()
        decode.close()


class Slow(Connecting):
    def __init__(self) -> None:
        self.peer: Any = None
        self.error: Exception | None = None
        self.cancelled = 0

    def poll(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.peer

    def cancel(self) -> None:
        self.cancelled += 1


class Backend:
    """Connections that end when told, and who was left."""

    def __init__(self) -> None:
        self.begun: list[Slow] = []
        self.left: list[Any] = []

    def start_connect(self, blob: bytes, epoch: int) -> Slow:
        self.begun.append(Slow())
        return self.begun[-1]

    def disconnect(self, peer: Any) -> None:
        self.left.append(peer)


def instance(*blobs: bytes) -> Any:
    """A pairing with a destination rank for each connect blob, to all of which this rank writes."""
    ranks = [
        SimpleNamespace(rank=RankId(0, n), epoch=100 + n, transport=SimpleNamespace(connect=blob))
        for n, blob in enumerate(blobs)
    ]
    decode = SimpleNamespace(ranks=ranks, rank=lambda rank: ranks[rank.tp_rank])
    return SimpleNamespace(decode=decode, plan=lambda src, dst: SimpleNamespace(moves=True))


def some_peer(name: str) -> Any:
    return SimpleNamespace(name=name, transport="memfd")


class Side:
    def __init__(self) -> None:
        self.backend, self.said, self.met = Backend(), list[Any](), list[int]()
        self.meetings = Meetings(RANK, self.backend, self.said.append, self.met.append)  # type: ignore[arg-type]

    def step(self) -> bool:
        return self.meetings.step(set)


def test_an_instance_is_met_when_its_last_rank_is_connected() -> None:
    side = Side()
    side.meetings.pair(7, instance(b"a", b"b"))
    first, second = side.backend.begun
    first.peer = some_peer("a")
    assert side.step() and side.meetings.approaching(7) and side.meetings.get(7) is None and not side.said
    second.peer = some_peer("b")
    assert not side.step()
    meeting = side.meetings.get(7)
    assert meeting is not None and [peer.name for peer in meeting.peers.values()] == ["a", "b"]  # type: ignore[attr-defined]
    assert [(report.peer_epoch, report.error, report.transport) for report in side.said] == [(7, None, "memfd")]
    assert side.met == [7]


def test_one_rank_that_fails_leaves_the_others_and_says_why() -> None:
    side = Side()
    side.meetings.pair(7, instance(b"a", b"b"))
    first, second = side.backend.begun
    first.peer = some_peer("a")
    second.error = TransferError("nobody there", code="peer_lost")
    assert not side.step()
    assert side.said[0].error.code == "peer_lost" and side.met == [7]
    assert [peer.name for peer in side.backend.left] == ["a"] and second.cancelled == 1
    assert side.meetings.get(7) is None and not side.meetings.approaching(7)


def test_a_connection_that_is_made_anew_keeps_what_holds_and_falls_back_where_it_fails() -> None:
    side = Side()
    side.meetings.pair(7, instance(b"a", b"b"))
    for slow, name in zip(side.backend.begun, "ab", strict=True):
        slow.peer = some_peer(name)
    side.step()
    before = side.meetings.get(7)
    side.meetings.pair(7, instance(b"a", b"c"))
    assert len(side.backend.begun) == 3, "the first rank says what it said before"
    assert side.meetings.get(7) is before and side.meetings.approaching(7)
    side.backend.begun[-1].error = TransferError("gone", code="peer_lost")
    side.step()
    assert side.meetings.get(7) is before and not side.backend.left
    side.meetings.pair(7, instance(b"a", b"d"))
    side.backend.begun[-1].peer = some_peer("d")
    side.step()
    meeting = side.meetings.get(7)
    assert meeting is not None and [peer.name for peer in meeting.peers.values()] == ["a", "d"]  # type: ignore[attr-defined]
    side.step()
    assert [peer.name for peer in side.backend.left] == ["b"]


def test_a_later_order_and_a_lost_instance_end_what_was_being_made() -> None:
    side = Side()
    side.meetings.pair(7, instance(b"a"))
    side.meetings.pair(7, instance(b"b"))
    first, second = side.backend.begun
    assert first.cancelled == 1 and not side.said
    side.meetings.unpair(7)
    assert second.cancelled == 1 and side.met == [7] and not side.meetings.approaching(7)
    second.peer = some_peer("b")
    assert not side.step() and side.meetings.get(7) is None and not side.said


def test_a_peer_is_left_once_nothing_is_in_flight_to_it() -> None:
    side = Side()
    side.meetings.pair(7, instance(b"a"))
    side.backend.begun[0].peer = peer = some_peer("a")
    side.step()
    side.meetings.unpair(7)
    side.meetings.step(lambda: {id(peer)})
    assert not side.backend.left
    side.step()
    assert side.backend.left == [peer]


def test_a_connection_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "CONNECT_WITHIN_S", 0.05)
    side = Side()
    side.meetings.pair(7, instance(b"a", b"b"))
    side.backend.begun[0].peer = some_peer("a")
    assert side.step()
    time.sleep(0.06)
    assert not side.step()
    (said,) = side.said
    assert said.error.code == "peer_lost" and "0.05 s" in said.error.expected and str(RankId(0, 1)) in said.error.where
    assert side.backend.begun[1].cancelled == 1 and side.met == [7]
    assert [peer.name for peer in side.backend.left] == ["a"]


def test_a_defect_in_a_backend_is_told_not_raised() -> None:
    side = Side()
    side.meetings.pair(7, instance(b"a"))
    side.backend.begun[0].error = ZeroDivisionError("a defect")
    assert not side.step()
    assert side.said[0].error.code == "internal" and "a defect" in side.said[0].error.message
