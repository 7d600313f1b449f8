"""Both roles of a room over a link that splits, drops, repeats, reorders and delays, with ranks that die."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.room import State
from sglang_pd.protocol.room_events import Cancel, Computed, Fail, QueueNote

from .pair import DIGEST, RANKS, W0, W1, World

ROOMS = st.integers(1, 3)
PICK = st.integers(0, 10**6)
SIDES = st.sampled_from(["P", "D"])
WRITERS = st.sampled_from([W0, W1])


class RoomPair(RuleBasedStateMachine):
    """Random histories; whatever they are, in the end everything ends once, and no byte lands in released memory."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.used: set[tuple[str, int]] = set()

    # --- requests ----------------------------------------------------------------------------------------------------

    @rule(room=ROOMS, legs=st.sampled_from(["PD", "DP", "P", "D"]), wrong=st.sampled_from([0, 0, 0, 0, 1]))
    def ask(self, room: int, legs: str, wrong: int) -> None:
        for leg in legs:
            self.world.request(room, DIGEST + wrong) if leg == "P" else self.world.begin(room)

    @rule(room=ROOMS)
    def allocate(self, room: int) -> None:
        found = self.world.decode.rooms.get(room)
        if found is not None and found.now_in is State.ALLOCATING:
            self.world.allocate(room)

    @rule(seed=st.integers(0, 2**32), steps=st.integers(1, 60), loss=st.sampled_from([0.0, 0.0, 0.05, 0.3]))
    def go(self, seed: int, steps: int, loss: float) -> None:
        rng = Random(seed)
        for _ in range(steps):
            self.world.step(rng, loss)

    # --- the link ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.link)
    @rule(pick=PICK, split=st.sampled_from([0, 0, 1, 7]), keep=st.sampled_from([False, False, True]))
    def deliver(self, pick: int, split: int, keep: bool) -> None:
        self.world.deliver(pick % len(self.world.link), split=split, keep=keep)

    @precondition(lambda self: self.world.link)
    @rule()
    def deliver_all(self) -> None:
        for _ in range(min(len(self.world.link), 20)):
            self.world.deliver(0)

    @precondition(lambda self: self.world.link)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        self.world.link.pop(pick % len(self.world.link))

    # --- ranks -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.work)
    @rule(pick=PICK)
    def bind(self, pick: int) -> None:
        self.world.bind(sorted(self.world.work)[pick % len(self.world.work)])

    @precondition(lambda self: self.world.writable())
    @rule(pick=PICK, many=st.integers(1, 6))
    def post_write(self, pick: int, many: int) -> None:
        for _ in range(many):
            if keys := self.world.writable():
                self.world.post_write(keys[pick % len(keys)], pick)

    @precondition(lambda self: self.world.writes)
    @rule(pick=PICK, ranks=st.sampled_from([("d0",), ("d1",), ("d0", "d1")]))
    def land(self, pick: int, ranks: tuple[str, ...]) -> None:
        write = self.world.writes[pick % len(self.world.writes)]
        for rank in ranks:
            if write in self.world.writes:
                self.world.land(self.world.writes.index(write), rank)

    @precondition(lambda self: self.world.writes)
    @rule()
    def land_all(self) -> None:
        for write in list(self.world.writes):
            for rank in sorted(write.pending):
                self.world.land(self.world.writes.index(write), rank)

    @precondition(lambda self: self.world.work)
    @rule(pick=PICK)
    def hand_off(self, pick: int) -> None:
        self.world.hand_off(sorted(self.world.work)[pick % len(self.world.work)])

    @precondition(lambda self: any(work.stopped for work in self.world.work.values()))
    @rule(pick=PICK, writer=WRITERS, fenced=st.booleans())
    def fence(self, pick: int, writer: object, fenced: bool) -> None:
        keys = sorted(key for key, work in self.world.work.items() if work.stopped)
        self.world.fence(keys[pick % len(keys)], writer, fenced=fenced)  # type: ignore[arg-type]

    @precondition(lambda self: self.world.revokes)
    @rule(pick=PICK, rank=st.sampled_from(sorted(RANKS)))
    def revoke(self, pick: int, rank: str) -> None:
        self.world.revoke(pick % len(self.world.revokes), rank)

    @precondition(lambda self: self.world.checks)
    @rule(pick=PICK, equal=st.booleans())
    def compared(self, pick: int, equal: bool) -> None:
        self.world.compared(sorted(self.world.checks)[pick % len(self.world.checks)], equal=equal)

    # --- trouble -----------------------------------------------------------------------------------------------------

    @rule(side=SIDES, room=ROOMS, cancel=st.booleans())
    def give_up(self, side: str, room: int, cancel: bool) -> None:
        if room in self.world.table(side).rooms:
            self.world.local_end.add(room)
            event = Cancel() if cancel else Fail(ErrorInfo(code="transfer_failed", message=f"{side} failed"))
            self.world.local(side, room, event)

    @rule(room=ROOMS, computed=st.booleans())
    def progress(self, room: int, computed: bool) -> None:
        found = self.world.prefill.rooms.get(room)
        if found is not None and found.now_in in (State.AWAIT_OPEN, State.MATCHED, State.WRITING):
            self.world.local("P", room, Computed() if computed else QueueNote(3))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 12.0]), alive=st.sampled_from(["PD", "PD", "P", "D", ""]))
    def time(self, seconds: float, alive: str) -> None:
        for side in alive:
            self.world.alive(side)
        self.world.advance(seconds)

    @precondition(lambda self: not self.world.killed)
    @rule(side=SIDES, dice=st.integers(0, 3))
    def kill(self, side: str, dice: int) -> None:
        if dice == 0:
            self.world.kill(side)

    # --- judgement ---------------------------------------------------------------------------------------------------

    @invariant()
    def tables_are_sound(self) -> None:
        self.world.check()
        for side in ("P", "D"):
            for room in self.world.table(side).rooms.values():
                deadline_s, timer_s = room.deadline_s(), room.next_timer_s()
                assert deadline_s is not None and timer_s is not None, f"{side} {room.now_in} waits without an end"
                assert timer_s <= deadline_s < self.world.now_s + 10**4

    def teardown(self) -> None:
        self.world.quiesce()
        self.world.judge()


TestRoomPair = RoomPair.TestCase
TestRoomPair.settings = settings(max_examples=120, stateful_step_count=30)


def history(seed: int) -> World:
    """One whole random history: some rooms, a bad link, troubles, then quiet."""
    rng = Random(seed)
    world, rooms = World(), range(1, 2 + rng.randrange(4))
    loss, trouble = rng.choice((0.0, 0.02, 0.1, 0.3)), rng.choice((0.02, 0.08, 0.3))
    for room in rooms:
        world.begin(room)
        world.request(room)
    for _ in range(rng.randrange(20, 300)):
        if rng.random() < trouble:
            world.trouble(rng, rooms)
        else:
            world.step(rng, loss)
    world.check()
    world.quiesce()
    world.judge()
    return world


@pytest.mark.parametrize("block", range(4))
def test_random_histories(block: int) -> None:
    ends: set[tuple[str, str]] = set()
    for seed in range(150 * block, 150 * block + 150):
        try:
            world = history(seed)
        except Exception as error:
            raise AssertionError(f"history({seed}) failed: {error!r}") from error
        ends |= {(end.state, end.error.code if end.error else "") for end in world.ended["D"].values()}
    # The histories are worth something only if they get everywhere.
    wanted = {("done", ""), ("aborted", "room_aborted"), ("failed", "transfer_failed"), ("failed", "peer_lost")}
    assert wanted | {("failed", "digest_mismatch")} <= ends
