"""Transports that adopt host memory: an engine's own tensors cross a real transport, in a child process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_pd.backends.mooncake.backend import environment

MOONCAKE = {"insecure_data_plane": True}
CASES: dict[str, tuple[dict[str, object], dict[str, str]]] = {
    "nixl": ({}, {}),
    "mooncake": (dict(MOONCAKE), environment(MOONCAKE)),
}


@pytest.mark.parametrize("name", CASES)
def test_adopted_tensors_cross_a_real_transport(name: str, repository: Path) -> None:
    if importlib.util.find_spec(name) is None:  # looked for, not loaded: it may not live in this process
        pytest.skip(f"{name} is not installed")
    options, settings = CASES[name]
    env = {**os.environ, **settings, "PYTHONPATH": str(repository / "tests")}
    command = [sys.executable, "-m", "support.adopting_child", name, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert (result["state"], result["differ"]) == ("done", [])
    assert result["bytes"] > 100_000
