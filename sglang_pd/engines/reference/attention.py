"""Exact attention over paged keys, and the layers that use it: full, sliding window, QSA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_pd.engines.reference.grid import linear, rms, score_scale, sigmoid, snap
from sglang_pd.engines.reference.links import Links
from sglang_pd.engines.reference.step import Keys, Step
from sglang_pd.engines.reference.weights import Attention

BLOCK_ELEMENTS = 2**19
"""Scores held at once, per query block: bounds memory, changes no result."""


@dataclass(frozen=True)
class Choice:
    """Which keys each query reads. mask: bool [B, n, T]. bias: float64 [B, n, T] added to the logits, or None."""

    mask: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Place:
    """Where a layer's keys and values lie: pools [rows, kv heads, width], rows of the new tokens, keys to be read."""

    k: torch.Tensor
    v: torch.Tensor
    write: torch.Tensor
    keys: Keys


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, choice: Choice, links: Links) -> torch.Tensor:
    """Softmax attention with exact sums. Returns float64 [B, n, heads, v width] on the grid.

    q: [B, n, heads, width]; k: [B, T, kv heads, width]; v: [B, T, kv heads, v width] on 2**-16. Where keys are cut over
    context-parallel ranks, the maximum is shared, numerators and denominators are summed, and divided once: exact.
    """
    batch, count, heads, _ = q.shape
    step = max(1, BLOCK_ELEMENTS // max(1, batch * heads * k.shape[1]))
    parts = [_attend_block(q[:, a:b], k, v, _block(choice, a, b), links) for a, b in _blocks(count, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _blocks(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((a, min(a + step, count)) for a in range(0, count, step))


def _block(choice: Choice, a: int, b: int) -> Choice:
    return Choice(choice.mask[:, a:b], None if choice.bias is None else choice.bias[:, a:b])


def _attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, choice: Choice, links: Links) -> torch.Tensor:
    batch, n, heads, width = q.shape
    kv = k.shape[2]
    group = heads // kv
    rows = q.reshape(batch, n, kv, group, width).permute(0, 2, 3, 1, 4).reshape(batch, kv, group * n, width)
    scores = rows @ k.permute(0, 2, 3, 1)
    scores = scores.mul_(score_scale(width) * 2.0**16).round_().mul_(2.0**-16).view(batch, kv, group, n, -1)
    if choice.bias is not None:
        scores += choice.bias[:, None, None]
    scores.masked_fill_(~choice.mask[:, None, None], -torch.inf)
    most = scores.amax(-1, keepdim=True) if k.shape[1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    weights = torch.exp(scores.sub_(links.dcp_max(most))).mul_(2.0**20).round_().mul_(2.0**-20)
    total = links.dcp_sum(weights.sum(-1, keepdim=True))
    values = weights.view(batch, kv, group * n, -1) @ v.permute(0, 2, 1, 3)
    out = snap(links.dcp_sum(values).view(batch, kv, group, n, -1) / total)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, n, heads, v.shape[3])


def causal(step: Step, keys: Keys, window: int = 0) -> Choice:
    """All keys up to the query's own position; with a window, that many before it and its own. Kept in the step."""
    if (id(keys), window) not in step.choices:
        step.choices[id(keys), window] = Choice(_causal_mask(step, keys, window))
    choice: Choice = step.choices[id(keys), window]
    return choice


def _causal_mask(step: Step, keys: Keys, window: int) -> torch.Tensor:
    at = step.positions[:, :, None]
    where = keys.positions[:, None, :]
    mask = (where <= at) & (where >= 0)
    if window:
        mask &= where >= at - window
    return mask


def attention_layer(
    parts: tuple[torch.Tensor, ...], w: Attention, step: Step, place: Place, choice: Choice, links: Links
) -> torch.Tensor:
    """One layer: write the new keys and values, read the chosen ones. parts: q and k, v, gate of the new tokens, each
    [B, n, outputs] on the grid. Result: float64 [B, n, hidden]."""
    both, v, gate = parts
    batch, n, _ = v.shape
    width = place.k.shape[-1]
    turned = step.rotary.turn(rms(both.view(batch, n, -1, width)))
    heads = turned.shape[2] - place.k.shape[1]
    place.k[place.write] = turned[:, :, heads:].flatten(0, 1)
    place.v[place.write] = snap(v, 16).view(batch * n, -1, width)
    out = attend(turned[:, :, :heads], place.keys.gather(place.k), place.keys.gather(place.v), choice, links)
    gated = snap(out.reshape(batch, n, -1) * sigmoid(gate))
    return snap(links.tp_sum(linear(gated, w.out)))
