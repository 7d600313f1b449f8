"""What every benchmark result carries: the machine, the versions, the commit; and one way to write it down."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


COMMIT = "SGLANG_PD_BENCHMARK_COMMIT"
"""Environment variable with the commit, for a copy of the tree without its history."""
PACKAGES = (
    "numpy", "msgspec", "torch", "triton", "transformers", "nixl", "nixl-cu13", "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
)  # fmt: skip


def _commit() -> str:
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def machine_stamp() -> dict[str, Any]:
    """Facts a reader needs to judge a figure: processor, cores, load, versions, commit. No names of machines."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "kernel": platform.release(),
        "versions": versions,
        "commit": _commit(),
        "unix_time_s": int(time.time()),
    }


def write_result(name: str, figures: dict[str, Any], directory: Path | None = None) -> Path:
    """Write `figures` with the machine's stamp to `<directory>/<name>.json` and return the path."""
    target = (directory or RESULTS) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": machine_stamp(), **figures}, indent=2) + "\n")
    return target
