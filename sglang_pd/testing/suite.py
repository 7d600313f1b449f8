"""Run the cases against a backend, keep what each found, and print it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from sglang_pd.testing import cases_bounds, cases_bytes, cases_cost, cases_fence, cases_forks, cases_peers
from sglang_pd.testing.case import CASES, Case, Figures
from sglang_pd.testing.lab import BackendSpec, CaseSkipped, ConformanceFailure, Lab, RemoteRefusal

MODULES = (cases_bytes, cases_bounds, cases_peers, cases_fence, cases_forks, cases_cost)
"""Where the cases are; importing them fills `CASES`."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one case: `figures` are what it measured, `reason` says why it failed or does not apply."""

    case: str
    status: Literal["passed", "failed", "skipped"]
    took_s: float
    reason: str = ""
    figures: Figures = {}


def run_case(lab: Lab, case: Case) -> Outcome:
    """Run one case in a lab. Never raises for what a backend does; the lab is fit for the next case afterwards."""
    began = time.monotonic()
    status: Literal["passed", "failed", "skipped"] = "passed"
    reason, figures = "", None
    try:
        figures = case.run(lab)
    except CaseSkipped as skipped:
        status, reason = "skipped", str(skipped)
    except (ConformanceFailure, RemoteRefusal) as failure:
        status, reason = "failed", str(failure)
    except Exception:
        status, reason = "failed", traceback.format_exc()
    if status == "failed":
        lab.discard_shared()
    lab.end_private()
    took = round(time.monotonic() - began, 3)
    return Outcome(case=case.name, status=status, took_s=took, reason=reason, figures=figures or {})


def run_suite(
    spec: BackendSpec, names: Iterable[str] | None = None, told: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run the named cases (default: all) and return their outcomes in order; `told` hears of each as it ends."""
    chosen = [CASES[name] for name in names] if names is not None else list(CASES.values())
    lab = Lab(spec)
    outcomes = []
    try:
        for case in chosen:
            outcomes.append(run_case(lab, case))
            told(outcomes[-1])
    finally:
        lab.close()
    return outcomes
