"""Leases: what they hold, what their states forbid, and what a quarantine keeps."""

from __future__ import annotations

import numpy as np
import pytest
from support.hybrid_state import PAGE, WINDOW, capacity, hybrid_state

from sglang_pd.memory.allocator import Allocator, Policy, instance_index_bytes
from sglang_pd.memory.index_pool import IndexPool, LeaseError, Order
from sglang_pd.memory.layout import layout_rank, roots_of
from sglang_pd.protocol.errors import ConfigError, PdError, PlanError, RoomError
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.spaces import AnySpace, Page, RequestRow, SwaTok, VirtualTok

ROOTS = roots_of(hybrid_state(), capacity(10), Topology())
SPACES: dict[str, AnySpace] = dict(zip(("pages", "swa", "rows", "slots"), ROOTS.list_spaces, strict=True))


def allocator(order: Order = "low", **policy: object) -> Allocator:
    layout = layout_rank(hybrid_state(), capacity(10), Topology(), RankId(0, 0))
    return Allocator(ROOTS, Policy(order, **policy), instance_index_bytes([layout]))  # type: ignore[arg-type]


def free(a: Allocator) -> dict[str, int]:
    return {name: a.pools[space].free for name, space in SPACES.items()}


@pytest.mark.parametrize(("order", "first"), [("low", [1, 2, 3]), ("high", [9, 8, 7])])
def test_order_decides_what_goes_out_first(order: Order, first: list[int]) -> None:
    pool = IndexPool(RequestRow(rows=9), order)
    taken = pool.take(3)
    assert taken.tolist() == first
    pool.give_back(taken)
    assert pool.take(3).tolist() == first


def test_random_order_is_a_permutation_by_seed() -> None:
    pools = [IndexPool(RequestRow(rows=50, reserved=3), "random", seed) for seed in (1, 1, 2)]
    a, b, c = (pool.take(50).tolist() for pool in pools)
    assert a == b != c
    assert sorted(a) == list(range(3, 53))
    with pytest.raises(ConfigError, match="low"):
        IndexPool(RequestRow(rows=5), "sideways")  # type: ignore[arg-type]


def test_the_reserve_is_never_issued() -> None:
    for order in ("low", "high", "random"):
        a = allocator(order)  # type: ignore[arg-type]
        lease = a.lease(10 * PAGE)
        for space, holding in lease.holdings.items():
            assert int(holding.indices.min()) >= space.reserve
            assert int(holding.indices.max()) < space.extent


