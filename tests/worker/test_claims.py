"""What must not be mixed up: two processes that claim one rank, two uses of one room id, and whose record it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.local_pair import CONFIG, IDS, LocalPair, Side
from support.worker_pair import wait_until

from sglang_pd import PrefillEndpoint
from sglang_pd.backends.base import TransferState
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.errors import ErrorInfo, RoomError
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.worker.ranks.flights import Flight, cause_of
from sglang_pd.worker.ranks.orders import Joined
from sglang_pd.worker.ranks.roster import Ranks
from sglang_pd.worker.serving.decode_runner import DecodeRunner, _Running


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalPair]:
    made = LocalPair()
    made.start(1)
    made.complete(1)
    yield made
    made.close()


def joined(pair: LocalPair, epoch: int) -> Joined:
    manifest = msgspec.structs.replace(pair.prefill.at.agent.manifest(), epoch=epoch)
    return Joined(rank=RankId(0, 0), epoch=epoch, term=manifest.term, manifest=msgspec.msgpack.encode(manifest))


@pytest.mark.parametrize(
    ("remote", "serving", "silent_s", "refused"),
    [
        (False, False, 100.0, True),
        (False, True, 100.0, True),
        (True, True, 0.0, True),
        (True, True, 100.0, True),
        (True, False, 0.0, True),
        (True, False, 100.0, False),
    ],
)
def test_a_rank_keeps_its_place(pair: LocalPair, remote: bool, serving: bool, silent_s: float, refused: bool) -> None:
    """Else a fence that the newcomer gives, which never wrote, would pass for the former one's."""
    ranks, orders = Ranks(Topology(), 5.0), list[Any]()
    assert ranks.join(joined(pair, 7), orders.append, remote=remote, now_s=0.0)
    assert not ranks.refuses(joined(pair, 7), serving=serving, now_s=silent_s), "the same process may join again"
    assert bool(ranks.refuses(joined(pair, 8), serving=serving, now_s=silent_s)) is refused
    assert ranks.epoch_of(RankId(0, 0)) == 7


def test_chunks_of_a_refused_request_are_dropped(pair: LocalPair) -> None:
    """They became the state of the next request under that id."""
    side = Side(PrefillEndpoint, "whole")
    side.at.close()
    alone = PrefillEndpoint(replace(CONFIG, instance_id="half", topology=Topology(tp=2)), side.setup)
    try:
        handle = alone.request(5, IDS, pair.prefill.lists())
        alone.agent.send(handle, Chunk(0, len(IDS), True))
        alone.agent.handoff(handle, len(IDS), b"stale")
        wait_until(lambda: len(alone.poll()) >= 2)
        wait_until(lambda: alone.agent.source.rooms == 0)
        alone.agent.send(handle, Chunk(0, 16, False))  # what the engine says after it
        wait_until(lambda: not alone.agent._calls)
        assert alone.agent.source.rooms == 0
    finally:
        alone.close()
        side.close()


def test_what_is_sent_after_a_rooms_end_waits_for_nobody(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.start(20)
    pair.complete(20)
    asked = list[Any]()
    monkeypatch.setattr(pair.prefill.at.agent, "send", lambda *a, **k: asked.append(a))
    monkeypatch.setattr(pair.prefill.at.agent, "handoff", lambda *a: asked.append(a))
    pair.prefill.at.send(pair.handles[20], 0, 40, last=True)
    pair.prefill.at.finish(pair.handles[20], 40, b"record")
    assert not asked


def test_late_lists_are_the_calls_own(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[Any]()
    monkeypatch.setattr(pair.prefill.at.agent.source, "chunk", lambda room, ready: taken.append(ready.lists))
    lists = dict(pair.prefill.lists())
    wanted = dict(lists)
    pair.prefill.at.agent.send(30, Chunk(0, 40, True), lists=lists)
    lists.clear()
    wait_until(lambda: bool(taken))
    assert taken == [wanted]


def test_a_transfer_that_cannot_be_asked_is_unknown() -> None:
    class Broken:
        def poll(self) -> TransferState:
            raise ZeroDivisionError("on purpose")

    flight = Flight(Chunk(0, 1, True), [(None, Broken())])  # type: ignore[list-item]
    assert flight.states() == [TransferState.UNKNOWN] and not flight.quiesced
    assert "on purpose" in cause_of(Broken()).message  # type: ignore[arg-type]


def test_a_cancel_that_meets_the_end_of_the_hand_over_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """ADMITTED and RELEASABLE were on their way when it came, so that aborting the room had no effect any more."""
    runner, given_up = object.__new__(DecodeRunner), list[Any]()
    pools = SimpleNamespace(disarm=lambda generation: None)
    runner.parts = SimpleNamespace(pools=pools)  # type: ignore[assignment]
    monkeypatch.setattr(DecodeRunner, "_give_up", lambda self, entry, error: given_up.append(error.code))
    monkeypatch.setattr(DecodeRunner, "_admit", lambda self, entry: given_up.append("admitted"))
    lease = SimpleNamespace(generation=1, disarm=lambda: None)
    entry = _Running(SimpleNamespace(), lease, 1, 0.0)  # type: ignore[arg-type]
    runner._memory_is_ours(entry)
    entry.cancelled = ErrorInfo(code="room_aborted", message="the client went")
    runner._memory_is_ours(entry)
    assert given_up == ["admitted", "room_aborted"]


@pytest.mark.parametrize("room", [-1, 2**70])
def test_abort_of_what_no_call_returned_is_refused(pair: LocalPair, room: int) -> None:
    with pytest.raises(RoomError, match="no such handle"):
        pair.prefill.at.abort(room)
    with pytest.raises(TypeError):
        pair.prefill.at.abort([1])  # type: ignore[arg-type]
