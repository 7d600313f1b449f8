"""The support matrix is current, and says what the backends themselves say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sglang_pd.backends.registry import BACKENDS
from sglang_pd.cli.app import EXIT_USAGE, run
from sglang_pd.cli.probe import probe_backend
from sglang_pd.cli.support import markdown
from sglang_pd.config import backend_settings, load_worker
from sglang_pd.protocol.kinds import KINDS
from sglang_pd.worker.serving.transports import support, transports_of, verified_on

Capture = pytest.CaptureFixture[str]


def test_the_document_is_current(repository: Path) -> None:
    path = repository / "docs" / "support.md"
    assert path.read_text(encoding="utf-8") == markdown(), "run: sglang-pd capabilities --write docs/support.md"


def test_every_backend_kind_and_transport_is_there() -> None:
    text = markdown()
    assert {s.backend for s in support()} == set(BACKENDS)
    assert all(f"| {kind} |" in text for kind in KINDS)
    for name in BACKENDS:
        listed = {s.transport for s in support() if s.backend == name}
        assert listed == set(verified_on(name)), f"{name}: the matrix and the backend list other transports"


def test_what_never_ran_says_so() -> None:
    last_run = {(s.backend, s.transport): s.last_run for s in support()}
    assert "not yet run on AMD hardware" in last_run["mori", "rdma"]
    assert "not yet run on an RDMA NIC" in last_run["nixl", "rdma"] + last_run["mooncake", "rdma"]


@pytest.mark.parametrize("name", ["local", "nixl", "mooncake"])
def test_the_matrix_is_what_the_backend_says_here(name: str) -> None:
    security = {"insecure_data_plane": True}
    config = load_worker({"role": "prefill", "backend": {"name": name}, "security": security}, environ={})
    answer = probe_backend(backend_settings(config), os.environ)
    assert answer.error is None, answer.error
    can = answer.capabilities
    assert can is not None
    entry = transports_of(name, config.backend.options)
    assert (entry.host_memory, entry.same_host_only, entry.proof) == (
        can.host_memory,
        can.same_host_only,
        can.revoke_proof,
    )
    assert ("host" in entry.adopts) == can.adopts_host
    assert entry.device_memory or not can.device_memory


def test_options_choose_the_transports() -> None:
    assert transports_of("mooncake", {"transport": "nvlink_intra"}).same_host_only
    assert not transports_of("mooncake", {"transport": "rdma"}).same_host_only
    assert transports_of("mooncake", {}).transport == "tcp"
    assert transports_of("nixl", {"plugin": "LIBFABRIC"}).transport == "libfabric"
    assert transports_of("nixl", {}).device_memory and not transports_of("nixl", {}).same_host_only


def test_the_command(tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "support.md"
    assert run(["capabilities", "--write", str(target), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert target.read_text() == markdown() and len(document["transports"]) == len(support())
    assert run(["capabilities", "--set", "backend.name=mori"]) == 0
    text = capsys.readouterr().out
    assert "mori" in text and "memfd" not in text and "KV" in text
    assert run(["capabilities", "--set", "backend.name=nope"]) == EXIT_USAGE
    assert run(["capabilities", "--set", "pools.rows=2"]) == EXIT_USAGE
    capsys.readouterr()
    assert run(["capabilities", "--set", "backend.name=nix", "--json"]) == EXIT_USAGE
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "backend_unknown" and error["hint"] == "Did you mean 'nixl'?"
