"""Exact arithmetic: real numbers on dyadic grids, carried in float64.

Weights lie on 2**-10, activations are rounded to 2**-20 after every nonlinearity and every reduced sum. A sum of
products is then a sum of integers in disguise, exact as long as it stays below 2**53 units, hence independent of order,
blocking, batching, chunking and sharding. Divisions and square roots are correctly rounded everywhere. exp, sin and cos
may differ in the last place between code paths; rounding to the grid absorbs that except within 2**-32 of a rounding
boundary, and arguments come from a grid of few enough points for such a case to be unlikely in the whole model.
"""

from __future__ import annotations

import itertools
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
    """The nearest number on the grid of 2**-bits, ties to even; for |x| below 2**(51 - bits). A new tensor.

    Adding 1.5 * 2**(52 - bits) leaves no room for finer bits in a float64, so that the addition itself rounds.
    """
    shift = 1.5 * 2.0 ** (52 - bits)
    return x.add(shift).sub_(shift)


@dataclass(frozen=True)
class Matrix:
    """Weights on the grid. t: float64 [inputs, outputs]. reach: largest sum of |w| over the inputs of one output.

    ends: last columns of the parts of a matrix that is several stacked ones, so that they take one product.
    """

    t: torch.Tensor
    reach: float
    ends: tuple[int, ...] = ()

    @staticmethod
    def of(*parts: torch.Tensor) -> Matrix:
        """From one or more float64 [outputs, inputs]."""
        rows = torch.cat(parts)
        ends = itertools.accumulate(part.shape[0] for part in parts)
        return Matrix(rows.T.contiguous(), float(rows.abs().sum(1).max()), tuple(ends))


def linear(x: torch.Tensor, w: Matrix) -> torch.Tensor:
    """x @ w, exact, on the grid of 2**-30; x: [..., inputs] on 2**-20. Raises where the sum might not be exact."""
    peak = float(torch.linalg.vector_norm(x, torch.inf)) * w.reach
    if not peak < LIMIT:  # NaN too
        raise LocalProtocolError(
            "fixed-point headroom exhausted: a sum would not be exact",
            code="internal",
            where="engine.reference",
            expected=f"below {LIMIT}",
            actual=peak,
            hint="State that was never written (poison) looks like this too.",
        )
    return x @ w.t


def project(x: torch.Tensor, w: Matrix) -> tuple[torch.Tensor, ...]:
    """The parts of a stacked matrix's product, each [..., outputs] on the grid: views of one tensor."""
    out = snap(linear(x, w))
    return tuple(out[..., a:b] for a, b in zip((0, *w.ends), w.ends, strict=False))


def rms(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x**2)) over the last axis; statistics on 2**-12, so that the sum of squares is exact."""
    c = snap(x, 12)
    return snap(x / c.mul_(c).sum(-1, keepdim=True).div_(x.shape[-1]).add_(1e-6).sqrt_())


def unit(x: torch.Tensor) -> torch.Tensor:
    """x over its length, last axis, on 2**-16."""
    c = snap(x, 12)
    return snap(x / c.mul_(c).sum(-1, keepdim=True).add_(1e-6).sqrt_(), 16)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) on the grid."""
    return snap(torch.sigmoid(x.contiguous()))


def act(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) on the grid."""
    return snap(x * torch.sigmoid(x.contiguous()))


def score_scale(width: int) -> float:
    """A power of two near 1 / sqrt(width), so that scaling is exact."""
    return 2.0 ** -(round(math.log2(width)) // 2)


@dataclass(frozen=True)
class Rotary:
    """Factors of the rotary embedding on 2**-16, float64 [..., 1, 8], one row a position: x * cos + swapped x * sin."""

    cos: torch.Tensor
    sin: torch.Tensor

    @staticmethod
    def of(coordinates: torch.Tensor) -> Rotary:
        """From int64 coordinates [..., 3]; frequency i reads axis i % 3."""
        frequency = torch.tensor(ROTARY_FREQUENCIES, dtype=F64, device=coordinates.device)
        angles = (coordinates[..., list(ROTARY_AXES)].to(F64) * frequency).contiguous()
        cos, sin = snap(torch.cos(angles), 16), snap(torch.sin(angles), 16)
        return Rotary(torch.cat([cos, cos], -1).unsqueeze(-2), torch.cat([-sin, sin], -1).unsqueeze(-2))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the first 8 of the last axis. x: [..., heads, width], leading axes as the rows."""
        head = x[..., :8]
        turned = snap((head * self.cos).addcmul_(head.roll(4, -1), self.sin))
        return turned if x.shape[-1] == 8 else torch.cat([turned, x[..., 8:]], -1)
