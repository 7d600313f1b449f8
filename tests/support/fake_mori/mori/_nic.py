"""The "device": queue pairs to other processes, a thread that executes what is posted, registrations others can see."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import select
import socket
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from mori import _slab
from mori._slab import StatusCode

SLOTS = 4096
_IOV_MAX = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_ESRCH = 3


class Registrations:
    """Which memories of a process may be written: a byte each, in memory that other processes map."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("fake-mori", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SLOTS)
        self.valid = np.frombuffer(mmap.mmap(self.fd, SLOTS), np.uint8)


@dataclass
class Pair:
    """A queue pair. Once `broken` it stays so."""

    pid: int
    pidfd: int
    valid: np.ndarray
    broken: bool = False
    alive: bool = True

    @classmethod
    def connect(cls, pid: int, fd: int) -> Pair:
        try:
            pidfd = os.pidfd_open(pid)
            table = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        except OSError as error:
            raise RuntimeError(f"queue pair: {error}") from None
        valid = np.frombuffer(mmap.mmap(table, SLOTS, prot=mmap.PROT_READ), np.uint8)
        os.close(table)
        return cls(pid, pidfd, valid)

    def gone(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def __del__(self) -> None:
        os.close(self.pidfd)


@dataclass
class Job:
    """One posted call: addresses and lengths, where its status lies, whom to tell."""

    pair: Pair
    place: int
    memory: int
    src: np.ndarray
    dst: np.ndarray
    length: np.ndarray
    delay_s: float = 0.0
    notify: tuple[bytes, str, int] | None = None


@dataclass
class Device:
    """Executes jobs in order, in a thread."""

    failures: list[str] = field(default_factory=list)
    jobs: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    unfinished: int = 0
    stopped: bool = False

    def __post_init__(self) -> None:
        self._posted = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def post(self, job: Job) -> None:
        """A finished pair fails at once, with the words of a flushed request."""
        self._posted += 1
        if self._posted > int(os.environ.get("FAKE_MORI_DELAY_AFTER", "0")):
            job.delay_s = float(os.environ.get("FAKE_MORI_DELAY_MS", "0")) / 1000
        _slab.update(job.place, StatusCode.IN_PROGRESS)
        self.unfinished += 1
        self.jobs.put(job)

    def stop(self) -> None:
        """What is still queued stays in progress for ever."""
        self.stopped = True
        self.jobs.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None and not self.stopped:
            end = time.monotonic() + job.delay_s
            while time.monotonic() < end and not self.stopped:
                time.sleep(0.001)
            if self.stopped:
                return
            error = "Work Request Flushed Error" if job.pair.broken else self._execute(job)
            self.unfinished -= 1
            if error:
                job.pair.broken = True
                _slab.update(job.place, StatusCode.ERR_RDMA_OP, error)
                continue
            _slab.update(job.place, StatusCode.SUCCESS)
            if job.notify is not None:
                _tell(*job.notify)

    def _execute(self, job: Job) -> str:
        for start in range(0, job.length.shape[0], _IOV_MAX):
            at = slice(start, start + _IOV_MAX)
            if job.pair.gone():
                return self._unreachable(job.pair)
            if not job.pair.valid[job.memory]:
                return "remote access error"
            if not _write(job.pair.pid, job.src[at], job.dst[at], job.length[at]):
                if ctypes.get_errno() == _ESRCH:
                    return self._unreachable(job.pair)
                return f"local protection error ({os.strerror(ctypes.get_errno())})"
        return ""

    def _unreachable(self, pair: Pair) -> str:
        time.sleep(float(os.environ.get("FAKE_MORI_RETRY_MS", "540")) / 1000)
        pair.alive = False
        self.failures.append("PEER_UNREACHABLE")
        return "transport retry counter exceeded"


def _write(pid: int, src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> bool:
    """Copy everything; partial copies are taken up again where they broke off."""
    count = length.shape[0]
    local, remote = np.empty((count, 2), np.uint64), np.empty((count, 2), np.uint64)
    local[:, 0], local[:, 1] = src, length
    remote[:, 0], remote[:, 1] = dst, length
    first = 0
    while first < count:
        ours, theirs = local[first:], remote[first:]
        done = _libc.process_vm_writev(
            pid, ctypes.c_void_p(ours.ctypes.data), count - first, ctypes.c_void_p(theirs.ctypes.data), count - first, 0
        )
        if done <= 0:
            return False
        ends = np.cumsum(ours[:, 1])
        whole = int(np.searchsorted(ends, np.uint64(done), "right"))
        if whole < count - first:
            into = np.uint64(done - (int(ends[whole - 1]) if whole else 0))
            for rows in (ours, theirs):
                rows[whole, 0] += into
                rows[whole, 1] -= into
        first += whole
    return True


def _tell(address: bytes, key: str, uid: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(f"{key} {uid}".encode(), address)
        except OSError:
            pass
