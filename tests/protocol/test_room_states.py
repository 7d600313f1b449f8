"""The tables themselves, by enumeration: what is illegal changes nothing, what waits has an end, ends are final."""

from __future__ import annotations

import math

import pytest

from sglang_pd.protocol.errors import LocalProtocolError, PdError, RemoteProtocolError
from sglang_pd.protocol.messages import Message
from sglang_pd.protocol.room import (
    DEADLINES,
    FENCE,
    JOINT,
    TABLE,
    TERMINAL,
    Deadline,
    Kind,
    Limits,
    Memory,
    Role,
    RoomState,
    State,
    Trigger,
)
from sglang_pd.protocol.room_events import Alert, Ended, Fail, LocalEvent, Releasable, TimerFired
from sglang_pd.protocol.room_machine import RoomMachine

from .room_samples import BROKE, EVENTS, NOW_S, freeze, machine_in, peer

STATES = [(role, state) for role, rows in TABLE.items() for state in rows]
STATE_IDS = [f"{role.value}-{state.value}" for role, state in STATES]


def handler_trigger(machine: RoomMachine, event: LocalEvent | Message) -> Trigger:
    return machine.HANDLERS[type(event)][0]


def test_samples_cover_every_event_and_state() -> None:
    for role in Role:
        machine = machine_in(role, State.NEW)
        assert {type(event) for event in EVENTS[role]} == set(machine.HANDLERS)
        for state in TABLE[role]:
            assert machine_in(role, state).now_in is state


@pytest.mark.parametrize(("role", "state"), STATES, ids=STATE_IDS)
def test_illegal_triggers_raise_and_change_nothing(role: Role, state: State) -> None:
    for trigger in Trigger:
        place = RoomState(role)
        place.state = state
        before = (place.state, place.memory)
        if trigger in TABLE[role][state]:
            continue
        assert not place.allows(trigger)
        with pytest.raises(LocalProtocolError) as caught:
            place.process(trigger)
        assert caught.value.code == "illegal_transition"
        assert trigger.label in str(caught.value) and state.value in str(caught.value)
        assert (place.state, place.memory) == before


@pytest.mark.parametrize(("role", "state"), STATES, ids=STATE_IDS)
def test_every_event_in_every_state(role: Role, state: State) -> None:
    illegal = legal = 0
    for event in EVENTS[role]:
        machine = machine_in(role, state)
        trigger = handler_trigger(machine, event)
        sender = peer(22 if role is Role.PREFILL else 11) if isinstance(event, Message) else None
        if trigger in TABLE[role][state]:
            legal += 1
            effects = machine.handle(event, NOW_S, sender)
            ended = [effect for effect in effects if isinstance(effect, Ended)]
            assert len(ended) == (machine.now_in in TERMINAL and state not in TERMINAL)
            if state in TERMINAL:
                assert machine.now_in is state, "an end is final"
            continue
        illegal += 1
        before = freeze(machine)
        with pytest.raises(RemoteProtocolError if trigger.kind is Kind.REMOTE else LocalProtocolError) as caught:
            machine.handle(event, NOW_S, sender)
        assert caught.value.code == "illegal_transition"
        assert freeze(machine) == before
    assert legal and illegal


def test_a_foreign_message_is_refused_and_changes_nothing() -> None:
    for role, state in STATES:
        for event in (event for event in EVENTS[role] if isinstance(event, Message)):
            machine = machine_in(role, state)
            if machine.generation and hasattr(event, "generation"):
                before = freeze(machine)
                with pytest.raises(RemoteProtocolError) as caught:
                    machine.handle(event, NOW_S, peer(999)) if machine.peer else machine.handle(event, NOW_S)
                assert caught.value.code in ("epoch_stale", "illegal_transition")
                assert freeze(machine) == before


def test_an_unknown_event_is_the_callers_fault() -> None:
    with pytest.raises(LocalProtocolError, match="knows no"):
        machine_in(Role.PREFILL, State.NEW).handle(EVENTS[Role.DECODE][0], NOW_S)


