"""Memory that can be registered: allocated here, or adopted after its mapping was looked at."""

from __future__ import annotations

import importlib
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from sglang_pd.backends.base import Segment
from sglang_pd.protocol.errors import BackendError

MAX_BYTES = 1 << 47
_MAP_NORESERVE = 0x4000
_DEVICE = re.compile(r"cuda:(0|[1-9]\d{0,3})")
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (..)", re.MULTILINE)


def rocm_present() -> bool:
    """Whether this machine has a ROCm device. Starts nothing."""
    return Path("/dev/kfd").exists()


def allocate(nbytes: int, device: str) -> Segment:
    """Zeroed memory on `cpu` (page aligned) or on a ROCm device, which torch calls `cuda:N`.

    Raises `BackendError` (`memory_refused`).
    """
    if not isinstance(nbytes, int) or not 0 < nbytes < MAX_BYTES:
        raise refused("that many bytes cannot be had", nbytes, device, expected=f"1 to {MAX_BYTES} bytes")
    if device != "cpu":
        torch = rocm_torch(nbytes, device)
        try:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
        except Exception as error:
            raise refused("the device refuses the memory", nbytes, device, actual=str(error)) from error
        return Segment(address=int(tensor.data_ptr()), nbytes=nbytes, device=device, keep_alive=tensor)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        view = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    except (OSError, ValueError) as error:
        raise refused("the system refuses the memory", nbytes, device, actual=str(error)) from error
    return Segment(address=int(view.ctypes.data), nbytes=nbytes, device="cpu", keep_alive=view)


def rocm_torch(nbytes: int, device: str) -> Any:
    """The torch module where it is a ROCm build that sees `device`. Raises `BackendError` (`memory_refused`)."""
    if not _DEVICE.fullmatch(device):
        raise refused("no such device", nbytes, device, expected="cpu or cuda:N (torch's name for a ROCm device)")
    if not rocm_present():
        raise refused("this machine has no ROCm device (/dev/kfd)", nbytes, device)
    torch = importlib.import_module("torch")
    if not torch.version.hip:
        raise refused("this torch is no ROCm build", nbytes, device, actual=f"torch {torch.__version__}")
    if not torch.cuda.is_available() or int(device.partition(":")[2]) >= torch.cuda.device_count():
        raise refused("torch does not see that device", nbytes, device, actual=f"torch {torch.__version__}")
    return torch


def check_host(segment: Segment) -> None:
    """Refuse host memory that is not mapped, readable and writable throughout.

    The library registers at first use, deep in a thread of its own, so the mapping itself is looked at beforehand.
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


def refused(message: str, nbytes: int, device: str, **facts: object) -> BackendError:
    """A `memory_refused` error with the usual facts."""
    where = str(facts.pop("where", f"{nbytes} bytes on {device}"))
    return BackendError(message, code="memory_refused", where=where, **{"backend": "mori", **facts})  # type: ignore[arg-type]
