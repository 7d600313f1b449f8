"""One pair of workers for all tests that only use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.serving import Oracle, Pair, pair_of


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Prefill and decode over `local`, decode's pools poisoned."""
    with pair_of() as made:
        yield made


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The model run whole."""
    return Oracle()
