"""Between the last byte and the admit of a room that is verified; and whose handoff record counts."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import pytest

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.messages import AbortAck, Handoff, RoomEnd, StatusQuery, StatusReply, Writer
from sglang_pd.protocol.room import State
from sglang_pd.protocol.room_events import (
    Admit,
    Effect,
    Ended,
    Fail,
    PeerLost,
    Releasable,
    Revoke,
    Send,
    TimerFired,
    Verified,
    Verify,
)

from .pair import LIVENESS_S, PIECES, TOKENS, W0, W1, wrote
from .room_samples import GENERATION, GONE, HANDOFF, KEY, NOW_S, ROOM, decode_in

E = TypeVar("E")
DIFFERS = Fail(ErrorInfo(code="digest_mismatch", message="layer 3 differs"))


def of(effects: list[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_check_covers_every_record_with_elements_and_comes_once() -> None:
    room = decode_in(State.RECEIVING, verify=True)
    for piece in reversed(range(len(PIECES))):
        assert not of(room.handle(wrote(ROOM, GENERATION, piece), NOW_S), Verify), "the record is still missing"
    (check,) = of(room.handle(HANDOFF, NOW_S), Verify)
    assert set(check.records) == {wrote(ROOM, GENERATION, n) for n, piece in enumerate(PIECES) if piece[2] < piece[3]}
    for late in (HANDOFF, wrote(ROOM, GENERATION, 0), RoomEnd(**KEY, records=len(PIECES))):
        assert room.handle(late, NOW_S) == []
    assert room.now_in is State.VERIFYING


def test_nothing_is_admitted_before_it_was_compared() -> None:
    room = decode_in(State.VERIFYING)
    effects = room.handle(Verified(), NOW_S)
    assert of(effects, Admit) and of(effects, Releasable) and room.now_in is State.DONE and room.settled


def test_bytes_that_differ_are_nobodys_until_every_writer_is_fenced() -> None:
    """Every writer said that it was through, and one of them was wrong: its word is no fence."""
    room = decode_in(State.VERIFYING)
    effects = room.handle(DIFFERS, NOW_S)
    assert of(effects, Ended) and not of(effects, Releasable) and room.unfenced == {W0, W1}
    assert not of(room.handle(AbortAck(**KEY, writer=W0, fenced=True), NOW_S), Releasable)
    assert of(room.handle(AbortAck(**KEY, writer=W1, fenced=True), NOW_S), Releasable)


def test_a_peer_that_dies_meanwhile_is_fenced_by_own_ranks() -> None:
    room = decode_in(State.VERIFYING)
    effects = room.handle(PeerLost(GONE), NOW_S)
    assert of(effects, Revoke) and not of(effects, Releasable)


def test_there_is_nothing_to_ask_the_peer() -> None:
    room = decode_in(State.VERIFYING)
    assert room.next_timer_s() == NOW_S + LIVENESS_S
    effects = room.handle(TimerFired(), NOW_S + LIVENESS_S / 2)
    assert not [send for send in of(effects, Send) if isinstance(send.message, StatusQuery)]


def test_a_contradiction_that_comes_late_still_counts() -> None:
    record = Handoff(**KEY, writer=W0, covered_tokens=TOKENS, record=b"other facts")
    range_ = msgspec.structs.replace(wrote(ROOM, GENERATION, 0), token_stop=3)
    for late in (record, range_):
        room = decode_in(State.VERIFYING)
        assert of(room.handle(late, NOW_S), Ended)
        assert room.error is not None and room.error.code == "range_conflict"


@pytest.mark.parametrize("writer", [W1, Writer(7, 7)], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a status reply"])
@pytest.mark.parametrize("verify", [False, True], ids=["unverified", "verified"])
def test_a_record_of_a_rank_that_has_none_to_give_ends_the_room(writer: Writer, inside: bool, verify: bool) -> None:
    room = decode_in(State.RECEIVING, verify=verify)
    record = Handoff(**KEY, writer=writer, covered_tokens=TOKENS, record=b"EVIL")
    event: Any = StatusReply(**KEY, nonce=9, known=True, state="writing", handoff=record) if inside else record
    assert of(room.handle(event, NOW_S), Ended)
    assert room.error is not None and room.error.code == "range_conflict"
