"""Engines and the whole product on GPUs: the tests that need a device, and the demo with its workers on two of them.

    python3 benchmarks/gpu/run_engines.py [--wheels DIR] [--parts tests,demo] [--demos NAME ...] [--out DIR] [--jobs N]

Prefill's pools and engine lie on the first GPU, decode's on the last; every token and log-probability is compared with
the model run whole on the first. The interpreter must have what `run_backends.py` says, transformers, pytest with
pytest-timeout and pytest-xdist, and the packages of `sglang-pd[server]`, or they lie as wheels in DIR. Prints a table
and writes <out>/gpu_engines.json; demos that are not run keep the result that the file has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staging import REPOSITORY, STAGED, start_again

TESTS = (
    "tests/engines/test_reference_cuda.py",
    "tests/engines/test_transformers_gpu.py",
    "tests/server/test_device_digest.py",
)
TESTS_S, DEMO_S = 400, 240


@dataclass(frozen=True)
class Demo:
    """One run of `sglang-pd demo`. sets: `path=value` beside the devices. env: for its processes."""

    backend: str
    sets: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


NVLINK = {"MC_INTRANODE_NVLINK": "1", "MC_INTRA_NVLINK": "1", "MC_LOG_LEVEL": "ERROR"}
DEMOS = {
    "local": Demo("local"),
    "local, PLE in host memory": Demo("local", ("pools.host_kinds=[PLE]",)),
    "nixl": Demo("nixl", env={"UCX_TLS": "cuda_ipc,cuda_copy,sm,tcp,self"}),
    "mooncake": Demo(
        "mooncake", ("backend.options.transport=nvlink_intra", "backend.options.insecure_data_plane=true"), NVLINK
    ),
}


def run_tests(jobs: int) -> dict[str, Any]:
    """The device tests, in `jobs` processes. Every test with its status and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-W", "default"]
        command += ["-n", str(jobs), "--timeout=300", f"--junitxml={report}", *TESTS]
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TESTS_S,
            check=False,
        )  # fmt: skip
        if not report.exists():
            return {"error": done.stdout[-3000:], "tests": []}
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    tests = [
        {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "status": next((one.tag for one in case if one.tag in ("failure", "error", "skipped")), "passed"),
            "took_s": float(case.get("time", "0")),
            "reason": "".join((one.text or one.get("message") or "")[-1500:] for one in case),
        }
        for case in cases
    ]
    return {"error": "", "tests": tests}


def start_demo(demo: Demo, devices: tuple[str, str]) -> subprocess.Popen[str]:
    """Begin it; its JSON comes on standard output."""
    sets = (f"prefill.pools.device={devices[0]}", f"decode.pools.device={devices[1]}", *demo.sets)
    command = [sys.executable, "-m", "sglang_pd.cli", "demo", "--backend", demo.backend, "--json"]
    command += [part for one in sets for part in ("--set", one)]
    environ = {**os.environ, **demo.env}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def end_demo(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it found."""
    try:
        output, error = process.communicate(timeout=DEMO_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        return {"equal": False, "error": f"not finished within {DEMO_S} s"}
    try:
        found: dict[str, Any] = json.loads(output)
    except json.JSONDecodeError:
        return {"equal": False, "error": (output + error)[-3000:]}
    return found if "models" in found else {"equal": False, "error": json.dumps(found)[:1500] + error[-1500:]}


def print_demo(name: str, found: dict[str, Any]) -> None:
    """One line a model, and one a prompt that differs."""
    print(f"demo {name}: {'equal' if found['equal'] else 'DIFFERENT'} {found.get('error', '')}")
    for model in found.get("models", ()):
        answers = model["answers"]
        tokens, wanted = sum(a["equal_tokens"] for a in answers), sum(a["wanted"] for a in answers)
        logprobs, moved = sum(a["equal_logprobs"] for a in answers), model["bytes_by_component"]
        print(
            f"    {model['model']:24}over {model['transport'] or '?'}: tokens {tokens}/{wanted}, log-probabilities "
            f"{logprobs}/{wanted}, {sum(moved.values())} B in {' '.join(moved)}, {model['seconds']:.1f} s"
        )
        for answer in answers:
            if answer["error"] or answer["equal_logprobs"] != answer["wanted"]:
                print(f"        {answer['tokens']} tokens {answer['how']}: {answer}"[:600])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--parts", default="tests,demo")
    parser.add_argument("--demos", nargs="*", default=["local", "local, PLE in host memory"], choices=sorted(DEMOS))
    parser.add_argument("--jobs", type=int, default=4, help="processes of the tests")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    given = parser.parse_args()
    if STAGED not in os.environ:
        start_again(given.wheels, [])

    import torch
    from stamp import write_result

    gpus = torch.cuda.device_count()
    devices = ("cuda:0", f"cuda:{gpus - 1}") if gpus else ("cpu", "cpu")
    before = given.out / "gpu_engines.json"
    kept = json.loads(before.read_text()) if before.exists() else {}
    figures: dict[str, Any] = {
        "gpus": [torch.cuda.get_device_name(number) for number in range(gpus)],
        "devices": devices,
        "tests": kept.get("tests", {}),
        "demos": kept.get("demos", {}),
    }
    running = {}
    if "demo" in given.parts.split(","):
        running = {name: start_demo(DEMOS[name], devices) for name in given.demos}
    if "tests" in given.parts.split(","):
        figures["tests"] = run_tests(given.jobs)
        outcomes = figures["tests"]["tests"]
        passed = sum(outcome["status"] == "passed" for outcome in outcomes)
        print(f"tests: {passed} of {len(outcomes)} passed {figures['tests']['error']}")
        for outcome in outcomes:
            if outcome["status"] != "passed":
                print(f"    {outcome['status']:8}{outcome['test']} {outcome['reason']}")
    for name, process in running.items():
        figures["demos"][name] = end_demo(process)
        print_demo(name, figures["demos"][name])
    print(write_result("gpu_engines", figures, given.out))


if __name__ == "__main__":
    main()
