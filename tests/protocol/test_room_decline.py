"""A room that decode refuses before it opens: prefill learns the cause, whichever comes first, and nobody else does."""

from __future__ import annotations

import pytest

from sglang_pd.protocol.errors import ErrorInfo, RoomError
from sglang_pd.protocol.messages import Abort, AbortAck
from sglang_pd.protocol.room import State
from sglang_pd.protocol.room_events import Ended
from sglang_pd.protocol.rooms_decode import DecodeRooms

from .pair import LIMITS, LIVENESS_S
from .test_room_table import NOW_S, REQUEST, answers, decode, prefill

CAUSE = ErrorInfo(code="prompt_too_long", message="the request can never fit", expected="<= 5", actual="7")


def declined(table: DecodeRooms, room: int) -> Abort:
    (message,) = answers(table.decline(room, 11, CAUSE))
    assert isinstance(message, Abort)
    return message


def fresh() -> DecodeRooms:
    table = DecodeRooms(22, LIMITS)
    table.add_peer(11, "prefill", LIVENESS_S, NOW_S)
    return table


@pytest.mark.parametrize("draining", [False, True])
def test_a_waiting_request_fails_with_the_cause(draining: bool) -> None:
    table, source = fresh(), prefill()
    table.draining = draining
    source.request(1, REQUEST, NOW_S)
    effects = source.receive(22, declined(table, 1), NOW_S)
    (end,) = [effect for effect in effects if isinstance(effect, Ended)]
    assert end.error == CAUSE and end.state == State.FAILED.value
    (ack,) = [message for message in answers(effects) if isinstance(message, AbortAck)]
    assert ack.fenced and table.receive(11, ack, NOW_S) == [] and not table.rooms


def test_a_request_that_comes_later_fails_as_well() -> None:
    table, source = fresh(), prefill()
    source.receive(22, declined(table, 1), NOW_S)
    with pytest.raises(RoomError) as caught:
        source.request(1, REQUEST, NOW_S)
    assert caught.value.info() == CAUSE


def test_a_cause_that_is_not_of_the_request_is_only_mentioned() -> None:
    table, source = fresh(), prefill()
    cause = ErrorInfo(code="pool_exhausted", message="no memory")
    (message,) = answers(table.decline(1, 11, cause))
    source.receive(22, message, NOW_S)
    with pytest.raises(RoomError, match="no memory") as caught:
        source.request(1, REQUEST, NOW_S)
    assert caught.value.code == "room_aborted"


def test_a_room_that_runs_is_not_declined() -> None:
    table, _ = decode()
    with pytest.raises(RoomError) as caught:
        table.decline(1, 11, CAUSE)
    assert caught.value.code == "room_duplicate"
    with pytest.raises(RoomError) as caught:
        table.decline(2, 12, CAUSE)
    assert caught.value.code == "peer_unknown"


def test_generations_keep_rising() -> None:
    table = fresh()
    first = declined(table, 1).generation
    second, _ = table.begin(2, 11, NOW_S)
    assert first < second < declined(table, 3).generation
