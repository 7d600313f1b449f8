"""`python -m sglang_pd.testing BACKEND`: run the conformance suite and print what each case found."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from sglang_pd.testing.case import CASES
from sglang_pd.testing.lab import BackendSpec
from sglang_pd.testing.suite import Outcome, run_suite


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sglang_pd.testing", description=__doc__)
    parser.add_argument("backend", help="name of the backend, or NAME=MODULE for one that is not built in")
    parser.add_argument("--options", default="{}", help="the backend's options, as JSON")
    parser.add_argument("--restart-options", default="{}", help="JSON laid over them where a peer restarts in place")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the child processes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for both sides")
    parser.add_argument("--src-device", help="device of the writers, e.g. cuda:0 (default: --device)")
    parser.add_argument("--dst-device", help="device of the destinations, e.g. cuda:1 (default: --device)")
    parser.add_argument("--case", action="append", dest="cases", choices=sorted(CASES), help="only this case")
    parser.add_argument("--json", action="store_true", help="print each outcome as a line of JSON")
    return parser.parse_args()


def _device(name: str) -> str:
    return "cuda:0" if name == "cuda" else name


def _spec(given: argparse.Namespace) -> BackendSpec:
    name, _, module = given.backend.partition("=")
    return BackendSpec(
        name=name,
        module=module,
        options=msgspec.json.decode(given.options, type=dict[str, Any]),
        restart_options=msgspec.json.decode(given.restart_options, type=dict[str, Any]),
        env=dict(pair.split("=", 1) for pair in given.env),
        src_device=_device(given.src_device or given.device),
        dst_device=_device(given.dst_device or given.device),
    )


def _print(outcome: Outcome) -> None:
    figures = " ".join(f"{name}={value}" for name, value in outcome.figures.items())
    print(f"{outcome.status:8}{outcome.case:28}{outcome.took_s:7.2f} s  {figures}{outcome.reason}", flush=True)


def _print_json(outcome: Outcome) -> None:
    print(msgspec.json.encode(outcome).decode(), flush=True)


def main() -> int:
    """Exit status 0 when no case failed."""
    given = _arguments()
    outcomes = run_suite(_spec(given), given.cases, _print_json if given.json else _print)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if not given.json:
        print(f"{len(outcomes) - len(failed)} of {len(outcomes)} cases held in {sum(o.took_s for o in outcomes):.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
