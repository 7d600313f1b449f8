"""Which process a peer is, and the proof that it is gone.

The proof is a pidfd that turned readable: the kernel's word that every thread of that process has exited. It exists
only where both processes live on one host and in one PID namespace.
"""

from __future__ import annotations

import os
import select
from functools import cache
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process, by facts that no other process of any host has.

    boot_id: of the kernel that runs it. pid_namespace: inode of its PID namespace. pid: in that namespace.
    start_ticks: when it started, in clock ticks since boot (a reused pid has another).
    """

    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int


@cache
def _boot_id() -> str:
    """Empty where /proc does not tell: then nothing is known of any process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def own_identity() -> ProcessIdentity:
    """This process. Not cached: a fork is another process."""
    ticks = _start_ticks("self")
    return ProcessIdentity(_boot_id(), _pid_namespace(), os.getpid(), -1 if ticks is None else ticks)


def _start_ticks(pid: int | str) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the program's name in brackets and may hold anything, brackets included.
    return int(stat.rpartition(b")")[2].split()[19])


def same_host(identity: ProcessIdentity) -> bool:
    """Whether that process runs under this kernel."""
    return identity.boot_id == _boot_id() != ""


def same_pid_namespace(identity: ProcessIdentity) -> bool:
    """Whether that process can be watched from here, and reached by `process_vm_writev`."""
    return same_host(identity) and identity.pid_namespace == _pid_namespace() != 0


class Watch:
    """Watches one process for its death. `fd` turns readable then; it is -1 where there is nothing to watch."""

    def __init__(self, identity: ProcessIdentity | None) -> None:
        self.fd = -1
        self._gone = False
        if identity is None or not same_pid_namespace(identity):
            return
        try:
            self.fd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            self._gone = True
            return
        except OSError:
            return
        ticks = _start_ticks(identity.pid)
        if ticks != identity.start_ticks:
            # Another process has the number now, so ours has ended; an unreadable entry proves nothing.
            self._gone = ticks is not None or self._readable()
            self.close()

    def _readable(self) -> bool:
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(0))

    def gone(self) -> bool:
        """True when that process has exited. Never blocks; False also where nothing can be known."""
        if not self._gone and self.fd >= 0 and self._readable():
            self._gone = True
        return self._gone

    def known(self) -> bool:
        """Whether its death was already seen."""
        return self._gone

    def close(self) -> None:
        """Give the descriptor back; the answer stays. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def process_gone(identity: ProcessIdentity) -> bool:
    """One look: True when that process has exited; False also where nothing can be known."""
    watch = Watch(identity)
    try:
        return watch.gone()
    finally:
        watch.close()
