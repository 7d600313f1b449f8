"""The conformance suite over the `mori` backend and the stand-in for its library. Shows nothing about AMD hardware."""

from pathlib import Path

from sglang_pd.testing import BackendSpec
from sglang_pd.testing.case import Case
from sglang_pd.testing.lab import Lab
from sglang_pd.testing.pytest_helper import check, conformance_fixtures

STAND_IN = Path(__file__).resolve().parent.parent / "support" / "fake_mori"

lab, conformance_case = conformance_fixtures([BackendSpec(name="mori", python_path=(str(STAND_IN),))], ids=["stand-in"])


def test_conformance(lab: Lab, conformance_case: Case) -> None:
    check(lab, conformance_case)


def test_the_label_is_honest(lab: Lab) -> None:
    declared = lab.shared().writer.capabilities
    assert declared["verified_on"] == {"rdma": "implemented against amd-mori 1.2.4; not yet run on AMD hardware"}
    assert declared["revoke_proof"] == "none" and declared["idle_reason"]
