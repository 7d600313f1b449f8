"""The tables: who may open what, what is answered when it is too late, and what a stranger can make grow."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, PdError, RemoteProtocolError, RoomError
from sglang_pd.protocol.indices import pack_indices
from sglang_pd.protocol.messages import (
    Abort,
    AbortAck,
    Admitted,
    Draining,
    Failed,
    Heartbeat,
    Hello,
    LeaseRenew,
    Message,
    Refusal,
    RoomAccepted,
    RoomEnd,
    RoomRefused,
    StatusQuery,
    StatusReply,
)
from sglang_pd.protocol.room import State
from sglang_pd.protocol.room_events import (
    Allocated,
    Bound,
    Cancel,
    Computed,
    Effect,
    Ended,
    Fail,
    HandoffReady,
    RankFenced,
    Releasable,
    Request,
    Send,
)
from sglang_pd.protocol.room_table import TableLimits
from sglang_pd.protocol.rooms_decode import DecodeRooms
from sglang_pd.protocol.rooms_prefill import PrefillRooms
from sglang_pd.protocol.tickets import Ticket, encode_ticket

from .message_samples import SAMPLES
from .pair import DIGEST, EXPECTED, LIMITS, LIVENESS_S, RANKS, TOKENS, W0, open_message, wrote

NOW_S = 100.0
REQUEST = Request(prompt_tokens=TOKENS, prompt_digest=DIGEST)
GONE = ErrorInfo(code="room_aborted", message="client left")


def prefill(**bounds: int) -> PrefillRooms:
    table = PrefillRooms(11, "prefill", LIMITS, TableLimits(**bounds))
    for epoch in (22, 33):
        table.add_peer(epoch, f"decode-{epoch}", LIVENESS_S, NOW_S)
    return table


def decode() -> tuple[DecodeRooms, int]:
    """A table with one room, 1, that is being opened; and its generation."""
    table = DecodeRooms(22, LIMITS)
    table.add_peer(11, "prefill", LIVENESS_S, NOW_S)
    generation, _ = table.begin(1, 11, NOW_S)
    table.local(
        1, Allocated(open=open_message(1, generation, 11), expected=EXPECTED, record_writer=W0, ranks=RANKS), NOW_S
    )
    return table, generation


def answers(effects: list[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def refusal_code(effects: list[Effect]) -> str:
    (message,) = answers(effects)
    assert isinstance(message, RoomRefused)
    return message.error.code


# --- one open generation a room --------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["concurrent", "after_abort", "after_done"])
@pytest.mark.parametrize("other", [22, 33])
def test_a_second_open_of_a_room_is_409_and_harms_nobody(when: str, other: int) -> None:
    table = prefill()
    table.request(1, REQUEST, NOW_S)
    table.receive(22, open_message(1, 5, 11), NOW_S)
    if when == "after_abort":
        table.receive(22, Abort(room=1, generation=5, error=GONE), NOW_S)
    state = table.rooms[1].now_in if when == "concurrent" else None
    if when == "after_done":
        finish(table, 1, 5)
    assert refusal_code(table.receive(other, open_message(1, 6, 11), NOW_S)) == "room_duplicate"
    assert refusal_code(table.receive(other, open_message(1, 6, 11), NOW_S)) == "room_duplicate", "also when repeated"
    with pytest.raises(RoomError) as caught:
        table.request(1, REQUEST, NOW_S)
    assert caught.value.code == "room_duplicate" and caught.value.http_status == 409
    if when == "concurrent":
        assert table.rooms[1].now_in is state and table.rooms[1].generation == 5
    table.check_integrity()


def finish(table: PrefillRooms, room: int, generation: int) -> None:
    table.local(room, Bound(()), NOW_S)
    table.local(room, HandoffReady(writer=W0, covered_tokens=TOKENS, record=b""), NOW_S)
    table.receive(22, Admitted(room=room, generation=generation), NOW_S)
    assert room not in table.rooms


def test_an_open_refused_once_is_refused_for_ever() -> None:
    table = prefill(rooms=1)
    table.receive(22, open_message(1, 5, 11), NOW_S)
    assert refusal_code(table.receive(22, open_message(2, 6, 11), NOW_S)) == "queue_full"
    table.receive(22, Abort(room=1, generation=5, error=GONE), NOW_S)  # now there would be room
    again = open_message(2, 6, 11)
    assert refusal_code(table.receive(22, again, NOW_S)) == "queue_full", "decode has given its memory to someone else"
    # And even when nothing of it is remembered any more.
    table.tick(NOW_S + LIVENESS_S - 1)
    table.peers[22].heard(NOW_S + 500)
    table.tick(NOW_S + 500)
    assert refusal_code(table.receive(22, again, NOW_S + 500)) == "room_expired"
    assert isinstance(answers(table.receive(22, open_message(3, 7, 11), NOW_S + 500))[0], RoomAccepted)


def test_an_abort_that_overtakes_its_open_wins() -> None:
    table = prefill()
    acks = answers(table.receive(22, Abort(room=1, generation=5, error=GONE), NOW_S))
    assert acks == [AbortAck(room=1, generation=5, writer=None, fenced=True)]
    assert refusal_code(table.receive(22, open_message(1, 5, 11), NOW_S)) == "room_aborted"
    with pytest.raises(RoomError) as caught:
        table.request(1, REQUEST, NOW_S)
    assert caught.value.code == "room_aborted"
    # Another peer's room of that id is not its business.
    assert isinstance(answers(table.receive(33, open_message(1, 9, 11), NOW_S))[0], RoomAccepted)


def test_a_decode_that_waits_for_memory_may_give_an_unclaimed_room_up() -> None:
    table = prefill()
    table.request(1, REQUEST, NOW_S)
    effects = table.receive(22, Abort(room=1, generation=5, error=GONE), NOW_S)
    assert any(isinstance(effect, Releasable) for effect in effects) and 1 not in table.rooms
    assert table.receive(22, open_message(1, 5, 11), NOW_S)
    other = prefill()
    other.request(1, REQUEST, NOW_S)
    stale = ErrorInfo(code="room_unknown", message="decode does not know that room (any more)")
    other.receive(22, Abort(room=1, generation=5, error=stale), NOW_S)
    assert other.rooms[1].now_in is State.AWAIT_OPEN


def test_a_room_rejected_before_its_open_says_why() -> None:
    table = prefill()
    table.request(1, REQUEST, NOW_S)
    why = ErrorInfo(code="prompt_too_long", message="8 tokens, the limit is 4")
    table.local(1, Fail(why), NOW_S)
    (message,) = answers(table.receive(22, open_message(1, 5, 11), NOW_S))
    assert isinstance(message, RoomRefused) and message.error == why


def test_an_expired_lease_is_never_used() -> None:
    table = prefill()
    table.request(1, REQUEST, NOW_S)
    table.local(1, Computed(), NOW_S)
    late_s = NOW_S + LIMITS.lease_s
    effects = table.receive(22, open_message(1, 5, 11), late_s)  # before any tick
    assert [effect.error.code for effect in effects if isinstance(effect, Ended) and effect.error] == ["lease_expired"]
    (message,) = answers(effects)
    assert isinstance(message, RoomRefused) and message.error.code == "lease_expired"
    assert table.counts["expired_then_opened"] == 1
    renewed = prefill()
    renewed.request(2, REQUEST, NOW_S)
    assert any(isinstance(e, Ended) for e in renewed.receive(22, LeaseRenew(room=2, lease_ms=10_000), late_s))


def test_leases_all_expire_in_one_pass() -> None:
    table = prefill()
    for room in range(1, 5):
        table.request(room, REQUEST, NOW_S)
    for step in range(1, 10):
        table.receive(22, LeaseRenew(room=1, lease_ms=60_000), NOW_S + 10 * step)
    table.tick(NOW_S + 90)
    assert set(table.rooms) == {1}


# --- incarnations ----------------------------------------------------------------------------------------------------


def test_tickets_name_the_incarnation() -> None:
    table = prefill()
    table.request(1, REQUEST, NOW_S)
    ticket = table.ticket(1)
    for wrong in (encode_ticket(Ticket("prefill", 12, 1)), encode_ticket(Ticket("prefill", 11, 2))):
        assert refusal_code(table.receive(22, open_message(1, 5, 11, ticket=wrong), NOW_S)) == "epoch_stale"
    with pytest.raises(RemoteProtocolError):
        table.receive(22, open_message(1, 6, 11, ticket="nonsense"), NOW_S)
    assert isinstance(answers(table.receive(22, open_message(1, 7, 11, ticket=ticket), NOW_S))[0], RoomAccepted)
    with pytest.raises(LocalProtocolError):
        table.ticket(1)


def test_messages_of_strangers_and_of_the_dead_are_refused() -> None:
    table = prefill()
    with pytest.raises(RemoteProtocolError) as caught:
        table.receive(99, open_message(1, 5, 11), NOW_S)
    assert caught.value.code == "peer_unknown"
    assert refusal_code(table.receive(22, open_message(1, 5, 12), NOW_S)) == "epoch_stale"
    table.lose_peer(22, ErrorInfo(code="peer_lost", message="x"), NOW_S)
    with pytest.raises(RemoteProtocolError) as caught:
        table.receive(22, Heartbeat(peer_epoch=11, seq=1, state="ready"), NOW_S)
    assert caught.value.code == "epoch_stale"
    with pytest.raises(LocalProtocolError):
        table.add_peer(22, "decode-22", LIVENESS_S, NOW_S)
    with pytest.raises(RemoteProtocolError):
        table.receive(33, Heartbeat(peer_epoch=12, seq=1, state="ready"), NOW_S)
    for wrong in ("hello", "wrote", "room_accepted"):
        with pytest.raises(RemoteProtocolError):
            table.receive(33, SAMPLES[wrong], NOW_S)
    assert isinstance(SAMPLES["hello"], Hello)
    table.check_integrity()


def test_silence_loses_a_peer_and_its_rooms_but_no_others() -> None:
    table = prefill()
    for epoch, room in ((22, 1), (33, 2)):
        table.request(room, REQUEST, NOW_S)
        table.receive(epoch, open_message(room, 5, 11), NOW_S)
    table.receive(33, Heartbeat(peer_epoch=11, seq=1, state="ready"), NOW_S + LIVENESS_S - 1)
    effects = table.tick(NOW_S + LIVENESS_S)
    assert [(e.room, e.error.code) for e in effects if isinstance(e, Ended) and e.error] == [(1, "peer_lost")]
    assert set(table.peers) == {33} and set(table.rooms) == {2}
    table.check_integrity()


def test_a_refusal_by_the_peer_fails_the_room_it_names() -> None:
    table, generation = decode()
    broken = ErrorInfo(code="message_malformed", message="no")
    effects = table.receive(11, Refusal(error=broken, refused_type=16, room=1, generation=generation), NOW_S)
    assert [e.error for e in effects if isinstance(e, Ended)] == [broken]
    assert table.receive(11, Refusal(error=broken, refused_type=16, room=9, generation=9), NOW_S) == []
    stale = ErrorInfo(code="peer_unknown", message="who are you")
    table.receive(11, Refusal(error=stale, refused_type=64), NOW_S)
    assert table.peers[11].lost is not None, "kept only for the fence of room 1"


def test_draining_takes_no_new_rooms_but_finishes_known_ones() -> None:
    table = prefill()
    table.request(1, REQUEST, NOW_S)
    table.draining = True
    assert isinstance(answers(table.receive(22, open_message(1, 5, 11), NOW_S))[0], RoomAccepted)
    assert refusal_code(table.receive(22, open_message(2, 6, 11), NOW_S)) == "draining"
    with pytest.raises(RoomError) as caught:
        table.request(3, REQUEST, NOW_S)
    assert caught.value.code == "draining"
    table.fail_all(ErrorInfo(code="draining", message="time is up"), NOW_S)
    assert not table.rooms
    other, _ = decode()
    other.receive(11, Draining(deadline_ms=5_000), NOW_S)
    for step in range(1, 100):
        if 11 in other.peers:
            other.peers[11].heard(NOW_S + step)
        other.tick(NOW_S + step)
    assert other.rooms[1].error is not None and other.rooms[1].error.code == "draining"


# --- decode ----------------------------------------------------------------------------------------------------------


def test_generations_rise_and_differ_between_incarnations() -> None:
    table, first = decode()
    second, _ = table.begin(2, 11, NOW_S)
    assert second == first + 1
    assert DecodeRooms(23, LIMITS)._first_generation != DecodeRooms(22, LIMITS)._first_generation
    for epoch in (1, 2**31, 2**63, 2**64 - 1):
        assert 1 <= DecodeRooms(epoch, LIMITS)._first_generation <= 2**62
    for room, peer_epoch, code in ((1, 11, "room_duplicate"), (3, 12, "peer_unknown")):
        with pytest.raises(RoomError) as caught:
            table.begin(room, peer_epoch, NOW_S)
        assert caught.value.code == code


def test_prefill_is_told_of_rooms_that_are_over_here() -> None:
    table, generation = decode()
    key = {"room": 1, "generation": generation}
    table.local(1, Cancel(), NOW_S)
    table.receive(11, AbortAck(**key, writer=None, fenced=True), NOW_S)
    assert not table.rooms
    (message,) = answers(table.receive(11, RoomEnd(**key, records=1), NOW_S))
    assert isinstance(message, Abort) and message.error.code == "room_aborted"
    assert table.receive(11, Failed(**key, error=GONE), NOW_S) == []
    done, again = decode()
    for piece in range(6):
        done.receive(11, wrote(1, again, piece), NOW_S)
    sample = SAMPLES["handoff"]
    done.receive(11, msgspec.structs.replace(sample, room=1, generation=again, writer=W0, covered_tokens=TOKENS), NOW_S)
    assert answers(done.receive(11, RoomEnd(room=1, generation=again, records=6), NOW_S)) == [
        Admitted(room=1, generation=again)
    ]
    assert done.receive(11, wrote(1, again, 0), NOW_S) == [], "a late duplicate"
    assert done.receive(11, wrote(1, again + 1_000, 0), NOW_S) == [], "another incarnation's"
    done.check_integrity()


def test_what_is_forgotten_unproven_is_never_called_fenced() -> None:
    table = prefill(tombstones_per_peer=1)
    table.request(1, REQUEST, NOW_S)
    table.receive(22, open_message(1, 5, 11), NOW_S)
    table.local(1, Bound(EXPECTED), NOW_S)
    table.local(1, Cancel(), NOW_S)
    for expected in EXPECTED[::2]:
        table.local(1, RankFenced(writer=expected.writer, fenced=False, source_free=True), NOW_S)
    assert 1 not in table.rooms
    abort = Abort(room=1, generation=5, error=GONE)
    assert answers(table.receive(22, abort, NOW_S)) == [AbortAck(room=1, generation=5, writer=None, fenced=False)]
    status = answers(table.receive(22, StatusQuery(room=1, generation=5, nonce=1), NOW_S))[0]
    assert isinstance(status, StatusReply) and status.known and status.acks[0].fenced is False
    table.receive(22, Abort(room=2, generation=6, error=GONE), NOW_S)  # pushes the tombstone out
    assert answers(table.receive(22, abort, NOW_S)) == [AbortAck(room=1, generation=5, writer=None, fenced=False)]
    again = answers(table.receive(22, open_message(1, 5, 11), NOW_S))
    assert [type(message) for message in again] == [Failed, AbortAck], "a refusal would be a fence"
    assert isinstance(again[1], AbortAck) and not again[1].fenced
    later = Abort(room=2, generation=6, error=GONE)
    assert answers(table.receive(22, later, NOW_S)) == [AbortAck(room=2, generation=6, writer=None, fenced=True)]
    table.check_integrity()


# --- what grows ------------------------------------------------------------------------------------------------------

MIB = 2**20


def flood(table: PrefillRooms, count: int, start: int = 0) -> None:
    """Bogus opens, aborts, queries and renewals, as fast as a stranger with keys can send them."""
    huge = ErrorInfo(code="room_aborted", message="x" * 2_000, details={str(n): "y" * 2_000 for n in range(32)})
    opened = open_message(1, 1, 11)
    aborted = Abort(room=1, generation=1, error=huge)
    for n in range(start + 1, start + count + 1):
        if n % 2:
            message: Message = type(opened)(
                room=n,
                generation=n,
                to_epoch=11,
                request_id="bogus",
                prompt_tokens=9,
                prompt_digest=n,
                index_lists=opened.index_lists,
            )
        else:
            message = type(aborted)(room=n, generation=n, error=huge)
        table.receive(22, message, NOW_S + n * 1e-6)


def judge_flooded(table: PrefillRooms) -> None:
    table.check_integrity()
    assert len(table.rooms) <= table.bounds.rooms_per_peer
    # Valid traffic of another peer goes on.
    table.request(2**40, REQUEST, NOW_S)
    assert isinstance(answers(table.receive(33, open_message(2**40, 1, 11), NOW_S))[0], RoomAccepted)


def test_bogus_rooms_cost_little_and_no_more_once_the_tables_are_full() -> None:
    table = prefill(rooms_per_peer=500, tombstones_per_peer=500)
    sizes = []
    tracemalloc.start()
    for start in (0, 2_000, 4_000):
        flood(table, 2_000, start)
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[0] < 8 * MIB and sizes[2] < 1.1 * sizes[1]
    judge_flooded(table)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_bogus_rooms_cost_less_than_50_mib() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    table = prefill()
    before = resident_bytes()
    flood(table, 1_000_000)
    assert resident_bytes() - before < 50 * MIB
    judge_flooded(table)


def test_waiting_index_lists_are_bounded_in_bytes() -> None:
    table = prefill(waiting_index_bytes=10_000)
    big = pack_indices(7, range(0, 2_000, 2))
    opened = open_message(1, 1, 11)
    codes = []
    for n in range(1, 6):
        message = type(opened)(
            room=n,
            generation=n,
            to_epoch=11,
            request_id="",
            prompt_tokens=TOKENS,
            prompt_digest=DIGEST,
            index_lists=(big,),
        )
        (answer,) = answers(table.receive(22, message, NOW_S))
        codes.append(answer.error.code if isinstance(answer, RoomRefused) else "")
    assert codes == ["", "", "queue_full", "queue_full", "queue_full"]
    table.request(1, REQUEST, NOW_S)  # no longer waiting: its bytes count no more
    table.check_integrity()
    assert isinstance(answers(table.receive(22, open_message(9, 9, 11), NOW_S))[0], RoomAccepted)


def test_churn_leaves_nothing_behind() -> None:
    table = prefill()
    for n in range(1, 3_000):
        now_s = NOW_S + n
        for epoch in (22, 33):
            table.peers[epoch].heard(now_s)
        table.request(n, REQUEST, now_s)
        table.receive(22, open_message(n, n, 11), now_s)
        table.local(n, Cancel(), now_s)
        table.tick(now_s)
    assert not table.rooms and len(table._timers) < 2_000 and sum(map(len, table._graves.values())) < 100
    table.check_integrity()
    peers = prefill()
    for epoch in range(1_000, 3_000):
        peers.add_peer(epoch, "x", LIVENESS_S, NOW_S)
        peers.lose_peer(epoch, GONE, NOW_S)
    assert set(peers.peers) == {22, 33}
    with pytest.raises(PdError):
        prefill(peers=2).add_peer(44, "x", LIVENESS_S, NOW_S)


def test_integrity_audit_sees_planted_faults() -> None:
    for plant in ("timer", "peer_list", "bytes"):
        table = prefill()
        table.receive(22, open_message(1, 5, 11), NOW_S)
        table.check_integrity()
        if plant == "timer":
            table._scheduled[1] += 10_000
        elif plant == "peer_list":
            table._by_peer[22].clear()
        else:
            table._waiting_total_bytes += 1
        with pytest.raises(LocalProtocolError):
            table.check_integrity()
