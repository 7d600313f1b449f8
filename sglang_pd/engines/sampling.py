"""Choosing a token from logits, repeatable on any machine: the draw depends on (seed, number of the draw) alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_pd.engines.base import Sampling
from sglang_pd.protocol.digest import mix64


def logprobs(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def likeliest(logits: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens with their log-probabilities, falling; of equal ones the lower number comes first.

    logits: float64 [vocabulary]. The temperature does not count, as in `choose`.
    """
    count = min(count, logits.shape[0])
    if not count:
        return ()
    least = np.partition(logits, -count)[-count]
    among = np.flatnonzero(logits >= least)
    order = among[np.argsort(-logits[among], kind="stable")][:count]
    values = logprobs(logits)[order]
    return tuple(zip(order.tolist(), values.tolist(), strict=True))


def choose(logits: NDArray[np.float64], sampling: Sampling, drawn: int) -> tuple[int, float]:
    """The token and its log-probability. logits: float64 [vocabulary]. drawn: tokens drawn before this one."""
    log_probability = logprobs(logits)
    if sampling.temperature == 0.0:
        token = int(np.argmax(logits))  # the first of equal ones
    else:
        weights = np.exp(logprobs(logits / sampling.temperature))
        allowed = candidates(weights, sampling)
        edges = np.cumsum(weights[allowed])
        place = int(np.searchsorted(edges, uniform(sampling.seed, drawn) * edges[-1], side="right"))
        token = int(allowed[min(place, allowed.shape[0] - 1)])
    return token, float(log_probability[token])


def candidates(weights: NDArray[np.float64], sampling: Sampling) -> NDArray[np.int64]:
    """Tokens that may be drawn, rising. weights: float64 [vocabulary], probabilities that sum to 1."""
    if not sampling.top_k and sampling.top_p == 1.0:
        return np.arange(weights.shape[0])
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        reached = int(np.searchsorted(np.cumsum(weights[order]), sampling.top_p, side="left"))
        order = order[: reached + 1]
    return np.sort(order)


def uniform(seed: int, drawn: int) -> float:
    """A number in [0, 1) for one draw."""
    key = mix64(np.array([seed], dtype=np.uint64)) ^ np.uint64(drawn)
    return float(mix64(key)[0] >> np.uint64(11)) * 2.0**-53
