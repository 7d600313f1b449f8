"""Memory that can be registered: allocated here, or adopted after its mapping was looked at."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from sglang_pd.backends.base import Segment
from sglang_pd.protocol.errors import BackendError

_MAP_NORESERVE = 0x4000
_CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10
_MAX_BYTES = 1 << 47
_DEVICE = re.compile(r"cuda:(0|[1-9]\d{0,3})")
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (..)", re.MULTILINE)


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
    if not isinstance(nbytes, int) or not 0 < nbytes < _MAX_BYTES:
        raise refused("that many bytes cannot be had", nbytes, device, expected=f"1 to {_MAX_BYTES} bytes")
    if device != "cpu":
        return _allocate_cuda(nbytes, device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        view = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    except (OSError, ValueError) as error:
        raise refused("the system refuses the memory", nbytes, device, actual=str(error)) from error
    return Segment(address=int(view.ctypes.data), nbytes=nbytes, device="cpu", keep_alive=view)


def _allocate_cuda(nbytes: int, device: str) -> Segment:
    torch = _torch(nbytes, device)
    try:
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
    except Exception as error:
        raise refused("the device refuses the memory", nbytes, device, actual=str(error)) from error
    segment = Segment(address=int(tensor.data_ptr()), nbytes=nbytes, device=device, keep_alive=tensor)
    check_cuda(segment)
    return segment


def _torch(nbytes: int, device: str) -> Any:
    if not _DEVICE.fullmatch(device):
        raise refused("no such device", nbytes, device, expected="cpu or cuda:N")
    if not cuda_present():
        raise refused("this machine has no CUDA device or no driver (libcuda.so.1)", nbytes, device)
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available() or int(device.partition(":")[2]) >= torch.cuda.device_count():
        raise refused("torch does not see that device", nbytes, device, actual=f"torch {torch.__version__}")
    return torch


def use_device(device: str) -> None:
    """Make the device's primary context current in this thread; the library works in the current context."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(device)


def check_host(segment: Segment) -> None:
    """Refuse host memory that is not mapped, readable and writable throughout.

    UCX over shared memory or TCP registers any address without looking, so the mapping itself is looked at.
    """
    start, end = segment.address, segment.address + segment.nbytes
    for found in _LINE.finditer(Path("/proc/self/maps").read_bytes()):
        first, last = int(found[1], 16), int(found[2], 16)
        if last <= start:
            continue
        if first > start or found[3] != b"rw":
            break
        start = last
        if start >= end:
            return
    raise refused(
        "not mapped readable and writable throughout",
        segment.nbytes,
        segment.device,
        where=f"{segment.nbytes} bytes at {segment.address:#x}",
        actual=f"it breaks off at {start:#x}",
    )


def check_cuda(segment: Segment) -> None:
    """Refuse device memory that other processes cannot open, such as torch's expandable segments."""
    _torch(segment.nbytes, segment.device)
    use_device(segment.device)
    driver = ctypes.CDLL("libcuda.so.1")
    capable = ctypes.c_int(0)
    for address in (segment.address, segment.address + segment.nbytes - 1):
        code = driver.cuPointerGetAttribute(
            ctypes.byref(capable), _CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, ctypes.c_uint64(address)
        )
        if code != 0 or not capable.value:
            raise refused(
                "other processes cannot open this device memory",
                segment.nbytes,
                segment.device,
                where=f"{segment.nbytes} bytes at {segment.address:#x}",
                expected="memory from cudaMalloc",
                actual=f"driver status {code}" if code else "memory of a virtual-memory pool",
                hint="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False before the pools are made.",
            )


def refused(message: str, nbytes: int, device: str, **facts: object) -> BackendError:
    """A `memory_refused` error with the usual facts."""
    where = str(facts.pop("where", f"{nbytes} bytes on {device}"))
    return BackendError(message, code="memory_refused", where=where, **{"backend": "nixl", **facts})  # type: ignore[arg-type]
