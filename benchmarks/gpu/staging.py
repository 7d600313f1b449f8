"""The package as it is installed, from a checkout and a folder of wheels, where nothing can be installed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
STAGED = "SGLANG_PD_BENCHMARK_STAGED"


def stage(wheels: Path | None) -> Path:
    """A folder with the package as it is installed, and the wheels' content."""
    site = Path(tempfile.mkdtemp(prefix="pd-site-"))
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "sglang_pd", site / "sglang_pd", ignore=ignore)
    for name in ("protocol", "backends"):
        shutil.copytree(REPOSITORY / name, site / "sglang_pd" / name, ignore=ignore)
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def start_again(wheels: Path | None, env: list[str]) -> None:
    """Run this script once more with the staged folder on the path, in the wanted environment; never returns."""
    site = stage(wheels)
    ours = [REPOSITORY / "benchmarks", REPOSITORY / "benchmarks" / "gpu"]  # as PYTHONSAFEPATH leaves them out
    path = os.pathsep.join([str(site), *map(str, ours), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    wanted = dict(pair.split("=", 1) for pair in env)
    os.execve(
        sys.executable,
        [sys.executable, *sys.argv],
        {**os.environ, **wanted, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", STAGED: "1"},
    )
