"""From a configuration to the manifest that the worker will register, with no process, no memory and no traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sglang_pd.config import WorkerConfig, topology_of
from sglang_pd.config.schema import DEFAULT_TOKENS
from sglang_pd.engines.registry import Described, describe_engine, host_kinds_of
from sglang_pd.memory.budget import Budget, lines_of, plan_budget, window_pool_tokens
from sglang_pd.memory.layout import Capacity, RankLayout, layout_rank
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.protocol.manifest import InstanceManifest, RankId, Topology, Transport
from sglang_pd.worker.serving.transports import transports_of


@dataclass(frozen=True)
class Planned:
    """A configuration, the memory of each of its ranks, and its manifest. budget: where sizes came from one."""

    config: WorkerConfig
    layouts: tuple[RankLayout, ...]
    manifest: InstanceManifest
    budget: Budget


def describe(config: WorkerConfig) -> Described:
    """Ask the engine, computing nothing. Raises `ConfigError` for one that is not installed, and what it raises."""
    return describe_engine(config.engine.name, config.engine.options)


def plan_instance(config: WorkerConfig, described: Described | None = None) -> Planned:
    """Size the pools, lay out every rank, and build the manifest.

    Raises `ConfigError` where the budget is too small, `ManifestError` where model, topology and pools do not fit.
    """
    described = described or describe(config)
    if config.pools.page_tokens % described.page_multiple:
        raise ConfigError(
            "the model's groups of tokens do not fill pages",
            where="$.pools.page_tokens",
            expected=f"a multiple of {described.page_multiple}",
            actual=config.pools.page_tokens,
        )
    topology = topology_of(config)
    state, device = _placed(config, described.state), config.pools.device
    budget = size_pools(config, state, topology)
    ranks = [RankId(p, t) for p in range(topology.pp) for t in range(topology.tp)]
    layouts = tuple(layout_rank(state, budget.capacity, topology, rank, device) for rank in ranks)
    transport = _transport(config)
    manifest = InstanceManifest(
        instance_id=config.name,
        topology=topology,
        model=described.fingerprint,
        max_tokens=_max_tokens(config, described, budget.capacity, topology),
        ranks=tuple(layout.manifest(0, transport) for layout in layouts),
    )
    return Planned(config, layouts, manifest, budget)


def _placed(config: WorkerConfig, state: StateSpec) -> StateSpec:
    """The state, with what `host_kinds` names in host memory. Raises `ConfigError` for what the engine cannot use."""
    wanted = frozenset(config.pools.host_kinds)
    usable = host_kinds_of(config.engine.name, state)
    if not wanted <= usable:
        raise ConfigError(
            f"the engine {config.engine.name!r} does not compute on such state in host memory",
            where="$.pools.host_kinds",
            expected=" | ".join(sorted(usable)) or "none for this model",
            actual=" ".join(sorted(wanted - usable))[:200],
        )
    placed = (replace(c, device="cpu") if c.kind in wanted else c for c in state.components)
    return replace(state, components=tuple(placed))


def size_pools(config: WorkerConfig, state: StateSpec, topology: Topology) -> Budget:
    """Capacities of every pool from a budget or from capacities. Raises `ConfigError` where the budget is too small."""
    pools = config.pools
    swa = pools.swa_tokens
    if swa is None:
        step = config.engine.chunk_tokens if config.role == "prefill" else pools.page_tokens
        swa = window_pool_tokens(pools.rows, state.window_tokens, step, pools.page_tokens)
    page = pools.page_tokens
    tokens = pools.tokens if pools.tokens is not None else -(-DEFAULT_TOKENS // page) * page
    capacity = Capacity(
        tokens=tokens,
        page_tokens=page,
        rows=pools.rows,
        slots=pools.slots or pools.rows,
        swa_tokens=swa if state.window_tokens else 0,
        interleave=pools.interleave,
    )
    if pools.memory_bytes is not None:
        memory = {pools.device: pools.memory_bytes} | ({"cpu": pools.memory_bytes} if pools.device != "cpu" else {})
        return plan_budget(state, topology, capacity, memory, pools.device)
    layouts = [layout_rank(state, capacity, topology, RankId(p, 0), pools.device) for p in range(topology.pp)]
    used: dict[str, int] = {}
    for layout in layouts:
        here: dict[str, int] = {}
        for segment in layout.segments:
            here[segment.device] = here.get(segment.device, 0) + segment.nbytes
        used = {where: max(used.get(where, 0), here.get(where, 0)) for where in {*used, *here}}
    fullest = max(layouts, key=lambda layout: layout.total_bytes)
    return Budget(capacity, dict(used), used, lines_of(fullest))


def _max_tokens(config: WorkerConfig, described: Described, capacity: Capacity, topology: Topology) -> int:
    bounds = [described.max_tokens]
    if "tokens" in described.state.roots:
        bounds.append(capacity.tokens * topology.dcp)
    if config.limits.max_prompt_tokens is not None:
        bounds.append(config.limits.max_prompt_tokens)
    return min(bounds)


def _transport(config: WorkerConfig) -> Transport:
    facts: Any = transports_of(config.backend.name, config.backend.options)
    return Transport(
        backend=config.backend.name,
        host_memory=facts.host_memory,
        device_memory=facts.device_memory,
        same_host_only=facts.same_host_only,
        host_id=f"the host of {config.advertised_host}",
    )
