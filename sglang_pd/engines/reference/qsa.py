"""QSA: block-sparse attention steered by compressed index keys. Ring, compressed pages, selection.

A group of r tokens closes when its last one arrives: the mean of its raw keys, normalised, rotated by the coordinates
of its first member. Until then its raw keys and coordinates wait in rings. The coordinate ring is shared by all QSA
layers of a stage: every layer reads it as it was before the step (`Step.rope_ring`), and `commit_coordinates` writes it
once, after the last of them. A layer that wrote it earlier would give the next one coordinates of later tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_pd.engines.reference.attention import Choice, causal
from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.grid import Rotary, rms, snap
from sglang_pd.engines.reference.step import Keys, Qsa, Step


@dataclass(frozen=True)
class QsaPools:
    """A layer's pools: ring [ring slots, 1, width], compressed [group slots, 1, width]."""

    ring: torch.Tensor
    compressed: torch.Tensor


def top(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest visible entries of the last axis, the lowest index of equal ones first. bool, same shape."""
    if scores.shape[-1] <= count:
        return visible
    ranked = scores.masked_fill(~visible, -torch.inf)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(visible).scatter_(-1, order, True) & visible


def choose_blocks(
    query: torch.Tensor, keys: torch.Tensor, step: Step, pools: QsaPools, config: ReferenceConfig
) -> Choice:
    """Update ring and compressed keys with the new tokens, and choose what every query reads.

    query: float64 [B, n, index heads * width], keys: [B, n, width], both on the grid, neither normalised.
    """
    qsa = step.qsa
    if qsa is None or step.rope_ring is None or step.keys is None:
        raise TypeError("choose_blocks is for QSA layers")
    batch, n, _ = keys.shape
    _close(keys, step.rope_ring, step, qsa, pools)
    pending = qsa.pending
    pools.ring[pending.slot, 0] = keys[pending.sequence, pending.offset]
    query = step.rotary.turn(rms(query.view(batch, n, config.qsa_heads, config.qsa_dim)))
    groups = qsa.compressed.gather(pools.compressed)[:, :, 0]
    scores = snap(torch.relu(snap(query.flatten(1, 2) @ groups.transpose(1, 2), 16)), 16)
    scores = snap(scores.view(batch, n, config.qsa_heads, -1).sum(2), 12)
    visible = torch.arange(groups.shape[1], device=keys.device) < qsa.closed[:, :, None]
    soft = config.coupling == "soft"
    chosen = visible if soft else top(scores, visible, config.qsa_budget // config.qsa_ratio)
    return _expand(step, step.keys, qsa, chosen, scores if soft else None)


def _close(keys: torch.Tensor, rope_ring: torch.Tensor, step: Step, qsa: Qsa, pools: QsaPools) -> None:
    closing = qsa.closing
    if not len(closing.target):
        return
    raw = torch.cat([pools.ring[qsa.ring][:, :, 0], keys], 1)  # as the ring was before this step
    where = torch.cat([rope_ring, step.coordinates], 1)
    members = raw[closing.sequence[:, None], closing.member]
    first = where[closing.sequence, closing.member[:, 0]]
    pooled = rms(snap(members.sum(1) / members.shape[1]))
    pools.compressed[closing.target, 0] = Rotary.of(first).turn(pooled[:, None])[:, 0]


def _expand(step: Step, keys: Keys, qsa: Qsa, chosen: torch.Tensor, scores: torch.Tensor | None) -> Choice:
    """From groups to tokens: chosen groups, and the open tail always. Positions of `keys` count from 0."""
    choice = causal(step, keys)
    ratio = qsa.closing.member.shape[1]
    length = keys.positions.shape[1]
    inside = keys.positions[:, None, :] < qsa.closed[:, :, None] * ratio

    def by_token(groups: torch.Tensor) -> torch.Tensor:
        wide = groups.repeat_interleave(ratio, -1)[..., :length]
        return torch.nn.functional.pad(wide, (0, length - wide.shape[-1]))

    mask = choice.mask & (by_token(chosen) | ~inside)
    if scores is None:
        return Choice(mask)
    bias = by_token(snap(scores / 4, 12)).masked_fill(~inside, 0.0)
    return Choice(mask, bias)


def coordinates_before(ring: torch.Tensor, qsa: Qsa) -> torch.Tensor:
    """The coordinate ring of every request, int64 [B, width, 3]: a copy, taken at the start of a step."""
    return ring[qsa.ring][:, :, 0].clone()


def commit_coordinates(ring: torch.Tensor, step: Step, qsa: Qsa) -> None:
    """Write the coordinates of the open group's new tokens, once, after the stage's last QSA layer."""
    pending = qsa.pending
    ring[pending.slot, 0] = step.coordinates[pending.sequence, pending.offset]
