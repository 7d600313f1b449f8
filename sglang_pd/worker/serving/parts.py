"""One rank's memory and engine put together: layout, scope, pools, allocator, and the setup of its endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pd.backends.base import DEFAULT_DEADLINE_S, Backend
from sglang_pd.engines.base import Engine, ModelFacts
from sglang_pd.memory.allocator import Allocator, Policy, instance_index_bytes
from sglang_pd.memory.layout import Capacity, RankLayout, layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.views import segment_tensor
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.worker.ranks.device_digest import digest_device_rows
from sglang_pd.worker.setup import RankSetup


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How much memory, and how it is handed out.

    layout: where it was planned already; else it follows from the engine's state and the capacity. poison: a byte that
    fills the pools at start.
    """

    capacity: Capacity
    policy: Policy
    device: str = "cpu"
    layout: RankLayout | None = None
    poison: int | None = None


@dataclass(frozen=True)
class Parts:
    """A rank, ready to serve: its engine is attached to its pools, its segments are registered."""

    engine: Engine
    facts: ModelFacts
    backend: Backend
    scope: Scope
    layout: RankLayout
    pools: RankPools
    allocator: Allocator
    setup: RankSetup


def assemble(engine: Engine, backend: Backend, memory: Memory, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Parts:
    """Build one rank's parts over its backend. One rank here: instances of several build theirs in each process.

    Raises `ConfigError` for pages the engine cannot use, `BackendError` where memory cannot be had.
    """
    facts = engine.describe()
    if memory.capacity.page_tokens % facts.page_multiple:
        raise ConfigError(
            "the engine needs other pages",
            where="$.pools.page_tokens",
            expected=f"a multiple of {facts.page_multiple}",
            actual=memory.capacity.page_tokens,
        )
    layout = memory.layout or layout_rank(facts.state, memory.capacity, Topology(), RankId(0, 0), memory.device)
    scope = Scope(backend)
    segments = scope.allocate_layout(layout)
    if memory.poison is not None:
        for segment in segments:
            segment_tensor(segment).fill_(memory.poison)
    pools = RankPools(layout, segments)
    engine.attach(pools)
    allocator = Allocator(layout.roots, memory.policy, instance_index_bytes([layout]))
    setup = RankSetup(
        backend=backend,
        components=layout.components,
        segments=segments,
        deadline_s=deadline_s,
        device_digest=digest_device_rows,
    )
    return Parts(engine, facts, backend, scope, layout, pools, allocator, setup)
