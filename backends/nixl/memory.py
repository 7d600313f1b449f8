"""Device memory for the `nixl` backend: what other processes can open."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

from sglang_pd.backends.base import Segment
from sglang_pd.backends.library.segments import (
    allocate_host,
    allocate_torch,
    check_mapped,
    check_range,
    check_seen,
    check_size,
    refused,
)

_CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10


def cuda_present() -> bool:
    """Whether this machine has a CUDA device and its driver's library. Starts nothing."""
    if not Path("/dev/nvidiactl").exists():
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def allocate(nbytes: int, device: str) -> Segment:
    """Zeroed memory on `cpu` (page aligned, backed as it is touched) or `cuda:N` (aligned to 256 bytes or more).

    Raises `BackendError` (`memory_refused`).
    """
    check_size("nixl", nbytes, device)
    if device == "cpu":
        return allocate_host("nixl", nbytes)
    torch = _torch(Segment(address=0, nbytes=nbytes, device=device))
    segment = allocate_torch("nixl", torch, nbytes, device)
    _check_cuda(segment)
    return segment


def check_adoptable(segment: Segment) -> None:
    """Refuse (`memory_refused`) what is no memory, not mapped, or cannot be opened by other processes."""
    check_range("nixl", segment)
    if segment.device == "cpu":
        check_mapped("nixl", segment)
    else:
        _check_cuda(segment)


def _torch(segment: Segment) -> Any:
    if not cuda_present():
        raise refused("nixl", "this machine has no CUDA device or no driver (libcuda.so.1)", segment)
    torch = importlib.import_module("torch")
    check_seen("nixl", torch, segment)
    return torch


def use_device(device: str) -> None:
    """Make the device's primary context current in this thread; the library works in the current context."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(device)


def _check_cuda(segment: Segment) -> None:
    """Refuse device memory that other processes cannot open, such as torch's expandable segments."""
    _torch(segment)
    use_device(segment.device)
    driver = ctypes.CDLL("libcuda.so.1")
    capable = ctypes.c_int(0)
    for address in (segment.address, segment.address + segment.nbytes - 1):
        code = driver.cuPointerGetAttribute(
            ctypes.byref(capable), _CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, ctypes.c_uint64(address)
        )
        if code != 0 or not capable.value:
            raise refused(
                "nixl",
                "other processes cannot open this device memory",
                segment,
                expected="memory from cudaMalloc",
                actual=f"driver status {code}" if code else "memory of a virtual-memory pool",
                hint="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False before the pools are made.",
            )
