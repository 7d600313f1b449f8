"""Live rows by the typed maps agree with arithmetic written down here once more, and with the planner's."""

from __future__ import annotations

import numpy as np
import pytest
from support.hybrid_state import PAGE, RATIO, WINDOW, capacity, copy_chunk, fill, hybrid_state, instance, layouts
from support.stub_backend import StubBackend

from sglang_pd.memory.allocator import Allocator, Policy
from sglang_pd.memory.live import live_rows
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import Topology
from sglang_pd.protocol.pairing import Pairing

LENGTHS = [1, RATIO - 1, RATIO, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 5]


def open_pools(state: StateSpec, pages: int, topology: Topology) -> list[RankPools]:
    return [
        RankPools(layout, Scope(StubBackend()).allocate_layout(layout))
        for layout in layouts(state, capacity(pages, pages, pages), topology)
    ]


def without_window() -> StateSpec:
    whole = hybrid_state()
    return hybrid_state(components=tuple(c for c in whole.components if c.kind != "SWA"), window_tokens=0)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_live_elements_and_their_slots(tokens: int) -> None:
    (pools,) = open_pools(hybrid_state(), 6, Topology())
    lease = Allocator(pools.layout.roots, Policy("random", 5)).lease(tokens)
    prompt = Prompt(tokens)
    lists = lease.lists(prompt)
    held = [holding.indices for holding in lease.holdings.values()]
    pages, swa, row, slot = held
    expected = {
        ("KV", 4, "k"): [(t, pages[t // PAGE] * PAGE + t % PAGE) for t in range(tokens)],
        ("QSA_COMPRESSED", 2, "key"): [
            (g, pages[g * RATIO // PAGE] * (PAGE // RATIO) + g % (PAGE // RATIO)) for g in range(tokens // RATIO)
        ],
        ("QSA_PENDING", 5, "key"): [
            (t, row[0] * (RATIO + 1) + t % (RATIO + 1)) for t in range(tokens // RATIO * RATIO, tokens)
        ],
        ("MAMBA", 3, "conv"): [(0, slot[0])],
        ("SWA", 1, "v"): [
            (t, swa[t // PAGE - max(0, tokens - WINDOW) // PAGE] * PAGE + t % PAGE)
            for t in range(max(0, tokens - WINDOW), tokens)
        ],
    }
    for key, want in expected.items():
        rows = pools.row_bytes(*key)
        flat = rows.reshape(-1, rows.shape[-1])
        flat[:] = np.random.default_rng(1).integers(0, 256, flat.shape, dtype=np.uint8)
        numbers, found = live_rows(pools, key, lists, prompt)
        assert numbers.tolist() == [n for n, _ in want], key
        np.testing.assert_array_equal(found, flat[[int(s) for _, s in want]])


@pytest.mark.parametrize(
    ("src_topology", "dst_topology"),
    [(Topology(), Topology(tp=2, dcp=2)), (Topology(tp=4, dcp=4), Topology(tp=2, dcp=2))],
)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_context_shards_meet_by_token(src_topology: Topology, dst_topology: Topology, tokens: int) -> None:
    """After the plans ran, each token's latent row is with exactly one destination rank, and is the source's row."""
    src, dst = open_pools(without_window(), 6, src_topology), open_pools(without_window(), 9, dst_topology)
    rng = np.random.default_rng(7)
    for pools in src:
        rows = pools.row_bytes("MLA", 5, "latent")
        rows[...] = rng.integers(1, 256, rows.shape, dtype=np.uint8)
    for pools in dst:
        fill(pools, 0)
    a = Allocator(src[0].layout.roots, Policy("random", 1)).lease(tokens)
    b = Allocator(dst[0].layout.roots, Policy("random", 2)).lease(tokens)
    prompt = Prompt(tokens)
    pairing = Pairing(instance("p", [p.layout for p in src]), instance("d", [p.layout for p in dst]))
    room = pairing.room(prompt, a.lists(prompt), b.lists(prompt))
    copy_chunk(pairing, room, Chunk(0, tokens, last=True), src, dst)

    def by_token(side: list[RankPools], lists: object) -> dict[int, set[bytes]]:
        found: dict[int, set[bytes]] = {}
        for pools in side:
            numbers, rows = live_rows(pools, ("MLA", 5, "latent"), lists, prompt)  # type: ignore[arg-type]
            for n, row in zip(numbers, rows, strict=True):
                found.setdefault(int(n), set()).add(row.tobytes())
        return found

    sent, arrived = by_token(src, a.lists(prompt)), by_token(dst, b.lists(prompt))
    assert sorted(arrived) == list(range(tokens))
    assert arrived == sent
