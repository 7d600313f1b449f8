"""Real workers over real transports against the model run whole: tokens, logits and live state, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.parity_live import LENGTHS, P, R, whole
from support.parity_pair import LANES, TRANSPORTS, Case, Pairs

pytestmark = pytest.mark.timeout(180)  # the first test of a backend starts its processes

CHUNKED = [n for n in LENGTHS if n > 1]
LEAN = (1, R - 1, P, 4 * P + 5)
"""Lengths that a transport other than `local` runs in the fast suite."""


def chunk_of(length: int) -> int:
    """Chunks that cut groups and pages where they are longer than that, and never the prompt's last token off."""
    return 1 if length <= R else 3 if length <= P + 1 else 7


def matrix() -> Iterator[object]:
    for transport in TRANSPORTS:
        for mode in LANES:
            for chunks in ("whole", "chunked"):
                for length in LENGTHS if chunks == "whole" else CHUNKED:
                    lean = transport == "nixl" and length in LEAN and (mode == "soft") == (chunks == "chunked")
                    marks = () if transport == "local" or lean else (pytest.mark.slow,)
                    yield pytest.param(transport, mode, chunks, length, marks=marks)


@pytest.mark.parametrize(("transport", "mode", "chunks", "length"), list(matrix()))
def test_a_hand_over_is_bit_equal(pairs: Pairs, transport: str, mode: str, chunks: str, length: int) -> None:
    pair = pairs.get(transport, LANES)
    got = pair.hand_over(mode, Case(length, chunk_of(length) if chunks == "chunked" else 0))
    want = whole(mode, length)
    assert not got.explain(want)
    assert got == want
    assert got.source == got.before


@pytest.mark.parametrize("mode", LANES)
@pytest.mark.parametrize(
    "transport", [t if t == "local" else pytest.param(t, marks=pytest.mark.slow) for t in TRANSPORTS]
)
def test_hand_overs_in_flight_together_are_bit_equal(pairs: Pairs, transport: str, mode: str) -> None:
    """All lengths at once: chunks of one room move while others compute, and decode's batch grows and shrinks."""
    pair = pairs.get(transport, LANES)
    cases = [Case(length, 5, seed=7 + length % 2) for length in LENGTHS if length < 5 * P]
    for _ in range(2):  # the second time over memory that others have just left
        pair.ready(mode, prefill=None, decode=None)
        outcomes = pair.run(mode, cases)
        for case, got in zip(cases, outcomes, strict=True):
            assert not got.explain(whole(mode, case.length, case.seed)), case
    pair.ready(mode)
