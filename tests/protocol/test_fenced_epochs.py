"""What a prefill that lives may say of a conversation that was lost: nothing is written in it any more."""

from __future__ import annotations

import pytest

from sglang_pd.protocol.messages import Abort, AbortAck, Writer
from sglang_pd.protocol.room_events import Bound, RankFenced, Request, Send
from sglang_pd.protocol.rooms_prefill import PrefillRooms

from .pair import DIGEST, EXPECTED, LIMITS, LIVENESS_S, TOKENS, W0, W1, open_message
from .room_samples import GONE, NOW_S

OWN = 77


def table(*, room: bool = True) -> PrefillRooms:
    """A prefill that spoke to decode 22 as `OWN`, with one room that is being written."""
    found = PrefillRooms(11, "prefill", LIMITS)
    found.add_peer(22, "decode", LIVENESS_S, NOW_S, own_epoch=OWN)
    if room:
        found.request(1, Request(prompt_tokens=TOKENS, prompt_digest=DIGEST), NOW_S)
        found.receive(22, open_message(1, 5, OWN), NOW_S)
        found.local(1, Bound(EXPECTED), NOW_S)
    return found


def fence(found: PrefillRooms, writer: Writer, **said: bool) -> None:
    found.local(1, RankFenced(writer=writer, **{"fenced": True, **said}), NOW_S)


@pytest.mark.parametrize("room", [False, True])
def test_not_while_it_stands(room: bool) -> None:
    assert not table(room=room).fenced(OWN)


def test_not_before_every_writer_is_fenced() -> None:
    found = table()
    found.lose_peer(22, GONE, NOW_S)
    assert not found.fenced(OWN)
    fence(found, W0)
    assert not found.fenced(OWN)
    fence(found, W1)
    assert found.fenced(OWN) and not found.peers


def test_never_where_a_room_ended_without_its_proof() -> None:
    found = table()
    found.lose_peer(22, GONE, NOW_S)
    fence(found, W0)
    fence(found, W1, fenced=False, source_free=True)
    assert not found.rooms and not found.peers, "the source is free"
    assert not found.fenced(OWN), "but something may still land"


def test_one_without_rooms_is_fenced_once_it_is_lost() -> None:
    found = table(room=False)
    found.lose_peer(22, GONE, NOW_S)
    assert found.fenced(OWN)


def freed_unproven() -> PrefillRooms:
    """A room that is over at prefill while one of its writers may still land: its transport only let the source go."""
    found = table()
    found.receive(22, Abort(room=1, generation=5, error=GONE), NOW_S)
    fence(found, W0)
    fence(found, W1, fenced=False, source_free=True)
    assert not found.rooms
    return found


def test_a_proof_that_comes_late_reaches_decode() -> None:
    """It was dropped with the room, and decode's memory withheld for as long as both lived."""
    found = freed_unproven()
    assert found.owes(5) and found.owed_by(W1) == [(5, 1)] and found.owed_by(W0) == []
    assert found.late_fence(1, 4, W1) == found.late_fence(2, 5, W1) == [], "of another room"
    assert found.late_fence(1, 5, W1) == [Send(22, AbortAck(room=1, generation=5, writer=None, fenced=True))]
    (again,) = found.receive(22, Abort(room=1, generation=5, error=GONE), NOW_S)
    assert isinstance(again, Send) and again.message == AbortAck(room=1, generation=5, writer=None, fenced=True)
    found.check_integrity()
    found.lose_peer(22, GONE, NOW_S)
    assert found.fenced(OWN)


def test_a_proof_that_comes_after_the_peer_was_lost_is_for_the_next_handshake() -> None:
    found = freed_unproven()
    found.lose_peer(22, GONE, NOW_S)
    assert not found.fenced(OWN)
    assert found.late_fence(1, 5, W1) == []
    assert found.fenced(OWN)


def test_a_proof_is_awaited_while_its_peer_is_there_and_its_writer_lives() -> None:
    found = freed_unproven()
    assert found.awaited(frozenset()) and found.awaited(frozenset({W0})) and not found.awaited(frozenset({W1}))
    found.lose_peer(22, GONE, NOW_S)
    assert not found.awaited(frozenset())
    proven = freed_unproven()
    proven.late_fence(1, 5, W1)
    assert not proven.awaited(frozenset())
