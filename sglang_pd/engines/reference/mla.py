"""Latent attention (MLA) with token-sparse index keys. Latents are cut over context-parallel ranks, index keys are not.

Index keys are int8 with one scale a row. They are global: every rank holds those of all tokens, at virtual slots, and
so chooses the same tokens; each rank then reads the chosen latents that it owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_pd.engines.reference.attention import Choice, attend, causal
from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.grid import F64, linear, project, rms, snap
from sglang_pd.engines.reference.links import Links
from sglang_pd.engines.reference.qsa import top
from sglang_pd.engines.reference.step import Keys, Step
from sglang_pd.engines.reference.weights import Cut, Mla


@dataclass(frozen=True)
class MlaPools:
    """latent: [local rows, 1, latent]. rope: [local rows, 1, rope] or None. key: int8 [virtual rows, 1, index width],
    scale: float32 [virtual rows, 1]."""

    latent: torch.Tensor
    rope: torch.Tensor | None
    key: torch.Tensor
    scale: torch.Tensor


def mla_layer(
    x: torch.Tensor, w: Mla, step: Step, pools: MlaPools, model: tuple[ReferenceConfig, Cut], links: Links
) -> torch.Tensor:
    """One layer. x, result: float64 [B, n, hidden]."""
    config, cut = model
    local = step.local
    if local is None or step.keys is None:
        raise TypeError("mla_layer needs token pools")
    batch, n, _ = x.shape
    q, latent, *rest = project(x, w.into)
    choice = _to_local(_choose(rest[0], rest[1], step, pools, config), step.keys, local)
    q = rms(q.view(batch, n, -1, config.mla_latent))
    _write(snap(rms(latent), 16), pools.latent, step)
    keys = values = local.gather(pools.latent)
    if pools.rope is not None:
        turned = step.rotary.turn(rms(rest[2].view(batch, n, -1, config.mla_rope)))
        q = torch.cat([q, turned], -1)
        _write(step.rotary.turn(rms(rest[3].unsqueeze(-2)))[:, :, 0], pools.rope, step)
        keys = torch.cat([values, local.gather(pools.rope)], -1)
    out = attend(q, keys, values, choice, links)  # heads of the whole context-parallel group
    mine = out.shape[2] // cut.dcp
    own = out[:, :, cut.dcp_rank * mine : (cut.dcp_rank + 1) * mine]
    heads = snap((own.transpose(1, 2) @ w.value).transpose(1, 2))
    return snap(links.tp_sum(linear(heads.reshape(batch, n, -1), w.out)))


def _write(rows: torch.Tensor, pool: torch.Tensor, step: Step) -> None:
    if step.local_write is not None:
        which, slots = step.local_write
        pool[slots, 0] = rows.flatten(0, 1)[which]


def quantise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 keys, and float32 scales on 2**-20 (exact in float32), one a row."""
    scale = snap(keys.abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-20)
    return (keys / scale).round().clamp(-127, 127).to(torch.int8), scale[..., 0].to(torch.float32)


def _choose(query: torch.Tensor, raw: torch.Tensor, step: Step, pools: MlaPools, config: ReferenceConfig) -> Choice:
    """Write the new index keys; choose tokens for every query, over all positions."""
    batch, n, _ = raw.shape
    keys = step.keys
    if keys is None or step.write is None:
        raise TypeError("index keys need token pools")
    key, scale = quantise(step.rotary.turn(rms(raw.unsqueeze(-2)))[:, :, 0])
    pools.key[step.write, 0] = key.flatten(0, 1)
    pools.scale[step.write, 0] = scale.flatten(0, 1)
    query = step.rotary.turn(rms(query.view(batch, n, config.index_heads, config.index_dim)))
    table = keys.gather(pools.key)[:, :, 0].to(F64)
    scales = keys.gather(pools.scale)[:, None, :, 0].to(F64)
    scores = snap(torch.relu((query.flatten(1, 2) @ table.transpose(1, 2)) * scales), 16)
    scores = snap(scores.view(batch, n, config.index_heads, -1).sum(2), 12)
    visible = causal(step, keys).mask
    if config.coupling == "soft":
        return Choice(visible, snap(scores / 4, 12))
    return Choice(top(scores, visible, config.index_budget))


def _to_local(choice: Choice, everywhere: Keys, local: Keys) -> Choice:
    """The columns of the tokens that this rank owns."""
    if local is everywhere:
        return choice
    columns = local.positions.clamp_min(0)[:, None, :].expand(-1, choice.mask.shape[1], -1)
    mask = choice.mask.gather(2, columns) & (local.positions >= 0)[:, None, :]
    return Choice(mask, None if choice.bias is None else choice.bias.gather(2, columns))
