"""Whole plans with known answers: context shards, pipeline stages, paddings, views of one page, widths that differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from random import Random

import pytest

from sglang_pd.protocol.bind import Chunk, NeededLists, RoomIndices, bind, needed_lists
from sglang_pd.protocol.coverage import prove_coverage
from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.handshake import compare
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import InstanceManifest, RankId
from sglang_pd.protocol.plan import PACKING_ORDER, compile_plan
from sglang_pd.protocol.spaces import AnySpace, Page

from . import oracle
from .builders import NGRAM, ROPE, Part, Pools, Shape, Spec, build, every_kind
from .handover import Pair, hand_over, simple, whole

LATENT = (Part("latent", (5,), 1, replicated=True, rows_per_item=4),)


def moved(
    sides: tuple[InstanceManifest, InstanceManifest],
    ranks: tuple[RankId, RankId],
    prompt: Prompt,
    lists: tuple[dict[AnySpace, list[int]], dict[AnySpace, list[int]]],
) -> list[tuple[int, int, int, int, int]]:
    """(source region, offset, destination region, offset, length) of everything one rank pair moves."""
    needed = NeededLists(*(needed_lists(side, side.kinds) for side in sides))
    room = RoomIndices.of(needed, prompt, oracle.ingest(lists[0]), oracle.ingest(lists[1]))
    batch = bind(compile_plan(sides[0], ranks[0], sides[1], ranks[1]), room, Chunk(0, prompt.tokens, last=True))
    columns = (batch.src_region, batch.src_offset, batch.dst_region, batch.dst_offset, batch.length)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def context_pair() -> tuple[InstanceManifest, InstanceManifest, Pools, Pools]:
    one, two = Pools(page_tokens=4), Pools(page_tokens=4, dcp=2)
    prefill = build(Shape((Spec("MLA", one.virtual, LATENT),)))
    decode = build(Shape((Spec("MLA", two.virtual, LATENT, local=True),), tp=2, dcp=2))
    return prefill, decode, one, two


@pytest.mark.parametrize(
    "tokens,prefix,src_pages,dst_pages,want",
    [
        (6, 0, [5, 2], [3], {0: [(20, 12), (22, 13), (8, 14)], 1: [(21, 12), (23, 13), (9, 14)]}),
        # a prefix of one virtual page: owner by absolute position, rows from the first page that decode lists
        (14, 8, [5, 2, 7, 1], [3], {0: [(28, 12), (30, 13), (4, 14)], 1: [(29, 12), (31, 13), (5, 14)]}),
        (9, 8, [5, 2, 7], [6], {0: [(28, 24)], 1: []}),
    ],
    ids=["no prefix", "prefix 8", "one token"],
)
def test_dcp_two_ranks_pages_of_four(
    tokens: int,
    prefix: int,
    src_pages: list[int],
    dst_pages: list[int],
    want: dict[int, list[tuple[int, int]]],
) -> None:
    prefill, decode, one, two = context_pair()
    assert compare(prefill, decode).accepted
    lists: tuple[dict[AnySpace, list[int]], dict[AnySpace, list[int]]] = (
        {Page(of=one.virtual): src_pages},
        {Page(of=two.virtual): dst_pages},
    )
    for rank in range(2):
        got = moved((prefill, decode), (RankId(0, 0), RankId(0, rank)), Prompt(tokens, prefix), lists)
        assert got == [(0, a * 5, 0, b * 5, 5) for a, b in want[rank]]


def test_tp_13_mla_goes_by_token_rows_and_index_k_by_pages_to_every_rank() -> None:
    one, two = Pools(page_tokens=4), Pools(page_tokens=4, dcp=2)
    key = (Part("key", (6,), 1, replicated=True, rows_per_item=4),)
    prefill = build(Shape((Spec("MLA", one.virtual, LATENT), Spec("INDEX_K", one.virtual, key)), tp=2))
    decode = build(
        Shape((Spec("MLA", two.virtual, LATENT, local=True), Spec("INDEX_K", two.virtual, key)), tp=4, dcp=2)
    )
    sides = (prefill, decode)
    lists: tuple[dict[AnySpace, list[int]], dict[AnySpace, list[int]]] = (
        {Page(of=one.virtual): [5, 9, 2]},
        {Page(of=two.virtual): [3, 6]},
    )
    for d in range(4):
        writer = d // 2
        got = moved(sides, (RankId(0, writer), RankId(0, d)), Prompt(11), lists)
        index_k = [entry for entry in got if entry[0] == 1]
        # whole pages of 24 bytes at virtual pages 3 and 6: physical pages 6, 7, then 12 with three rows
        assert index_k == [(1, 5 * 24, 1, 6 * 24, 24), (1, 9 * 24, 1, 7 * 24, 24), (1, 2 * 24, 1, 12 * 24, 18)]
        mla = [entry for entry in got if entry[0] == 0]
        assert [n for *_, n in mla] == [5] * (6 if d % 2 == 0 else 5)
        assert moved(sides, (RankId(0, 1 - writer), RankId(0, d)), Prompt(11), lists) == []
    hand_over(simple(prefill, decode, 11))


def test_tp_06_two_stages_into_one_by_layer_id_with_windows_in_both() -> None:
    own = Pools()
    specs = every_kind(own, layers=(0, 1, 2, 3))
    prefill = build(Shape(specs, pp=2, tp=2, stages={2: 1, 3: 1, 100: 1}, name="pp2"))
    decode = build(Shape(specs, tp=2, name="pp1"))
    assert {r.layer_id for r in prefill.rank(RankId(1, 0)).component("SWA").regions} == {2, 3}
    plans = hand_over(simple(prefill, decode, 13))
    swa = {
        (s.pp_rank, layer)
        for (s, _), plan in plans.items()
        for m in plan.moves
        if m.kind == "SWA"
        for layer in m.layer_id.tolist()
    }
    assert swa == {(0, 0), (0, 1), (1, 2), (1, 3)}
    hand_over(simple(decode, prefill, 13))


def test_request_wide_state_of_several_stages_has_the_lowest_stage_as_writer() -> None:
    specs = every_kind(Pools(), layers=(0, 1, 2, 3))
    prefill = build(Shape(specs, pp=3, stages={1: 1, 2: 1, 3: 2, 0: 2, 100: 0}, name="p"))
    decode = build(Shape(specs, pp=2, stages={0: 1, 1: 1, 2: 0, 3: 0}, name="d"))
    plans = hand_over(simple(prefill, decode, 7))
    for sentinel, writer in ((ROPE, 1), (NGRAM, 2)):
        writers = {
            (s.pp_rank, d.pp_rank)
            for (s, d), plan in plans.items()
            for m in plan.moves
            if sentinel in m.layer_id.tolist()
        }
        assert {s for s, _ in writers} == {writer}
    # n-gram history follows PLE, which only layer 0 has; the ring follows the QSA layers of both decode stages
    assert {d for s, d in writers} == {1}


def test_tp_18_layer_split_prefill_into_token_split_decode() -> None:
    layers = tuple(range(16))
    one, eight = Pools(page_tokens=4), Pools(page_tokens=4, dcp=8)
    prefill = build(Shape((Spec("MLA", one.virtual, LATENT, layers),), pp=8, stages={i: i % 8 for i in layers}))
    decode = build(Shape((Spec("MLA", eight.virtual, LATENT, layers, local=True),), tp=8, dcp=8))
    plans = hand_over(simple(prefill, decode, 17))
    assert len(plans) == 64 and all(plan.entries == 2 for plan in plans.values())


def test_st_06_padding_of_strides_is_never_written() -> None:
    own = Pools(slots=3)
    conv = Part("conv", (4, 4, 8), 2, outer=3, pad_bytes=7)
    prefill = build(Shape((Spec("MAMBA", own.slot, (conv,)),), tp=2))
    decode = build(Shape((Spec("MAMBA", own.slot, (replace(conv, pad_bytes=13),)),), tp=4))
    hand_over(simple(prefill, decode, 5))
    region = decode.ranks[0].components[0].regions[0]
    assert (region.item_bytes, region.stride_bytes) == (24, 37)
    # equal ranks, equal rows, other strides: whole items, yet never the padding between
    same = build(Shape((Spec("MAMBA", own.slot, (replace(conv, pad_bytes=1),)),), tp=2))
    hand_over(simple(prefill, same, 5))
    kv = (Part("k", (2,), 2, rows_per_item=4, pad_bytes=3),)
    pair = [build(Shape((Spec("KV", own.virtual, kv),))) for _ in range(2)]
    assert all(n == 16 for *_, n in contiguous(pair[0], pair[1], 12))


def contiguous(
    prefill: InstanceManifest, decode: InstanceManifest, tokens: int
) -> list[tuple[int, int, int, int, int]]:
    """What rank 0 moves when both page lists are 1, 2, 3, ..."""
    lists: list[dict[AnySpace, list[int]]] = []
    for side in (prefill, decode):
        space = side.ranks[0].components[0].space.list_space
        count = oracle.pages_needed(space.of, oracle.Request(tokens)) if isinstance(space, Page) else 1
        lists.append({space: list(range(1, count + 1))})
    return moved((prefill, decode), (RankId(0, 0), RankId(0, 0)), Prompt(tokens), (lists[0], lists[1]))


def test_contiguous_pages_are_one_piece_a_region() -> None:
    own = Pools(capacity_tokens=64)
    spec = Spec("KV", own.virtual, (Part("k", (2,), 2, rows_per_item=4), Part("v", (2,), 3)), (0, 1))
    pair = [build(Shape((spec,), name=name)) for name in "pd"]
    got = contiguous(pair[0], pair[1], 50)
    # packing order 1: k and v differ in their items, so they are two moves, each in order of layers
    assert [(s, d, n) for s, _, d, _, n in got] == [(0, 0, 200), (2, 2, 200), (1, 1, 300), (3, 3, 300)]


def test_a_page_of_two_views_moves_keys_and_scales_apart() -> None:
    own = Pools()
    parts = (Part("key", (4,), 1, replicated=True, rows_per_item=4), Part("scale", (1,), 4, replicated=True))
    parts = (parts[0], replace(parts[1], rows_per_item=4))
    pair = [build(Shape((Spec("INDEX_K", own.virtual, parts, shared_page=True),), name=name)) for name in "pd"]
    # pages 1 and 2 of 32 bytes, keys first: never merged, since a neighbour's scales lie between
    assert contiguous(pair[0], pair[1], 7) == [
        (0, 32, 0, 32, 16), (0, 64, 0, 64, 12), (1, 32, 1, 32, 16), (1, 64, 1, 64, 12),
    ]  # fmt: skip
    hand_over(simple(pair[0], pair[1], 7))


def test_rings_of_other_widths_pair_by_position() -> None:
    narrow, wide = Pools(r=4, ring_width=4), Pools(r=4, ring_width=6, rows=9)
    sides = tuple(build(Shape((spec_of("QSA_PENDING", pools),), name=n)) for pools, n in ((narrow, "p"), (wide, "d")))
    # 11 tokens: 8, 9, 10 are open; slots 0, 1, 2 of a ring of 4 and 2, 3, 4 of one of 6
    got = moved(
        (sides[0], sides[1]), (RankId(0, 0), RankId(0, 0)), Prompt(11), ({narrow.row: [3]}, {wide.row: [7]})
    )  # fmt: skip
    key = [(a // 6, b // 6, n) for s, a, _, b, n in got if s == 0]
    assert key == [(12, 44, 18)]
    for tokens in range(1, 13):
        hand_over(simple(sides[0], sides[1], tokens))
        hand_over(simple(sides[1], sides[0], tokens))


def spec_of(kind: str, pools: Pools, heads: int = 4) -> Spec:
    return next(replace(spec, layers=(0,)) for spec in every_kind(pools, heads) if spec.kind == kind)


def test_k_and_v_of_different_widths_in_both_tp_directions() -> None:
    own = Pools()
    spec = Spec("KV", own.virtual, (Part("k", (4,), 6, rows_per_item=4), Part("v", (2,), 5, rows_per_item=2)))
    sides = [build(Shape((spec,), tp=tp, name=f"tp{tp}")) for tp in (1, 2, 4)]
    for prefill in sides:
        for decode in sides:
            hand_over(simple(prefill, decode, 11))


def test_ix_12_bases_near_the_end_of_the_address_space_do_not_wrap() -> None:
    own = Pools(slots=2)
    spec = Spec("MAMBA", own.slot, (Part("temporal", (4,), 2**40),))
    far = {tp: build(Shape((spec,), tp=tp, lead_bytes=2**51)) for tp in (1, 2, 4)}
    for src_tp, dst_tp in ((1, 4), (4, 1), (2, 4), (4, 2)):
        sides = (far[src_tp], far[dst_tp])
        total = 0
        for s in range(src_tp):
            for d in range(dst_tp):
                plan = compile_plan(sides[0], RankId(0, s), sides[1], RankId(0, d))
                needed = NeededLists(*(needed_lists(side, side.kinds) for side in sides))
                lists = {own.slot: own.slot.ingest([2])}
                batch = bind(plan, RoomIndices.of(needed, Prompt(3), lists, lists), Chunk(0, 3, last=True))
                for segment, at in (batch.src_addresses(), batch.dst_addresses()):
                    assert segment.tolist() == [0] * len(batch)
                    assert all(2**51 <= a < 2**52 for a in at.tolist())
                assert all(0 < n <= 4 * 2**40 for n in batch.length.tolist())
                total += batch.total_bytes
        assert total == 4 * 2**40


def test_an_item_over_four_gib_is_one_descriptor() -> None:
    own = Pools(slots=2)
    spec = Spec("PLE", own.slot, (Part("conv", (3,), 2**32, replicated=True),))
    pair = [build(Shape((spec,))) for _ in range(2)]
    got = moved((pair[0], pair[1]), (RankId(0, 0), RankId(0, 0)), Prompt(1), ({own.slot: [1]}, {own.slot: [2]}))
    item = 3 * 2**32
    assert got == [(0, item, 0, 2 * item, item)]


# Plans that must not be


def test_regions_that_disagree_do_not_compile() -> None:
    own = Pools()
    prefill = build(Shape((spec_of("KV", own),)))
    decode = build(Shape((replace(spec_of("KV", own), parts=(Part("k", (4,), 6), Part("v", (4,), 2))),)))
    with pytest.raises(PlanError) as caught:
        compile_plan(prefill, RankId(0, 0), decode, RankId(0, 0))
    assert caught.value.code == "peer_incompatible" and "KV[0/k]" in caught.value.where


def test_a_layer_that_prefill_lacks_fails_the_proof() -> None:
    own = Pools()
    specs = [replace(spec_of("KV", own), layers=layers) for layers in ((0, 1), (0, 1, 2))]
    prefill, decode = (build(Shape((spec,), tp=2)) for spec in specs)
    plan = compile_plan(prefill, RankId(0, 0), decode, RankId(0, 0))
    with pytest.raises(PlanError, match=r"KV\[2/k\]"):
        prove_coverage(prefill, decode, RankId(0, 0), [plan])
    with pytest.raises(PlanError, match="another rank"):
        prove_coverage(prefill, decode, RankId(0, 1), [plan])


def test_only_the_kinds_that_both_sides_have_are_planned() -> None:
    own = Pools()
    prefill, decode = (build(Shape((spec_of("KV", own), spec_of(kind, own)))) for kind in ("PLE", "DRAFT_KV"))
    plan = compile_plan(prefill, RankId(0, 0), decode, RankId(0, 0))
    assert plan.kinds == {"KV"}


def test_segments_of_other_numbers_and_offsets_are_followed() -> None:
    own = Pools()
    spec = spec_of("KV", own)
    prefill = build(Shape((spec,), segments=2, lead_bytes=11))
    decode = build(Shape((spec,), segments=3, gap_bytes=5))
    hand_over(Pair(prefill, decode, oracle.Request(9), whole(9), False, 3))


def test_packing_order_1() -> None:
    # Staging packs in the order of descriptors, so the order is part of the protocol, whatever order manifests have.
    prefill, decode = build(Shape(every_kind(Pools()), tp=2)), build(Shape(every_kind(Pools())[::-1], tp=1))
    assert PACKING_ORDER == 1
    plan = compile_plan(prefill, RankId(0, 0), decode, RankId(0, 0))
    regions = [(c.kind, r.layer_id, r.part) for c in decode.ranks[0].components for r in c.regions]
    entries = [
        [(*regions[d], b) for d, b in zip(move.dst_region.tolist(), move.dst_inner.tolist(), strict=True)]
        for move in plan.moves
    ]
    assert all(move == sorted(move) and len({kind for kind, *_ in move}) == 1 for move in entries)
    assert [move[0] for move in entries] == sorted(move[0] for move in entries)
    request = oracle.Request(11)
    needed = NeededLists(*(needed_lists(side, side.kinds) for side in (prefill, decode)))
    lists = [oracle.ingest(oracle.make_lists(side, request, Random(1))) for side in (prefill, decode)]
    batch = bind(plan, RoomIndices.of(needed, Prompt(11), *lists), Chunk(0, 11, last=True))
    order = [entry[:3] for move in entries for entry in move]
    seen = [regions[number] for number in batch.dst_region.tolist()]
    assert [key for key, _ in groupby(seen)] == [key for key, _ in groupby(order)]
