"""What a rank asks of the others: sums, maxima, and the stage before and after. Injected, so one rank needs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_pd.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch

    Reduce = Callable[[torch.Tensor], torch.Tensor]


def alone(x: torch.Tensor) -> torch.Tensor:
    """The reduction over one rank."""
    return x


def nobody(x: object) -> torch.Tensor:
    """Stands where a pipeline neighbour is missing."""
    raise ConfigError("this rank has no such pipeline neighbour", where="engine.links")


@dataclass(frozen=True)
class Links:
    """Reductions over tensor-parallel ranks (tp_sum), over the context-parallel group inside them (dcp_sum, dcp_max),
    and the pipeline: recv(shape) -> float64 hidden states of the stage before, send(hidden) to the stage behind.

    Sums are of exact numbers, so their order is free. Reductions return a tensor of the same shape on every rank.
    """

    tp_sum: Reduce = alone
    dcp_sum: Reduce = alone
    dcp_max: Reduce = alone
    recv: Callable[[tuple[int, ...]], torch.Tensor] = nobody
    send: Callable[[torch.Tensor], object] = nobody
