"""Typed views on raw memory: numpy arrays on host memory, torch tensors on host or device. Nothing is copied."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import Segment
from sglang_pd.memory.spec import DTYPE_BYTES
from sglang_pd.protocol.errors import BackendError

if TYPE_CHECKING:
    import torch

NUMPY_DTYPES = frozenset({"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"})
"""Dtypes that numpy knows; the others are seen through torch only."""


def host_bytes(segment: Segment) -> NDArray[np.uint8]:
    """The segment's memory as uint8 [nbytes], writable. Whoever holds the view keeps `segment.keep_alive` alive too."""
    if segment.device != "cpu":
        raise BackendError("numpy sees host memory only", where="host_bytes", actual=segment.device)
    buffer = (ctypes.c_uint8 * segment.nbytes).from_address(segment.address)
    return np.ctypeslib.as_array(buffer)


class _CudaMemory:
    """Raw device memory in the form that torch takes without a copy."""

    def __init__(self, segment: Segment) -> None:
        self.keep_alive = segment.keep_alive
        self.__cuda_array_interface__ = {
            "shape": (segment.nbytes,),
            "typestr": "|u1",
            "data": (segment.address, False),
            "version": 3,
        }


def segment_tensor(segment: Segment) -> torch.Tensor:
    """The segment's memory as a uint8 tensor [nbytes] on its device."""
    import torch

    if segment.device == "cpu":
        return torch.from_numpy(host_bytes(segment))
    return torch.as_tensor(_CudaMemory(segment), device=segment.device)


def strided_array(
    raw: NDArray[np.uint8], dtype: str, offset: int, shape: tuple[int, ...], item_stride_bytes: int
) -> NDArray[Any]:
    """View of `shape` at `offset` bytes: dense but for the first axis, whose stride is given in bytes."""
    if dtype not in NUMPY_DTYPES:
        raise BackendError("numpy has no such dtype", where="strided_array", expected="a torch view", actual=dtype)
    _, strides = _strides(dtype, offset, shape, item_stride_bytes)
    typed = np.dtype(dtype)
    return np.ndarray(shape, typed, raw.data, offset, tuple(s * typed.itemsize for s in strides))


def strided_tensor(
    raw: torch.Tensor, dtype: str, offset: int, shape: tuple[int, ...], item_stride_bytes: int
) -> torch.Tensor:
    """The same for torch: a view of `raw`, a uint8 tensor."""
    import torch

    first, strides = _strides(dtype, offset, shape, item_stride_bytes)
    usable = raw.shape[0] // DTYPE_BYTES[dtype] * DTYPE_BYTES[dtype]
    typed = raw[:usable].view(getattr(torch, dtype))
    return typed.as_strided(shape, strides, typed.storage_offset() + first)


def _strides(dtype: str, offset: int, shape: tuple[int, ...], item_stride_bytes: int) -> tuple[int, tuple[int, ...]]:
    """First element and strides, in elements."""
    size = DTYPE_BYTES[dtype]
    if offset % size or item_stride_bytes % size:
        raise BackendError(
            "a region is not aligned to its elements", where="view", expected=f"multiples of {size} bytes",
            actual=f"offset {offset}, stride {item_stride_bytes}",
        )  # fmt: skip
    strides, step = [], 1
    for length in reversed(shape[1:]):
        strides.append(step)
        step *= length
    return offset // size, (item_stride_bytes // size, *reversed(strides))