@pytest.mark.parametrize("tokens", [1, WINDOW, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE + 3])
@pytest.mark.parametrize("prefix_pages", [0, 1])
def test_lists_have_the_length_their_rule_demands(tokens: int, prefix_pages: int) -> None:
    prefix = min(prefix_pages * PAGE, tokens // PAGE * PAGE)
    lease = allocator("random", seed=3).lease(tokens + 9, window_stop=tokens)
    lists = lease.lists(Prompt(tokens, prefix))
    pages = lease.holdings[SPACES["pages"]].indices
    assert lists[SPACES["pages"]].lower().tolist() == pages[prefix // PAGE : -(-tokens // PAGE)].tolist()
    first = max(prefix, tokens - WINDOW, 0) // PAGE
    want = -(-tokens // PAGE) - first if tokens > prefix else 0
    assert len(lists[SPACES["swa"]]) == want
    assert len(lists[SPACES["rows"]]) == len(lists[SPACES["slots"]]) == 1


def test_a_list_beyond_the_lease_is_refused() -> None:
    lease = allocator().lease(2 * PAGE, window_stop=PAGE)
    with pytest.raises(PlanError, match="does not hold"):
        lease.lists(Prompt(2 * PAGE))  # the window is only held up to the first page


def test_a_source_lists_its_window_only_once_it_is_computed() -> None:
    """A room is opened before prefill has the window of the prompt's end; the other lists are known from the start."""
    lease = allocator().lease(3 * PAGE, window_stop=0)
    early = lease.lists(Prompt(3 * PAGE), windows=False)
    assert set(early) == {SPACES["pages"], SPACES["rows"], SPACES["slots"]}
    lease.advance(3 * PAGE)
    late = lease.lists(Prompt(3 * PAGE))
    assert set(late) == set(SPACES.values())
    assert all(late[space] == early[space] for space in early)


def test_all_or_nothing() -> None:
    a = allocator()
    before = free(a)
    held = [a.lease(1) for _ in range(3)]
    with pytest.raises(RoomError) as caught:
        a.lease(1)
    assert caught.value.code == "pool_exhausted"
    assert "RequestRow" in caught.value.where
    a.check_integrity()
    held[0].release()
    pages = free(a)
    with pytest.raises(RoomError):
        a.lease(9 * PAGE)
    assert free(a) == pages
    with pytest.raises(RoomError) as never:
        a.lease(10 * PAGE + 1)
    assert never.value.code == "prompt_too_long"
    assert (a.fits(10 * PAGE), a.fits(10 * PAGE + 1)) == (True, False)
    assert (a.fits(10 * PAGE, step_tokens=3 * PAGE), a.fits(10 * PAGE, step_tokens=5 * PAGE)) == (True, False)
    assert a.fits(5 * PAGE, step_tokens=99)
    with pytest.raises(RoomError) as empty:
        a.lease(0)
    assert empty.value.code == "prompt_empty"
    for lease in held[1:]:
        lease.release()
    assert free(a) == before
    a.check_integrity()


def test_generations_rise() -> None:
    a = allocator("high")
    first = a.lease(5)
    first.release()
    second = a.lease(5)
    assert second.generation > first.generation


def test_the_window_slides() -> None:
    a = allocator()
    swa = SPACES["swa"]
    lease = a.lease(9 * PAGE, window_stop=0)
    assert lease.tables().swa_first_page == 0
    most = 0
    for stop in range(PAGE // 2, 9 * PAGE, PAGE // 2):
        lease.advance(stop)
        most = max(most, a.pools[swa].held)
        lease.settle(stop)
        tables = lease.tables()
        assert tables.swa_pages is not None
        first, last = tables.swa_first_page, tables.swa_first_page + len(tables.swa_pages)
        assert (first, last) == (max(0, stop - WINDOW) // PAGE, -(-stop // PAGE))
        a.check_integrity()
    assert most == 2, "never more than the window and the step"
    assert len(lease.tables().pages or ()) == 9
    lease.release()
    assert free(a) == {name: a.pools[space].size for name, space in SPACES.items()}


def test_growth_takes_all_or_nothing() -> None:
    a = allocator()
    lease, other = a.lease(PAGE), a.lease(7 * PAGE)
    with pytest.raises(RoomError):
        lease.advance(4 * PAGE)
    assert lease.tokens == PAGE
    a.check_integrity()
    other.release()
    lease.advance(4 * PAGE)
    assert (lease.tokens, lease.tables().tokens) == (4 * PAGE, 4 * PAGE)


def test_an_armed_lease_belongs_to_the_peer() -> None:
    a = allocator()
    lease = a.lease(12)
    lease.arm()
    for forbidden in (
        lease.release,
        lease.arm,
        lambda: lease.advance(20),
        lambda: lease.pin(),
    ):
        with pytest.raises(LeaseError):
            forbidden()
    with pytest.raises(LeaseError):
        lease.settle(12)
    lease.disarm()
    lease.release()
    for forbidden in (lease.release, lease.arm, lease.disarm, lambda: lease.quarantine("x", 0.0)):
        with pytest.raises(LeaseError):
            forbidden()


def test_a_pinned_lease_is_quarantined_never_released() -> None:
    a = allocator()
    lease = a.lease(12, window_stop=0)
    lease.pin()
    lease.advance(12)
    lease.pin(whole=True)
    for forbidden in (lease.release, lease.arm, lambda: lease.settle(12), lambda: lease.advance(13)):
        with pytest.raises(LeaseError):
            forbidden()
    lease.unpin(whole=True)
    with pytest.raises(LeaseError):
        lease.unpin(whole=True)
    lease.settle(12)
    lease.quarantine("source still read", 1.0)
    assert free(a)["rows"] == 2
    a.fenced(lease.generation)
    assert free(a)["rows"] == 3
    with pytest.raises(LeaseError):
        a.fenced(lease.generation)


@pytest.mark.parametrize("pins", [(True,), (False, True), (True, True)], ids=str)
def test_an_unpin_gives_back_a_pin_of_its_own_kind_only(pins: tuple[bool, ...]) -> None:
    """Unpinned as the other kind, a lease could be released with a whole reader still counted."""
    a = allocator()
    lease = a.lease(12)
    for whole in pins:
        lease.pin(whole=whole)
    for _ in range(pins.count(False)):
        lease.unpin()
    with pytest.raises(LeaseError, match="more often than pinned"):
        lease.unpin()
    with pytest.raises(LeaseError, match="being read"):
        lease.release()
    for _ in range(pins.count(True)):
        lease.unpin(whole=True)
    lease.release()


@pytest.mark.parametrize("end", ["released", "quarantined"])
def test_a_lease_that_is_over_names_no_memory(end: str) -> None:
    """Its pages may be another's by now: nothing is to be sent from them, nor computed into them."""
    a = allocator()
    lease = a.lease(12)
    lease.tables()
    lease.arm()
    assert lease.lists(Prompt(12)) and lease.tables(), "armed: the peer and the rank need them"
    lease.disarm()
    if end == "released":
        lease.release()
    else:
        lease.quarantine("gone", 0.0)
    for forbidden in (lease.tables, lambda: lease.lists(Prompt(12))):
        with pytest.raises(LeaseError):
            forbidden()


def test_a_callback_that_raises_leaves_the_books_balanced() -> None:
    """The lease stayed armed, and could be given back, while its memory was withheld."""

    def broken(held: int) -> None:
        raise ValueError("a defect")

    a = allocator(quarantine_bytes=0, on_over_budget=broken)
    lease = a.lease(10)
    lease.arm()
    lease.quarantine("prefill lost", 5.0)
    a.check_integrity()
    with pytest.raises(LeaseError):
        lease.release()
    a.fenced(lease.generation)
    a.check_integrity()


def test_quarantine_keeps_memory_out_of_use_and_counts_bytes() -> None:
    calls: list[int] = []
    a = allocator(quarantine_bytes=0, on_over_budget=calls.append)
    lease = a.lease(3 * PAGE)
    lease.arm()
    mine = {space: holding.indices.tolist() for space, holding in lease.holdings.items()}
    lease.quarantine("prefill lost", 5.0)
    nbytes = sum(a._bytes[space] * len(indices) for space, indices in mine.items())
    assert (a.quarantine.held_bytes, a.quarantine.oldest_since_s, len(a.quarantine)) == (nbytes, 5.0, 1)
    assert nbytes > 0
    assert a.quarantine.over_budget
    assert calls == [nbytes]
    others = [a.lease(3 * PAGE) for _ in range(2)]
    for other in others:
        for space, holding in other.holdings.items():
            assert not set(holding.indices.tolist()) & set(mine[space])
    second = others[0]
    second.arm()
    second.quarantine("another", 6.0)
    assert len(calls) == 1, "once a crossing"
    assert a.quarantine.reasons() == {lease.generation: "prefill lost", second.generation: "another"}
    a.check_integrity()
    assert a.fenced(lease.generation) == nbytes
    a.fenced(second.generation)
    assert not a.quarantine.over_budget
    a.check_integrity()


def test_a_shared_prefix_is_not_armed_not_quarantined_not_lost() -> None:
    a = allocator()
    source = a.lease(4 * PAGE + 3)
    lease = a.lease(6 * PAGE, window_stop=5 * PAGE, prefix=(source, 3 * PAGE))
    pages = SPACES["pages"]
    assert lease.holdings[pages].indices[:3].tolist() == source.holdings[pages].indices[:3].tolist()
    assert (
        lease.lists(Prompt(5 * PAGE, 3 * PAGE))[pages].lower().tolist() == lease.holdings[pages].indices[3:5].tolist()
    )
    lease.arm()
    with pytest.raises(LeaseError, match="shares"):
        source.arm()
    source.release()
    lease.quarantine("gone", 0.0)
    assert a.pools[pages].withheld == 3
    assert a.pools[pages].free == 7, "the prefix has no holder left, and no peer ever writes it"
    a.check_integrity()
    a.fenced(lease.generation)
    assert a.pools[pages].free == 10


def test_a_source_page_that_others_share_waits_for_its_reader_too() -> None:
    a = allocator()
    source = a.lease(3 * PAGE)
    sharer = a.lease(4 * PAGE, window_stop=4 * PAGE, prefix=(source, 2 * PAGE))
    source.pin()
    source.quarantine("still read", 0.0)
    sharer.release()
    a.check_integrity()
    assert a.pools[SPACES["pages"]].withheld == 3
    a.fenced(source.generation)
    assert a.pools[SPACES["pages"]].free == 10


@pytest.mark.parametrize("prefix", [0, 3, PAGE + 1, 5 * PAGE])
def test_a_prefix_is_whole_pages_that_the_other_holds(prefix: int) -> None:
    a = allocator()
    source = a.lease(4 * PAGE + 3)
    with pytest.raises(PlanError, match="prefix"):
        a.lease(6 * PAGE, prefix=(source, prefix))
    a.check_integrity()
    assert a.pools[SPACES["rows"]].held == 1


def test_a_window_that_slid_away_cannot_be_shared() -> None:
    a = allocator()
    source = a.lease(6 * PAGE)
    source.settle(6 * PAGE)
    with pytest.raises(PlanError, match="prefix"):
        a.lease(3 * PAGE + 1, window_stop=3 * PAGE + 1, prefix=(source, 3 * PAGE))
    a.lease(6 * PAGE, window_stop=6 * PAGE, prefix=(source, 3 * PAGE)).release()
    source.arm()
    with pytest.raises(LeaseError, match="share"):
        a.lease(6 * PAGE, prefix=(source, 3 * PAGE))


def test_a_model_without_state_spaces_leases_pages_only() -> None:
    only = tuple(c for c in hybrid_state().components if c.kind == "KV")
    roots = roots_of(hybrid_state(components=only, window_tokens=0), capacity(4), Topology(dcp=2, tp=2))
    assert roots.list_spaces == (Page(of=VirtualTok(capacity_tokens=32, page_tokens=8, dcp_size=2)),)
    tables = Allocator(roots).lease(17).tables()
    assert (tables.row, tables.slot, tables.swa_pages) == (None, None, None)
    assert len(tables.pages or ()) == 2
    assert not isinstance(tables.pages.space.of if tables.pages else None, SwaTok)


@pytest.mark.parametrize("damage", ["free twice", "lost", "stranger", "bytes"])
def test_the_books_are_really_checked(damage: str) -> None:
    a = allocator()
    lease = a.lease(20)
    pool = a.pools[SPACES["pages"]]
    if damage == "free twice":
        pool._stack[pool._free - 1] = pool._stack[0]
    elif damage == "lost":
        pool._free -= 1
    elif damage == "stranger":
        lease.holdings[SPACES["pages"]].indices = np.array([7, 8, 9])
    else:
        a.quarantine.held_bytes += 1
    with pytest.raises(LeaseError):
        a.check_integrity()


def test_what_is_not_held_cannot_change_hands() -> None:
    pool = IndexPool(RequestRow(rows=4))
    taken = pool.take(2)
    pool.give_back(taken[:1])
    for forbidden in (pool.give_back, pool.share, pool.withhold, pool.fenced):
        with pytest.raises(PdError):
            forbidden(taken)
    assert (pool.free, pool.held, pool.withheld) == (3, 1, 0)


def test_shared_window_pages_slide_away_like_own_ones() -> None:
    a = allocator()
    source = a.lease(3 * PAGE)
    lease = a.lease(6 * PAGE, window_stop=3 * PAGE, prefix=(source, 3 * PAGE))
    swa = SPACES["swa"]
    assert (lease.holdings[swa].indices.size, lease.holdings[swa].shared) == (1, 1)
    lease.advance(5 * PAGE)
    lease.settle(5 * PAGE)
    assert (lease.holdings[swa].first, lease.holdings[swa].shared) == (4, 0)
    lease.arm()
    lease.quarantine("gone", 0.0)
    assert a.pools[swa].withheld == 1
    a.check_integrity()
