"""OB-04: stages have no gap and no overlap, so their sum is the total by construction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.observe.stages import ROLE_STAGES, Stage, StageClock
from sglang_pd.protocol.errors import LocalProtocolError
from sglang_pd.protocol.room import Role


class Clock:
    def __init__(self, now_ns: int = 1000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def test_each_moment_belongs_to_one_stage() -> None:
    clock = Clock()
    stages = StageClock(Role.DECODE, Stage.HANDSHAKE, clock)
    for stage, at_ns in ((Stage.ALLOC_WAIT, 1010), (Stage.QUEUE, 1100), (Stage.WIRE, 1150), (Stage.QUEUE, 1160)):
        clock.now_ns = at_ns
        stages.enter(stage)
    clock.now_ns = 2000
    assert stages.age_ns() == (1000, 840)
    times = stages.end()
    assert times.stage_ns == {
        Stage.HANDSHAKE: 10,
        Stage.ALLOC_WAIT: 90,
        Stage.QUEUE: 50 + 840,
        Stage.WIRE: 10,
        Stage.VERIFY: 0,
        Stage.ADMIT: 0,
    }
    assert times.total_ns == 1000 and times.last is Stage.QUEUE
    clock.now_ns = 9999
    assert stages.end() == times


@given(st.sampled_from(Role), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**12)), max_size=30))
def test_stages_sum_to_the_total(role: Role, steps: list[tuple[int, int]]) -> None:
    clock, known = Clock(), ROLE_STAGES[role]
    stages = StageClock(role, known[0], clock)
    for index, step_ns in steps:
        clock.now_ns += step_ns
        stages.enter(known[index % len(known)])
    times = stages.end()
    assert times.total_ns == clock.now_ns - 1000 == sum(times.stage_ns.values())
    assert set(times.stage_ns) == set(known)


def test_a_clock_that_steps_back_breaks_nothing() -> None:
    clock = Clock()
    stages = StageClock(Role.PREFILL, Stage.QUEUE, clock)
    clock.now_ns = 1
    stages.enter(Stage.WIRE)
    assert stages.age_ns() == (0, 0)
    clock.now_ns = 1500
    times = stages.end()
    assert times.total_ns == 500 and min(times.stage_ns.values()) >= 0


def test_stages_of_the_other_role_are_refused() -> None:
    stages = StageClock(Role.PREFILL, Stage.QUEUE, Clock())
    with pytest.raises(LocalProtocolError, match="handshake"):
        stages.enter(Stage.ADMIT)
    with pytest.raises(LocalProtocolError):
        StageClock(Role.DECODE, Stage.POST, Clock())
    stages.end()
    with pytest.raises(LocalProtocolError, match="ended"):
        stages.enter(Stage.WIRE)
