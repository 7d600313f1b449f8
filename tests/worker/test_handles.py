"""A handle is one use of a room's id: nothing that is sent under one is taken for another, and what flies is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_pair import IDS, LocalPair
from support.worker_pair import wait_until

from sglang_pd import handle_of
from sglang_pd.backends.base import TransferState
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.errors import RoomError
from sglang_pd.protocol.manifest import RankId
from sglang_pd.worker.ranks import source as source_module
from sglang_pd.worker.ranks.flights import Flight
from sglang_pd.worker.ranks.orders import Fenced, Forget, Halt, RoomFault
from sglang_pd.worker.ranks.source import Ready, SourceSide, _Room


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    yield both
    both.close()


def test_what_was_sent_for_a_use_that_never_came_is_not_the_next_ones(pair: LocalPair) -> None:
    """A rank that runs ahead sends; its control never requests that room, or is replaced; the id comes again."""
    stray = handle_of("a request that was given up")
    pair.prefill.at.agent.send(stray, Chunk(0, len(IDS), True))
    pair.prefill.at.agent.handoff(stray, len(IDS), b"stale")
    pair.start(7)
    time.sleep(0.3)
    assert pair.decode.of(7) == [] and pair.prefill.at.stats()["bytes_written"] == 0
    pair.complete(7)
    assert [event.record for event in pair.decode.events if event.room == 7][0] == b"record"


def test_a_duplicates_chunks_harm_nobody(pair: LocalPair) -> None:
    pair.start(7)
    with pytest.raises(RoomError, match="already open"):
        pair.prefill.at.request(7, IDS, pair.prefill.lists(), handle=99)
    pair.prefill.at.agent.send(99, Chunk(0, len(IDS), True))  # as a rank does that runs the same schedule
    pair.prefill.at.agent.handoff(99, len(IDS), b"of the duplicate")
    pair.complete(7)
    assert [event.record for event in pair.decode.events if event.room == 7][0] == b"record"


def test_a_handle_is_used_once(pair: LocalPair) -> None:
    pair.handles[7] = pair.prefill.at.request(7, IDS, pair.prefill.lists(), handle=5)
    assert pair.handles[7] == 5
    with pytest.raises(RoomError, match="given before"):
        pair.prefill.at.request(8, IDS, pair.prefill.lists(), handle=5)
    pair.decode.at.open(7, pair.address, IDS, pair.decode.lists())
    pair.complete(7)
    with pytest.raises(RoomError, match="given before"):
        pair.prefill.at.request(8, IDS, pair.prefill.lists(), handle=5)
    for bad in (-1, 2**63):
        with pytest.raises(RoomError, match="handle"):
            pair.prefill.at.request(8, IDS, pair.prefill.lists(), handle=bad)


def test_a_room_that_the_engine_never_named_gives_it_no_events(pair: LocalPair) -> None:
    """Decode opened it and gave it up; what comes for it later has a handle, and its own two ends."""
    pair.start(6)
    pair.complete(6)
    opened = pair.decode.at.open(7, pair.address, IDS, pair.decode.lists())
    wait_until(lambda: pair.prefill.at.stats()["rooms"] == 1)
    pair.decode.at.abort(opened)
    pair.decode.released(7)
    assert pair.prefill.of(7) == []
    pair.prefill.at.request(7, IDS, pair.prefill.lists())
    assert len(pair.prefill.released(7)) == 2


def test_a_late_abort_harms_nobody(pair: LocalPair) -> None:
    pair.start(7)
    pair.complete(7)
    pair.start(8)
    pair.prefill.at.abort(pair.handles[7])
    pair.complete(8)


def test_an_abort_ends_the_room_of_its_handle_alone(pair: LocalPair) -> None:
    one, two = (pair.prefill.at.request(room, IDS, pair.prefill.lists(room)) for room in (1, 2))
    pair.prefill.at.abort(two)
    assert pair.prefill.released(2) == ["aborted:room_aborted", "releasable"]
    assert pair.prefill.of(1) == []
    pair.prefill.at.abort(one)
    assert pair.prefill.released(1) == ["aborted:room_aborted", "releasable"]
    with pytest.raises(RoomError, match="no such handle"):
        pair.decode.at.abort(1)  # a room's id


def test_handles_of_two_incarnations_differ(pair: LocalPair) -> None:
    other = LocalPair()
    try:
        assert next(pair.prefill.at._handles) != next(other.prefill.at._handles)
    finally:
        other.close()


def test_a_request_id_names_the_same_handle_on_every_rank() -> None:
    names = [f"request {number}" for number in range(1_000)]
    handles = [handle_of(name) for name in names]
    assert handles == [handle_of(name) for name in names] and len(set(handles)) == 1_000
    assert all(0 < handle < 2**63 for handle in handles)


def test_a_room_that_failed_before_it_began_ends(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks gave way to others: dropped in silence it would wait for ever."""
    monkeypatch.setattr(source_module, "MAX_WAITING_CHUNKS", 3)
    handle = pair.prefill.at.request(7, IDS, pair.prefill.lists())
    for start in range(4):
        pair.prefill.at.send(handle, start, start + 1, last=False)
    wait_until(lambda: pair.prefill.of(7) == ["failed:queue_full", "releasable"])


