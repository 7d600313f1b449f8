"""Random pairs of instances with all kinds and a request between them, for property tests of the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from random import Random

from hypothesis import strategies as st

from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.spaces import Scaled

from . import oracle
from .builders import NGRAM, ROPE, Part, Pools, Shape, Spec, build
from .handover import Pair


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
