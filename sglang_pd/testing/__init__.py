"""For authors of backends and engines: the conformance suite, and a backend that injects faults into another.

`python -m sglang_pd.testing BACKEND` runs the suite; in pytest, `pytest_helper` makes one test of each case.
"""

from sglang_pd.testing.case import CASES, Case
from sglang_pd.testing.lab import BackendSpec, ConformanceFailure, Lab
from sglang_pd.testing.suite import Outcome, run_case, run_suite

__all__ = ["CASES", "BackendSpec", "Case", "ConformanceFailure", "Lab", "Outcome", "run_case", "run_suite"]
