"""Every backend that runs on this machine passes the one suite."""

from sglang_pd.testing import BackendSpec
from sglang_pd.testing.case import Case
from sglang_pd.testing.lab import Lab
from sglang_pd.testing.pytest_helper import check, conformance_fixtures

lab, conformance_case = conformance_fixtures([BackendSpec(name="local")])


def test_conformance(lab: Lab, conformance_case: Case) -> None:
    check(lab, conformance_case)
