"""Single rows, as verification reads them, against the oracle's places."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pd.protocol.bind import NeededLists, RoomIndices, live_elements, needed_lists, rows_of
from sglang_pd.protocol.kinds import Elements, Prompt
from sglang_pd.protocol.plan import compile_plan

from . import oracle
from .handover import Pair
from .scenarios import pairs


@settings(max_examples=settings().max_examples // 4)
@given(pairs(), st.integers(0, 2**32))
def test_rows_are_the_elements_that_both_ranks_hold_where_they_hold_them(pair: Pair, seed: int) -> None:
    rng = Random(seed)
    whole = oracle.Request(pair.request.tokens)
    src = oracle.Side(pair.prefill, whole, oracle.make_lists(pair.prefill, whole, rng))
    dst = oracle.Side(pair.decode, pair.request, oracle.make_lists(pair.decode, pair.request, rng))
    kinds = tuple(sorted(set(pair.prefill.kinds) & set(pair.decode.kinds)))
    needed = NeededLists(*(needed_lists(side, kinds) for side in (pair.prefill, pair.decode)))
    prompt = Prompt(pair.request.tokens, pair.request.prefix)
    room = RoomIndices.of(needed, prompt, oracle.ingest(src.lists), oracle.ingest(dst.lists))
    s, d = rng.choice(pair.prefill.ranks), rng.choice(pair.decode.ranks)
    src_regions, dst_regions = ([(c, r) for c in rank.components for r in c.regions] for rank in (s, d))
    for move in compile_plan(pair.prefill, s.rank, pair.decode, d.rank).moves:
        live = live_elements(move.kind, move.dst.space, prompt)
        part = Elements(rng.randint(live.start, live.stop), live.stop)
        rows = rows_of(move, room, part)
        assert rows.element.dtype == np.int64 and rows.src_offset.dtype == rows.dst_offset.dtype == np.uint64
        both = []
        for element in range(part.start, part.stop):
            places = [side.slot(m.space, element) for side, m in ((src, move.src), (dst, move.dst))]
            if None not in places:
                both.append((element, *places))
        for a, b in zip(move.src_region.tolist(), move.dst_region.tolist(), strict=True):
            (source, src_region), (target, dst_region) = src_regions[a], dst_regions[b]
            assert source.kind == target.kind == move.kind and src_region.key == dst_region.key
            bases = (src_region.offset, dst_region.offset)
            want = [
                (e, oracle.row_start(src_region, p) - bases[0], oracle.row_start(dst_region, q) - bases[1])
                for e, p, q in both
            ]
            columns = (rows.element, rows.src_offset, rows.dst_offset)
            assert list(zip(*(column.tolist() for column in columns), strict=True)) == want
