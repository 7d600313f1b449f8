"""Index lists and chunks: exact counts, one space a list, nothing reserved, nothing twice, nothing truncated."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from sglang_pd.protocol.bind import Chunk, NeededLists, RoomIndices, bind, check_lists, needed_lists
from sglang_pd.protocol.errors import IndexOutOfSpace, PdError, PlanError, SpaceMismatch
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import InstanceManifest, RankId
from sglang_pd.protocol.pairing import Pairing, Record
from sglang_pd.protocol.spaces import AnySpace, LocalTok, Page, SwaTok, VirtualTok

from . import oracle
from .builders import Part, Pools, Shape, Spec, build, every_kind
from .handover import Pair, hand_over, simple, whole

POOLS = Pools(capacity_tokens=64)
PREFILL = build(Shape(every_kind(POOLS), name="prefill"))
DECODE = build(Shape(every_kind(replace(POOLS, rows=9, slots=9, capacity_tokens=80)), tp=2, name="decode"))
PAIRING = Pairing(PREFILL, DECODE)
Lists = dict[AnySpace, list[int]]


def lists(tokens: int, prefix: int = 0) -> tuple[Lists, Lists]:
    rng = Random(tokens)
    src = oracle.make_lists(PREFILL, oracle.Request(tokens), rng)
    return src, oracle.make_lists(DECODE, oracle.Request(tokens, prefix), rng)


def room(tokens: int, prefix: int, src: Lists, dst: Lists) -> RoomIndices:
    return PAIRING.room(Prompt(tokens, prefix), oracle.ingest(src), oracle.ingest(dst))


def refused(code: str, tokens: int, prefix: int, src: Lists, dst: Lists) -> PlanError:
    with pytest.raises(PlanError) as caught:
        room(tokens, prefix, src, dst)
    assert caught.value.code == code
    return caught.value


# Counts


@pytest.mark.parametrize("tokens", [3, 4, 5, 11, 12, 13])
@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("side", [0, 1])
def test_ix_01_every_list_has_exactly_its_own_count(tokens: int, wrong: int, side: int) -> None:
    hand_over(simple(PREFILL, DECODE, tokens))
    for space in lists(tokens)[side]:
        both = lists(tokens)
        unused = next(i for i in range(space.reserve, space.extent) if i not in both[side][space])
        both[side][space] = [*both[side][space], unused] if wrong > 0 else both[side][space][:-1]
        error = refused("count_mismatch", tokens, 0, *both)
        where = ("source", "destination")[side]
        assert error.where.startswith(where) and error.details["component"] in error.where
        assert error.actual == len(both[side][space]) and str(error.actual - wrong) in str(error.expected)


def test_ix_01_one_page_for_a_sampled_token_is_one_too_many() -> None:
    # prompt of one page; prefill appended the first token and lists the page it fell into
    src, dst = lists(4)
    page = next(s for s in src if isinstance(s, Page) and isinstance(s.of, VirtualTok))
    src[page] = [*src[page], 1]
    refused("count_mismatch", 4, 0, src, dst)


def test_ix_10_empty_sides() -> None:
    for side in (0, 1):
        both = lists(9)
        for space in both[side]:
            both[side][space] = []
        refused("count_mismatch", 9, 0, *both)
    nothing = RoomIndices.of(NeededLists({}, {}), Prompt(9), {}, {})
    empty = build(Shape(()))
    plan = Pairing(empty, empty).plan(RankId(0, 0), RankId(0, 0))
    assert len(bind(plan, nothing, Chunk(0, 9, last=True))) == 0
    src, dst = lists(9)
    for both in ((src, {}), ({}, dst), ({}, {})):
        assert "no index list" in refused("count_mismatch", 9, 0, *both).message


def test_a_prefix_that_covers_the_prompt_still_moves_the_state() -> None:
    src, dst = lists(12, 12)
    assert all(values == [] for space, values in dst.items() if isinstance(space, Page))
    hand_over(simple(PREFILL, DECODE, 12, 12))
    kinds: set[str] = set()
    for s, d, plan in PAIRING.all_plans():
        batch = bind(plan, room(12, 12, src, dst), Chunk(0, 12, last=True))
        numbers = [c.kind for c in DECODE.rank(d).components for _ in c.regions]
        kinds |= {numbers[n] for n in batch.dst_region.tolist()}
        assert s == RankId(0, 0)
    assert kinds == {"MAMBA", "PLE", "REQUEST_ROW"}  # 12 is a multiple of r: the rings are dead


@pytest.mark.parametrize("prefix", [1, 2, 3, 5])
def test_a_prefix_is_a_whole_number_of_pages(prefix: int) -> None:
    error = refused("prefix_unaligned", 9, prefix, *lists(9, prefix))
    assert "multiple of 4" in str(error.expected)
    # also where the prefix is the whole prompt and no page is listed
    refused("prefix_unaligned", prefix, prefix, *lists(prefix, prefix))


def test_a_prefix_under_dcp_is_a_whole_number_of_virtual_pages() -> None:
    pools = Pools(dcp=2)
    decode = build(Shape((Spec("MLA", pools.virtual, (Part("latent", replicated=True),), local=True),), tp=2, dcp=2))
    prefill = build(Shape((Spec("MLA", Pools().virtual, (Part("latent", replicated=True),)),)))
    with pytest.raises(PlanError, match="prefix_unaligned"):
        hand_over(simple(prefill, decode, 13, 4))
    hand_over(simple(prefill, decode, 13, 8))


def test_a_prefix_inside_a_page_of_the_window_is_refused_only_where_it_reaches_the_window() -> None:
    own = Pools(window=3)
    spec = Spec("SWA", own.swa, (Part("k", (2,)),))
    pair = build(Shape((spec,), name="p")), build(Shape((spec,), name="d"))
    with pytest.raises(PlanError, match="prefix_unaligned"):
        hand_over(simple(*pair, 8, 6))
    hand_over(simple(*pair, 10, 6))  # the window starts at 7
    hand_over(simple(*pair, 10, 8))


def test_prompts_and_prefixes_that_cannot_be() -> None:
    for tokens, prefix in ((0, 0), (8, 12), (8, -4)):
        with pytest.raises(PdError):
            Prompt(tokens, prefix)


# IX-02, IX-03, IX-16: what a list is counted in


def test_ix_02_the_count_follows_prompt_and_page_and_nothing_else() -> None:
    own = Pools(capacity_tokens=640, page_tokens=64, r=1)
    side = build(Shape((Spec("KV", own.virtual, (Part("k"),)),)))
    space = Page(of=own.virtual)
    needed = needed_lists(side, ("KV",))
    check_lists(needed, {space: space.ingest([3, 1, 2])}, Prompt(129), "source")
    # the range that prefill computed last (64) and the allocator's page (1) have no way in
    for wrong in ([3], list(range(1, 10))):
        with pytest.raises(PlanError, match="expected 3"):
            check_lists(needed, {space: space.ingest(wrong)}, Prompt(129), "source")
    with pytest.raises(IndexOutOfSpace):
        space.ingest([space.extent])


def three_pages() -> tuple[InstanceManifest, list[Page]]:
    spaces = [VirtualTok(capacity_tokens=512 * 4, page_tokens=page) for page in (1, 64, 256)]
    kinds = ("KV", "MLA", "QSA_RAW_K")
    parts = (Part("k"), Part("latent", replicated=True), Part("key", replicated=True))
    specs = tuple(Spec(kind, space, (part,)) for kind, space, part in zip(kinds, spaces, parts, strict=True))
    return build(Shape(specs)), [Page(of=space) for space in spaces]


@pytest.mark.parametrize("tokens", [1, 64, 65, 300])
def test_ix_03_three_components_of_three_page_sizes(tokens: int) -> None:
    side, pages = three_pages()
    hand_over(simple(side, side, tokens))
    counts = [-(-tokens // page) for page in (1, 64, 256)]
    needed = needed_lists(side, side.kinds)
    good: Any = {space: space.ingest(range(1, n + 1)) for space, n in zip(pages, counts, strict=True)}
    check_lists(needed, good, Prompt(tokens), "source")
    for a, b in ((0, 1), (1, 2), (0, 2)):
        swapped = dict(good)
        if counts[a] != counts[b]:
            if counts[a] < pages[b].extent:
                swapped[pages[b]] = pages[b].ingest(range(1, counts[a] + 1))
                with pytest.raises(PlanError, match="count_mismatch"):
                    check_lists(needed, swapped, Prompt(tokens), "source")
        swapped[pages[a]], swapped[pages[b]] = good[pages[b]], good[pages[a]]
        with pytest.raises(SpaceMismatch):
            check_lists(needed, swapped, Prompt(tokens), "source")


def test_ix_16_a_list_of_another_unit_is_refused_with_both_spaces() -> None:
    src, dst = (oracle.ingest(side) for side in lists(9))
    page = next(s for s in dst if isinstance(s, Page) and isinstance(s.of, VirtualTok))
    tokens = page.of.ingest(range(8, 8 + len(dst[page])))
    local = LocalTok(virtual=VirtualTok(capacity_tokens=8, page_tokens=4), dcp_rank=0)
    other = Page(of=local).ingest([1, 2, 1][: len(dst[page])])
    for wrong in (tokens, other, src[next(s for s in src if isinstance(s, Page))]):
        with pytest.raises(SpaceMismatch) as caught:
            PAIRING.room(Prompt(9), src, {**dst, page: wrong})
        assert "destination list for" in caught.value.where and str(page) in str(caught.value.expected)
    row = next(s for s in dst if type(s).__name__ == "RequestRow")
    slot = next(s for s in dst if type(s).__name__ == "RecurrentSlot")
    with pytest.raises(SpaceMismatch):
        PAIRING.room(Prompt(9), src, {**dst, row: dst[slot]})


# Values


def test_reserved_indices_are_refused() -> None:
    for side in (0, 1):
        for space in lists(9)[side]:
            both = lists(9)
            both[side][space][-1] = space.reserve - 1
            error = refused("index_invalid", 9, 0, *both)
            assert "reserved" in error.message and str(space.reserve) in str(error.expected)


def test_an_index_at_or_over_its_space_never_gets_as_far_as_a_room() -> None:
    for side in (0, 1):
        for space in lists(9)[side]:
            both = lists(9)
            both[side][space][0] = space.extent
            with pytest.raises(IndexOutOfSpace):
                room(9, 0, *both)


def test_an_index_twice_is_refused_on_either_side() -> None:
    for side in (0, 1):
        pages = [space for space, values in lists(9)[side].items() if len(values) > 1]
        assert all(isinstance(space, Page) for space in pages) and len(pages) == 2
        for space in pages:
            both = lists(9)
            both[side][space][-1] = both[side][space][0]
            error = refused("index_invalid", 9, 0, *both)
            assert "twice" in error.message and error.actual == both[side][space][0]


# Lists that come with the last chunk


def window_of(side: Lists) -> AnySpace:
    return next(space for space in side if isinstance(space, Page) and isinstance(space.of, SwaTok))


def test_a_window_list_of_the_source_may_come_late_and_is_checked_then() -> None:
    src, dst = lists(9)
    window = window_of(src)
    late = {window: src.pop(window)}
    early = room(9, 0, src, dst)
    plan = PAIRING.plan(RankId(0, 0), RankId(0, 0))
    assert len(bind(plan, early, Chunk(0, 8, last=False))) > 0
    with pytest.raises(PlanError, match="no index list"):
        bind(plan, early, Chunk(8, 9, last=True))
    done = early.completed(PAIRING.needed, oracle.ingest(late))
    complete = room(9, 0, {**src, **late}, dst)
    batches = [bind(plan, each, Chunk(0, 9, last=True)) for each in (done, complete)]
    assert batches[0].src_offset.tolist() == batches[1].src_offset.tolist()
    for wrong, code in (({}, "count_mismatch"), ({window: late[window][:-1]}, "count_mismatch")):
        with pytest.raises(PlanError) as caught:
            early.completed(PAIRING.needed, oracle.ingest(wrong))
        assert caught.value.code == code and "SWA" in caught.value.where
    again = {**late, **{space: values for space, values in src.items() if isinstance(space, Page)}}
    assert early.completed(PAIRING.needed, oracle.ingest(again)).src == complete.src


def test_a_list_that_comes_a_second_time_is_the_same_list() -> None:
    src, dst = lists(9)
    ready = room(9, 0, src, dst)
    for space, values in src.items():
        other = [values[0] - 3, *values[1:]]
        with pytest.raises(PlanError) as caught:
            ready.completed(PAIRING.needed, oracle.ingest({space: other}))
        assert caught.value.code == "index_invalid" and "another now" in caught.value.message


def test_no_other_list_may_come_late() -> None:
    for side in (0, 1):
        for space in lists(9)[side]:
            both = lists(9)
            del both[side][space]
            if space in PAIRING.needed.late and side == 0:
                room(9, 0, *both)
            else:
                refused("count_mismatch", 9, 0, *both)
    pages = {space for space in PAIRING.needed.late if isinstance(space, Page)}
    assert pages == {window_of(lists(9)[0])}


# Chunks


def test_ix_14_a_prompt_of_5601_in_chunks_of_2048() -> None:
    own = Pools(capacity_tokens=6400, page_tokens=64, r=1)
    pair = [build(Shape((Spec("KV", own.virtual, (Part("k", (1,), 1, rows_per_item=64),)),), name=n)) for n in "pd"]
    chunks = (Chunk(0, 2048, False), Chunk(2048, 4096, False), Chunk(4096, 5601, True))
    hand_over(Pair(pair[0], pair[1], oracle.Request(5601), chunks, True, 1))
    # IX-08: what one side calls two chunks the other may call one; records say offset and length
    hand_over(
        Pair(pair[0], pair[1], oracle.Request(4000, 2944), (Chunk(0, 2000, False), Chunk(2000, 4000, True)), True, 1)
    )


@pytest.mark.parametrize(
    "chunk",
    [(-1, 9, True), (0, 8, True), (0, 10, True), (5, 4, False), (0, 10, False), (10, 9, True)],
    ids=str,
)
def test_a_chunk_that_cannot_be_is_refused(chunk: tuple[int, int, bool]) -> None:
    ready = room(9, 0, *lists(9))
    with pytest.raises(PlanError, match="chunk"):
        bind(PAIRING.plan(RankId(0, 0), RankId(0, 0)), ready, Chunk(*chunk))


def test_records_of_all_chunks_tile_what_is_expected() -> None:
    prefill, decode = build(Shape(every_kind(POOLS), pp=2, tp=4, stages={1: 1, 100: 1})), DECODE
    pairing = Pairing(prefill, decode)
    prompt = Prompt(23, 8)
    expected = {((e.writer.pp, e.writer.tp), e.component): e for e in pairing.expected(prompt)}
    assert {writer for writer, _ in expected} == {(p, t) for p in range(2) for t in range(4)}
    silent = set()
    for rank in prefill.ranks:
        writer = (rank.rank.pp_rank, rank.rank.tp_rank)
        got: dict[str, list[Record]] = {}
        for chunk in (Chunk(0, 7, False), Chunk(7, 18, False), Chunk(18, 23, True)):
            for record in pairing.records(rank.rank, prompt, chunk):
                got.setdefault(record.kind, []).append(record)
        # TP-17: a rank that moves nothing of a kind it holds still reports
        assert set(got) == {c.kind for c in rank.components} == {kind for who, kind in expected if who == writer}
        for kind, records in got.items():
            want = expected[writer, kind]
            assert [record.last for record in records] == [False] * (len(records) - 1) + [True]
            cells = [
                (layer, element)
                for record in records
                for layer in want.layers
                if record.layer_start <= layer < record.layer_stop
                for element in range(record.start, record.stop)
            ]
            wanted = [(layer, e) for e in range(want.token_start, want.token_stop) for layer in want.layers]
            assert sorted(cells) == sorted(wanted), (writer, kind)
            if not want.layers:
                silent.add(kind)
    # replicated kinds have two writers of four for decode's two ranks; heads have all four
    assert "KV" not in silent and {"MLA", "PLE", "QSA_PENDING"} <= silent


# Batches


def test_a_batch_has_the_dtypes_it_promises_and_no_empty_descriptor() -> None:
    for tokens in (1, 9, 40):
        ready = room(tokens, 0, *lists(tokens))
        for _, _, plan in PAIRING.all_plans():
            batch = bind(plan, ready, Chunk(0, tokens, last=True))
            assert batch.src_region.dtype == batch.dst_region.dtype == np.uint32
            assert batch.src_offset.dtype == batch.dst_offset.dtype == batch.length.dtype == np.uint64
            assert len(batch) and int(batch.length.min()) > 0


def test_pf_01_descriptors_of_a_head_slice_are_a_row_and_of_whole_rows_a_page() -> None:
    own = Pools(capacity_tokens=4096, page_tokens=64, r=1)
    parts = (Part("k", (8,), 16, rows_per_item=64), Part("v", (8,), 16, rows_per_item=64))
    layers = tuple(range(4))
    four, one = (build(Shape((Spec("KV", own.virtual, parts, layers),), tp=tp)) for tp in (4, 1))
    rng = Random(5)
    for prefill, decode, most in ((four, one, 8 * 4096), (one, one, 8 * 64)):
        pairing = Pairing(prefill, decode)
        request = oracle.Request(4096)
        both = [oracle.ingest(oracle.make_lists(side, request, rng, top=False)) for side in (prefill, decode)]
        batch = bind(
            pairing.plan(RankId(0, 0), RankId(0, 0)), pairing.room(Prompt(4096), *both), Chunk(0, 4096, last=True)
        )  # fmt: skip
        assert len(batch) <= most


def test_one_room_serves_all_rank_pairs_of_a_hand_over() -> None:
    hand_over(Pair(PREFILL, DECODE, oracle.Request(21, 8), whole(21), False, 4))