@pytest.mark.parametrize(("role", "state"), STATES, ids=STATE_IDS)
def test_every_waiting_state_has_a_finite_deadline_that_ends_it(role: Role, state: State) -> None:
    machine = machine_in(role, state)
    deadline_s, timer_s = machine.deadline_s(), machine.next_timer_s()
    if state is State.NEW or machine.settled:
        assert deadline_s is None and timer_s is None
        return
    assert deadline_s is not None and timer_s is not None
    assert math.isfinite(deadline_s) and NOW_S < timer_s <= deadline_s
    waits = bool(DEADLINES[role].get(state))
    assert waits == (state not in TERMINAL), "the documented deadlines and the machine disagree"
    # One moment before, a timer changes no state; at the deadline the wait is over.
    machine.handle(TimerFired(), math.nextafter(deadline_s, 0))
    assert machine.now_in is state
    effects = machine.handle(TimerFired(), deadline_s)
    if state in TERMINAL:
        assert machine.state.memory is Memory.QUARANTINED, "a timer is never a fence"
        assert [type(effect) for effect in effects].count(Alert) == 1
        assert (machine.deadline_s() or 0) > deadline_s
    else:
        assert machine.now_in is State.FAILED and machine.error is not None
        assert any(isinstance(effect, Ended) for effect in effects)


@pytest.mark.parametrize(("role", "state"), STATES, ids=STATE_IDS)
def test_a_slow_peer_that_lives_never_times_out(role: Role, state: State) -> None:
    if Deadline.LIVENESS not in DEADLINES[role].get(state, ()) or len(DEADLINES[role][state]) > 1:
        return
    machine = machine_in(role, state)
    assert machine.peer is not None
    for step in range(1, 2000):
        now_s = NOW_S + 10.0 * step
        machine.peer.heard(now_s)
        machine.handle(TimerFired(), now_s)
    assert machine.now_in is state, "twenty thousand seconds of a living peer are not too long"


def test_documented_deadlines_name_every_waiting_state() -> None:
    for role in Role:
        waiting = {state for state in TABLE[role] if state not in TERMINAL and state is not State.NEW}
        assert set(DEADLINES[role]) == waiting
        assert all(DEADLINES[role].values())


def test_every_state_is_reachable_and_can_end() -> None:
    for role in Role:
        reached, frontier = {State.NEW}, [State.NEW]
        while frontier:
            for target in TABLE[role][frontier.pop()].values():
                if target not in reached:
                    reached.add(target)
                    frontier.append(target)
        assert reached == set(TABLE[role])
        for state, row in TABLE[role].items():
            if state in TERMINAL:
                assert set(row.values()) == {state}
            elif state is not State.NEW:
                assert row[Trigger.CANCEL] is State.ABORTED and row[Trigger.FAIL] is State.FAILED
                assert Trigger.TIMER in row
        assert set(TABLE[role]) - {State.NEW} >= TERMINAL


def test_joint_moves_settle_and_only_a_fence_leaves_quarantine() -> None:
    assert FENCE == {Memory.QUARANTINED: Memory.RELEASABLE}
    for role, moves in JOINT.items():
        for (state, memory), target in moves.items():
            assert memory is not Memory.QUARANTINED, "no room state may release quarantined memory"
            assert (state, target) not in moves, "one joint move, then rest"
            assert state in TABLE[role]
        for state in (State.FAILED, State.ABORTED):
            assert moves[state, Memory.EXPOSED] is Memory.QUARANTINED
    place = RoomState(Role.DECODE)
    for trigger in (Trigger.BEGIN, Trigger.ALLOCATED):
        place.process(trigger)
    with pytest.raises(LocalProtocolError, match="needs no fence"):
        place.fenced()
    assert place.memory is Memory.EXPOSED


@pytest.mark.parametrize(("role", "state"), STATES, ids=STATE_IDS)
def test_memory_is_given_back_once_and_never_while_exposed(role: Role, state: State) -> None:
    machine = machine_in(role, state)
    was_exposed = machine.state.memory is Memory.EXPOSED
    if state is State.NEW or state in TERMINAL:
        return
    effects = machine.handle(Fail(BROKE), NOW_S)
    given = sum(isinstance(effect, Releasable) for effect in effects)
    already = state is State.SENT
    assert given == (0 if was_exposed or already else 1)
    assert machine.state.memory is (Memory.QUARANTINED if was_exposed else Memory.RELEASABLE)


@pytest.mark.parametrize("field", ["lease_s", "request_wait_s", "alloc_wait_s", "fence_alarm_s", "status_interval_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_limits_are_finite_and_positive(field: str, value: float) -> None:
    with pytest.raises(PdError) as caught:
        Limits(**{field: value})
    assert caught.value.code == "config_invalid" and field in str(caught.value)
