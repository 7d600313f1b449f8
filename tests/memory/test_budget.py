"""One budget sizes all pools, and counts index-K at its true cost."""

from __future__ import annotations

import dataclasses

import pytest
from support.hybrid_state import capacity, hybrid_state

from sglang_pd.memory.allocator import window_pages
from sglang_pd.memory.budget import plan_budget, window_pool_tokens
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.protocol.manifest import RankId, Topology

MIB = 2**20
LATENT = ComponentSpec("MLA", "local_tokens", (RegionSpec("latent", (0,), "uint8", 1, (656,), replicated=True),))
INDEX = ComponentSpec("INDEX_K", "tokens", (RegionSpec("key", (0,), "uint8", 1, (132,), replicated=True),))
SPARSE = StateSpec((LATENT, INDEX), 1)


@pytest.mark.parametrize("topology", [Topology(), Topology(pp=3, tp=2), Topology(pp=2)])
@pytest.mark.parametrize("memory", [100_000, 1_000_003, 20 * MIB])
def test_the_largest_capacity_that_fits(topology: Topology, memory: int) -> None:
    state = hybrid_state()
    budget = plan_budget(state, topology, capacity(1), {"cpu": memory})

    def used(size: Capacity) -> int:
        ranks = [RankId(p, t) for p in range(topology.pp) for t in range(topology.tp)]
        return max(layout_rank(state, size, topology, rank).total_bytes for rank in ranks)

    chosen = budget.capacity
    more = dataclasses.replace(chosen, tokens=chosen.tokens + chosen.page_tokens)
    assert used(chosen) == budget.used_bytes["cpu"] <= memory < used(more)
    assert dataclasses.replace(chosen, tokens=0) == dataclasses.replace(capacity(1), tokens=0)


@pytest.mark.parametrize("dcp", [1, 2, 8])
def test_index_k_costs_dcp_times_its_rows(dcp: int) -> None:
    """Each token of capacity on a rank costs 656 B of latent, and 132 B of index key for each of dcp ranks' tokens."""
    budget = plan_budget(SPARSE, Topology(tp=8, dcp=dcp), Capacity(0, 64), {"cpu": 64 * MIB})
    page = 64 * (656 + 132 * dcp)
    assert budget.capacity.tokens // 64 + 1 == 64 * MIB // page  # one page is the reserve
    lines = {line.kind: line for line in budget.lines}
    rows = budget.capacity.tokens + 64
    assert (lines["MLA"].nbytes, lines["INDEX_K"].nbytes) == (rows * 656, rows * dcp * 132)
    assert (f"x {dcp}" in lines["INDEX_K"].note) == (dcp > 1)


def test_host_and_device_have_budgets_of_their_own() -> None:
    state, device = hybrid_state(), "cuda:0"
    budget = plan_budget(state, Topology(), capacity(1), {device: MIB, "cpu": 10_000}, device)
    assert set(budget.used_bytes) == {device, "cpu"}
    with pytest.raises(ConfigError, match="cpu"):
        plan_budget(state, Topology(), capacity(1), {device: MIB}, device)
    with pytest.raises(ConfigError, match=r"\$\.pools\.memory_bytes: .* MAMBA 4320,"):
        plan_budget(state, Topology(), capacity(1), {device: 1000, "cpu": 10_000}, device)


def test_the_table_shows_every_component_and_the_total() -> None:
    budget = plan_budget(hybrid_state(), Topology(), capacity(1), {"cpu": MIB})
    text = budget.text()
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [c.kind for c in hybrid_state().components]
    assert f"{budget.used_bytes['cpu']:,}" in lines[-1]
    assert sum(line.nbytes for line in budget.lines) <= budget.used_bytes["cpu"]


@pytest.mark.parametrize("window", [1, 6, 8, 9, 15])
@pytest.mark.parametrize("step", [1, 2, 8, 9, 20])
def test_a_window_and_its_step_lie_on_as_many_pages_as_counted(window: int, step: int) -> None:
    page = 8
    seen = {(start + window + step - 1) // page - start // page + 1 for start in range(64)}
    assert window_pages(window, step, page) == max(seen)


def test_a_window_pool_holds_every_row_and_its_step() -> None:
    assert window_pool_tokens(4, 6, 1, 8) == 4 * 2 * 8
    assert window_pool_tokens(2, 128, 512, 64) == 2 * 11 * 64
