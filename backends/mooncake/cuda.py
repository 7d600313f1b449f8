"""Device memory as the intra-node NVLink transport needs it: whole `cudaMalloc` allocations that legacy IPC can export.

Bound with ctypes to the CUDA runtime that Mooncake's GPU wheels load anyway, so that it needs nothing more installed.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from sglang_pd.backends.base import Segment
from sglang_pd.protocol.errors import BackendError

_RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_MEMORY_TYPE_DEVICE = 2
_ATTRIBUTE_MEMORY_TYPE = 2
_ATTRIBUTE_ORDINAL = 9
_ATTRIBUTE_LEGACY_IPC = 10


_in_use: list[int] = []
"""Ordinals of the devices on which memory was allocated or adopted, in order."""


def bind_thread(address: int | None = None) -> None:
    """Make the device of `address`, or the first one in use, this thread's current one.

    The library asks CUDA about memory in the calling thread's context, and knows nothing of another device's (measured:
    registering memory of a device that is not current fails with CUDA error 500).
    """
    if address is not None:
        _runtime().cudaSetDevice(_attribute(address, _ATTRIBUTE_ORDINAL, f"mooncake, {address:#x}"))
    elif _in_use:
        _runtime().cudaSetDevice(_in_use[0])


def current_device() -> str:
    """The device that this thread uses, `cuda:N`."""
    found = ctypes.c_int()
    _done(_runtime().cudaGetDevice(ctypes.byref(found)), "cudaGetDevice", "mooncake")
    return f"cuda:{found.value}"


def allocate(nbytes: int, device: str) -> Segment:
    """Zeroed memory of its own allocation. Raises `BackendError` (`memory_refused`)."""
    runtime = _runtime()
    _note(int(device[5:]))
    before = ctypes.c_int()
    runtime.cudaGetDevice(ctypes.byref(before))
    pointer = ctypes.c_void_p()
    try:
        _done(runtime.cudaSetDevice(int(device[5:])), "cudaSetDevice", device)
        _done(runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), "cudaMalloc", device)
        _done(runtime.cudaMemset(pointer, 0, ctypes.c_size_t(nbytes)), "cudaMemset", device)
        _done(runtime.cudaDeviceSynchronize(), "cudaDeviceSynchronize", device)
    finally:
        runtime.cudaSetDevice(before)
    return Segment(address=int(pointer.value or 0), nbytes=nbytes, device=device)


def free(segment: Segment) -> None:
    """Give back what `allocate` gave."""
    _runtime().cudaFree(ctypes.c_void_p(segment.address))


def write(address: int, data: bytes) -> None:
    """Copy bytes from the host to device memory and wait."""
    code = _runtime().cudaMemcpy(ctypes.c_void_p(address), data, ctypes.c_size_t(len(data)), 4)
    _done(code, "cudaMemcpy", f"{address:#x}")


def read(address: int, nbytes: int) -> bytes:
    """Copy device memory to the host."""
    out = ctypes.create_string_buffer(nbytes)
    code = _runtime().cudaMemcpy(out, ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 4)
    _done(code, "cudaMemcpy", f"{address:#x}")
    return out.raw


def check_exportable(segment: Segment) -> None:
    """Refuse (`memory_refused`) what is no device memory of that device, or cannot be exported by legacy CUDA IPC."""
    where = f"mooncake, {segment.nbytes} bytes on {segment.device} at {segment.address:#x}"
    if _attribute(segment.address, _ATTRIBUTE_MEMORY_TYPE, where) != _MEMORY_TYPE_DEVICE:
        raise BackendError("this is no device memory", code="memory_refused", where=where)
    ordinal = _attribute(segment.address, _ATTRIBUTE_ORDINAL, where)
    if f"cuda:{ordinal}" != segment.device:
        raise BackendError(
            "this memory is on another device", code="memory_refused", where=where, actual=f"cuda:{ordinal}"
        )
    if not _attribute(segment.address, _ATTRIBUTE_LEGACY_IPC, where):
        raise BackendError(
            "CUDA IPC cannot export this memory: expandable segments and other virtual memory have no IPC handle",
            code="memory_refused",
            where=where,
            expected="memory from cudaMalloc",
            hint="Run without expandable_segments:True in PYTORCH_ALLOC_CONF, or use this backend's allocate",
        )
    _note(ordinal)


def _note(ordinal: int) -> None:
    if ordinal not in _in_use:
        _in_use.append(ordinal)


@cache
def _runtime() -> Any:
    return _load(_RUNTIMES)


@cache
def _driver() -> Any:
    return _load(("libcuda.so.1",))


def _load(names: tuple[str, ...]) -> Any:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BackendError(
        "device memory needs the CUDA libraries", code="memory_refused", where="mooncake", expected=" or ".join(names)
    )


def _attribute(address: int, attribute: int, where: str) -> int:
    value = ctypes.c_int()
    code = _driver().cuPointerGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_uint64(address))
    _done(code, "cuPointerGetAttribute", where)
    return value.value


def _done(code: int, call: str, where: str) -> None:
    if code:
        raise BackendError(f"{call} failed", code="memory_refused", where=where, expected=0, actual=code)
