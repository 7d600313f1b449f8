"""Exact arithmetic: real numbers on dyadic grids, carried in float64.

Weights lie on 2**-10, activations are rounded to 2**-20 after every nonlinearity and every reduced sum. A sum of
products is then a sum of integers in disguise, exact as long as it stays below 2**53 units, hence independent of order,
blocking, batching, chunking and sharding. Divisions and square roots are correctly rounded everywhere. exp, sin and cos
may differ in the last place between code paths; rounding to the grid absorbs that except within 2**-32 of a rounding
boundary, and arguments come from a grid of few enough points for such a case to be unlikely in the whole model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from sglang_pd.protocol.errors import LocalProtocolError

F64: Final = torch.float64
ACTIVATION_BITS: Final = 20
WEIGHT_BITS: Final = 10
LIMIT: Final = 2.0**22
"""Largest sum of |activation| * |weight|: 2**53 units of 2**-30, with a factor of two to spare."""

ROTARY_FREQUENCIES: Final = (1.0, 0.1, 0.01, 0.001)
ROTARY_AXES: Final = (0, 1, 2, 0)


def snap(x: torch.Tensor, bits: int = ACTIVATION_BITS) -> torch.Tensor:
    """The nearest number on the grid of 2**-bits, ties to even. A new tensor."""
    return x.mul(2.0**bits).round_().mul_(2.0**-bits)


@dataclass(frozen=True)
class Matrix:
    """Weights on the grid. t: float64 [inputs, outputs]. reach: largest sum of |w| over the inputs of one output."""

    t: torch.Tensor
    reach: float

    @staticmethod
    def of(rows: torch.Tensor) -> Matrix:
        """From float64 [outputs, inputs]."""
        reach = float(rows.abs().sum(1).max()) if rows.numel() else 0.0
        return Matrix(rows.T.contiguous(), reach)


def linear(x: torch.Tensor, w: Matrix) -> torch.Tensor:
    """x @ w, exact, on the grid of 2**-30; x: [..., inputs] on 2**-20. Raises where the sum might not be exact."""
    peak = float(x.abs().max()) * w.reach if x.numel() else 0.0
    if not peak < LIMIT:  # NaN too
        raise LocalProtocolError(
            "fixed-point headroom exhausted: a sum would not be exact", code="internal", where="engine.reference",
            expected=f"below {LIMIT}", actual=peak, hint="State that was never written (poison) looks like this too.",
        )  # fmt: skip
    return x @ w.t


def rms(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x**2)) over the last axis; statistics on 2**-12, so that the sum of squares is exact."""
    c = snap(x, 12)
    mean = (c * c).sum(-1, keepdim=True) / x.shape[-1]
    return snap(x / torch.sqrt(mean + 1e-6))


def unit(x: torch.Tensor) -> torch.Tensor:
    """x over its length, last axis, on 2**-16."""
    c = snap(x, 12)
    return snap(x / torch.sqrt((c * c).sum(-1, keepdim=True) + 1e-6), 16)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) on the grid."""
    return snap(1.0 / (1.0 + torch.exp(-x.contiguous())))


def act(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) on the grid."""
    return snap(x / (1.0 + torch.exp(-x.contiguous())))


def score_scale(width: int) -> float:
    """A power of two near 1 / sqrt(width), so that scaling is exact."""
    return 2.0 ** -(round(math.log2(width)) // 2)


@dataclass(frozen=True)
class Rotary:
    """cos and sin of the rotary angles, float64 [..., 4] on 2**-16, one row a position."""

    cos: torch.Tensor
    sin: torch.Tensor

    @staticmethod
    def of(coordinates: torch.Tensor) -> Rotary:
        """From int64 coordinates [..., 3]; frequency i reads axis i % 3."""
        frequency = torch.tensor(ROTARY_FREQUENCIES, dtype=F64, device=coordinates.device)
        angles = (coordinates[..., list(ROTARY_AXES)].to(F64) * frequency).contiguous()
        return Rotary(snap(torch.cos(angles), 16), snap(torch.sin(angles), 16))

    def turn(self, x: torch.Tensor, heads: bool = True) -> torch.Tensor:
        """Rotate the first 8 of the last axis. x: [..., heads, width] (or [..., width]), leading axes as the rows."""
        c, s = (self.cos.unsqueeze(-2), self.sin.unsqueeze(-2)) if heads else (self.cos, self.sin)
        a, b = x[..., :4], x[..., 4:8]
        return torch.cat([snap(a * c - b * s), snap(a * s + b * c), x[..., 8:]], -1)
