"""Running a model on tensors without data, to learn what its caches hold without reading a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, operations on the meta device that need values get plausible ones: every mask is true, every count
    one. Only shapes and precisions of the results mean anything."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        stand_in = _STAND_INS.get(func)
        if stand_in is not None and args[0].is_meta:
            return stand_in(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _all_true(mask: torch.Tensor) -> torch.Tensor:
    return torch.empty((mask.numel(), mask.dim()), dtype=torch.int64, device="meta")


def _one(value: torch.Tensor) -> Any:
    return torch.ones((), dtype=value.dtype).item()


def _grouped(a: torch.Tensor, b: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Experts side by side: [rows, k] times [experts, k, n]."""
    return torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device="meta")


_STAND_INS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.nonzero.default: _all_true,
    torch.ops.aten._local_scalar_dense.default: _one,
    torch.ops.aten._grouped_mm.default: _grouped,
}
