"""Per-layer n-gram embedding: hashed n-grams, a gated value, and a dilated short convolution. Replicated over TP.

The token history (the last n - 1 ids, EOS before the start) is shared by all PLE layers of a stage: read before the
step, advanced once after the last of them. An EOS in the past ends its segment: it and everything older reads as EOS.
"""

from __future__ import annotations

import torch

from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.gdn import causal_conv
from sglang_pd.engines.reference.grid import act, project, rms, sigmoid, snap
from sglang_pd.engines.reference.step import Step, put, take
from sglang_pd.engines.reference.weights import Ple

MASK = 2**62 - 1


def grams(history: torch.Tensor, ids: torch.Tensor, eos: int) -> torch.Tensor:
    """int64 [B, n, ngram]: each token, then those before it, nearest first. history: [B, ngram - 1], oldest first."""
    context = torch.cat([history, ids], 1)
    back = context.unfold(1, history.shape[1] + 1, 1).flip(-1)
    past = back[..., 1:]
    ended = (past == eos).cumsum(-1) > 0
    return torch.cat([back[..., :1], past.masked_fill(ended, eos)], -1)


def rows_of(tokens: torch.Tensor, w: Ple) -> torch.Tensor:
    """int64 [B, n, heads]: table rows of all n-gram orders from 2 up, the same number of heads for each."""
    terms = (tokens * w.multipliers) & MASK
    orders = tokens.shape[-1] - 1
    per_order = len(w.primes) // orders
    mixed, hashes = terms[..., 0], []
    for order in range(1, orders + 1):
        mixed = mixed ^ terms[..., order]
        hashes += [mixed] * per_order
    return torch.stack(hashes, -1) % w.primes + w.offsets


def ple_layer(x: torch.Tensor, w: Ple, step: Step, conv: torch.Tensor, config: ReferenceConfig) -> torch.Tensor:
    """What the embedding adds to the hidden states. conv: pool [slots, hidden, (K - 1) * ngram]; it advances."""
    if step.history is None or step.slot is None:
        raise TypeError("ple_layer is for stages with PLE layers")
    rows = rows_of(grams(step.history, step.ids, config.eos), w)
    embedded = w.table[rows].flatten(-2)
    value, key = project(embedded, w.into)
    agreement = (rms(key) * rms(x)).sum(-1, keepdim=True) / config.hidden**0.5
    gated = snap(sigmoid(snap(agreement)) * value)
    mixed, left = causal_conv(take(conv, step.slot), rms(gated), w.conv, config.ngram)
    put(conv, step.slot, left)
    return snap(gated + act(mixed))


def next_history(history: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The history after the step, int64 [B, ngram - 1]."""
    return torch.cat([history, ids], 1)[:, -history.shape[1] :]
