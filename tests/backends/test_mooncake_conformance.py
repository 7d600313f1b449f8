"""The conformance suite over the mooncake backend, TCP on loopback."""

from __future__ import annotations

import importlib.util

import pytest

from sglang_pd.backends.mooncake.backend import environment
from sglang_pd.testing.case import Case
from sglang_pd.testing.lab import BackendSpec, Lab
from sglang_pd.testing.pytest_helper import check, conformance_fixtures

if importlib.util.find_spec("mooncake") is None:
    pytest.skip("needs the mooncake-transfer-engine-non-cuda package", allow_module_level=True)

OPTIONS = {"insecure_data_plane": True}
lab, conformance_case = conformance_fixtures(
    [BackendSpec(name="mooncake", options=OPTIONS, env=environment(OPTIONS))], ["mooncake-tcp"]
)


def test_conformance(lab: Lab, conformance_case: Case) -> None:
    check(lab, conformance_case)
