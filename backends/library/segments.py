"""Memory that a backend over a library exports: allocated or adopted, and numbered once."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sglang_pd.backends.base import Segment
from sglang_pd.backends.library.blob import DEVICE
from sglang_pd.backends.sides import Side, ordinal
from sglang_pd.protocol.errors import BackendError

MAX_BYTES = 1 << 47
_MAP_NORESERVE = 0x4000
_LOWEST, _HIGHEST, _HUGE = 1 << 36, 0x7E << 40, 2 << 20
"""User addresses of x86-64 and arm64 (47 bits at least) that are nobody's as a rule; the size of a huge page."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (..)", re.MULTILINE)


class Scope:
    """What a backend allocated or adopted, and the table of what it registered. `most`: segments in that table."""

    def __init__(self, backend: str, most: int) -> None:
        self._backend = backend
        self._most = most
        self._known: dict[tuple[int, int, str], Segment] = {}
        self.segments: tuple[Segment, ...] = ()
        self.side = Side()

    def admit(self, segment: Segment) -> Segment:
        """Take memory into the scope; it is kept alive until `clear`."""
        self._known[_place(segment)] = segment
        return segment

    def number(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """The segments with their numbers, after checking scope and overlap; `commit` makes them the table's.

        Raises `BackendError` (`memory_refused`).
        """
        wanted = tuple(segments)
        for one in wanted:
            if _place(one) not in self._known:
                raise refused(
                    self._backend,
                    "neither allocated nor adopted by this backend",
                    one,
                    hint="Take memory from `allocate`, or pass it through `adopt`.",
                )
        table = [*self.segments, *wanted]
        if len(table) > self._most:
            raise BackendError(
                "too many segments",
                code="memory_refused",
                where="register",
                expected=f"at most {self._most}",
                actual=len(table),
                backend=self._backend,
            )
        ordered = sorted(table, key=lambda one: (one.device, one.address))
        for left, right in zip(ordered, ordered[1:], strict=False):
            if left.device == right.device and left.address + left.nbytes > right.address:
                other = f"{left.nbytes} bytes at {left.address:#x}"
                raise refused(self._backend, "overlaps another segment, or is registered already", right, actual=other)
        first = len(self.segments)
        return tuple(replace(one, number=first + i) for i, one in enumerate(wanted))

    def commit(self, numbered: tuple[Segment, ...]) -> None:
        """Add registered segments to the table."""
        self.segments += numbered
        self.side = Side(self.segments)

    def overlaps(self, segment: Segment) -> bool:
        """Whether a registered segment shares bytes with this one."""
        end = segment.address + segment.nbytes
        mine = (one for one in self.segments if one.device == segment.device)
        return any(one.address < end and segment.address < one.address + one.nbytes for one in mine)

    def clear(self) -> None:
        """Let go of all memory. Idempotent."""
        self._known.clear()
        self.segments = ()


def _place(segment: Segment) -> tuple[int, int, str]:
    return segment.address, segment.nbytes, segment.device


def check_size(backend: str, nbytes: int, device: str) -> None:
    """Refuse (`memory_refused`) a length that no memory has, and a device that is written otherwise."""
    wanted = Segment(address=0, nbytes=nbytes, device=device)
    if not isinstance(nbytes, int) or not 0 < nbytes < MAX_BYTES:
        raise refused(backend, "that many bytes cannot be had", wanted, expected=f"1 to {MAX_BYTES} bytes")
    if not DEVICE.fullmatch(device):
        raise refused(backend, "no such device", wanted, expected="cpu or cuda:N")


def allocate_host(backend: str, nbytes: int) -> Segment:
    """Zeroed pages of the host, backed as they are touched. Raises `BackendError` (`memory_refused`).

    They lie anywhere in the address space, so that a process started again hardly ever has them where the one before
    had its own: a writer that does not know of that death may still write to those addresses. The system's own choice
    is within 1 TiB (28 random bits of pages), of which large pools are much.
    """
    check_size(backend, nbytes, "cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    where = _LOWEST + secrets.randbelow(max(1, (_HIGHEST - _LOWEST - nbytes) // _HUGE)) * _HUGE
    address = _LIBC.mmap(where, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)  # elsewhere if that is taken
    if address == _FAILED:
        wanted = Segment(address=0, nbytes=nbytes, device="cpu")
        raise refused(backend, "the system refuses the memory", wanted, actual=os.strerror(ctypes.get_errno()))
    # Scattered pages cost a look-up each, in the library and in the kernel; huge pages, where there are any, fewer.
    _LIBC.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, nbytes).atexit = False  # threads of a library may still use it
    return Segment(address=address, nbytes=nbytes, device="cpu", keep_alive=np.ctypeslib.as_array(memory))


def allocate_torch(backend: str, torch: Any, nbytes: int, device: str) -> Segment:
    """Zeroed device memory by torch, done when it returns. Raises `BackendError` (`memory_refused`)."""
    try:
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
    except Exception as error:
        wanted = Segment(address=0, nbytes=nbytes, device=device)
        raise refused(backend, "the device refuses the memory", wanted, actual=str(error)) from error
    return Segment(address=int(tensor.data_ptr()), nbytes=nbytes, device=device, keep_alive=tensor)


def check_seen(backend: str, torch: Any, segment: Segment) -> None:
    """Refuse (`memory_refused`) a device that torch does not see."""
    if not torch.cuda.is_available() or ordinal(segment.device) >= torch.cuda.device_count():
        raise refused(backend, "torch does not see that device", segment, actual=f"torch {torch.__version__}")


def check_range(backend: str, segment: Segment) -> None:
    """Refuse (`memory_refused`) what is no range of memory on a device that is written as one."""
    inside = 0 < segment.nbytes and 0 < segment.address and segment.address + segment.nbytes <= 1 << 63
    if not inside or not DEVICE.fullmatch(segment.device):
        raise refused(backend, "not a segment", segment)


def check_mapped(backend: str, segment: Segment) -> None:
    """Refuse host memory that is not mapped, readable and writable throughout.

    Libraries register an address without looking at it, or much later, in a thread of their own. So the mapping itself
    is looked at.
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
        backend, "not mapped readable and writable throughout", segment, actual=f"it breaks off at {start:#x}"
    )


def refused(backend: str, message: str, segment: Segment, **facts: object) -> BackendError:
    """A `memory_refused` error that names the memory; `facts` as of every error (expected, actual, hint)."""
    at = f" at {segment.address:#x}" if segment.address else ""
    return BackendError(
        message,
        code="memory_refused",
        where=f"{segment.nbytes} bytes on {segment.device}{at}",
        **{"backend": backend, **facts},  # type: ignore[arg-type]
    )
