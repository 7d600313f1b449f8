"""One forward of a model over its cache: the single place that calls the library's models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_pd.engines.transformers.model import accepts


def forward(model: Any, ids: torch.Tensor, cache: Any, lengths: Sequence[int], *, every: bool = False) -> torch.Tensor:
    """Logits after the last of `ids` (int64 [B, n]): [B, vocabulary]; the cache advances by n.

    lengths: tokens that each request has in the cache; shorter ones are padded on the left. Positions are always given,
    as the library's `generate` does: some of its models count from 0 at every call otherwise. every: after each of
    `ids`, [B, n, vocabulary]; the last row's bits may then differ from those without, since the head multiplies more.
    """
    more: dict[str, Any] = {"logits_to_keep": 0 if every else 1} if accepts(model, "logits_to_keep") else {}
    tokens, longest, count = torch.tensor(lengths)[:, None], max(lengths), ids.shape[1]
    if accepts(model, "position_ids"):
        more["position_ids"] = (tokens + torch.arange(count)).to(ids.device)
    if min(lengths) < longest:
        more["attention_mask"] = (torch.arange(longest + count) >= longest - tokens).long().to(ids.device)
    result: torch.Tensor = model(input_ids=ids, cache=cache, use_cache=True, **more).logits
    return result if every else result[:, -1]
