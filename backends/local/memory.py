"""Host memory that another process can map: sealed memfds. Nothing is left behind when a process dies."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

from sglang_pd.protocol.errors import BackendError

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
_MADV_DONTFORK, _MADV_HUGEPAGE = 10, 14


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A mapping of a memfd: `address` of the first byte, `nbytes`, `fd` (-1 once it is a peer's), and the mapping."""

    address: int
    nbytes: int
    fd: int
    mapping: mmap.mmap


def create_memory(nbytes: int) -> HostMemory:
    """Zeroed shared memory of `nbytes` bytes. Raises `BackendError` (`memory_refused`)."""
    if nbytes <= 0 or nbytes > _physical_bytes():
        raise BackendError(
            "host memory cannot be had in that size",
            code="memory_refused",
            where="cpu",
            expected=f"1 to {_physical_bytes()} bytes",
            actual=f"{nbytes} bytes",
        )
    fd = -1
    try:
        fd = os.memfd_create("sglang-pd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        return _mapped(fd, nbytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise BackendError(
            "host memory was refused by the system", code="memory_refused", where="cpu", actual=str(error)
        ) from error


def map_peer_memory(fd: int, nbytes: int) -> HostMemory:
    """Map memory that a peer sent; closes `fd`. Raises `BackendError` (`memory_refused`).

    The seals are checked first: a peer that could still shrink its file could kill this process with SIGBUS.
    """
    try:
        size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, _F_GET_SEALS)
        if size < nbytes or seals & _SEAL_SHRINK == 0:
            raise BackendError(
                "a peer's descriptor is not the memory it announced",
                code="memory_refused",
                expected=f"{nbytes} bytes, sealed against shrinking",
                actual=f"{size} bytes, seals {seals:#x}",
            )
        made = _mapped(fd, nbytes)
        # A child that this process forks must not be able to write to the peer after this process is gone.
        made.mapping.madvise(_MADV_DONTFORK)
        return HostMemory(made.address, nbytes, -1, made.mapping)
    except OSError as error:
        raise BackendError(
            "a peer's memory cannot be mapped", code="memory_refused", where="cpu", actual=str(error)
        ) from error
    finally:
        os.close(fd)


def _mapped(fd: int, nbytes: int) -> HostMemory:
    mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError):
        # Scattered pages cost a look-up each; where the system lends huge pages to shared memory, far fewer.
        mapping.madvise(_MADV_HUGEPAGE)
    first = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(first)
    del first
    return HostMemory(address, nbytes, fd, mapping)


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
