"""What a case of the suite is, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_pd.testing.lab import Lab

Figures = dict[str, float | str]
"""What a case measured on its way: name with unit -> value."""


@dataclass(frozen=True)
class Case:
    """One sentence of the contract, and how it is tried."""

    name: str
    sentence: str
    run: Callable[[Lab], Figures | None]


CASES: dict[str, Case] = {}
"""Every case by name, in the order in which they run."""


def case(function: Callable[[Lab], Figures | None]) -> Callable[[Lab], Figures | None]:
    """Add a function to `CASES`; its docstring is the sentence."""
    sentence = " ".join((function.__doc__ or "").split())
    CASES[function.__name__] = Case(function.__name__, sentence, function)
    return function
