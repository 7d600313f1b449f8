"""Where a room's time goes: stages that follow one another without gap or overlap, so that they sum to the total."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from sglang_pd.protocol.errors import LocalProtocolError
from sglang_pd.protocol.room import Role

Nanoseconds = Callable[[], int]
"""A monotonic clock, such as `time.monotonic_ns`."""


class Stage(Enum):
    """What a room waits for. A room is in exactly one stage at any time; it may return to an earlier one."""

    HANDSHAKE = "handshake"
    """The other side: its verdict, its half of the room."""
    ALLOC_WAIT = "alloc_wait"
    """Decode: memory."""
    QUEUE = "queue"
    """Its turn: prefill's engine, or the rooms ahead of it."""
    POST = "post"
    """Prefill: indices are bound to a plan and descriptors handed to the backend."""
    WIRE = "wire"
    """Bytes: prefill's transfers in flight, or decode's missing records."""
    VERIFY = "verify"
    """Decode: digests of what arrived."""
    ADMIT = "admit"
    """Decode: the engine takes the request over."""


ROLE_STAGES: Final[Mapping[Role, tuple[Stage, ...]]] = MappingProxyType(
    {
        Role.PREFILL: (Stage.HANDSHAKE, Stage.QUEUE, Stage.POST, Stage.WIRE),
        Role.DECODE: (Stage.HANDSHAKE, Stage.ALLOC_WAIT, Stage.QUEUE, Stage.WIRE, Stage.VERIFY, Stage.ADMIT),
    }
)
"""Stages that rooms of a role go through."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Nanoseconds in each stage of the role, zero included. Their sum is `total_ns`, exactly."""

    stage_ns: Mapping[Stage, int]
    last: Stage
    """The stage in which the room ended."""

    @property
    def total_ns(self) -> int:
        """From the first stage's start to the end."""
        return sum(self.stage_ns.values())


class StageClock:
    """Times of one room. Each moment belongs to the one stage that is open, so no moment is counted twice or lost."""

    __slots__ = ("_clock", "_ended", "_open", "_since_ns", "_spent_ns", "started_ns")

    def __init__(self, role: Role, first: Stage, clock: Nanoseconds) -> None:
        self._clock = clock
        self._spent_ns: dict[Stage, int] = dict.fromkeys(ROLE_STAGES[role], 0)
        self._require(first)
        self._open = first
        self._ended = False
        self.started_ns = self._since_ns = clock()

    @property
    def stage(self) -> Stage:
        """The open stage; after the end, the last one."""
        return self._open

    def age_ns(self) -> tuple[int, int]:
        """Nanoseconds since the start, and since the open stage was entered."""
        now_ns = max(self._clock(), self._since_ns)
        return now_ns - self.started_ns, now_ns - self._since_ns

    def enter(self, stage: Stage) -> None:
        """Close the open stage and open `stage`, at this moment. Raises `LocalProtocolError` after the end, or for a
        stage that rooms of this role do not have."""
        self._require(stage)
        if self._ended:
            raise LocalProtocolError("the room has ended", where="StageClock.enter", actual=stage.value)
        self._close()
        self._open = stage

    def end(self) -> StageTimes:
        """Close the open stage for good. Again: the same times."""
        if not self._ended:
            self._close()
            self._ended = True
        return StageTimes(dict(self._spent_ns), self._open)

    def _close(self) -> None:
        # A clock that steps back (it should not) costs nothing and breaks nothing: total is the sum.
        now_ns = max(self._clock(), self._since_ns)
        self._spent_ns[self._open] += now_ns - self._since_ns
        self._since_ns = now_ns

    def _require(self, stage: Stage) -> None:
        if stage not in self._spent_ns:
            raise LocalProtocolError(
                "rooms of this role do not have that stage",
                where="StageClock",
                expected=" | ".join(known.value for known in self._spent_ns),
                actual=stage.value,
            )
