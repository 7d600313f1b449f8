"""Worker processes of the parity tests, started once a backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.parity_pair import Pairs


@pytest.fixture(scope="session")
def pairs() -> Iterator[Pairs]:
    found = Pairs()
    yield found
    found.close()