def test_a_rank_that_is_faster_than_the_request_fails_it_all_the_same(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MAX_WAITING_CHUNKS", 3)
    for start in range(4):
        pair.prefill.at.agent.send(77, Chunk(start, start + 1, False))
    wait_until(lambda: not pair.prefill.at.agent._calls)
    time.sleep(0.2)
    pair.prefill.at.request(7, IDS, pair.prefill.lists(), handle=77)
    wait_until(lambda: pair.prefill.of(7) == ["failed:queue_full", "releasable"])


class Flying:
    """A transfer that is on its way until it is told to land."""

    error = None
    nbytes = 8
    source_free = False

    def __init__(self) -> None:
        self.state = TransferState.PENDING

    def poll(self) -> TransferState:
        return self.state

    def cancel(self) -> None:
        """It is under way: no effect."""


class Rig:
    """A source side with one room that has a write in flight."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        backend: Any = SimpleNamespace(fence=lambda peer: False)
        self.side = SourceSide(RankId(0, 0), backend, self.said.append, digest=lambda *rows: 0, deadline_s=1.0)  # type: ignore[arg-type,return-value]
        self.flying = Flying()
        begun: Any = SimpleNamespace(room=7, generation=70, peer_epoch=3)
        self.entry = _Room(700, begun=begun, next_token=1)
        self.entry.flights.append(Flight(Chunk(0, 1, False), [(SimpleNamespace(), self.flying)]))  # type: ignore[list-item]
        self.side._rooms[700] = self.entry
        self.halt = Halt(room=7, generation=70, handle=700)

    def fences(self) -> list[bool]:
        return [report.fenced for report in self.said if isinstance(report, Fenced)]


def test_where_too_much_waits_nothing_that_flies_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, and its fence was answered at once: the write landed in memory that had been given back."""
    rig = Rig()
    monkeypatch.setattr(source_module, "MAX_WAITING_CHUNKS", 0)
    rig.side.chunk(700, Ready(Chunk(1, 2, True)))
    assert [report.error.code for report in rig.said if isinstance(report, RoomFault)] == ["queue_full"]
    rig.side.halt(rig.halt)
    rig.side.step()
    assert rig.fences() == []
    rig.flying.state = TransferState.DONE
    rig.side.step()
    assert rig.fences() == [True]


@pytest.mark.parametrize("gone", ["forgotten", "left by its control"])
def test_a_room_that_is_over_is_kept_while_something_flies(gone: str) -> None:
    rig = Rig()
    if gone == "forgotten":
        rig.side.forget(Forget(room=7, generation=70, handle=700))
    else:
        rig.side.leave_all()
    rig.side.halt(rig.halt)
    assert rig.side.step() and rig.fences() == [] and rig.side.in_flight == 1
    rig.flying.state = TransferState.FAILED
    rig.side.step()
    assert rig.fences() == [True] and rig.side.rooms == 0 and not rig.side.step()
    rig.side.chunk(700, Ready(Chunk(1, 2, True)))
    assert rig.side.rooms == 0, "what comes late waits for nothing"


@pytest.mark.parametrize("ends", ["before it is forgotten", "after"])
def test_a_proof_that_comes_with_the_end_of_a_room_is_told(ends: str) -> None:
    """Its source was free without one, so the room is over; decode still waits for it."""
    rig = Rig()
    rig.flying.state, rig.flying.source_free = TransferState.UNKNOWN, True
    rig.flying.error = RoomError("no word of it", code="transfer_unknown")  # type: ignore[assignment]
    rig.side.halt(rig.halt)
    assert rig.fences() == [False]
    if ends == "after":
        rig.side.forget(Forget(room=7, generation=70, handle=700))
    rig.flying.state = TransferState.DONE
    if ends != "after":
        rig.side.forget(Forget(room=7, generation=70, handle=700))
    rig.side.step()
    assert rig.fences() == [False, True] and rig.side.rooms == 0
