"""Choosing tokens: greedy ties, bounds of top-k and top-p, and draws that anybody can repeat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.engines.base import Sampling
from sglang_pd.engines.sampling import candidates, choose, likeliest, logprobs, uniform

WEIGHTS = np.array([0.1, 0.4, 0.2, 0.3])


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert choose(np.array([1.0, 3.0, 3.0]), Sampling(), 0)[0] == 1


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), [0, 1, 2, 3]),
        (Sampling(temperature=1, top_k=2), [1, 3]),
        (Sampling(temperature=1, top_p=0.7), [1, 3]),
        (Sampling(temperature=1, top_p=0.75), [1, 2, 3]),
        (Sampling(temperature=1, top_p=0.01), [1]),
        (Sampling(temperature=1, top_k=3, top_p=0.5), [1, 3]),
        (Sampling(temperature=1, top_k=99), [0, 1, 2, 3]),
    ],
)
def test_who_may_be_drawn(sampling: Sampling, expected: list[int]) -> None:
    assert candidates(WEIGHTS, sampling).tolist() == expected


def test_equal_tokens_at_the_bound_are_cut_from_above() -> None:
    assert candidates(np.full(4, 0.25), Sampling(temperature=1, top_k=2)).tolist() == [0, 1]


@given(st.integers(0, 2**63 - 1), st.integers(0, 5000), st.floats(0.01, 1), st.integers(0, 5))
def test_draws_are_allowed_and_repeatable(seed: int, drawn: int, top_p: float, top_k: int) -> None:
    logits = np.log(WEIGHTS)
    sampling = Sampling(temperature=0.7, top_p=top_p, top_k=top_k, seed=seed)
    token, logprob = choose(logits, sampling, drawn)
    weights = WEIGHTS ** (1 / 0.7) / (WEIGHTS ** (1 / 0.7)).sum()
    assert token in candidates(weights, sampling)
    assert choose(logits.copy(), sampling, drawn) == (token, logprob)
    assert logprob == pytest.approx(np.log(WEIGHTS[token]))


def test_draws_follow_the_distribution() -> None:
    sampling = Sampling(temperature=1, top_k=2, seed=5)
    drawn = [choose(np.log(WEIGHTS), sampling, n)[0] for n in range(4000)]
    assert set(drawn) == {1, 3}
    assert abs(drawn.count(1) / 4000 - 4 / 7) < 0.03


def test_pinned_draws() -> None:
    """The wire carries (seed, number): another version must draw the same."""
    assert [round(uniform(7, n), 6) for n in range(3)] == [0.716974, 0.384413, 0.114739]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=30), st.integers(0, 20))
def test_the_likeliest_are_the_head_of_a_sort_and_ties_go_by_number(values: list[float], count: int) -> None:
    logits = np.array(values)
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]
    found = likeliest(logits, count)
    assert [token for token, _ in found] == ranked
    assert [logprob for _, logprob in found] == [float(logprobs(logits)[token]) for token in ranked]
