"""Whether the device that is to compute is there, asked before anything is built on it."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_pd.protocol.errors import BackendUnavailable


def require_device(name: str, *, where: str) -> None:
    """Raise `BackendUnavailable` unless this process can compute on `cpu`, `cuda` or `cuda:N`. where: the key."""
    if name == "cpu":
        return
    instead = f"or set {where.removeprefix('$.')} to cpu"
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError:
        raise BackendUnavailable(
            "a GPU is used through torch, which is not installed",
            where=where,
            expected="torch, built for GPUs",
            actual="not installed",
            hint=f"pip install 'sglang-pd[cuda]', {instead}.",
        ) from None
    if not (torch.version.cuda or torch.version.hip):
        raise BackendUnavailable(
            "this torch is built without CUDA",
            where=where,
            expected=f"torch built for GPUs, for {name}",
            actual=f"torch {torch.__version__}",
            hint=f"Install a CUDA build of torch, {instead}.",
        )
    count = torch.cuda.device_count()
    if not count:
        raise BackendUnavailable(
            "no GPU is visible to this process",
            where=where,
            expected=f"a GPU and its driver, for {name}",
            actual="none",
            hint=f"See `nvidia-smi`, CUDA_VISIBLE_DEVICES and, in a container, --gpus; {instead}.",
        )
    if int(name.partition(":")[2] or 0) >= count:
        raise BackendUnavailable(
            "no such GPU is visible to this process",
            where=where,
            expected="cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}",
            actual=name,
            hint="CUDA_VISIBLE_DEVICES hides GPUs and numbers the others anew.",
        )
