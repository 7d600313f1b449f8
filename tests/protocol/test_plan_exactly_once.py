"""Exactly once, by brute force: random pairs of instances, all plans executed, every destination byte judged.

`oracle.py` is the judge; it shares no code with placement, plan or bind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.coverage import prove_coverage
from sglang_pd.protocol.errors import PlanError
from sglang_pd.protocol.manifest import RankId
from sglang_pd.protocol.plan import Plan, compile_plan
from sglang_pd.protocol.spaces import Scaled

from . import oracle
from .builders import NGRAM, ROPE, Part, Pools, Shape, Spec, build, every_kind
from .handover import Pair, hand_over


def chunked(rng: Random, tokens: int, parts: int) -> tuple[Chunk, ...]:
    """The prompt in up to `parts` chunks that may end anywhere, an empty one included."""
    cuts = sorted(rng.randrange(tokens + 1) for _ in range(parts - 1))
    starts, stops = [0, *cuts], [*cuts, tokens]
    return tuple(Chunk(a, b, last=i == parts - 1) for i, (a, b) in enumerate(zip(starts, stops, strict=True)))


def fitting(rng: Random, tps: tuple[int, int], least: int = 1) -> int:
    """A group size that both tensor-parallel sizes can hold evenly; small, replicated or cut."""
    good = [g for g in range(1, 2 * lcm(*tps) + 1) if all(g % tp == 0 or tp % g == 0 for tp in tps)]
    return rng.choice([g for g in good if g >= least][:6])


def context_heads(tps: tuple[int, int], dcps: tuple[int, int]) -> int:
    """The most heads that leave a copy of each to every context class on both sides; 0 where that cannot be."""
    good = [
        g
        for g in range(1, max(tps) + 1)
        if all(g % tp == 0 or tp % g == 0 for tp in tps)
        and all(dcp == 1 or tp // g >= dcp for tp, dcp in zip(tps, dcps, strict=True))
    ]
    return max(good, default=0)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def pools(rng: Random, shared: Pools, dcp: int, tokens: int) -> Pools:
    """One side's pools: sizes of its own, page, window and group as agreed."""
    page = shared.page_tokens
    most = -(-tokens // page)
    return replace(
        shared,
        capacity_tokens=page * (most + rng.randrange(4)),
        swa_capacity_tokens=page * (shared.window // page + 2 + rng.randrange(3)),
        rows=rng.randrange(1, 5),
        slots=rng.randrange(1, 5),
        ring_width=shared.r + rng.randrange(4),
        dcp=dcp,
        interleave=rng.choice(divisors(page)),
    )


@dataclass(frozen=True)
class Agreed:
    """What both sides have in common: sizes of groups and units, layers."""

    kv: int
    context_kv: int
    swa: int
    conv: tuple[int, ...]
    temp: tuple[int, ...]
    layers: dict[str, tuple[int, ...]]
    swa_allowed: bool
    index_k: str


def specs(rng: Random, side: Pools, agreed: Agreed) -> tuple[Spec, ...]:
    """One side's components: the agreed facts in item shapes, paddings, spaces and an order of its own."""

    def part(name: str, groups: tuple[int, ...], unit: int, rows: list[int], **facts: object) -> Part:
        return Part(name, groups, unit, rows_per_item=rng.choice(rows), pad_bytes=rng.choice((0, 0, 1, 5)), **facts)  # type: ignore[arg-type]

    def copies(name: str, units: int, unit: int, rows: list[int], **facts: object) -> Part:
        return part(name, (units,), unit, rows, replicated=True, **facts)

    page, virtual, one = side.page_tokens, side.virtual, [1]
    index_k = {"tokens": virtual, "groups": side.scaled, "window": Scaled(of=side.swa, ratio=side.r)}[agreed.index_k]
    whole = [*divisors(page), page * side.dcp]
    context = side.dcp > 1 or rng.random() < 0.3
    context_kv = context and agreed.context_kv > 0
    tok = divisors(page)
    kv_rows = tok if context_kv else whole
    heads, kv = agreed.context_kv or agreed.kv, (agreed.kv,)
    scale_rows = rng.choice(divisors(page if agreed.index_k == "tokens" else page // side.r))
    ring = divisors(side.ring_width)
    made = [
        Spec("KV", virtual, (part("k", (heads,), 3, kv_rows), part("v", (heads,), 2, kv_rows)), local=context_kv),
        Spec("MLA", virtual, (copies("latent", 5, 1, tok), copies("rope", 3, 1, tok)), local=context),
        Spec(
            "INDEX_K",
            index_k,
            (
                Part("key", (4,), 1, replicated=True, rows_per_item=scale_rows),
                Part("scale", (1,), 4, replicated=True, rows_per_item=scale_rows),
            ),
            layout="keys_then_scales",
            shared_page=True,
        ),
        Spec("INDEX_K_TAIL", side.ring, (copies("key", 2, 2, ring), copies("score", 1, 2, ring))),
        Spec("QSA_PENDING", side.ring, (copies("key", 3, 2, ring), copies("rope", 3, 8, ring, sentinel=ROPE))),
        Spec("QSA_COMPRESSED", side.scaled, (copies("key", 3, 2, divisors(page // side.r)),)),
        Spec("QSA_RAW_K", virtual, (copies("key", 3, 2, tok if context else whole),), local=context),
        Spec("QSA_POSITIONS", virtual, (copies("position", 3, 1, whole),)),
        Spec("MAMBA", side.slot, (part("conv", agreed.conv, 2, one, outer=3), part("temporal", agreed.temp, 4, one))),
        Spec("PLE", side.slot, (copies("conv", 9, 2, [1]), copies("ngram", 2, 8, [1], sentinel=NGRAM))),
        Spec("DRAFT_KV", virtual, (part("k", kv, 2, whole), part("v", kv, 1, whole)), optional=True),
        Spec("BLOCK_SCALE", virtual, (part("k", kv, 1, whole), copies("v", 2, 1, whole))),
        Spec("REQUEST_ROW", side.row, (copies("row", 11, 1, [1]),), optional=True),
    ]  # fmt: skip
    if agreed.swa_allowed:
        made.append(Spec("SWA", side.swa, (part("k", (agreed.swa,), 2, tok), part("v", (agreed.swa,), 3, tok))))
    rng.shuffle(made)
    return tuple(replace(spec, layers=agreed.layers[spec.kind]) for spec in made)


TOPOLOGY = st.tuples(st.integers(1, 3), st.integers(1, 8)).flatmap(
    lambda pt: st.tuples(st.just(pt[0]), st.just(pt[1]), st.sampled_from(divisors(pt[1])))
)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Two instances with all kinds, and a request."""
    (pp_s, tp_s, dcp_s), (pp_d, tp_d, dcp_d) = draw(TOPOLOGY), draw(TOPOLOGY)
    page = draw(st.sampled_from([2, 4, 6]))
    shared = Pools(page_tokens=page, r=draw(st.sampled_from(divisors(page))), window=draw(st.integers(1, 9)))
    pages_held = draw(st.integers(0, 2))
    prefix = pages_held * page * dcp_d
    tokens = draw(st.integers(max(1, prefix), max(1, prefix) + 4 * page + 1))
    seed = draw(st.integers(0, 2**32))
    rng = Random(seed)
    tps = (tp_s, tp_d)
    src, dst = pools(rng, shared, dcp_s, tokens), pools(rng, shared, dcp_d, tokens)
    no_context = dcp_s == dcp_d == 1
    agreed = Agreed(
        kv=fitting(rng, tps),
        context_kv=context_heads(tps, (dcp_s, dcp_d)),
        swa=fitting(rng, tps),
        conv=tuple(fitting(rng, tps) for _ in range(3)),
        temp=(fitting(rng, tps),),
        layers={kind: tuple(sorted(rng.sample(range(5), rng.randrange(1, 3)))) for kind in oracle.LIVE},
        swa_allowed=no_context,
        index_k=rng.choice(["tokens", "groups", "window"][: 2 + no_context]),
    )
    if no_context and rng.random() < 0.5:
        agreed = replace(agreed, context_kv=0)
    sides = []
    for name, pp, tp, own in (("prefill", pp_s, tp_s, src), ("decode", pp_d, tp_d, dst)):
        stages = {layer: rng.randrange(pp) for layer in range(5)}
        segments, gap, lead = rng.randrange(1, 4), rng.randrange(4), rng.randrange(9)
        sides.append(build(Shape(specs(rng, own, agreed), pp, tp, own.dcp, stages, name, segments, gap, lead)))
    chunks = chunked(rng, tokens, draw(st.integers(1, 4)))
    return Pair(sides[0], sides[1], oracle.Request(tokens, prefix), chunks, draw(st.booleans()), seed)


@pytest.mark.timeout(900)
@settings(max_examples=settings().max_examples * 2 // 5)
@given(pairs())
def test_every_live_byte_arrives_exactly_once(pair: Pair) -> None:
    hand_over(pair)


CORNERS = {
    "tp8 to tp1": (Shape((), tp=8), Shape((), tp=1)),
    "tp1 to tp8": (Shape((), tp=1), Shape((), tp=8)),
    "tp3 to tp2, 6 heads": (Shape((), tp=3), Shape((), tp=2)),
    "tp8 dcp8 to tp8 dcp4": (Shape((), tp=8, dcp=8), Shape((), tp=8, dcp=4)),
    "tp2 to tp8 dcp8": (Shape((), tp=2), Shape((), tp=8, dcp=8)),
    "pp3 tp2 to pp2 tp4": (Shape((), pp=3, tp=2), Shape((), pp=2, tp=4)),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corners(name: str) -> None:
    heads = 6 if "tp3" in name else 2
    sides = []
    for shape, stages in zip(CORNERS[name], ({0: 0, 1: 1, 100: 2}, {0: 1, 1: 1}), strict=True):
        dcp = shape.dcp
        own = Pools(capacity_tokens=40 + 8 * shape.tp, swa_capacity_tokens=24, dcp=dcp, ring_width=4 + shape.tp % 3)
        components = [spec for spec in every_kind(own, heads) if spec.kind != "SWA"]
        mine = {layer: stage % shape.pp for layer, stage in stages.items()}
        sides.append(build(replace(shape, components=tuple(components), stages=mine, name=f"{shape.tp}-{dcp}")))
    page_len = 4 * CORNERS[name][1].dcp
    for tokens, prefix in ((1, 0), (3, 0), (4, 0), (5, 0), (13, 0), (page_len + 3, page_len), (page_len, page_len)):
        request = oracle.Request(tokens, prefix)
        hand_over(Pair(sides[0], sides[1], request, (Chunk(0, tokens, last=True),), True, tokens))


def test_a_pair_whose_prefill_has_no_draft_leaves_the_draft_alone() -> None:
    own = Pools()
    with_draft = every_kind(own)
    without = tuple(spec for spec in with_draft if not spec.optional)
    for prefill, decode in ((without, with_draft), (with_draft, without)):
        pair = Pair(
            build(Shape(prefill, tp=2, name="p")),
            build(Shape(decode, tp=4, name="d")),
            oracle.Request(9),
            (Chunk(0, 9, last=True),),
            True,
            1,
        )
        hand_over(pair)


def rank_plans(pair: Pair, rank: RankId) -> list[Plan]:
    return [compile_plan(pair.prefill, s.rank, pair.decode, rank) for s in pair.prefill.ranks]


@pytest.mark.timeout(900)
@settings(max_examples=settings().max_examples // 5)
@given(pairs())
def test_the_proof_misses_any_plan_that_is_taken_away_or_made_twice(pair: Pair) -> None:
    for d in pair.decode.ranks:
        plans = rank_plans(pair, d.rank)
        prove_coverage(pair.prefill, pair.decode, d.rank, plans)
        for number, plan in enumerate(plans):
            if not plan.entries:
                continue
            for wrong in (plans[:number] + plans[number + 1 :], [*plans, plan]):
                with pytest.raises(PlanError) as caught:
                    prove_coverage(pair.prefill, pair.decode, d.rank, wrong)
                assert caught.value.code == "coverage_incomplete" and str(d.rank) in caught.value.where


def spoil(plan: Plan, rng: Random) -> tuple[str, Plan]:
    """One entry of one move shifted, cut, lengthened, doubled, dropped, or sent to another region."""
    number = rng.randrange(len(plan.moves))
    move = plan.moves[number]
    at = rng.randrange(len(move))
    fields = ("layer_id", "src_region", "dst_region", "src_inner", "dst_inner", "length")
    columns = {name: getattr(move, name).copy() for name in fields}
    how = rng.choice(["shift", "cut", "lengthen", "double", "drop", "other region", "other source", "source shift"])
    if how == "shift":
        columns["dst_inner"][at] += 1
    elif how == "cut":
        columns["length"][at] -= 1
    elif how == "lengthen":
        columns["length"][at] += 1
    elif how == "double":
        columns = {name: np.append(column, column[at]) for name, column in columns.items()}
    elif how == "drop":
        columns = {name: np.delete(column, at) for name, column in columns.items()}
    elif how == "other region":
        columns["dst_region"][at] = (columns["dst_region"][at] + 1) % len(plan.dst.base)
    elif how == "other source":
        columns["src_region"][at] = (columns["src_region"][at] + 1) % len(plan.src.base)
    else:
        columns["src_inner"][at] += 1
    moves = (*plan.moves[:number], replace(move, **columns), *plan.moves[number + 1 :])
    return how, replace(plan, moves=moves)


@pytest.mark.timeout(900)
@settings(max_examples=settings().max_examples * 2 // 5)
@given(pairs(), st.integers(0, 2**32))
def test_the_proof_misses_no_spoiled_plan(pair: Pair, seed: int) -> None:
    rng = Random(seed)
    d = rng.choice([d for d in pair.decode.ranks if d.components])
    plans = rank_plans(pair, d.rank)
    number = rng.choice([i for i, plan in enumerate(plans) if plan.entries])
    for _ in range(4):
        how, wrong = spoil(plans[number], rng)
        with pytest.raises(PlanError, match="coverage_incomplete"):
            prove_coverage(pair.prefill, pair.decode, d.rank, [*plans[:number], wrong, *plans[number + 1 :]])
            pytest.fail(how)
