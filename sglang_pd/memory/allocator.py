"""The allocator of an instance: leases over page, row and slot spaces, conserved to the last index. Knows no byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sglang_pd.memory.index_pool import IndexPool, LeaseError, Order
from sglang_pd.memory.layout import RankLayout, Roots
from sglang_pd.memory.lease import NOBODY_KNOWS, Holding, Lease, LeaseState
from sglang_pd.memory.quarantine import Quarantine, Withheld
from sglang_pd.protocol.errors import PlanError, RoomError
from sglang_pd.protocol.idx import I64
from sglang_pd.protocol.spaces import AnySpace, Page, RequestRow, SwaTok


@dataclass(frozen=True, slots=True)
class SpaceCount:
    """Indices of one list space by state; they always sum to what can be issued."""

    size: int
    free: int
    held: int
    withheld: int


@dataclass(frozen=True, slots=True)
class Policy:
    """How an allocator behaves.

    order, seed: which indices go out first. quarantine_bytes: budget of withheld memory, None for no limit.
    on_over_budget: called with the withheld bytes when the budget is crossed.
    """

    order: Order = "low"
    seed: int = 0
    quarantine_bytes: int | None = None
    on_over_budget: Callable[[int], None] | None = None


def instance_index_bytes(layouts: list[RankLayout]) -> dict[AnySpace, int]:
    """Bytes, over all ranks of an instance, that one index of each list space stands for."""
    total: dict[AnySpace, int] = {}
    for layout in layouts:
        for space, nbytes in layout.index_bytes.items():
            total[space] = total.get(space, 0) + nbytes
    return total


def window_pages(window_tokens: int, step_tokens: int, page_tokens: int) -> int:
    """Most pages that a window and the step behind it can lie on, wherever they begin."""
    return -(-(window_tokens + step_tokens - 1) // page_tokens) + 1


def pool_name(space: AnySpace) -> str:
    """What a pool is called in metrics and statistics: `pages`, `swa_pages`, `rows` or `slots`."""
    if isinstance(space, Page):
        return "swa_pages" if isinstance(space.of, SwaTok) else "pages"
    return "rows" if isinstance(space, RequestRow) else "slots"


class Allocator:
    """Hands out leases. One an instance, owned by its control thread: all ranks of the instance share the indices.

    index_bytes: bytes one index of each list space stands for, for the quarantine's budget (`instance_index_bytes`).
    """

    def __init__(
        self, roots: Roots, policy: Policy | None = None, index_bytes: Mapping[AnySpace, int] | None = None
    ) -> None:
        policy = policy or Policy()
        self.roots = roots
        self._bytes = dict(index_bytes or {})
        self.pools = {
            space: IndexPool(space, policy.order, policy.seed + number)
            for number, space in enumerate(roots.list_spaces)
        }
        """The pool of each list space."""
        self.quarantine = Quarantine(policy.quarantine_bytes, policy.on_over_budget)
        self.leases: dict[int, Lease] = {}
        """Live leases by generation; quarantined ones are no longer here."""
        self._generation = 0

    def lease(self, tokens: int, *, window_stop: int | None = None, prefix: tuple[Lease, int] | None = None) -> Lease:
        """A row, a slot, and pages for `tokens` positions; nothing at all where any of it is missing.

        window_stop: position before which the sliding window must be held now. A destination passes its prompt's end,
        which is the default, `tokens`, unless it leases more; prefill starts at 0 (or its prefix) and calls
        `Lease.advance` before each chunk.
        prefix: another lease and the number of leading tokens (whole pages) whose pages are shared with it.
        Raises `RoomError`: `prompt_too_long` where the pool is too small even when empty, `pool_exhausted` where not
        now; `PlanError` (`prefix_unaligned`) for a prefix that cannot be shared.
        """
        window_stop = tokens if window_stop is None else window_stop
        if tokens < 1:
            raise RoomError("a request has at least one token", code="prompt_empty", actual=tokens)
        self._require_fits(tokens)
        lease = Lease(self, self._generation + 1)
        try:
            for space, pool in self.pools.items():
                if isinstance(space, Page):
                    first = self._span(space, tokens, window_stop)[0]
                    written_from = self._window_start(space, window_stop)
                    lease.holdings[space] = Holding(np.empty(0, np.int64), first, written_from=written_from)
                else:
                    lease.holdings[space] = Holding(pool.take(1))
            if prefix is not None:
                self._share(lease, prefix[0], prefix[1], (tokens, window_stop))
            self.extend(lease, tokens, window_stop)
        except BaseException:
            for space, holding in lease.holdings.items():
                self.pools[space].give_back(holding.indices)
            raise
        self._generation += 1
        self.leases[lease.generation] = lease
        return lease

    def fits(self, tokens: int, step_tokens: int = 1) -> bool:
        """True where an empty pool could hold a request of `tokens` positions.

        step_tokens: most positions one step computes (prefill: its chunk): a sliding-window pool must hold the window
        before a step and the step itself at once.
        """
        try:
            self._require_fits(tokens, step_tokens)
        except RoomError:
            return False
        return True

    def _require_fits(self, tokens: int, step_tokens: int = 1) -> None:
        for space, pool in self.pools.items():
            if not isinstance(space, Page):
                continue
            pages = -(-tokens // space.of.page_len)
            if isinstance(space.of, SwaTok):
                pages = min(pages, window_pages(space.of.window_tokens, step_tokens, space.of.page_tokens))
            if pages > pool.size:
                raise RoomError(
                    "the request can never fit",
                    code="prompt_too_long",
                    where=str(space),
                    expected=f"at most {pool.size} pages of {space.of.page_len} tokens",
                    actual=f"{pages} pages for {tokens} tokens, {step_tokens} at once",
                )

    @staticmethod
    def _span(space: Page, tokens: int, window_stop: int) -> tuple[int, int]:
        """Page positions [first, stop): all of `tokens`, or the sliding window before `window_stop`."""
        length = space.of.page_len
        if isinstance(space.of, SwaTok):
            return Allocator._window_start(space, window_stop) // length, -(-window_stop // length)
        return 0, -(-tokens // length)

    @staticmethod
    def _window_start(space: Page, window_stop: int) -> int:
        """The first token position of what must be held: 0, or that of the sliding window before `window_stop`."""
        return max(0, window_stop - space.of.window_tokens) if isinstance(space.of, SwaTok) else 0

    def extend(self, lease: Lease, tokens: int, window_stop: int) -> None:
        """Serve `Lease.advance`: all or nothing."""
        wanted: list[tuple[AnySpace, Holding, int]] = []
        for space, holding in lease.holdings.items():
            if isinstance(space, Page):
                end = self._span(space, tokens, window_stop)[1]
                wanted.append((space, holding, max(0, end - holding.stop)))
        for space, _, count in wanted:
            if count > self.pools[space].free:
                self.pools[space].take(count)  # raises, naming what is missing
        for space, holding, count in wanted:
            if count:
                taken = self.pools[space].take(count)
                holding.indices = np.concatenate([holding.indices, taken])
        if tokens > lease.tokens or any(count for _, _, count in wanted):
            lease.tokens = max(lease.tokens, tokens)
            lease.changed()

    def trim(self, lease: Lease, stop: int) -> None:
        """Serve `Lease.settle`."""
        for space, holding in lease.holdings.items():
            if not isinstance(space, Page) or not isinstance(space.of, SwaTok):
                continue
            gone = min(self._span(space, stop, stop)[0] - holding.first, holding.indices.shape[0])
            if gone > 0:
                self.pools[space].give_back(holding.indices[:gone])
                holding.indices = holding.indices[gone:]
                holding.first += gone
                holding.shared = max(0, holding.shared - gone)
                holding.written_from = max(holding.written_from, holding.first * space.of.page_len)
                lease.changed()

    def _share(self, lease: Lease, source: Lease, prefix_tokens: int, size: tuple[int, int]) -> None:
        tokens, window_stop = size
        if source.state is not LeaseState.HELD:
            raise LeaseError(
                "only a lease the engine owns can share its prefix", where=f"generation {source.generation}",
                expected=LeaseState.HELD.value, actual=source.state.value,
            )  # fmt: skip
        for space, holding in lease.holdings.items():
            if not isinstance(space, Page):
                continue
            length = space.of.page_len
            first, stop = self._span(space, tokens, window_stop)[0], prefix_tokens // length
            theirs = source.holdings[space]
            read_from = holding.written_from
            has = theirs.first <= first and stop <= theirs.stop and theirs.written_from <= read_from
            there = 0 < prefix_tokens <= min(source.tokens, tokens) and (first >= stop or has)
            if prefix_tokens % length or not there:
                raise PlanError(
                    "that prefix cannot be shared", code="prefix_unaligned", where=f"generation {source.generation}",
                    expected=f"whole pages of {length} tokens that the other lease holds, with all that is read of "
                    f"them, from position {read_from} on",
                    actual=f"{prefix_tokens} tokens, "
                    + ("none known" if theirs.written_from >= NOBODY_KNOWS else f"from {theirs.written_from} on"),
                )  # fmt: skip
            if first < stop:
                shared = theirs.indices[first - theirs.first : stop - theirs.first].copy()
                self.pools[space].share(shared)
                holding.indices, holding.first, holding.shared = shared, first, stop - first
                holding.written_from = max(theirs.written_from, first * length)
        lease.prefix_tokens = prefix_tokens

    def require_alone(self, lease: Lease) -> None:
        """Raise `LeaseError` where anything but the lease's own prefix is held by another lease too."""
        for space, holding in lease.holdings.items():
            if self.pools[space].is_shared(holding.indices[holding.shared :]):
                raise LeaseError("memory that another lease shares cannot be armed", where=str(space))

    def finish(self, lease: Lease, withheld: str, now_s: float) -> None:
        """Serve `Lease.release` (withheld empty) and `Lease.quarantine` (the reason).

        A borrowed prefix is withheld too where this lease may be a source: its pages may be read until the fence.
        """
        kept: list[tuple[AnySpace, I64]] = []
        for space, holding in lease.holdings.items():
            own = holding.indices[holding.shared :] if lease.is_armed else holding.indices
            if not withheld:
                self.pools[space].give_back(holding.indices)
                continue
            if lease.is_armed:  # a peer never writes the prefix, so nobody waits for it
                self.pools[space].give_back(holding.indices[: holding.shared])
            self.pools[space].withhold(own)
            kept.append((space, own))
        del self.leases[lease.generation]
        if withheld:
            nbytes = sum(self._bytes.get(space, 0) * indices.shape[0] for space, indices in kept)
            self.quarantine.admit(Withheld(lease.generation, withheld, nbytes, now_s, tuple(kept)))

    def fenced(self, generation: int) -> int:
        """Every writer and reader of that lease is proven gone: its memory is free again. Returns its bytes."""
        item = self.quarantine.take(generation)
        for space, indices in item.indices:
            self.pools[space].fenced(indices)
        return item.nbytes

    def counts(self) -> dict[AnySpace, SpaceCount]:
        """Indices by state, for every list space."""
        return {s: SpaceCount(p.size, p.free, p.held, p.withheld) for s, p in self.pools.items()}

    def check_integrity(self) -> None:
        """Raise `LeaseError` unless pools, leases and quarantine tell one story about every index."""
        for space, pool in self.pools.items():
            holders, fences = np.zeros((2, space.extent), dtype=np.int64)
            for lease in self.leases.values():
                np.add.at(holders, lease.holdings[space].indices, 1)
            for item in self.quarantine:
                for where, indices in item.indices:
                    if where == space:
                        np.add.at(fences, indices, 1)
            pool.check_integrity(holders, fences)
        held_bytes = sum(item.nbytes for item in self.quarantine)
        if held_bytes != self.quarantine.held_bytes:
            raise LeaseError(
                "the quarantine's bytes do not sum", expected=held_bytes, actual=self.quarantine.held_bytes
            )
