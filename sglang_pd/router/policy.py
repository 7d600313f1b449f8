"""Which of the eligible workers gets the next room. A policy never sees another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_pd.router.worker import Worker


class Policy(Protocol):
    """Chooses among workers of one role that are all eligible; there is at least one."""

    def pick(self, workers: Sequence[Worker]) -> Worker:
        """The worker for the next request."""
        ...


class RoundRobin:
    """The one whose last turn is longest ago."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, workers: Sequence[Worker]) -> Worker:
        """The worker for the next request."""
        chosen = min(workers, key=lambda worker: worker.turn)
        self._turn += 1
        chosen.turn = self._turn
        return chosen


class LeastRooms:
    """The one with the fewest open rooms of this router; among equals, in turn."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def pick(self, workers: Sequence[Worker]) -> Worker:
        """The worker for the next request."""
        fewest = min(worker.rooms for worker in workers)
        return self._turns.pick([worker for worker in workers if worker.rooms == fewest])


def policy_named(name: str) -> Policy:
    """The policy of that configuration value."""
    return RoundRobin() if name == "round_robin" else LeastRooms()
