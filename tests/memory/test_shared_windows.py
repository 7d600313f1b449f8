"""Which rows of a sliding window a lease has, by the lists that it gave, and with whom it may share them."""

from __future__ import annotations

import pytest
from support.hybrid_state import PAGE, WINDOW, capacity, hybrid_state

from sglang_pd.memory.allocator import Allocator, Policy, instance_index_bytes
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.memory.layout import layout_rank, roots_of
from sglang_pd.memory.lease import NOBODY_KNOWS
from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.spaces import AnySpace

ROOTS = roots_of(hybrid_state(), capacity(10), Topology())
SWA: AnySpace = ROOTS.list_spaces[1]


def allocator() -> Allocator:
    layout = layout_rank(hybrid_state(), capacity(10), Topology(), RankId(0, 0))
    return Allocator(ROOTS, Policy(), instance_index_bytes([layout]))


def test_a_peer_is_not_given_what_another_lease_shares() -> None:
    a = allocator()
    source = a.lease(3 * PAGE, window_stop=0)
    source.advance(3 * PAGE)
    lease = a.lease(3 * PAGE, prefix=(source, PAGE))
    lease.arm()
    with pytest.raises(LeaseError, match="another lease shares"):
        lease.lists(Prompt(3 * PAGE))
    lease.lists(Prompt(3 * PAGE, PAGE))


def test_lists_refuse_a_prefix_whose_window_the_lease_lacks() -> None:
    """It was sized for what is still to be decoded, and judged by that."""
    a = allocator()
    short = PAGE + 2
    source = a.lease(short + 2)
    source.arm()
    source.lists(Prompt(short + 2))
    source.disarm()
    lease = a.lease(short + 2, prefix=(source, PAGE))  # the prompt is shorter
    lease.arm()
    with pytest.raises(PlanError, match=f"from position {short - WINDOW} on") as raised:
        lease.lists(Prompt(short, PAGE))
    assert raised.value.code == "prefix_unaligned"
    lease.lists(Prompt(short + 2, PAGE))


def test_a_window_that_continues_its_prefix_is_there_from_where_that_was() -> None:
    a = allocator()
    space, short = SWA, PAGE + 2
    source = a.lease(3 * PAGE, window_stop=0)
    source.advance(3 * PAGE)
    lease = a.lease(short, prefix=(source, PAGE))
    lease.arm()
    lease.lists(Prompt(short, PAGE))  # reads from before the prefix's end on
    lease.disarm()
    assert short - WINDOW < PAGE and lease.holdings[space].written_from == 0


def test_a_hand_over_says_which_rows_of_a_window_are_there() -> None:
    """Not the size of the lease: a second turn, or a retry, writes its own window, and leaves what lies before it."""
    a = allocator()
    space, longer = SWA, 2 * PAGE + 3
    lease = a.lease(PAGE + 3)
    lease.arm()
    lease.lists(Prompt(PAGE + 3))
    lease.disarm()
    assert lease.holdings[space].written_from == PAGE + 3 - WINDOW
    lease.advance(longer)
    lease.arm()
    lease.lists(Prompt(longer, PAGE))
    lease.disarm()
    assert lease.holdings[space].written_from == longer - WINDOW > PAGE, "nobody wrote what lies between"
    lease.arm()
    lease.disarm()
    assert lease.holdings[space].written_from == NOBODY_KNOWS, "no list was given for that one"
    with pytest.raises(PlanError, match="none that are known"):
        lease.lists(Prompt(longer, 2 * PAGE))


def test_a_window_page_is_shared_only_with_the_rows_that_the_other_ever_had() -> None:
    """What a hand-over writes of a sliding window begins within its first page; the rest of that page is nobody's."""
    a = allocator()
    space, longer = SWA, PAGE + 3
    begins = longer - WINDOW
    assert 0 < begins < PAGE
    arrived = a.lease(longer)
    assert arrived.holdings[space].first == 0 and arrived.holdings[space].written_from == begins
    shared = a.lease(longer, prefix=(arrived, PAGE))
    assert shared.holdings[space].written_from == begins
    for source in (arrived, shared):  # what was borrowed knows it as well
        with pytest.raises(PlanError, match=f"from position {begins - 1} on"):
            a.lease(longer - 1, prefix=(source, PAGE))
    arrived.release()
    computed = a.lease(longer, window_stop=0)  # as prefill does: from the start on
    computed.advance(longer)
    a.lease(longer - 1, prefix=(computed, PAGE)).release()
    shared.release()
    shared = a.lease(longer, prefix=(computed, PAGE))
    a.lease(longer - 1, prefix=(shared, PAGE)).release()
    computed.advance(2 * PAGE + WINDOW)
    computed.settle(2 * PAGE + WINDOW)
    assert computed.holdings[space].written_from == computed.holdings[space].first * PAGE > 0


def test_no_list_makes_more_rows_known_than_there_were() -> None:
    """A shorter hand-over, one that was aborted, one that was refused, one more list: the gap before stays a gap."""
    a = allocator()
    space, longer = SWA, 2 * PAGE + 3
    lease = a.lease(longer, window_stop=0)
    lease.advance(longer)
    for prompt in (Prompt(longer), Prompt(WINDOW + 1), Prompt(longer, 2 * PAGE)):
        lease.arm()
        lease.lists(prompt)
        assert lease.holdings[space].written_from == longer - WINDOW, "known while it is armed, too"
        lease.disarm()
        assert lease.holdings[space].written_from == longer - WINDOW
    with pytest.raises(PlanError, match="prefix"):
        a.lease(longer - 1, prefix=(lease, 2 * PAGE))
    short = a.lease(3 * PAGE)
    short.arm()
    with pytest.raises(PlanError, match="does not hold"):
        short.lists(Prompt(WINDOW))
    short.disarm()
    assert short.holdings[space].written_from == NOBODY_KNOWS


def test_lists_from_before_it_was_armed_give_no_peer_what_is_shared() -> None:
    a = allocator()
    source = a.lease(3 * PAGE, window_stop=0)
    source.advance(3 * PAGE)
    lease = a.lease(3 * PAGE, prefix=(source, PAGE))
    lease.lists(Prompt(3 * PAGE))
    with pytest.raises(LeaseError, match="another lease shares"):
        lease.arm()
