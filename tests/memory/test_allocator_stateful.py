"""Random lives of leases: after every step the books balance, and nobody holds what a peer may still touch."""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.hybrid_state import PAGE, capacity, hybrid_state

from sglang_pd.memory.allocator import Allocator, Policy
from sglang_pd.memory.index_pool import LeaseError, Order
from sglang_pd.memory.layout import roots_of
from sglang_pd.memory.lease import Lease, LeaseState
from sglang_pd.protocol.errors import PlanError, RoomError
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import Topology
from sglang_pd.protocol.spaces import AnySpace

TOKENS = st.integers(1, 7 * PAGE)
Indices = set[tuple[AnySpace, int]]


class Leases(RuleBasedStateMachine):
    """The machine keeps its own, simpler books: which indices a peer may still touch, by generation."""

    def __init__(self) -> None:
        super().__init__()
        order: Order = os.environ.get("LEASE_ORDER", "random")  # type: ignore[assignment]
        self.allocator = Allocator(roots_of(hybrid_state(), capacity(9, 4, 4), Topology()), Policy(order, 11))
        self.live: list[Lease] = []
        self.pins: dict[int, list[bool]] = {}
        self.dangerous: dict[int, Indices] = {}
        self.written: set[int] = set()
        """Generations that a peer may write, not only read."""
        self.last_generation = 0

    def pick(self, number: int) -> Lease:
        return self.live[number % len(self.live)]

    def touched(self, lease: Lease, own_only: bool) -> Indices:
        return {
            (space, int(i))
            for space, holding in lease.holdings.items()
            for i in holding.indices[holding.shared if own_only else 0 :]
        }

    @rule(tokens=TOKENS, window=TOKENS, number=st.integers(0, 9), share=st.integers(0, 3))
    def lease(self, tokens: int, window: int, number: int, share: int) -> None:
        prefix = (self.pick(number), share * PAGE) if share and self.live else None
        try:
            lease = self.allocator.lease(tokens, window_stop=min(tokens, window), prefix=prefix)
        except (RoomError, PlanError, LeaseError):
            return
        assert lease.generation > self.last_generation
        self.last_generation = lease.generation
        fresh = self.touched(lease, own_only=True)
        for generation, indices in self.dangerous.items():
            assert not fresh & indices, f"memory of generation {generation} went out before its fence"
        self.live.append(lease)
        self.pins[lease.generation] = []

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9), more=st.integers(1, 2 * PAGE))
    def advance(self, number: int, more: int) -> None:
        lease = self.pick(number)
        allowed = lease.state is LeaseState.HELD and not any(self.pins[lease.generation])
        try:
            lease.advance(lease.tokens + more)
        except RoomError:
            return
        except LeaseError:
            assert not allowed
            return
        assert allowed
        lease.settle(lease.tokens)
        lease.lists(Prompt(lease.tokens))

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9))
    def arm(self, number: int) -> None:
        lease = self.pick(number)
        try:
            lease.arm()
        except LeaseError:
            return
        assert not self.pins[lease.generation]
        self.dangerous[lease.generation] = self.touched(lease, own_only=True)
        self.written.add(lease.generation)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9))
    def disarm(self, number: int) -> None:
        lease = self.pick(number)
        if lease.is_armed:
            lease.disarm()
            self.written.discard(lease.generation)
            del self.dangerous[lease.generation]

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9), whole=st.booleans())
    def pin(self, number: int, whole: bool) -> None:
        lease = self.pick(number)
        if lease.state is LeaseState.HELD:
            lease.pin(whole=whole)
            self.pins[lease.generation].append(whole)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9))
    def unpin(self, number: int) -> None:
        lease = self.pick(number)
        if self.pins[lease.generation]:
            lease.unpin(whole=self.pins[lease.generation].pop())

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        lease = self.pick(number)
        allowed = lease.state is LeaseState.HELD and not self.pins[lease.generation]
        try:
            lease.release()
        except LeaseError:
            assert not allowed
            return
        assert allowed
        self.live.remove(lease)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9))
    def quarantine(self, number: int) -> None:
        lease = self.pick(number)
        touched = self.touched(lease, own_only=lease.is_armed)
        lease.quarantine("random", 0.0)
        self.dangerous[lease.generation] = touched
        self.live.remove(lease)

    @precondition(lambda self: len(self.allocator.quarantine))
    @rule(number=st.integers(0, 9))
    def fenced(self, number: int) -> None:
        waiting = sorted(self.allocator.quarantine.reasons())
        generation = waiting[number % len(waiting)]
        self.allocator.fenced(generation)
        del self.dangerous[generation]

    @invariant()
    def books_balance(self) -> None:
        self.allocator.check_integrity()
        for space, count in self.allocator.counts().items():
            assert count.free + count.held + count.withheld == count.size, space

    @invariant()
    def nobody_owns_what_a_peer_may_touch(self) -> None:
        for lease in self.live:
            own = self.touched(lease, own_only=True)
            for generation, indices in self.dangerous.items():
                if generation == lease.generation:
                    continue
                assert not own & indices or generation not in self.written, "a peer may write it"

    def teardown(self) -> None:
        """Everything comes back: to the last index, the pools are as they were."""
        for lease in self.live:
            lease.quarantine("the end", 0.0)
        for generation in list(self.allocator.quarantine.reasons()):
            self.allocator.fenced(generation)
        self.allocator.check_integrity()
        assert all(c.free == c.size for c in self.allocator.counts().values())


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLeases = Leases.TestCase
