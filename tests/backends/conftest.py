"""What of the conformance suite belongs to the fast run.

`local` and nixl over CMA run all of it. Each further transport starts two or more processes a case, so that `make test`
takes from those the cases in which transports differ most; `make test-all` runs every case over every transport.
"""

from __future__ import annotations

import pytest

FURTHER = ("[tcp-", "[mooncake-tcp-", "[stand-in-")
CORE = (
    "exact_permuted",
    "exact_mixed_lengths",
    "exact_unaligned",
    "exact_65536_descriptors",
    "out_of_bounds",
    "unregistered",
    "wrong_epoch",
    "source_reused_after_done",
    "peer_killed_during",
    "peer_stopped",
    "peer_restarted",
    "clean_drain",
    "no_byte_after_fence",
    "writer_killed",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what the fast run leaves to the whole one."""
    for item in items:
        if "test_conformance" in item.nodeid and any(prefix in item.nodeid for prefix in FURTHER):
            if not any(item.nodeid.endswith(f"-{case}]") for case in CORE):
                item.add_marker(pytest.mark.slow)
