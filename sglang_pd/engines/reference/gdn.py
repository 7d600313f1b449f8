"""Gated DeltaNet: a causal convolution over the last K - 1 projections, and a matrix state per value head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.grid import act, linear, project, rms, sigmoid, snap, unit
from sglang_pd.engines.reference.links import Links
from sglang_pd.engines.reference.step import Step
from sglang_pd.engines.reference.weights import Gdn


@dataclass(frozen=True)
class GdnPools:
    """conv: [slots, q | k | v channels of this rank, K - 1], oldest first. temporal: [slots, value heads, dk, dv]."""

    conv: torch.Tensor
    temporal: torch.Tensor


def causal_conv(
    past: torch.Tensor, new: torch.Tensor, w: torch.Tensor, dilation: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise convolution over [past | new]. past: [B, channels, (K - 1) * dilation], new: [B, n, channels],
    w: [channels, K]. Returns (float64 [B, n, channels] on the grid, the next past)."""
    n = new.shape[1]
    line = torch.cat([past, new.transpose(1, 2)], 2)
    out = sum((w[:, j, None] * line[:, :, j * dilation : j * dilation + n] for j in range(w.shape[1])), torch.zeros(()))
    return snap(out).transpose(1, 2).contiguous(), line[:, :, n:]


def gdn_layer(
    x: torch.Tensor, w: Gdn, step: Step, pools: GdnPools, config: ReferenceConfig, links: Links
) -> torch.Tensor:
    """One layer over the new tokens; both states advance. x, result: float64 [B, n, hidden]."""
    batch, n, _ = x.shape
    dk, dv = config.gdn_key_dim, config.gdn_value_dim
    heads = w.rate.shape[0]
    keys = heads * config.gdn_key_heads // config.gdn_value_heads
    past = pools.conv[step.slot]
    mix, gate, decays, betas = project(x, w.into)
    mixed, left = causal_conv(past, mix, w.conv, 1)
    pools.conv[step.slot] = left
    done, width = act(mixed), keys * dk
    q, k, v = done[..., :width], done[..., width : 2 * width], done[..., 2 * width :]
    q, k = (unit(part.reshape(batch, n, keys, dk)).repeat_interleave(heads // keys, 2) for part in (q, k))
    rate = torch.log1p(torch.exp((decays + w.shift).contiguous()))
    decay = snap(torch.exp(-w.rate * rate), 16)
    beta = sigmoid(betas)
    state, out = recur(pools.temporal[step.slot], Inputs(q, k, v.reshape(batch, n, heads, dv), decay, beta))
    pools.temporal[step.slot] = state
    opened = act(gate).view(batch, n, heads, dv)
    return snap(links.tp_sum(linear(snap(rms(out) * opened).reshape(batch, n, -1), w.out)))


@dataclass(frozen=True)
class Inputs:
    """q, k: [B, n, heads, dk] on 2**-16. v: [B, n, heads, dv]. decay (2**-16), beta: [B, n, heads]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


def recur(state: torch.Tensor, i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay, read for the delta, write, output, token by token. state: [B, heads, dk, dv] on 2**-20.

    Returns (next state, outputs [B, n, heads, dv] on the grid). Works on integers (units of 2**-20), which saves the
    scaling of every rounding; the numbers are the same.
    """
    n = i.q.shape[1]
    s = state * 2.0**20
    v = i.v * 2.0**20
    q, k = i.q[..., None, :], i.k[..., None, :]  # rows: [B, n, heads, 1, dk]
    columns = i.k[..., :, None]
    decay, beta = i.decay[..., None, None], i.beta[..., None, None]
    out = torch.empty_like(i.v)
    for t in range(n):
        s.mul_(decay[:, t]).round_()
        delta = v[:, t, :, None].sub(k[:, t] @ s).mul_(beta[:, t]).round_()
        s.addcmul_(columns[:, t].expand_as(s), delta.expand_as(s)).round_()
        out[:, t] = (q[:, t] @ s)[:, :, 0]
    return s.mul_(2.0**-20), out.round_().mul_(2.0**-20)
