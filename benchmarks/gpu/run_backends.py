"""Everything about one backend that needs GPUs: the conformance suite, kill -9 with kernels in flight, speed.

    python3 benchmarks/gpu/run_backends.py BACKEND [--wheels DIR] [--options JSON] [--env NAME=VALUE] [--out DIR]
                                           [--parts suite,kill,speed] [--kills 100] [--lanes 8]

Run from a checkout on a machine with two GPUs (with one, the cases between two are left out and the table says so). The
interpreter must have torch, triton, numpy, xxhash and cuda-bindings; what else is needed (msgspec, a transport) may lie
as wheels in DIR, which are unpacked, not installed. Prints a table and writes <out>/gpu_<backend>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
STAGED = "SGLANG_PD_BENCHMARK_STAGED"
SUITE_WITHIN_S = 540


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
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    wanted = dict(pair.split("=", 1) for pair in env)
    os.execve(
        sys.executable,
        [sys.executable, *sys.argv],
        {**os.environ, **wanted, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", STAGED: "1"},
    )


def suite_pairs(backend: str, gpus: int) -> list[tuple[str, str]]:
    """Devices of source and destination that the suite runs on."""
    pairs = [("cuda:0", "cuda:1")] if gpus > 1 else []
    pairs.append(("cuda:0", "cuda:0"))
    if backend == "local":
        pairs += [("cpu", "cuda:0"), ("cuda:0", "cpu")]
    return pairs


def run_suites(backend: str, options: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """The suite on each pair of devices, all at once."""
    running = []
    for src, dst in pairs:
        command = [sys.executable, "-m", "sglang_pd.testing", backend, "--json", "--options", options]
        command += ["--src-device", src, "--dst-device", dst]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    end = time.monotonic() + SUITE_WITHIN_S
    found: dict[str, Any] = {}
    for (src, dst), process in zip(pairs, running, strict=True):
        name = f"{src} -> {dst}"
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
            found[name] = json.loads(out) if out.strip() else {"error": err[-4000:]}
        except subprocess.TimeoutExpired:
            process.kill()
            found[name] = {"error": f"not finished within {SUITE_WITHIN_S} s"}
    return found


def print_suites(found: dict[str, Any]) -> None:
    """One line a pair of devices, and one a case that did not pass."""
    for name, outcomes in found.items():
        if isinstance(outcomes, dict):
            print(f"suite {name}: ERROR {outcomes['error']}")
            continue
        passed = sum(outcome["status"] == "passed" for outcome in outcomes)
        took = sum(outcome["took_s"] for outcome in outcomes)
        print(f"suite {name}: {passed} of {len(outcomes)} passed in {took:.0f} s")
        for outcome in outcomes:
            figures = " ".join(f"{key}={value}" for key, value in outcome.get("figures", {}).items())
            if outcome["status"] != "passed" or figures:
                print(f"    {outcome['status']:8}{outcome['case']:28}{figures}{outcome.get('reason', '')[:1500]}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--parts", default="suite,kill,speed")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--lanes", type=int, default=8)
    given = parser.parse_args()
    if STAGED not in os.environ:
        start_again(given.wheels, given.env)

    sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(Path(__file__).parent)]
    import torch
    from stamp import write_result

    gpus = torch.cuda.device_count()
    devices = [torch.cuda.get_device_name(number) for number in range(gpus)]
    figures: dict[str, Any] = {"backend": given.backend, "options": given.options, "env": given.env, "gpus": devices}
    parts = given.parts.split(",")
    if gpus < 2:
        print("one GPU: nothing between two is run")
    if "suite" in parts:
        figures["suite"] = run_suites(given.backend, given.options, suite_pairs(given.backend, gpus))
        print_suites(figures["suite"])
        write_result(f"gpu_{given.backend}", figures, given.out)
    if "kill" in parts:
        from kill_canaries import print_kills, run_kills

        figures["kill"] = run_kills(given.backend, json.loads(given.options), given.kills, given.lanes, gpus)
        print_kills(figures["kill"])
        write_result(f"gpu_{given.backend}", figures, given.out)
    if "speed" in parts:
        from gpu_speed import print_speed, run_speed

        figures["speed"] = run_speed(given.backend, json.loads(given.options), gpus)
        print_speed(figures["speed"])
        write_result(f"gpu_{given.backend}", figures, given.out)
    sys.stdout.flush()
    os._exit(0)  # a process that created UCX dies in its exit handlers


if __name__ == "__main__":
    main()
