"""The stand-in for `mori.io` has the faults that were measured on the package, row by row."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).resolve().parent.parent / "support" / "fake_mori"

ROWS = {
    "dropped_status": 0,
    "codes": 0,
    "broken_pair": 0,
    "dead_peer": 0,
    "no_cancel": 0,
    "refusals": 0,
    "notifications": 0,
    "silent_peer": 0,
    "uneven_lists": -signal.SIGABRT,
    "tcp": -signal.SIGABRT,
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MORI_", "FAKE_MORI_"))}
    done = subprocess.run(
        [sys.executable, str(STAND_IN / "rows.py"), name],
        env=kept | {"PYTHONPATH": str(STAND_IN)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == ROWS[name], done.stderr
    if done.returncode:
        assert "Assertion" in done.stderr
