"""One conversation for each peer: nobody states another's ranks, and one peer under two names is still one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from support.local_pair import IDS, LocalPair, Side
from support.worker_pair import wait_until

from sglang_pd import DecodeEndpoint, PrefillEndpoint
from sglang_pd.memory.views import host_bytes
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.worker.peers.peering import Peering


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    """Patient: whoever comes in again does so because of what it is told, not because the other was given up."""
    both = LocalPair(liveness_s=60.0)
    yield both
    both.close()


def peering(side: Side) -> Peering:
    found = side.at.control.peering
    assert found is not None
    return found  # type: ignore[no-any-return]


def on_loop(side: Side, call: Callable[[], Any]) -> None:
    """Run on the side's control thread."""
    done: list[bool] = []
    side.at._loop.submit(lambda: (call(), done.append(True)))
    wait_until(lambda: done)


def memory(side: Side) -> list[Any]:
    return [host_bytes(segment) for segment in side.setup.segments]


@pytest.mark.parametrize("whose", ["another decode's", "prefill's own"])
def test_nobody_states_the_ranks_of_another(pair: LocalPair, whose: str) -> None:
    """Its rooms would be written into the other's memory, at pages that it chooses."""
    pair.start(1)
    pair.complete(1)
    kept = pair.decode if whose == "another decode's" else pair.prefill
    evil = Side(DecodeEndpoint, "evil", peer_wait_s=0.7)
    try:
        peering(evil).own = peering(kept).own
        before = [segment.copy() for segment in memory(kept)]
        for segment in memory(pair.prefill):
            segment[:] = 0x77
        if kept is pair.prefill:
            before = [segment.copy() for segment in memory(kept)]
        pair.handles[2] = pair.prefill.at.request(2, IDS, pair.prefill.lists())
        handle = evil.at.open(2, pair.address, IDS, evil.lists(8))
        pair.prefill.at.send(pair.handles[2], 0, len(IDS), last=True)
        pair.prefill.at.finish(pair.handles[2], len(IDS), b"record")
        assert evil.released(2) == ["failed:peer_unknown", "releasable"]
        (error,) = [event.error for event in evil.events if event.handle == handle and event.error]
        assert "speaks in another conversation" in error.message
        (talk,) = evil.at.peers()
        assert talk["error"]["code"] == "peer_duplicate" and kept.at.control.config.instance_id in str(talk["error"])
        assert all(np.array_equal(a, b) for a, b in zip(before, memory(kept), strict=True))
        assert [peer["stage"] for peer in pair.prefill.at.peers()] == ["agreed"]
    finally:
        evil.close()


def test_a_peer_whose_connection_was_closed_comes_in_over_another(pair: LocalPair) -> None:
    """Its former conversation stands for a minute more, but nobody can speak there any more."""
    pair.start(1)
    pair.complete(1)

    def reconnect() -> None:
        (talk,) = peering(pair.decode).all()
        pair.decode.at.link.hang_up(talk.party)
        talk.party = pair.decode.at.link.call(talk.address)

    on_loop(pair.decode, reconnect)
    wait_until(lambda: pair.decode.at.stats().get("count_refusals_peer_unknown", 0) > 0)
    wait_until(lambda: [peer["stage"] for peer in pair.decode.at.peers()] == ["agreed"])
    pair.start(2)
    pair.complete(2)
    assert [peer["stage"] for peer in pair.prefill.at.peers()] == ["agreed"]


@pytest.mark.parametrize("first", ["both at once", "one after the other"])
def test_one_prefill_under_two_names_has_one_conversation(pair: LocalPair, first: str) -> None:
    """When it is lost, the rooms of both names end and give their memory back, and both names serve again."""
    one, other = pair.address, pair.address.replace("127.0.0.1", "localhost")
    prefill, decode = pair.prefill, pair.decode
    assert prefill.at.address == one
    if first == "one after the other":
        pair.start(9)
        pair.complete(9)
    decode.at.connect(other)
    for room, address in ((1, one), (2, other)):
        pair.handles[room] = prefill.at.request(room, IDS, prefill.lists(3 * room))
        decode.at.open(room, address, IDS, decode.lists(3 * room))
    wait_until(
        lambda: (
            [({talk["address"], *talk["aliases"]}, talk["stage"]) for talk in decode.at.peers()]
            == [({one, other}, "agreed")]
            and decode.at.stats()["rooms"] == 2
        )
    )
    lost = ErrorInfo(code="peer_lost", message="the connection broke")
    on_loop(decode, lambda: [peering(decode).give_up(talk.epoch, lost) for talk in peering(decode).all()])
    assert decode.released(1) == decode.released(2) == ["failed:peer_lost", "releasable"]
    for room in (1, 2):
        prefill.at.abort(pair.handles[room])
        prefill.released(room)
    for room, address in ((3, one), (4, other)):
        pair.handles[room] = prefill.at.request(room, IDS, prefill.lists(3 * room))
        decode.at.open(room, address, IDS, decode.lists(3 * room))
        pair.complete(room)
    (talk,) = decode.at.peers()
    assert {talk["address"], *talk["aliases"]} == {one, other}


def test_a_late_answer_of_a_control_that_was_replaced_parts_nobody(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for that of a newer control: the healthy conversation was dropped, and its rooms failed."""
    found, late = peering(pair.decode), list[tuple[Any, ...]]()
    heard, other = found._on_reply, pair.address.replace("127.0.0.1", "localhost")

    def hear(talk: Any, epoch: int, message: Any) -> None:
        if talk.address == other:
            late.append((talk, epoch, message))
        else:
            heard(talk, epoch, message)

    monkeypatch.setattr(found, "_on_reply", hear)
    on_loop(pair.decode, lambda: found.call(other, None, found._now_s, wanted=True))
    wait_until(lambda: late)
    pair.start(1)
    pair.complete(1)
    speaking = [peer["conversation"] for peer in pair.decode.at.peers() if peer["stage"] == "agreed"]
    talk, epoch, message = late[0]
    of_another = msgspec.structs.replace(message, control=message.control ^ 1)
    before = found.counts["late_replies"]
    on_loop(pair.decode, lambda: heard(talk, epoch, of_another))
    assert found.counts["late_replies"] == before + 1
    pair.start(2)
    pair.complete(2)
    assert speaking == [peer["conversation"] for peer in pair.decode.at.peers() if peer["stage"] == "agreed"]


def test_those_called_at_once_agree_at_once() -> None:
    """An agreement with one voids no answer of the others, who have other ranks."""
    sides = [Side(PrefillEndpoint, f"p{n}", heartbeat_s=20.0, liveness_s=60.0) for n in range(3)]
    decode = Side(DecodeEndpoint, "d", heartbeat_s=20.0, liveness_s=60.0)
    try:
        wait_until(lambda: all(side.at.ready for side in (*sides, decode)))
        for side in sides:
            decode.at.connect(side.at.address)
        wait_until(lambda: [peer["stage"] for peer in decode.at.peers()] == ["agreed"] * 3, timeout_s=10.0)
        assert "late_replies" not in peering(decode).counts
    finally:
        for side in (*sides, decode):
            side.close()
