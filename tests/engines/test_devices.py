"""A device that is not there is refused by its key, before an engine is made on it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.serving import document

from sglang_pd.cli.app import EXIT_USAGE
from sglang_pd.config import load_worker
from sglang_pd.engines.devices import require_device
from sglang_pd.protocol.errors import BackendUnavailable
from sglang_pd.worker.serving.service import WorkerService


def _built_for(monkeypatch: pytest.MonkeyPatch, cuda: str | None, count: int) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("cuda", "count", "name", "said"),
    [
        (None, 0, "cuda", "built without CUDA"),
        ("13.0", 0, "cuda:0", "no GPU is visible"),
        ("13.0", 2, "cuda:2", "cuda:0 to cuda:1"),
        ("13.0", 1, "cuda:1", "expected cuda:0, got cuda:1"),
    ],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, count: int, name: str, said: str
) -> None:
    _built_for(monkeypatch, cuda, count)
    with pytest.raises(BackendUnavailable) as refused:
        require_device(name, where="$.pools.device")
    assert refused.value.where == "$.pools.device" and said in str(refused.value) and refused.value.hint


def test_what_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _built_for(monkeypatch, "13.0", 2)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        require_device(name, where="$.pools.device")


def test_without_torch_only_the_host_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    require_device("cpu", where="$.pools.device")
    with pytest.raises(BackendUnavailable, match="pip install"):
        require_device("cuda", where="$.pools.device")


def test_a_worker_is_refused_before_its_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _built_for(monkeypatch, "13.0", 0)
    config = load_worker(document("prefill", pools={"device": "cuda"}))
    with pytest.raises(BackendUnavailable) as refused:
        WorkerService(config)
    assert refused.value.where == "$.pools.device"


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="needs a machine without a GPU")
def test_the_command_line_says_so_in_one_line() -> None:
    sets = [part for key in ("pools.device=cuda", "network.http_port=0") for part in ("--set", key)]
    command = [sys.executable, "-m", "sglang_pd.cli", "prefill", *sets]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == EXIT_USAGE and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("sglang-pd: [backend_unavailable] $.pools.device: ")
