"""The chaos run in the test suites: a small one in the fast suite, the larger share in the whole one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from chaos_run import Run


@pytest.mark.timeout(240)
def test_a_small_chaos_run() -> None:
    """One seed for all: what fails here fails again."""
    report = Run(seed=20_260, rooms=150, backend="local").go()
    assert report["rooms"] == 150 and report["done"] > 150


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_chaos_run_of_two_thousand_rooms() -> None:
    report = Run(seed=4_711, rooms=2_000, backend="local").go()
    assert report["rooms"] == 2_000 and report["done"] > 2_000
