"""Everything about one backend that needs GPUs: the conformance suite, kill -9 with kernels in flight, speed.

    python3 benchmarks/gpu/run_backends.py BACKEND [--wheels DIR] [--options JSON] [--env NAME=VALUE] [--out DIR]
                                           [--parts suite,kill,speed] [--suite-within S] [--pair SRC DST]
                                           [--first-pair] [--shards N]

Run from a checkout on a machine with two GPUs (with one, the cases between two are left out and the table says so). The
interpreter must have torch, triton, numpy, xxhash and cuda-bindings; what else is needed (msgspec, a transport) may lie
as wheels in DIR, which are unpacked, not installed. Prints a table and writes <out>/gpu_<backend>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staging import REPOSITORY, STAGED, start_again


@dataclass(frozen=True)
class Limits:
    """within_s: seconds for all suites. shards: processes of one suite."""

    within_s: float
    shards: int


def suite_pairs(backend: str, gpus: int) -> list[tuple[str, str]]:
    """Devices of source and destination that the suite runs on."""
    pairs = [("cuda:0", "cuda:1")] if gpus > 1 else []
    pairs.append(("cuda:0", "cuda:0"))
    if backend == "local":
        pairs += [("cpu", "cuda:0"), ("cuda:0", "cpu")]
    return pairs


def run_suites(backend: str, options: str, pairs: list[tuple[str, str]], limits: Limits) -> dict[str, Any]:
    """The suite on each pair of devices, all at once, each in `shards` processes that share its cases. What is not
    finished in time is told with what was."""
    from sglang_pd.testing.suite import CASES  # importing it fills the table

    names = list(CASES)
    running = []
    for pair in pairs:
        for shard in range(limits.shards):
            command = [sys.executable, "-m", "sglang_pd.testing", backend, "--json", "--options", options]
            command += ["--src-device", pair[0], "--dst-device", pair[1]]
            for name in names[shard :: limits.shards] if limits.shards > 1 else ():
                command += ["--case", name]
            log = tempfile.TemporaryFile("w+")
            running.append((pair, subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, text=True), log))
    end = time.monotonic() + limits.within_s
    found: dict[str, Any] = {}
    for (src, dst), process, log in running:
        error = ""
        try:
            _, error = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            error = f"not finished within {limits.within_s:.0f} s"
        log.seek(0)
        suite = found.setdefault(f"{src} -> {dst}", {"cases": [], "finished": True, "error": ""})
        suite["cases"] += [json.loads(line) for line in log if line.startswith("{")]
        if process.returncode not in (0, 1):
            suite["finished"] = False
            suite["error"] += error[-2000:]
    for suite in found.values():
        suite["cases"].sort(key=lambda outcome: names.index(outcome["case"]))
    return found


def print_suites(found: dict[str, Any]) -> None:
    """One line a pair of devices, and one a case that did not pass or has figures."""
    for name, suite in found.items():
        outcomes = suite["cases"]
        passed = sum(outcome["status"] == "passed" for outcome in outcomes)
        took = sum(outcome["took_s"] for outcome in outcomes)
        end = "" if suite["finished"] else f", then stopped: {suite['error']}"
        print(f"suite {name}: {passed} of {len(outcomes)} passed in {took:.0f} s{end}")
        for outcome in outcomes:
            figures = " ".join(f"{key}={value}" for key, value in outcome.get("figures", {}).items())
            if outcome["status"] != "passed" or figures:
                reason = outcome.get("reason", "")[:1500]
                print(f"    {outcome['status']:8}{outcome['case']:28}{outcome['took_s']:6.1f} s {figures}{reason}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--parts", default="suite,kill,speed")
    parser.add_argument("--suite-within", type=float, default=540, metavar="SECONDS")
    parser.add_argument("--shards", type=int, default=1, help="processes that share the cases of one suite")
    parser.add_argument("--pair", nargs=2, action="append", metavar=("SRC", "DST"), help="suite on these devices only")
    parser.add_argument("--first-pair", action="store_true", help="the first pair of devices alone")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--lanes", type=int, default=8)
    given = parser.parse_args()
    if STAGED not in os.environ:
        start_again(given.wheels, given.env)

    import torch
    from stamp import write_result

    gpus = torch.cuda.device_count()
    devices = [torch.cuda.get_device_name(number) for number in range(gpus)]
    figures: dict[str, Any] = {"backend": given.backend, "options": given.options, "env": given.env, "gpus": devices}
    parts = given.parts.split(",")
    if gpus < 2:
        print("one GPU: nothing between two is run")
    if "suite" in parts:
        limits = Limits(given.suite_within, given.shards)
        chosen = [tuple(pair) for pair in given.pair or suite_pairs(given.backend, gpus)]
        chosen = chosen[: 1 if given.first_pair else None]
        figures["suite"] = run_suites(given.backend, given.options, chosen, limits)
        print_suites(figures["suite"])
        write_result(f"gpu_{given.backend}", figures, given.out)
    if "kill" in parts:
        from kill_canaries import print_kills, run_kills

        figures["kill"] = run_kills(given.backend, json.loads(given.options), given.kills, given.lanes, gpus)
        print_kills(figures["kill"])
        write_result(f"gpu_{given.backend}", figures, given.out)
    if "speed" in parts:
        from gpu_speed import print_speed, run_speed

        figures["speed"] = run_speed(given.backend, json.loads(given.options), gpus, first_pair=given.first_pair)
        print_speed(figures["speed"])
        write_result(f"gpu_{given.backend}", figures, given.out)
    sys.stdout.flush()
    os._exit(0)  # a process that created UCX dies in its exit handlers


if __name__ == "__main__":
    main()
