"""`check` and `explain`: the verdict and the plan of two configurations, without a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.hybrid_state import PAGE, hybrid_state

from sglang_pd.cli.app import EXIT_NO, EXIT_USAGE, run
from sglang_pd.config import load_worker
from sglang_pd.engines.registry import Facts, describe_reference
from sglang_pd.worker.serving import instances
from sglang_pd.worker.serving.instances import plan_instance

Capture = pytest.CaptureFixture[str]
STATE = hybrid_state()
KINDS = sorted(c.kind for c in STATE.components)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose options are the fingerprint, with every kind of state."""
    monkeypatch.setattr(
        instances, "describe", lambda config: Facts(str(config.engine.options.get("model", "m")), STATE, 4096)
    )


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    paths = []
    for role in ("prefill", "decode"):
        path = tmp_path / f"{role}.yaml"
        path.write_text(f"role: {role}\npools:\n  tokens: 256\n  rows: 2\n  page_tokens: {PAGE}\n")
        paths.append(str(path))
    return paths


def checked(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["check", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_equal_workers_are_accepted(pair: list[str], capsys: Capture) -> None:
    code, document = checked(capsys, *pair)
    assert code == 0 and document["accepted"] and document["kinds"] == KINDS and not document["mismatches"]
    assert run(["check", *pair]) == 0
    assert "accepted" in capsys.readouterr().out


def test_tp_and_pp_and_capacity_may_differ(pair: list[str], capsys: Capture) -> None:
    sets = ["prefill.topology.tp=4", "decode.topology.pp=2", "decode.pools.tokens=512", "decode.pools.rows=5"]
    code, document = checked(capsys, *pair, *(x for s in sets for x in ("--set", s)))
    assert code == 0, document


@pytest.mark.parametrize(
    ("override", "field", "prefill", "decode"),
    [
        ("decode.pools.page_tokens=16", "page_tokens", "8", "16"),
        ("decode.engine.options.model=other", "model", "m", "other"),
        ("decode.backend.name=nixl", "backend", "local", "nixl"),
        ("decode.network.bootstrap_port=8998", "network.bootstrap_port", "8998", "8998"),
        ("decode.network.advertise=10.0.0.9", "host_id", "127.0.0.1", "10.0.0.9"),
    ],
)
def test_a_difference_is_named(  # the override and what it leads to
    pair: list[str], capsys: Capture, override: str, field: str, prefill: str, decode: str
) -> None:
    code, document = checked(capsys, *pair, "--set", override)
    found = [m for m in document["mismatches"] if m["field"] == field]
    assert code == EXIT_NO and not document["accepted"] and found
    assert prefill in found[0]["prefill"] and decode in found[0]["decode"]
    assert run(["check", *pair, "--set", override]) == EXIT_NO
    text = capsys.readouterr().out
    assert "refused" in text and field in text


def test_keys_on_one_side_only(pair: list[str], capsys: Capture) -> None:
    sets = ["--set", "decode.security.curve={secret_key_file: a, server_key_file: b}"]
    code, document = checked(capsys, *pair, *sets)
    assert code == EXIT_NO and [m["field"] for m in document["mismatches"]] == ["security.curve"]


def test_roles_are_checked(pair: list[str], capsys: Capture) -> None:
    assert run(["check", pair[0], pair[0]]) == EXIT_USAGE
    assert "$.role" in capsys.readouterr().err
    for command in ("check", "explain"):
        assert run([command, pair[1], pair[0]]) == EXIT_USAGE
        assert "Swap the two" in capsys.readouterr().err


def test_a_file_of_the_other_kind_is_said_to_be_one(repository: Path, pair: list[str], capsys: Capture) -> None:
    assert run(["check", pair[0], str(repository / "configs/router.yaml")]) == EXIT_USAGE
    assert "the configuration of a router" in capsys.readouterr().err
    assert run(["router", "--config", pair[0]]) == EXIT_USAGE
    assert "the configuration of a worker" in capsys.readouterr().err


def test_explain_counts_every_byte_once(pair: list[str], capsys: Capture) -> None:
    """What all writers write into all ranks of decode is what decode must receive, whatever the topologies."""

    def totals(*sets: str) -> dict[str, int]:
        arguments = [x for s in sets for x in ("--set", s)]
        assert run(["explain", *pair, "--tokens", "37", "--json", *arguments]) == 0
        found: dict[str, int] = {}
        for row in json.loads(capsys.readouterr().out)["plan"]:
            found[row["component"]] = found.get(row["component"], 0) + row["nbytes"]
        return found

    one = totals()
    heads = 2 * 3 * 4 * 3 * 4  # k and v, layers, heads, width, bytes
    assert one["KV"] == 37 * heads and set(one) == set(KINDS)
    assert totals("prefill.topology.tp=2")["KV"] == one["KV"] == totals("decode.topology.tp=2")["KV"]
    assert totals("prefill.topology.pp=2") == one
    assert totals("decode.topology.tp=2")["MLA"] == 2 * one["MLA"], "replicated state goes to each rank"
    assert totals("prefill.topology.tp=2")["MLA"] == one["MLA"], "and comes from one of them"


def test_explain_shows_who_writes(pair: list[str], capsys: Capture) -> None:
    assert run(["explain", *pair, "--set", "prefill.topology.pp=2", "--set", "decode.topology.tp=2"]) == 0
    text = capsys.readouterr().out
    assert "pp1/tp0" in text and "pp0/tp1" in text and "QSA_COMPRESSED" in text and "total" in text


def test_explain_of_one_worker_and_of_a_budget(pair: list[str], capsys: Capture) -> None:
    assert run(["explain", pair[0], "--json"]) == 0
    (pools,) = json.loads(capsys.readouterr().out)["pools"]
    assert (
        pools["capacity"]["tokens"] == 256
        and sum(c["nbytes"] for c in pools["components"]) <= pools["used_bytes"]["cpu"]
    )
    budget = ["--set", "pools.tokens=null", "--set", "pools.memory_bytes=1MiB"]
    assert run(["explain", pair[0], "--json", *budget]) == 0
    (pools,) = json.loads(capsys.readouterr().out)["pools"]
    assert 0 < pools["used_bytes"]["cpu"] <= 1 << 20 and pools["capacity"]["tokens"] % PAGE == 0
    assert run(["explain", pair[0], "--set", "pools.tokens=null", "--set", "pools.memory_bytes=1KiB"]) == EXIT_USAGE
    assert "at least" in capsys.readouterr().err


def test_index_k_is_counted_at_its_true_cost(tmp_path: Path) -> None:
    """Under DCP a global-indexed component is D times as large on each rank, a context-sharded one is not."""
    pools = {"tokens": 256, "rows": 2, "page_tokens": PAGE}
    components = tuple(c for c in STATE.components if c.kind in ("MLA", "INDEX_K"))
    facts = Facts("m", hybrid_state(components=components, window_tokens=0), 4096)
    sizes = []
    for dcp in (1, 4):
        config = load_worker({"role": "decode", "pools": pools, "topology": {"tp": 4, "dcp": dcp}}, environ={})
        planned = plan_instance(config, facts)
        sizes.append({line.kind: line.nbytes for line in planned.budget.lines})
        assert planned.manifest.max_tokens == min(4096, 256 * dcp)
    assert sizes[1] == {"MLA": sizes[0]["MLA"], "INDEX_K": 4 * sizes[0]["INDEX_K"]}


def test_a_prompt_that_a_worker_would_refuse_is_refused_in_tokens(pair: list[str], capsys: Capture) -> None:
    limit = ["--set", "limits.max_prompt_tokens=100"]
    for files, tokens, sets in ((pair, 100_000, []), (pair[:1], 257, []), (pair[1:], 101, limit), (pair, 101, limit)):
        assert run(["explain", *files, "--tokens", str(tokens), *sets, "--json"]) == EXIT_USAGE
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["code"] == "prompt_too_long" and error["actual"] == f"{tokens:,} tokens"
        assert error["expected"].startswith(f"at most {100 if sets else 256} tokens")
    assert run(["explain", *pair, "--tokens", "256"]) == 0
    capsys.readouterr()


def test_a_refused_pair_shows_its_pools_and_its_differences(pair: list[str], capsys: Capture) -> None:
    sets = ["--set", "decode.pools.page_tokens=16"]
    assert run(["explain", *pair, *sets]) == EXIT_NO
    text = capsys.readouterr().out
    assert text.count("pools of one rank") == 2 and "refused" in text and "page_tokens" in text
    assert run(["explain", *pair, *sets, "--json"]) == EXIT_NO
    document = json.loads(capsys.readouterr().out)
    assert not document["accepted"] and len(document["pools"]) == 2 and not document["plan"]
    assert "page_tokens" in {m["field"] for m in document["mismatches"]}


def test_the_reference_engine_describes_itself(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.undo()
    facts = describe_reference({"coupling": "soft"})
    assert facts.fingerprint != describe_reference({}).fingerprint and facts.page_multiple == 4
    for backend in ("local", "nixl", "mooncake", "mori"):
        files = [str(repository / "configs" / f"{backend}-{role}.yaml") for role in ("prefill", "decode")]
        assert run(["check", *files]) == 0, capsys.readouterr()
    assert run(["explain", files[0], "--set", "engine.options.couplin=soft"]) == EXIT_USAGE
    assert "$.engine.options.couplin" in capsys.readouterr().err
    assert run(["explain", files[0], "--set", "pools.page_tokens=6"]) == EXIT_USAGE
    assert "$.pools.page_tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "kinds"), [("reference", {"PLE"}), ("transformers", {"PLE", "MAMBA"})])
def test_host_kinds_lie_in_host_memory_and_all_else_on_the_device(engine: str, kinds: set[str]) -> None:
    pools = {"device": "cuda:1", "host_kinds": sorted(kinds), "tokens": 256, "page_tokens": PAGE}
    config = load_worker({"role": "decode", "engine": {"name": engine}, "pools": pools}, environ={})
    (layout,) = plan_instance(config, Facts("m", STATE, 4096)).layouts
    devices = {c.kind: {layout.segments[r.segment].device for r in c.regions} for c in layout.components}
    assert devices == {kind: {"cpu" if kind in kinds else "cuda:1"} for kind in KINDS}
