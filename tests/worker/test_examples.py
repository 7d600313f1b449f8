"""The examples run as they are, and say that every byte is equal."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(repository: Path, name: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(repository / "examples" / name)],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numpy_pair(repository: Path) -> None:
    said = run(repository, "numpy_pair.py")
    assert said.count("equal") == 4 and "DIFFERENT" not in said and "first token: 42" in said


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="it adopts host memory, which needs nixl")
def test_torch_two_ranks(repository: Path) -> None:
    said = run(repository, "torch_two_ranks.py")
    assert said.count("equal") == 2 and "DIFFERENT" not in said and "first token: 42" in said
