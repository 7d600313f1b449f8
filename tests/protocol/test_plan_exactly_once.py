"""Exactly once, by brute force: random pairs of instances, all plans executed, every destination byte judged.

`oracle.py` is the judge; it shares no code with placement, plan or bind.
"""

from __future__ import annotations

from dataclasses import replace
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

from . import oracle
from .builders import Pools, Shape, build, every_kind
from .handover import Pair, hand_over
from .scenarios import pairs


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
    ways = ["shift", "cut", "lengthen", "double", "drop", "source shift"]
    ways += ["other region"] if len(plan.dst.base) > 1 else []  # of one region there is no other
    ways += ["other source"] if len(plan.src.base) > 1 else []
    how = rng.choice(ways)
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
