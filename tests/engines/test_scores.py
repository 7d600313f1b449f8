"""Log-probabilities of a prompt's own tokens: those that the model gives while it answers with these tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support.reference_run import PREFILL, SPARSE, Host, prompt_ids

from sglang_pd.engines.base import PrefillChunk, PromptScorer, Request
from sglang_pd.engines.reference.engine import DELTA_TOKENS
from sglang_pd.engines.sampling import logprobs
from sglang_pd.protocol.errors import RoomError


def scored(host: Host, ids: np.ndarray, cuts: tuple[int, ...]) -> np.ndarray:
    lease = host.allocator.lease(len(ids), window_stop=0)
    host.engine.start(Request("scored", ids, score=True), lease.tables())
    for start, stop in pairwise((0, *cuts, len(ids))):
        lease.advance(stop)
        host.engine.prefill(PrefillChunk("scored", start, stop, lease.tables()))
        lease.settle(stop)
    found = host.engine.prompt_logprobs("scored")
    host.engine.release("scored")
    lease.release()
    return found


@pytest.mark.parametrize("cuts", [(), (5,), (1, 2, 12), (16,)])
def test_scores_are_those_of_the_prefixes(cuts: tuple[int, ...]) -> None:
    host, ids = Host(SPARSE, PREFILL), prompt_ids(17)
    found = scored(host, ids, cuts)
    want = []
    for length in range(DELTA_TOKENS, len(ids)):  # shorter prompts have coordinates of their own
        run = host.prefill("prefix", ids[:length])
        want.append(logprobs(run.logits[0])[ids[length]])
        host.end(run)
    assert found[DELTA_TOKENS - 1 :].tolist() == want
    assert found.tolist() == scored(host, ids, ()).tolist()


def test_a_prompt_of_one_token_has_none() -> None:
    assert scored(Host(SPARSE, PREFILL), prompt_ids(1), ()).shape == (0,)


def test_only_where_asked_for() -> None:
    host = Host(SPARSE, PREFILL)
    assert isinstance(host.engine, PromptScorer)
    host.prefill("plain", prompt_ids(3))
    with pytest.raises(RoomError, match="not scored"):
        host.engine.prompt_logprobs("plain")
