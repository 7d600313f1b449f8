"""A model run whole, with the library's own cache and no pools: what a hand-over is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_pd.engines.base import Output, Sampling
from sglang_pd.engines.sampling import choose
from sglang_pd.engines.transformers.engine import TransformersEngine
from sglang_pd.engines.transformers.run import forward

GREEDY = Sampling()


def run_whole(
    engine: TransformersEngine, token_ids: NDArray[np.int64], chunk_tokens: int, sampling: Sampling = GREEDY
) -> Iterator[Output]:
    """Tokens without end: the first one after the prompt, then one for each step. Touches neither the engine's pools
    nor its requests.

    chunk_tokens: of prefill; the bits of the result depend on it, so compare at the same one.
    """
    model, cache = engine.model, engine.source.new_cache()
    ids = np.ascontiguousarray(token_ids, dtype=np.int64)
    logits = np.empty(0)
    for start in range(0, len(ids), chunk_tokens):
        logits = _step(engine, model, cache, (ids[start : start + chunk_tokens], start))
    tokens, drawn = len(ids), 0
    while True:
        token, logprob = choose(logits, sampling, drawn)
        yield Output("whole", token, logprob, logits)
        logits = _step(engine, model, cache, (np.array([token]), tokens))
        tokens, drawn = tokens + 1, drawn + 1


def _step(
    engine: TransformersEngine, model: Any, cache: Any, chunk: tuple[NDArray[np.int64], int]
) -> NDArray[np.float64]:
    ids, start = chunk
    with torch.inference_mode():
        logits = forward(model, torch.from_numpy(ids)[None].to(engine.device), cache, [start])
        result: NDArray[np.float64] = logits[0].double().cpu().numpy()
    return result
