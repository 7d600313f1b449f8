"""The suite in pytest: one test of each case and backend.

In a test module:

    from sglang_pd.testing.pytest_helper import conformance_fixtures
    lab, conformance_case = conformance_fixtures([BackendSpec(name="local")])

    def test_conformance(lab, conformance_case):
        check(lab, conformance_case)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from sglang_pd.testing.case import CASES, Case
from sglang_pd.testing.lab import BackendSpec, Lab
from sglang_pd.testing.suite import run_case


def conformance_fixtures(specs: Sequence[BackendSpec], ids: Sequence[str] | None = None) -> tuple[Any, Any]:
    """Fixtures `lab` (one a backend, for the module) and `conformance_case` (each case), to be named so."""
    names = list(ids) if ids is not None else [spec.name for spec in specs]

    @pytest.fixture(scope="module", params=list(specs), ids=names)
    def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
        made = Lab(request.param)
        yield made
        made.close()

    @pytest.fixture(params=list(CASES.values()), ids=lambda case: case.name)
    def conformance_case(request: pytest.FixtureRequest) -> Case:
        found: Case = request.param
        return found

    return lab, conformance_case


def check(lab: Lab, case: Case, skip: Callable[[str], Any] = pytest.skip) -> None:
    """Run one case; fail with what the backend did, or skip with why the case does not apply."""
    outcome = run_case(lab, case)
    if outcome.status == "skipped":
        skip(outcome.reason)
    if outcome.status == "failed":
        pytest.fail(f"{case.sentence}\n{outcome.reason}", pytrace=False)
