"""Read and write a segment's bytes from the host, whatever the device, for tests alone."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import Segment
from sglang_pd.protocol.errors import BackendUnavailable


def read_bytes(segment: Segment, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """A copy of `nbytes` bytes from `offset`, uint8 of shape [nbytes]."""
    _inside(segment, offset, nbytes)
    out = np.empty(nbytes, np.uint8)
    if nbytes:
        _copy(out.ctypes.data, segment.address + offset, nbytes, segment.device)
    return out


def write_bytes(segment: Segment, offset: int, data: NDArray[np.uint8]) -> None:
    """Store `data` (uint8, contiguous) at `offset`."""
    _inside(segment, offset, data.nbytes)
    if data.nbytes:
        _copy(segment.address + offset, data.ctypes.data, data.nbytes, segment.device)


def fill(segment: Segment, offset: int, nbytes: int, value: int) -> None:
    """Set `nbytes` bytes from `offset` to `value`."""
    _inside(segment, offset, nbytes)
    if segment.device == "cpu":
        ctypes.memset(segment.address + offset, value, nbytes)
        return
    runtime = _runtime()
    _checked(runtime.cudaSetDevice(_ordinal(segment.device)))
    _checked(runtime.cudaMemset(segment.address + offset, value, nbytes))
    _checked(runtime.cudaDeviceSynchronize())


def _inside(segment: Segment, offset: int, nbytes: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > segment.nbytes:
        raise ValueError(f"[{offset}, {offset + nbytes}) is outside a segment of {segment.nbytes} bytes")


def _copy(dst: int, src: int, nbytes: int, device: str) -> None:
    if device == "cpu":
        ctypes.memmove(dst, src, nbytes)
        return
    runtime = _runtime()
    _checked(runtime.cudaSetDevice(_ordinal(device)))
    _checked(runtime.cudaMemcpy(dst, src, nbytes, runtime.cudaMemcpyKind.cudaMemcpyDefault))
    # From pageable host memory it returns when the bytes are staged, not when they have arrived.
    _checked(runtime.cudaDeviceSynchronize())


def _ordinal(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise BackendUnavailable(
            "device memory needs the CUDA runtime bindings",
            where="cuda-bindings",
            actual=str(error),
            hint="pip install cuda-bindings, of the driver's major version",
        ) from error
    return runtime


def _checked(result: tuple[Any, ...]) -> None:
    if int(result[0]) != 0:
        raise BackendUnavailable("a CUDA call failed", where="cudart", actual=str(result[0]))
