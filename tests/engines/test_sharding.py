"""Sharded over TP, PP and DCP the model says the same, to the last bit, also after a hand-over between topologies."""

from __future__ import annotations

from functools import cache

import pytest
from support.fleet import Fleet, hand_over_fleet
from support.reference_run import SOFT, SPARSE, Host, Running, Size, prompt_ids, same_logits

from sglang_pd.engines.reference import ReferenceConfig, ReferenceEngine
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.protocol.manifest import RankId, Topology

STEPS = 6
LENGTH = 29
CONTEXT = tuple(kind for kind in SPARSE.layers if kind != "swa")  # a sliding window is not defined under DCP
NO_WINDOW = {mode: ReferenceConfig(layers=CONTEXT, coupling=mode) for mode in ("sparse", "soft")}  # type: ignore[arg-type]
WINDOW = {"sparse": SPARSE, "soft": SOFT}


def config_of(mode: str, *topologies: Topology) -> ReferenceConfig:
    return (NO_WINDOW if any(t.dcp > 1 for t in topologies) else WINDOW)[mode]


@cache
def whole(config: ReferenceConfig, length: int = LENGTH) -> Running:
    host = Host(config, Size(pages=20))
    run = host.prefill("r", prompt_ids(length))
    host.decode([run], STEPS)
    return run


PAIRS = [
    (Topology(tp=4), Topology(tp=2)),
    (Topology(pp=3, tp=2), Topology()),
    (Topology(tp=2, dcp=2), Topology(tp=4, dcp=4)),
    (Topology(pp=2), Topology(pp=2, tp=4, dcp=2)),
]


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=str)
@pytest.mark.parametrize("mode", ["sparse", "soft"])
def test_any_topology_hands_over_to_any_other(mode: str, src: Topology, dst: Topology) -> None:
    config = config_of(mode, src, dst)
    want = whole(config)
    prefill = Fleet(config, src, Size(24, 4, 4, 16, "random", 3))
    run = prefill.prefill("r", prompt_ids(LENGTH), (6, 11, 12))
    decode = Fleet(config, dst, Size(31, 6, 7, 13, "high", 5))
    arrived = hand_over_fleet(prefill, run, decode)
    decode.decode([arrived], STEPS)
    assert arrived.tokens == want.tokens
    assert same_logits(arrived, want)


def test_ranks_without_a_token_have_a_neutral_share() -> None:
    """One token over four context-parallel ranks: three own nothing, and their pools hold NaN."""
    config = config_of("sparse", Topology(tp=4, dcp=4))
    fleet = Fleet(config, Topology(tp=4, dcp=4), Size(24), filler=float("nan"))
    runs = [fleet.prefill(f"r{length}", prompt_ids(length)) for length in (1, 2, 11)]
    fleet.decode(runs, STEPS)
    for length, run in zip((1, 2, 11), runs, strict=True):
        assert same_logits(run, whole(config, length))


def test_stages_without_a_kind_have_no_pool_of_it() -> None:
    """Three stages of 2, 4 and 2 layers: the last has no PLE and no QSA layer, the first no KV."""
    fleet = Fleet(SPARSE, Topology(pp=3), Size(24), starts=(0, 2, 6))
    kinds = [{c.kind for c in pools.layout.components} for pools in fleet.pools]
    assert kinds[0] == {"MAMBA", "PLE"}
    assert kinds[2] == {"SWA", "MLA", "INDEX_K"}
    run = fleet.prefill("r", prompt_ids(LENGTH))
    fleet.decode([run], STEPS)
    assert same_logits(run, whole(SPARSE))


@pytest.mark.parametrize(("tp", "field"), [(3, "heads"), (8, "gdn_key_heads")])
def test_a_cut_that_does_not_divide_is_refused(tp: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReferenceEngine(SPARSE, Topology(tp=tp), RankId(0, 0))
    assert field in caught.value.where
