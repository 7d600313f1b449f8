"""Runs a hand-over for real, on the oracle's memory: verdict, plans, proof, lists, every chunk of every rank pair."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sglang_pd.protocol.bind import Chunk, NeededLists, RoomIndices, bind, needed_lists
from sglang_pd.protocol.coverage import prove_coverage
from sglang_pd.protocol.handshake import compare
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import InstanceManifest, RankId
from sglang_pd.protocol.plan import Plan, compile_plan

from . import oracle


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode instance and one request between them."""

    prefill: InstanceManifest
    decode: InstanceManifest
    request: oracle.Request
    chunks: tuple[Chunk, ...]
    top: bool
    seed: int


def hand_over(pair: Pair) -> dict[tuple[RankId, RankId], Plan]:
    """Prove, bind and execute everything, then ask the oracle. Returns the plans."""
    verdict = compare(pair.prefill, pair.decode)
    assert verdict.accepted, verdict.mismatches
    kinds = set(pair.prefill.kinds) & set(pair.decode.kinds)
    plans = {
        (s.rank, d.rank): compile_plan(pair.prefill, s.rank, pair.decode, d.rank)
        for s in pair.prefill.ranks
        for d in pair.decode.ranks
    }
    for d in pair.decode.ranks:
        prove_coverage(pair.prefill, pair.decode, d.rank, [plan for key, plan in plans.items() if key[1] == d.rank])
    rng = Random(pair.seed)
    whole = oracle.Request(pair.request.tokens)
    src = oracle.Side(pair.prefill, whole, oracle.make_lists(pair.prefill, whole, rng, pair.top))
    dst = oracle.Side(pair.decode, pair.request, oracle.make_lists(pair.decode, pair.request, rng, pair.top))
    names = oracle.Names()
    oracle.fill_source(src, names)
    dst.blank(oracle.canary)
    needed = NeededLists(*(needed_lists(side, tuple(sorted(kinds))) for side in (pair.prefill, pair.decode)))
    prompt = Prompt(pair.request.tokens, pair.request.prefix)
    room = RoomIndices.of(needed, prompt, oracle.ingest(src.lists), oracle.ingest(dst.lists))
    for chunk in pair.chunks:
        for (s, d), plan in plans.items():
            oracle.execute(bind(plan, room, chunk), src.memory[s], dst.memory[d], dst.written[d])
        if not chunk.last:
            only_early(dst, names, chunk)
    for d in pair.decode.ranks:
        assert oracle.problems(dst, names, d.rank, kinds) == []
    return plans


def only_early(dst: oracle.Side, names: oracle.Names, chunk: Chunk) -> None:
    """Before the last chunk only streaming kinds move, and of them only tokens that were computed."""
    kind_of = {number: key[0] for key, number in names.numbers.items()}
    for segments in dst.memory.values():
        for memory in segments:
            for value in set(memory[memory != oracle.CANARY].tolist()):
                assert value < oracle.RUBBISH, "rubbish arrived"
                assert kind_of[value >> 36] in oracle.STREAMS and (value >> 20 & 0xFFFF) < chunk.stop, names.explain(
                    value
                )


def whole(tokens: int) -> tuple[Chunk, ...]:
    """The prompt in one chunk."""
    return (Chunk(0, tokens, last=True),)


def simple(prefill: InstanceManifest, decode: InstanceManifest, tokens: int, prefix: int = 0) -> Pair:
    """One request in one chunk, at the top of both pools."""
    return Pair(prefill, decode, oracle.Request(tokens, prefix), whole(tokens), True, tokens)
