"""Index spaces: extents with their reserve, validated doors, total maps, and the first seed's examples."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol.errors import IndexOutOfSpace, ManifestError, SpaceError, SpaceMismatch
from sglang_pd.protocol.idx import Idx, MaskedIdx
from sglang_pd.protocol.space_maps import (
    Absence,
    DivideGroups,
    Door,
    Identity,
    Localize,
    PageOf,
    RaggedAt,
    RingAt,
    TokenAt,
    Translate,
    local_address,
)
from sglang_pd.protocol.spaces import (
    MAX_EXTENT,
    AnySpace,
    LocalTok,
    Page,
    RaggedScratch,
    RecurrentSlot,
    RequestRow,
    Ring,
    Scaled,
    SwaTok,
    VirtualTok,
)

from .builders import Part, Shape, Spec, build
from .oracle import owner_and_local


def virtual(capacity: int = 100, page: int = 4, dcp: int = 4, interleave: int = 1) -> VirtualTok:
    return VirtualTok(capacity_tokens=capacity, page_tokens=page, dcp_size=dcp, interleave=interleave)


@st.composite
def virtuals(draw: st.DrawFn) -> VirtualTok:
    page = draw(st.integers(1, 12))
    interleave = draw(st.sampled_from([n for n in range(1, page + 1) if page % n == 0]))
    return virtual(page * draw(st.integers(1, 6)), page, draw(st.integers(1, 9)), interleave)


# Localize


@given(virtuals())
def test_local_addresses_are_a_bijection_with_the_whole_extent(space: VirtualTok) -> None:
    owner, local = local_address(np.arange(space.extent, dtype=np.int64), space)
    every_place = set(product(range(space.dcp_size), range(space.capacity_tokens + space.page_tokens)))
    assert set(zip(owner.tolist(), local.tolist(), strict=True)) == every_place
    assert len(every_place) == space.extent
    for rank in range(space.dcp_size):
        assert LocalTok(virtual=space, dcp_rank=rank).extent == space.capacity_tokens + space.page_tokens


@given(virtuals())
def test_localize_deals_like_cards(space: VirtualTok) -> None:
    owner, local = local_address(np.arange(space.extent, dtype=np.int64), space)
    for slot in range(space.extent):
        assert (owner[slot], local[slot]) == owner_and_local(slot, space)


@given(virtuals())
def test_every_slot_but_the_padding_slot_has_exactly_one_owner(space: VirtualTok) -> None:
    everything = space.ingest(np.arange(space.extent))
    owners = np.zeros(space.extent, dtype=int)
    for rank in range(space.dcp_size):
        owned = Localize(space, rank)(everything)
        owners[owned.positions] += 1
        assert len(owned.positions) == len(owned.idx)
        assert owned.idx.space == LocalTok(virtual=space, dcp_rank=rank)
        owned.idx.space.ingest(owned.idx.lower())  # in its own extent
        masked = Localize(space, rank).masked(everything)
        places, there = masked.compress()
        assert places.tolist() == owned.positions.tolist() and there == owned.idx
    assert owners[0] == 0 and (owners[1:] == 1).all()


@given(virtuals(), st.data())
def test_absent_and_padding_are_nobodys(space: VirtualTok, data: st.DataObject) -> None:
    table = data.draw(st.lists(st.sampled_from([-1, 0, space.extent - 1]), max_size=8))
    masked = space.ingest_masked(table)
    for rank in range(space.dcp_size):
        mine = Localize(space, rank).masked(masked).lower(absent=-1)
        last_owner = owner_and_local(space.extent - 1, space)
        for slot, local in zip(table, mine.tolist(), strict=True):
            assert local == (last_owner[1] if slot > 0 and last_owner[0] == rank else -1)


def test_a_rank_that_does_not_exist_owns_nothing() -> None:
    for rank in (-1, 4):
        with pytest.raises(SpaceError, match="dcp_rank"):
            Localize(virtual(), rank)(virtual().ingest([5]))


# Extents and doors


@given(virtuals(), st.integers(1, 9))
def test_extents(space: VirtualTok, window: int) -> None:
    c, p, d = space.capacity_tokens, space.page_tokens, space.dcp_size
    assert space.extent == (c + p) * d and space.reserve == p * d == space.page_len
    assert Page(of=space).extent == c // p + 1 and Page(of=space).reserve == 1
    swa = SwaTok(capacity_tokens=c, page_tokens=p, window_tokens=window)
    assert (swa.extent, swa.reserve) == (c + p, p)
    for ratio in (r for r in range(1, p + 1) if p % r == 0):
        scaled = Scaled(of=space, ratio=ratio)
        assert scaled.extent * ratio == space.extent and scaled.reserve * ratio == space.reserve
        assert scaled.list_space == Page(of=space)
    row = RequestRow(rows=3)
    ring = Ring(of=row, width=5, group_tokens=4)
    assert (row.extent, row.reserve, ring.extent, ring.reserve) == (4, 1, 20, 5)
    assert RecurrentSlot(slots=3, reserved=2).extent == 5


EACH: list[AnySpace] = [
    virtual(),
    LocalTok(virtual=virtual(), dcp_rank=2),
    SwaTok(capacity_tokens=8, page_tokens=4, window_tokens=3),
    RequestRow(rows=3),
    RecurrentSlot(slots=4),
    Page(of=virtual()),
    Scaled(of=virtual(), ratio=2),
    Ring(of=RequestRow(rows=3), width=4, group_tokens=4),
    RaggedScratch(token_counts=(3, 0, 2)),
]


def name(space: object) -> str:
    return type(space).__name__


@pytest.mark.parametrize("space", EACH, ids=name)
def test_the_last_index_is_legal_and_the_next_is_not(space: AnySpace) -> None:
    assert space.ingest([0, space.extent - 1]).lower().tolist() == [0, space.extent - 1]
    for wrong in (space.extent, space.extent + 7, -1, -space.extent, 2**62, -(2**63)):
        with pytest.raises(IndexOutOfSpace) as caught:
            space.ingest([0, wrong], consumer="kernel x")
        text = str(caught.value)
        assert caught.value.code == "index_out_of_space"
        assert "kernel x" in text and name(space) in text and f"< {space.extent}" in text and f"{wrong} at" in text


@pytest.mark.parametrize("space", EACH, ids=name)
def test_what_is_not_a_flat_array_of_integers_is_refused(space: AnySpace) -> None:
    for wrong in ([1.0], [[1]], [True], ["1"], [None], np.zeros((2, 2), int), np.array([2**63], np.uint64), 3, [2**70]):
        with pytest.raises(IndexOutOfSpace):
            space.ingest(wrong)


def test_an_empty_list_is_an_index_list() -> None:
    assert len(virtual().ingest([])) == 0 and len(virtual().ingest_masked([])) == 0


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_dtype_enters(dtype: Any) -> None:
    assert virtual().ingest(np.array([1, 100], dtype)).lower().tolist() == [1, 100]


def test_the_values_are_copied_and_read_only() -> None:
    array = np.array([1, 2, 3])
    idx = virtual().ingest(array)
    array[0] = 99
    assert idx.lower().tolist() == [1, 2, 3]
    with pytest.raises(ValueError):
        idx.lower()[0] = 5
    with pytest.raises(ValueError):
        idx[1:].lower()[0] = 5


def test_an_idx_is_no_number_and_no_array() -> None:
    idx = virtual().ingest([4, 5])
    for wrong in (
        lambda: idx + 1,
        lambda: idx // 4,
        lambda: idx % 4,
        lambda: idx < 3,
        lambda: int(idx),
        lambda: idx.__index__(),
    ):
        with pytest.raises((TypeError, AttributeError)):
            wrong()
    for refused in (lambda: idx[0], lambda: list(idx), lambda: np.asarray(idx), lambda: np.add(idx, 1)):
        with pytest.raises(SpaceError):
            refused()
    for forged in (
        lambda: Idx(object(), virtual(), np.array([1]), "here"),
        lambda: MaskedIdx(object(), virtual(), np.array([1]), np.array([True]), "here"),
    ):
        with pytest.raises(SpaceError):
            forged()


def test_a_sentinel_for_absence_is_negative_and_the_only_negative() -> None:
    masked = virtual().ingest_masked([5, -1, 0])
    assert masked.present.tolist() == [True, False, True] and masked.lower(absent=-7).tolist() == [5, -7, 0]
    for wrong in (lambda: virtual().ingest_masked([5], absent=0), lambda: masked.lower(absent=0)):
        with pytest.raises(SpaceError):
            wrong()
    with pytest.raises(IndexOutOfSpace):
        virtual().ingest_masked([5, -2])
    with pytest.raises(IndexOutOfSpace, match="ingest_masked"):
        virtual().ingest(np.ma.masked_array([5, 6], mask=[True, False]))
    with pytest.raises(IndexOutOfSpace):
        virtual().ingest_masked([virtual().extent, -1])


IMPOSSIBLE: dict[str, Any] = {
    "capacity not of pages": lambda: virtual(capacity=6),
    "no capacity": lambda: virtual(capacity=0),
    "no page": lambda: virtual(page=0),
    "no rank": lambda: virtual(dcp=0),
    "interleave over a page": lambda: virtual(interleave=3),
    "a bool": lambda: virtual(dcp=True),
    "extent too large": lambda: virtual(capacity=2**38, page=4, dcp=16),
    "swa extent too large": lambda: SwaTok(capacity_tokens=MAX_EXTENT, page_tokens=4, window_tokens=1),
    "swa not of pages": lambda: SwaTok(capacity_tokens=6, page_tokens=4, window_tokens=1),
    "no window": lambda: SwaTok(capacity_tokens=8, page_tokens=4, window_tokens=0),
    "rank over size": lambda: LocalTok(virtual=virtual(), dcp_rank=4),
    "group over a page": lambda: Scaled(of=virtual(), ratio=3),
    "ring under its group": lambda: Ring(of=RequestRow(rows=2), width=3, group_tokens=4),
    "ring too large": lambda: Ring(of=RequestRow(rows=2**30), width=2**30, group_tokens=4),
    "rows too many": lambda: RequestRow(rows=MAX_EXTENT),
    "reserve negative": lambda: RequestRow(rows=3, reserved=-1),
    "slots": lambda: RecurrentSlot(slots=0),
    "ragged": lambda: RaggedScratch(token_counts=(3, -1)),
    "ragged too large": lambda: RaggedScratch(token_counts=(MAX_EXTENT, 1)),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_space_is_refused_by_field(what: str) -> None:
    with pytest.raises(SpaceError) as caught:
        IMPOSSIBLE[what]()
    assert "." in caught.value.where and caught.value.code == "space_invalid"


def test_spaces_are_values_and_every_fact_is_in_the_digest() -> None:
    assert virtual() == virtual() and virtual().digest == virtual().digest
    others: list[AnySpace] = [
        *EACH,
        virtual(capacity=104),
        virtual(page=2),
        virtual(dcp=2),
        virtual(interleave=2),
        LocalTok(virtual=virtual(), dcp_rank=1),
        LocalTok(virtual=virtual(interleave=2), dcp_rank=2),
        SwaTok(capacity_tokens=8, page_tokens=4, window_tokens=4),
        RequestRow(rows=4),
        RecurrentSlot(slots=3),
        Page(of=LocalTok(virtual=virtual(), dcp_rank=2)),
        Scaled(of=virtual(), ratio=4),
        Ring(of=RequestRow(rows=3), width=5, group_tokens=4),
    ]
    digests = {space.digest for space in others}
    assert len(digests) == len(others) and max(digests) < 2**32
    for space in others:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(space), type=AnySpace)
        assert again == space and again.digest == space.digest


# Maps


def test_no_map_takes_an_index_of_another_space_or_a_bare_integer() -> None:
    space, other = virtual(), virtual(capacity=104)
    row = RequestRow(rows=3)
    positions = np.array([0])
    table = space.ingest_masked(np.full(other.extent, -1))
    wrong: Any = other.ingest([7])
    for call in (
        lambda idx: Identity(space)(idx),
        lambda idx: Localize(space, 1)(idx),
        lambda idx: Localize(space, 1).masked(idx),
        lambda idx: DivideGroups(Scaled(of=space, ratio=2))(idx),
        lambda idx: PageOf(space)(idx),
        lambda idx: TokenAt(space)(idx, positions),
        lambda idx: RingAt(Ring(of=row, width=4, group_tokens=4))(idx, positions),
        lambda idx: Translate(other, space, table)(space.ingest([1]) if idx is wrong else idx),
        lambda idx: Door(space, "x").accept(idx),
    ):
        with pytest.raises(SpaceMismatch):
            call(wrong)
        for bare in (7, np.array([7]), [7]):
            with pytest.raises(SpaceError):
                call(bare)


def test_positions_are_integers_within_what_they_index() -> None:
    space = virtual(dcp=1)
    pages = Page(of=space).ingest([9, 2])
    assert TokenAt(space)(pages, np.array([0, 3, 4, 7])).lower().tolist() == [36, 39, 8, 11]
    assert TokenAt(space, first_page=5)(pages, np.array([20, 27])).lower().tolist() == [36, 11]
    for positions in ([8], [-1], [1.5], [[1]], [2**63]):
        with pytest.raises(IndexOutOfSpace):
            TokenAt(space)(pages, np.array(positions))
    for positions in ([19], [28]):
        with pytest.raises(IndexOutOfSpace):
            TokenAt(space, first_page=5)(pages, np.array(positions))
    row = RequestRow(rows=3)
    ring = RingAt(Ring(of=row, width=5, group_tokens=4))
    assert ring(row.ingest([2]), np.array([4, 5, 6])).lower().tolist() == [14, 10, 11]
    for rows, positions in (([1, 2], [0]), ([], [0]), ([1], [-1]), ([1], [0.5])):
        with pytest.raises(IndexOutOfSpace):
            ring(row.ingest(rows), np.array(positions))


@given(virtuals(), st.data())
def test_pages_tokens_and_groups_agree(space: VirtualTok, data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.integers(0, space.extent - 1), min_size=1, max_size=9))
    idx = space.ingest(slots)
    assert PageOf(space)(idx).lower().tolist() == [slot // space.page_len for slot in slots]
    assert Identity(space)(idx) is idx
    ratio = data.draw(st.sampled_from([r for r in range(1, space.page_tokens + 1) if space.page_tokens % r == 0]))
    scaled = Scaled(of=space, ratio=ratio)
    groups = DivideGroups(scaled)(idx)
    assert groups.space == scaled and groups.lower().tolist() == [slot // ratio for slot in slots]
    scaled.ingest(groups.lower())


def test_a_translation_covers_its_source_and_may_have_holes() -> None:
    full, swa = virtual(dcp=1), SwaTok(capacity_tokens=8, page_tokens=4, window_tokens=3)
    partners = np.full(full.extent, -1)
    partners[[20, 21]] = [5, 6]
    translate = Translate(full, swa, swa.ingest_masked(partners))
    assert translate(full.ingest([21, 22, 20])).lower(absent=-1).tolist() == [6, -1, 5]
    with pytest.raises(SpaceError):
        Translate(full, swa, swa.ingest_masked(partners[:-1]))


def test_a_door_says_what_absence_means() -> None:
    space = virtual()
    masked = space.ingest_masked([3, -1])
    with pytest.raises(SpaceError, match="writer"):
        Door(space, "writer").accept_masked(masked)
    with pytest.raises(SpaceError, match="writer"):
        Door(space, "writer").accept(masked)  # type: ignore[arg-type]
    reader = Door(space, "sparse attention", Absence.SKIP)
    assert reader.accept_masked(masked).tolist() == [3, -1]
    with pytest.raises(SpaceError):
        reader.accept_masked(space.ingest([3]))  # type: ignore[arg-type]
    with pytest.raises(SpaceMismatch):
        reader.accept_masked(virtual(dcp=2).ingest_masked([3, -1]))


# The first seed


def test_seed_3_3_owner_and_local_slot_of_twelve_slots() -> None:
    owner, local = local_address(np.arange(12, dtype=np.int64), virtual())
    assert owner.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert local.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    ten = virtual().ingest([10])
    assert [len(Localize(virtual(), rank)(ten).idx) for rank in range(4)] == [0, 0, 1, 0]
    assert Localize(virtual(), 2)(ten).idx.lower().tolist() == [2]


def test_seed_3_3_capacity_is_not_what_is_in_use() -> None:
    # Four ranks of 100 slots reach 400 plus the reserve, however full each of them is.
    assert virtual().extent == 4 * (100 + 4)
    for slot in (99, 100, 101, 399, 415):
        virtual().ingest([slot])
    with pytest.raises(IndexOutOfSpace):
        virtual().ingest([416])


def test_seed_3_4_three_caches_read_one_slot_three_ways() -> None:
    space = virtual()
    slots = space.ingest([2, 5, 8, 10])
    assert Door(space, "index-K").accept(Identity(space)(slots)).tolist() == [2, 5, 8, 10]
    assert Door(space, "replicated draft").accept(slots).tolist() == [2, 5, 8, 10]
    local = LocalTok(virtual=space, dcp_rank=0)
    assert Door(local, "c-KV").accept(Localize(space, 0)(slots).idx).tolist() == [2]
    reader = Door(local, "sparse decode", Absence.SKIP)
    assert reader.accept_masked(Localize(space, 0).masked(slots)).tolist() == [-1, -1, 2, -1]


def test_seed_3_5_the_ragged_scratch_is_a_space_of_its_own() -> None:
    # [prefix_0; extend_0 | prefix_1; extend_1], 3 + 2 and 1 + 2 tokens
    scratch = RaggedScratch(token_counts=(5, 3))
    assert RaggedAt(scratch)(0, np.array([0, 4])).lower().tolist() == [0, 4]
    assert RaggedAt(scratch)(1, np.array([0, 2])).lower().tolist() == [5, 7]
    for request, position in ((1, 3), (2, 0), (-1, 0), (0, 5), (0, -1)):
        with pytest.raises(IndexOutOfSpace):
            RaggedAt(scratch)(request, np.array([position]))
    idx: Any = RaggedAt(scratch)(1, np.array([2]))
    with pytest.raises(SpaceMismatch):
        Door(virtual(), "index-K").accept(idx)


def index_k(capacity: int, page: int, dcp: int, declared_dcp: int) -> Any:
    space = virtual(capacity, page, declared_dcp)
    parts = (Part("key", (128,), 1, replicated=True, rows_per_item=page), Part("scale", (4,), 1, replicated=True))
    return build(Shape((Spec("INDEX_K", space, parts, shared_page=False),), tp=dcp, dcp=dcp))


@pytest.mark.parametrize("page,dcp", [(64, 8), (64, 2), (4, 4), (1, 8)])
def test_seed_4_1_index_k_is_as_large_as_its_space(page: int, dcp: int) -> None:
    capacity = 10 * page
    manifest = index_k(capacity, page, dcp, dcp)
    component = manifest.ranks[0].component("INDEX_K")
    for region in component.regions:
        rows = region.items(component.space) * region.rows_per_item
        assert rows == (capacity + page) * dcp  # covers (C + p) * D - 1
    # the fix that adds one small page lacks p * (D - 1) rows: 448 for p=64, D=8
    assert component.space.extent - (capacity * dcp + page) == page * (dcp - 1)
    if (page, dcp) == (64, 8):
        assert page * (dcp - 1) == 448


def test_seed_4_1_a_locally_sized_index_k_cannot_be_registered() -> None:
    with pytest.raises(ManifestError, match="dcp_size"):
        index_k(640, 64, 8, 1)
    right = index_k(640, 64, 8, 8).ranks[0]
    for region in right.components[0].regions:
        short = msgspec.structs.replace(
            right.segments[0], nbytes=region.offset + region.span_bytes(right.components[0].space) - 1
        )
        one = msgspec.structs.replace(right.components[0], regions=(region,))
        with pytest.raises(ManifestError, match="smaller than its index space"):
            msgspec.structs.replace(right, segments=(short,), components=(one,))


@pytest.mark.parametrize("slots", [[5, 9], [415, 7, 100]], ids=["low water", "high water"])
def test_seed_4_2_a_virtual_slot_cannot_reach_a_local_cache_even_when_it_is_small(slots: list[int]) -> None:
    space = virtual()
    raw: Any = space.ingest(slots, consumer="out_cache_loc of the allocator")
    door = Door(LocalTok(virtual=space, dcp_rank=1), "c-KV write, no RoPE")
    with pytest.raises(SpaceMismatch) as caught:
        door.accept(raw)
    text = str(caught.value)
    for fact in (
        "c-KV write, no RoPE",  # consumer
        "LocalTok",
        "VirtualTok",  # both spaces
        f"extent {space.extent}",
        "extent 104",
        f"[{min(slots)}, {max(slots)}]",  # index range
        "First offending operation: accept",
        "out_cache_loc of the allocator",  # producer
    ):
        assert fact in text, (fact, text)


def test_seed_4_2_another_ranks_local_slots_are_another_space() -> None:
    space = virtual()
    mine: Any = Localize(space, 2)(space.ingest([10])).idx
    with pytest.raises(SpaceMismatch):
        Door(LocalTok(virtual=space, dcp_rank=1), "c-KV read").accept(mine)


def test_seed_4_3_each_list_is_judged_by_its_own_space() -> None:
    space = virtual(382_976, 64, 8)
    table = space.ingest([2_937_855], consumer="flattened page table")
    assert Door(space, "index-K").accept(table).tolist() == [2_937_855]
    with pytest.raises(IndexOutOfSpace) as caught:
        LocalTok(virtual=space, dcp_rank=0).ingest([2_937_855], consumer="c-KV")
    assert "LocalTok" in str(caught.value) and str(382_976 + 64) in str(caught.value)
    # and once localised it is in bounds again: the check after the map has the map's space
    rank = 2_937_855 % 8
    assert Localize(space, rank)(table).idx.lower().tolist() == [2_937_855 // 8]
