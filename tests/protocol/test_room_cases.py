"""Single stories of a room, each with the messages in the order that once broke a system of this kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest

from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.ledger import Expected
from sglang_pd.protocol.messages import (
    Abort,
    AbortAck,
    Admitted,
    Failed,
    Handoff,
    LeaseRenew,
    Message,
    Queued,
    RoomAccepted,
    RoomEnd,
    RoomOpen,
    RoomRefused,
    StatusQuery,
    StatusReply,
    Writer,
)
from sglang_pd.protocol.room import Memory, State
from sglang_pd.protocol.room_decode import DecodeRoom
from sglang_pd.protocol.room_events import (
    Admit,
    Alert,
    Allocated,
    Begin,
    Bound,
    Cancel,
    Computed,
    Effect,
    Ended,
    Fail,
    HandoffReady,
    LeaseExtended,
    PeerLost,
    QueueNote,
    RankFenced,
    RankWrote,
    Releasable,
    Request,
    Revoke,
    Revoked,
    Send,
    Start,
    Stop,
    TimerFired,
)
from sglang_pd.protocol.room_prefill import PrefillRoom

from .pair import DIGEST, EXPECTED, LIMITS, PIECES, RANKS, TOKENS, W0, W1, open_message, wrote
from .room_samples import BROKE, GENERATION, GONE, HANDOFF, KEY, NOW_S, OPEN, ROOM, decode_in, peer, prefill_in

M = TypeVar("M", bound=Message)
E = TypeVar("E")


def sent(effects: list[Effect], kind: type[M]) -> list[M]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def of(effects: list[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


# --- the legs meet ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["open", "request"])
def test_both_orders_of_the_legs_match_and_start_once(first: str) -> None:
    room = PrefillRoom(ROOM, LIMITS, NOW_S)
    request = Request(prompt_tokens=TOKENS, prompt_digest=DIGEST)
    effects: list[Effect] = []
    for leg in ("open", "request") if first == "open" else ("request", "open"):
        effects += room.handle(OPEN, NOW_S, peer()) if leg == "open" else room.handle(request, NOW_S)
    assert room.now_in is State.MATCHED
    assert of(effects, Start) == [Start(ROOM, GENERATION, OPEN)]
    assert [message.state for message in sent(effects, RoomAccepted)][-1] == "matched"


@pytest.mark.parametrize("state", [State.AWAIT_OPEN, State.COMPUTED_UNCLAIMED, State.AWAIT_REQUEST])
@pytest.mark.parametrize(("tokens", "digest"), [(TOKENS, DIGEST + 1), (TOKENS + 1, DIGEST)])
def test_another_prompt_fails_the_room_on_both_sides(state: State, tokens: int, digest: int) -> None:
    room = prefill_in(state)
    if state is State.AWAIT_REQUEST:
        effects = room.handle(Request(prompt_tokens=tokens, prompt_digest=digest), NOW_S)
    else:
        other = msgspec.structs.replace(OPEN, prompt_tokens=tokens, prompt_digest=digest)
        effects = room.handle(other, NOW_S, peer())
    failed = sent(effects, Failed)[0]
    assert failed.error.code == "prompt_mismatch"
    assert f"{TOKENS} tokens" in failed.error.expected + failed.error.actual
    assert sent(effects, AbortAck) == [AbortAck(**KEY, writer=None, fenced=True)] and not of(effects, Start)
    decode = decode_in(State.OPENING)
    ends = decode.handle(failed, NOW_S, decode.peer) + decode.handle(sent(effects, AbortAck)[0], NOW_S, decode.peer)
    assert [end.error for end in of(ends, Ended)] == [failed.error] and of(ends, Releasable)


def test_a_lease_is_renewed_by_decode_and_by_this_side_but_never_beyond_its_duration_at_once() -> None:
    room = prefill_in(State.COMPUTED_UNCLAIMED)
    for step in range(1, 60):  # ten minutes of a decode that waits for memory
        now_s = NOW_S + 10.0 * step
        room.handle(TimerFired(), now_s)
        room.handle(LeaseRenew(room=ROOM, lease_ms=2**32 - 1), now_s)
        assert room.deadline_s() == now_s + LIMITS.lease_s
    room.handle(LeaseExtended(100.0), now_s)
    assert room.deadline_s() == now_s + 100.0
    effects = room.handle(TimerFired(), now_s + 100.0)
    assert room.error is not None and room.error.code == "lease_expired"
    assert of(effects, Ended) and of(effects, Releasable)
    with pytest.raises(LocalProtocolError):
        room.handle(LeaseExtended(1.0), now_s + 101.0)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(LocalProtocolError, match="lease"):
            prefill_in(State.AWAIT_OPEN).handle(LeaseExtended(bad), NOW_S)


def test_computing_restarts_the_lease() -> None:
    room = prefill_in(State.AWAIT_OPEN)
    room.handle(Computed(), NOW_S + 20)
    assert room.deadline_s() == NOW_S + 20 + LIMITS.lease_s


def test_a_queued_request_says_so_also_when_it_queued_before_the_open() -> None:
    room = prefill_in(State.AWAIT_OPEN)
    assert not room.handle(QueueNote(4), NOW_S)
    effects = room.handle(OPEN, NOW_S, peer())
    assert sent(effects, Queued) == [Queued(**KEY, ahead=4)]


def test_a_repeated_open_is_answered_again_and_another_one_is_refused() -> None:
    room = prefill_in(State.WRITING)
    assert sent(room.handle(OPEN, NOW_S, room.peer), RoomAccepted) == [RoomAccepted(**KEY, state="writing")]
    with pytest.raises(RemoteProtocolError, match="another open"):
        room.handle(msgspec.structs.replace(OPEN, prefix_tokens=4), NOW_S, room.peer)
    assert room.now_in is State.WRITING


# --- streaming -------------------------------------------------------------------------------------------------------


def test_prefill_sends_records_then_handoff_then_end_and_releases_at_the_last_done() -> None:
    room = prefill_in(State.MATCHED)
    room.handle(Bound(EXPECTED), NOW_S)
    for piece in (5, 4, 3, 2, 1):
        assert sent(room.handle(RankWrote(wrote(ROOM, GENERATION, piece)), NOW_S), type(OPEN)) == []
    ready = HandoffReady(writer=W0, covered_tokens=TOKENS, record=b"facts")
    with pytest.raises(LocalProtocolError, match="last transfer"):
        room.handle(ready, NOW_S)
    assert not of(room.handle(RankWrote(wrote(ROOM, GENERATION, 0)), NOW_S), Releasable)
    assert not room.handle(RankWrote(wrote(ROOM, GENERATION, 0)), NOW_S), "a repeated report goes nowhere"
    effects = room.handle(ready, NOW_S)
    assert sent(effects, Handoff) and sent(effects, RoomEnd) == [RoomEnd(**KEY, records=len(PIECES))]
    assert of(effects, Releasable) and room.now_in is State.SENT
    ended = room.handle(Admitted(**KEY), NOW_S)
    assert of(ended, Ended) == [Ended(ROOM, GENERATION, "done", None)] and room.settled


def test_prefill_refuses_its_own_ranks_lies() -> None:
    room = prefill_in(State.WRITING)
    with pytest.raises(LocalProtocolError) as caught:
        room.handle(RankWrote(replace_record(3, token_stop=TOKENS + 1)), NOW_S)
    assert caught.value.code == "range_conflict"
    with pytest.raises(LocalProtocolError):
        room.handle(RankWrote(msgspec.structs.replace(wrote(ROOM, GENERATION, 3), room=1)), NOW_S)
    with pytest.raises(LocalProtocolError) as caught:
        room.handle(HandoffReady(writer=W0, covered_tokens=1, record=b""), NOW_S)
    assert caught.value.code == "prompt_mismatch"
    with pytest.raises(LocalProtocolError, match="too large"):
        room.handle(HandoffReady(writer=W0, covered_tokens=TOKENS, record=bytes(65_537)), NOW_S)
    room.handle(HandoffReady(writer=W0, covered_tokens=TOKENS, record=b"a"), NOW_S)
    with pytest.raises(LocalProtocolError, match="once"):
        room.handle(HandoffReady(writer=W0, covered_tokens=TOKENS, record=b"b"), NOW_S)


def replace_record(piece: int, **changes: Any) -> Any:
    return msgspec.structs.replace(wrote(ROOM, GENERATION, piece), **changes)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (1, 1, 4, 0, 5, 3, 3, 2)])
@pytest.mark.parametrize("handoff_at", [0, 3, 99])
def test_decode_admits_on_all_ranges_and_the_record_in_any_order(order: tuple[int, ...], handoff_at: int) -> None:
    room = decode_in(State.OPENING)
    arrivals: list[Message] = [wrote(ROOM, GENERATION, piece) for piece in order]
    arrivals.insert(min(handoff_at, len(arrivals)), HANDOFF)
    for n, message in enumerate(arrivals):
        effects = room.handle(message, NOW_S, room.peer)
        if n < len(arrivals) - 1:
            assert not of(effects, Admit)
    assert [type(effect) for effect in effects] == [Admit, Ended, Send, Releasable]
    assert sent(effects, Admitted) and room.now_in is State.DONE
    assert sent(room.handle(RoomEnd(**KEY, records=6), NOW_S, room.peer), Admitted), "a lost Admitted is said again"


def test_rooms_without_any_component_are_complete_with_their_record() -> None:
    room = decode_in(State.ALLOCATING)
    room.handle(Allocated(open=OPEN, expected=(), record_writer=W0, ranks=RANKS), NOW_S)
    assert of(room.handle(HANDOFF, NOW_S, room.peer), Admit)
    prefill = prefill_in(State.MATCHED)
    prefill.handle(Bound(()), NOW_S)
    ready = HandoffReady(writer=W0, covered_tokens=TOKENS, record=b"facts")
    assert sent(prefill.handle(ready, NOW_S), RoomEnd) == [RoomEnd(**KEY, records=0)]


def test_an_empty_plan_still_owes_its_record() -> None:
    room = decode_in(State.ALLOCATING)
    owed = (Expected(W0, "KV", (), 0, 0),)
    room.handle(Allocated(open=OPEN, expected=owed, record_writer=W0, ranks=RANKS), NOW_S)
    assert not of(room.handle(HANDOFF, NOW_S, room.peer), Admit)
    empty = replace_record(5, writer=W0, component="KV")
    assert of(room.handle(empty, NOW_S, room.peer), Admit)


def test_decode_refuses_a_record_that_stands_for_another_prompt() -> None:
    room = decode_in(State.RECEIVING)
    effects = room.handle(msgspec.structs.replace(HANDOFF, covered_tokens=1), NOW_S, room.peer)
    assert room.error is not None and room.error.code == "prompt_mismatch" and room.now_in is State.FAILED
    assert sent(effects, Abort) and not of(effects, Admit)
    second = decode_in(State.RECEIVING)
    second.handle(HANDOFF, NOW_S, second.peer)
    assert not second.handle(HANDOFF, NOW_S, second.peer)
    second.handle(msgspec.structs.replace(HANDOFF, record=b"other"), NOW_S, second.peer)
    assert second.error is not None and second.error.code == "range_conflict"


def test_overlapping_records_fail_the_room_and_their_writers_word_proves_nothing_any_more() -> None:
    room = decode_in(State.OPENING)
    for piece in (0, 1, 2):  # all that W0 owes
        room.handle(wrote(ROOM, GENERATION, piece), NOW_S, room.peer)
    effects = room.handle(replace_record(0, token_stop=3), NOW_S, room.peer)
    assert room.error is not None and room.error.code == "range_conflict" and sent(effects, Abort)
    assert room.unfenced == {W0, W1}
    room.handle(AbortAck(**KEY, writer=W1, fenced=True), NOW_S, room.peer)
    assert room.state.memory is Memory.QUARANTINED
    assert of(room.handle(AbortAck(**KEY, writer=W0, fenced=True), NOW_S, room.peer), Releasable)


# --- ends and fences -------------------------------------------------------------------------------------------------


def test_abort_while_ranks_write_acks_each_writer_once_and_last_byte_first() -> None:
    room = prefill_in(State.WRITING)  # W0 is through, W1 has not begun
    effects = room.handle(Abort(**KEY, error=GONE), NOW_S, room.peer)
    assert of(effects, Stop) == [Stop(ROOM, GENERATION, frozenset({W1}))]
    assert sent(effects, AbortAck) == [AbortAck(**KEY, writer=W0, fenced=True)]
    assert not of(effects, Releasable) and not sent(effects, Failed)
    late = room.handle(RankWrote(wrote(ROOM, GENERATION, 3)), NOW_S)
    assert not late, "a report that crossed with the stop is no news"
    unsure = room.handle(RankFenced(writer=W1, fenced=False, reason="status unknown"), NOW_S)
    assert sent(unsure, AbortAck)[0].fenced is False and not of(unsure, Releasable)
    assert not room.handle(RankFenced(writer=W1, fenced=False), NOW_S), "said once"
    alert = room.handle(TimerFired(), NOW_S + LIMITS.fence_alarm_s)
    assert of(alert, Alert) and room.state.memory is Memory.QUARANTINED
    sure = room.handle(RankFenced(writer=W1, fenced=True), NOW_S)
    assert sent(sure, AbortAck) == [AbortAck(**KEY, writer=W1, fenced=True)] and of(sure, Releasable)
    again = room.handle(Abort(**KEY, error=GONE), NOW_S, room.peer)
    assert sent(again, AbortAck) == [AbortAck(**KEY, writer=None, fenced=True)]
    with pytest.raises(LocalProtocolError):
        room.handle(RankFenced(writer=Writer(7, 7), fenced=True), NOW_S)


def test_a_dead_ranks_memory_is_released_but_nothing_is_proven() -> None:
    room = prefill_in(State.WRITING)
    room.handle(Fail(BROKE), NOW_S)
    effects = room.handle(RankFenced(writer=W1, fenced=False, source_free=True, reason="killed"), NOW_S)
    assert of(effects, Releasable) and room.settled and not room.proven
    assert [ack.fenced for ack in room.all_acks()] == [True, False]


def test_decode_waits_for_every_writer_or_for_all_of_its_own_ranks() -> None:
    room = decode_in(State.RECEIVING)
    room.handle(PeerLost(BROKE), NOW_S)
    assert not of(room.handle(Revoked("d0"), NOW_S), Releasable)
    assert of(room.handle(Revoked("d1"), NOW_S), Releasable)
    with pytest.raises(LocalProtocolError):
        room.handle(Revoked("elsewhere"), NOW_S)
    other = decode_in(State.RECEIVING)
    effects = other.handle(Cancel(), NOW_S)
    assert sent(effects, Abort)[0].error.code == "room_aborted" and not of(effects, Revoke)
    assert not of(other.handle(AbortAck(**KEY, writer=W0, fenced=True), NOW_S, other.peer), Releasable)
    assert of(other.handle(AbortAck(**KEY, writer=W1, fenced=False), NOW_S, other.peer), Alert)
    assert not other.settled
    # The peer dies in quarantine: now only the own ranks can prove anything.
    revoke = of(other.handle(PeerLost(BROKE), NOW_S), Revoke)
    assert (
        revoke
        and revoke[0].ranks == RANKS
        and other.error == GONE.__class__(code="room_aborted", message=other.error.message)
    )  # type: ignore[union-attr]


def test_a_writer_that_has_written_all_it_owes_is_fenced_even_if_it_dies() -> None:
    room = decode_in(State.OPENING)
    for piece in range(len(PIECES)):
        room.handle(wrote(ROOM, GENERATION, piece), NOW_S, room.peer)
    effects = room.handle(PeerLost(BROKE), NOW_S)  # before the handoff record
    assert of(effects, Ended)[0].state == "failed" and of(effects, Releasable) and not of(effects, Revoke)


def test_quarantine_repeats_the_abort_and_alerts_but_never_releases() -> None:
    room = decode_in(State.RECEIVING)
    room.handle(Fail(BROKE), NOW_S)
    aborts = alerts = 0
    now_s = NOW_S
    while now_s < NOW_S + 3_600:
        now_s = max(room.next_timer_s() or 0, now_s + 0.001)
        effects = room.handle(TimerFired(), now_s)
        aborts += len(sent(effects, Abort))
        alerts += len(of(effects, Alert))
        assert not of(effects, Releasable) and room.state.memory is Memory.QUARANTINED
    assert 100 < aborts < 3_600 and 100 < alerts <= 3_600 / LIMITS.fence_alarm_s + 1


def test_the_first_cause_is_kept_and_reaches_both_sides() -> None:
    prefill, decode = prefill_in(State.WRITING), decode_in(State.RECEIVING)
    first = ErrorInfo(code="digest_mismatch", message="layer 3 differs")
    abort = sent(decode.handle(Fail(first), NOW_S), Abort)[0]
    for late in (Fail(BROKE), Cancel(), PeerLost(BROKE)):
        decode.handle(late, NOW_S)
    prefill.handle(abort, NOW_S, prefill.peer)
    prefill.handle(Fail(BROKE), NOW_S)
    assert decode.error == prefill.error == first
    assert decode.now_in is prefill.now_in is State.FAILED


def test_refused_is_a_fence() -> None:
    room = decode_in(State.OPENING)
    effects = room.handle(RoomRefused(**KEY, error=BROKE), NOW_S, room.peer)
    assert of(effects, Releasable) and not sent(effects, Abort)
    cancelled = decode_in(State.OPENING)
    cancelled.handle(Cancel(), NOW_S)
    assert of(cancelled.handle(RoomRefused(**KEY, error=GONE), NOW_S, cancelled.peer), Releasable)


# --- lost messages ---------------------------------------------------------------------------------------------------


def ask(decode: DecodeRoom, prefill: PrefillRoom, now_s: float) -> list[Effect]:
    """One silence at decode, one status round trip."""
    out: list[Effect] = []
    queries = sent(decode.handle(TimerFired(), now_s), StatusQuery)
    while queries:
        reply = sent(prefill.handle(queries.pop(), now_s, prefill.peer), StatusReply)[0]
        effects = decode.handle(reply, now_s, decode.peer)
        queries += sent(effects, StatusQuery)
        out += effects
    return out


def test_a_status_query_recovers_everything_that_was_lost() -> None:
    prefill, decode = prefill_in(State.SENT), decode_in(State.OPENING)
    decode.handle(wrote(ROOM, GENERATION, 4), NOW_S, decode.peer)
    effects = ask(decode, prefill, NOW_S + 2)
    assert of(effects, Admit) and decode.now_in is State.DONE


def test_a_status_query_recovers_a_failure_and_its_fences() -> None:
    prefill, decode = prefill_in(State.WRITING), decode_in(State.ACCEPTED)
    prefill.handle(Fail(BROKE), NOW_S)
    ask(decode, prefill, NOW_S + 2)
    assert decode.error == BROKE and decode.unfenced == {W1}


def test_many_records_come_in_pages() -> None:
    layers = tuple(range(1_300))
    owed = (Expected(W0, "KV", layers, 0, TOKENS),)
    prefill, decode = prefill_in(State.MATCHED), decode_in(State.ALLOCATING)
    prefill.handle(Bound(owed), NOW_S)
    decode.handle(Allocated(open=OPEN, expected=owed, record_writer=W0, ranks=RANKS), NOW_S)
    for layer in layers:
        record = replace_record(0, layer_start=layer, layer_stop=layer + 1, token_stop=TOKENS, last=layer == 1_299)
        prefill.handle(RankWrote(record), NOW_S)
    prefill.handle(HandoffReady(writer=W0, covered_tokens=TOKENS, record=b"facts"), NOW_S)
    assert of(ask(decode, prefill, NOW_S + 2), Admit)


def test_a_lost_open_is_sent_again_but_a_stale_answer_kills_nothing() -> None:
    room = decode_in(State.OPENING)
    query = sent(room.handle(TimerFired(), NOW_S + 2), StatusQuery)[0]
    unknown = StatusReply(**KEY, nonce=query.nonce, known=False, state="unknown")
    assert sent(room.handle(unknown, NOW_S + 2, room.peer), RoomOpen) == [OPEN]
    # Asked while opening, overtaken by the acceptance: the old answer says nothing any more.
    late = sent(room.handle(TimerFired(), NOW_S + 9), StatusQuery)[0]
    room.handle(RoomAccepted(**KEY, state="matched"), NOW_S + 9, room.peer)
    room.handle(StatusReply(**KEY, nonce=late.nonce, known=False, state="unknown"), NOW_S + 9, room.peer)
    assert room.now_in is State.ACCEPTED
    asked = sent(room.handle(TimerFired(), NOW_S + 29), StatusQuery)[0]
    effects = room.handle(StatusReply(**KEY, nonce=asked.nonce, known=False, state="unknown"), NOW_S + 29, room.peer)
    assert room.error is not None and room.error.code == "room_unknown" and sent(effects, Abort)


def test_an_unanswered_query_keeps_its_nonce_so_that_a_slow_answer_counts() -> None:
    room = decode_in(State.ACCEPTED)
    first = sent(room.handle(TimerFired(), NOW_S + 2), StatusQuery)[0]
    second = sent(room.handle(TimerFired(), NOW_S + 20), StatusQuery)[0]
    assert first.nonce == second.nonce
    room.handle(StatusReply(**KEY, nonce=first.nonce, known=False, state="unknown"), NOW_S + 21, room.peer)
    assert room.now_in is State.FAILED


def test_an_end_with_too_few_ranges_fails_with_the_missing_writer_named() -> None:
    room = decode_in(State.OPENING)
    for piece in (0, 1, 2, 3):
        room.handle(wrote(ROOM, GENERATION, piece), NOW_S, room.peer)
    room.handle(HANDOFF, NOW_S, room.peer)
    effects = room.handle(RoomEnd(**KEY, records=4), NOW_S, room.peer)
    assert room.error is not None and room.error.code == "ranges_incomplete"
    assert "pp0.tp1/KV: layer 3" in room.error.message and sent(effects, Abort)
    lossy = decode_in(State.RECEIVING)
    assert sent(lossy.handle(RoomEnd(**KEY, records=6), NOW_S, lossy.peer), StatusQuery), (
        "some are on their way or lost"
    )


def test_sent_repeats_its_end_until_admitted() -> None:
    room = prefill_in(State.SENT)
    assert room.peer is not None
    ends = 0
    for step in range(200):
        room.peer.heard(NOW_S + step)
        ends += len(sent(room.handle(TimerFired(), NOW_S + step), RoomEnd))
    assert 10 < ends < 60
    assert of(room.handle(Admitted(**KEY), NOW_S + 201, room.peer), Ended)


def test_a_draining_peer_is_given_its_own_deadline_and_one_liveness() -> None:
    room = decode_in(State.RECEIVING)
    room.peer.drain_until_s = NOW_S + 50
    for step in range(1, 80):
        room.peer.heard(NOW_S + step)
        room.handle(TimerFired(), NOW_S + step)
    assert room.now_in is State.RECEIVING
    room.handle(TimerFired(), NOW_S + 50 + room.peer.liveness_s)
    assert room.error is not None and room.error.code == "draining"


def test_decode_that_waits_for_memory_renews_the_lease() -> None:
    room = decode_in(State.ALLOCATING)
    effects = room.handle(TimerFired(), NOW_S + LIMITS.lease_renew_s)
    assert sent(effects, LeaseRenew)[0].room == ROOM
    room.peer.heard(NOW_S + 40)
    effects = room.handle(TimerFired(), NOW_S + LIMITS.alloc_wait_s)
    assert room.error is not None and room.error.code == "pool_exhausted"
    assert sent(effects, Abort), "prefill need not wait for its lease"


def test_bad_allocations_are_the_callers_fault() -> None:
    good = Allocated(open=OPEN, expected=EXPECTED, record_writer=W0, ranks=RANKS)
    for bad in (
        replace(good, ranks=frozenset()),
        replace(good, expected=(*EXPECTED, EXPECTED[0])),
        replace(good, open=open_message(ROOM, GENERATION, to_epoch=12)),
        replace(good, open=open_message(ROOM, GENERATION + 1, to_epoch=11)),
    ):
        room = decode_in(State.ALLOCATING)
        with pytest.raises(LocalProtocolError):
            room.handle(bad, NOW_S)
        assert room.now_in is State.ALLOCATING and room.state.memory is Memory.UNTOUCHED
    assert DecodeRoom(ROOM, GENERATION, peer(11), LIMITS, NOW_S).handle(Begin(), NOW_S) == []
