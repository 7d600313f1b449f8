"""`doctor` names what keeps a worker from running on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sglang_pd.cli import machine
from sglang_pd.cli.app import EXIT_NO, EXIT_USAGE, run
from sglang_pd.cli.machine import cannot_listen, in_range
from sglang_pd.cli.probe import probe_backend
from sglang_pd.config import load_worker, require_nics
from sglang_pd.config.address import Address
from sglang_pd.config.network import BackendSettings
from sglang_pd.protocol.errors import ConfigError, PdError
from sglang_pd.worker.serving.service import WorkerService

Capture = pytest.CaptureFixture[str]
FREE = ["--set", "network.bootstrap_port=0", "--set", "network.http_port=0"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text("role: prefill\n")
    return str(path)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def examined(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["doctor", *arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    document["by_name"] = {f["name"]: f for f in document["findings"]}
    return code, document


def test_a_local_worker_can_run_here(config: str, capsys: Capture) -> None:
    code, document = examined(capsys, "--config", config, *FREE)
    bad = [f for f in document["findings"] if f["level"] == "bad"]
    assert code == 0 and document["healthy"] and not bad
    areas = {f["area"] for f in document["findings"]}
    assert areas >= {"system", "library", "device", "limit", "port", "security", "backend"}
    assert {"memlock", "nofile", "msgspec", "local", "network.http_port"} <= document["by_name"].keys()


def test_a_taken_port_is_named_with_its_key(config: str, taken: int, capsys: Capture) -> None:
    sets = ["--set", f"network.http_port={taken}", "--set", "network.bootstrap_port=0", "--no-probe"]
    code, document = examined(capsys, "--config", config, *sets)
    finding = document["by_name"]["network.http_port"]
    assert code == EXIT_NO and finding["level"] == "bad"
    assert str(taken) in finding["found"] and "taken" in finding["found"] and "network.http_port" in finding["hint"]
    assert run(["doctor", "--config", config, *sets]) == EXIT_NO
    text = capsys.readouterr().out
    assert "BAD" in text and str(taken) in text


def test_an_address_of_another_host_is_named(config: str, capsys: Capture) -> None:
    sets = ["--set", "network.bind=192.0.2.1", "--set", "security.insecure=true", "--no-probe"]
    code, document = examined(capsys, "--config", config, *sets)
    finding = document["by_name"]["network.http_port"]
    assert code == EXIT_NO and "not an address of this host" in finding["found"]
    assert "network.bind" in finding["expected"] and "network.bind" in finding["hint"] and "Stop" not in finding["hint"]
    assert any("insecure" in f["found"] for f in document["findings"] if f["name"] == "caution")
    assert "does not resolve" in cannot_listen(Address("no-such-host.invalid", 1))


def test_a_data_plane_needs_free_ports(config: str, taken: int, capsys: Capture) -> None:
    sets = ["--set", "backend.name=nixl", "--set", f"network.ports={taken}-{taken}", *FREE, "--no-probe"]
    code, document = examined(capsys, "--config", config, *sets)
    assert code == EXIT_NO and document["by_name"]["network.ports"]["found"] == "0 of 1 free"


def test_settings_in_force_and_contradictions(config: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_IB_GID_INDEX", "5")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sets = ["--set", "backend.name=nixl", *FREE, "--no-probe"]
    code, document = examined(capsys, "--config", config, *sets)
    assert code == 0 and document["by_name"]["UCX_IB_GID_INDEX"]["found"] == "5"
    assert document["by_name"]["UCX_NET_DEVICES"]["found"] == "lo (set by the command line)"
    assert document["by_name"]["PYTORCH_CUDA_ALLOC_CONF"]["level"] == "warn"
    code, document = examined(capsys, "--config", config, *sets, "--set", "network.gid_index=3")
    bad = [f for f in document["findings"] if f["level"] == "bad"]
    assert code == EXIT_NO and len(bad) == 1 and "UCX_IB_GID_INDEX" in bad[0]["name"] and bad[0]["found"] == "5"


def test_versions_outside_the_tried_range_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "xxhash":
            raise importlib.metadata.PackageNotFoundError(name)
        return "99.0" if name in ("pyzmq", "rich") else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f.name: f for f in machine.libraries()}
    assert found["pyzmq"].level == found["rich"].level == "warn" and found["msgspec"].level == "ok"
    assert found["xxhash"].level == "bad" and "pip install" in found["xxhash"].hint


def test_only_the_extras_that_are_needed_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f.name: f.level for f in machine.libraries(frozenset({"nixl"}))}
    assert found["nixl"] == "bad" and found["amd-mori"] == "info" and found["numpy"] == "bad"


@pytest.mark.parametrize(
    ("version", "wanted", "inside"),
    [
        ("1.5.1", ">=1.5.1,<1.6", True),
        ("1.6", ">=1.5.1,<1.6", False),
        ("1.6.0", "<1.6", False),
        ("0.3.13.post1", ">=0.3.13,<0.3.14", True),
        ("2.13.0+cpu", "<2.15,>=2.13", True),
        ("1.5", ">=1.5.1", False),
        ("10.0", ">=9", True),
        ("1.2.4", "==1.2.4", True),
        ("1.2.5", "~=1.2.4", True),
        ("1.3.0", "~=1.2.4", False),
        ("1", "", True),
        ("1", "nonsense", False),
    ],
)
def test_ranges(version: str, wanted: str, inside: bool) -> None:
    assert in_range(version, wanted) is inside


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("topology.tp=2", "$.topology"),
        ("engine.options.foo=1", "$.engine.options.foo"),
        ("engine.name=transformers", "$.engine.options"),
        ("pools.memory_bytes=1KiB", "$.pools.memory_bytes"),
        ("pools.memory_bytes=900TiB", "local"),
        ("network.devices=[nosuch0:1]", "$.network.devices[0]"),
    ],
)
def test_what_a_start_refuses_is_no_health(key: str, name: str, config: str, capsys: Capture) -> None:
    sets = ["--set", key, *FREE, *(["--set", "backend.name=nixl"] if "devices" in key else [])]
    code, document = examined(capsys, "--config", config, *sets)
    bad = [f for f in document["findings"] if f["level"] == "bad"]
    assert code == EXIT_NO and [f["name"] for f in bad] == [name]
    assert bad[0]["expected"] and bad[0]["found"].startswith("[")
    if name == "local":
        assert "memory_refused" in bad[0]["found"] and "pools.memory_bytes" in bad[0]["hint"]
        return
    with pytest.raises(PdError) as refused:
        WorkerService(load_worker(config, sets=sets[1::2]))
    assert refused.value.where == name and f"[{refused.value.code}] {refused.value.message}" in bad[0]["found"]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="needs a machine without a GPU")
def test_pools_on_a_gpu_need_one(config: str, capsys: Capture) -> None:
    code, document = examined(capsys, "--config", config, "--set", "pools.device=cuda", *FREE)
    assert code == EXIT_NO and document["by_name"]["NVIDIA GPUs"]["level"] == "bad"
    assert document["by_name"]["$.pools.device"]["level"] == "bad"


def test_the_probe_has_the_memory_of_the_pools() -> None:
    said = probe_backend(BackendSettings("local", {}), {}, [(4096, "cpu"), (4096, "cuda:77")])
    assert said.error is not None and "cuda" in str(msgspec.to_builtins(said.error))


def test_a_backend_that_cannot_start_says_why(config: str, capsys: Capture) -> None:
    code, document = examined(capsys, "--config", config, "--set", "backend.name=mori", *FREE)
    finding = document["by_name"]["mori"]
    assert code == EXIT_NO and finding["level"] == "bad" and "amd-mori" in finding["found"] and finding["hint"]


def test_a_library_that_kills_its_process_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    for body, said in (
        ("kill -SEGV $$", "SIGSEGV"),
        ("echo boom; exit 255", "status 255"),
        ("sleep 30", "does not start"),
    ):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        answer = probe_backend(BackendSettings("local", {}), {"PATH": "/bin:/usr/bin"}, timeout_s=2)
        assert answer.error is not None and answer.error.code == "backend_unavailable" and said in answer.error.message


def test_overrides_need_a_configuration(capsys: Capture) -> None:
    assert run(["doctor", "--set", "network.mtu=1024"]) == EXIT_USAGE
    assert "--config" in capsys.readouterr().err


def test_network_devices_must_exist(tmp_path: Path) -> None:
    def require(*names: str) -> None:
        data = {"role": "prefill", "backend": {"name": "nixl"}, "network": {"devices": names}}
        require_nics(load_worker(data), tmp_path)

    require("eth9")  # without sysfs nobody knows
    for place in ("net/eth0", "net/lo", "infiniband/mlx5_0"):
        (tmp_path / place).mkdir(parents=True)
    require("eth0", "mlx5_0:1", "all")
    with pytest.raises(ConfigError) as refused:
        require("eth0", "mlx5_9:1")
    assert refused.value.where == "$.network.devices[1]" and refused.value.expected == "eth0 | lo | mlx5_0"
