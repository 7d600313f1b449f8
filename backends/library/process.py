"""Which process a peer is, and the proof that it is gone.

The proof is a pidfd that turned readable: the kernel's word that every thread of that process has exited. It exists
only where both processes live on one host and in one PID namespace.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import msgspec

from sglang_pd.backends.library.boot import TICK_NS, shift_ns


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process, by facts that no other process of any host has.

    boot_id: of the kernel that runs it. pid_namespace: inode of its PID namespace. pid: in that namespace.
    start_ticks: when it started, in clock ticks since the host's boot (a reused pid has another). Unread facts: "", 0,
    -1.
    """

    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int

    @property
    def known(self) -> bool:
        """Whether all of them were read: of another one nothing is concluded."""
        return bool(self.boot_id) and self.pid_namespace > 0 and self.pid > 0 and self.start_ticks >= 0


_own: ProcessIdentity | None = None


def own_identity() -> ProcessIdentity:
    """This process, read once; a fork is another one. Without a /proc of its own PID namespace, or in a time namespace
    of which too little can be read, the facts are unknown, see `ProcessIdentity.known`.

    Raises `OSError` where /proc is there and cannot be read (no descriptor is free): stated wrongly, this process would
    be taken for a dead one.
    """
    global _own
    if _own is None:
        _own = _read_own()
    return _own


def _forget_own() -> None:
    global _own
    _own = None


def foreign_proc() -> str:
    """By which number /proc knows this process, where that is another namespace's than its own; empty otherwise.

    What it says of other processes is of others than those that this one knows by these numbers.
    """
    try:
        shown = os.readlink("/proc/self")
    except (FileNotFoundError, PermissionError):
        return ""
    return shown if shown != str(os.getpid()) else ""


def _read_own() -> ProcessIdentity:
    if foreign_proc():
        return ProcessIdentity("", 0, os.getpid(), -1)
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        ticks = _ticks_in(Path("/proc/self/stat").read_bytes())
    except (FileNotFoundError, PermissionError):
        boot_id, namespace, ticks = "", 0, None
    if ticks is None:
        return ProcessIdentity("", 0, os.getpid(), -1)
    return ProcessIdentity(boot_id, namespace, os.getpid(), ticks)


os.register_at_fork(after_in_child=_forget_own)


def pid_namespace() -> str:
    """This process's PID namespace, by facts that no other one of any host has; "" where they are not known.

    The inode of a namespace that has ended is given to others, so that the start of its first process belongs to its
    name; that part is empty where this process may not look at it (hidepid). See `same_namespace`. Raises `OSError`
    where no descriptor is free.
    """
    own = own_identity()
    try:
        first = _ticks_in(Path("/proc/1/stat").read_bytes())
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        first = None
    return f"{own.boot_id}/{own.pid_namespace}/{'' if first is None else first}" if own.known else ""


def same_namespace(one: str, other: str) -> bool:
    """Whether two names of `pid_namespace` may be of one: whoever may not look at its first process knows less."""
    (place, _, first), (there, _, also) = one.rpartition("/"), other.rpartition("/")
    return place == there and (first == also or not first or not also)


def _start_ticks(pid: int) -> int | None:
    try:
        return _ticks_in(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return None


def _ticks_in(stat: bytes) -> int | None:
    """In the host's terms; None where those are not known (`boot`)."""
    shift = shift_ns()
    # The second field is the program's name in brackets and may hold anything, brackets included.
    return None if shift is None else int(stat.rpartition(b")")[2].split()[19]) - shift // TICK_NS


def same_host(identity: ProcessIdentity) -> bool:
    """Whether that process is known to run under this kernel."""
    own = own_identity()
    return own.known and identity.known and identity.boot_id == own.boot_id


def same_pid_namespace(identity: ProcessIdentity) -> bool:
    """Whether that process can be watched from here, and is known to be reached by `process_vm_writev`."""
    return same_host(identity) and identity.pid_namespace == own_identity().pid_namespace


def elsewhere(identity: ProcessIdentity) -> bool:
    """Whether that process is known to be where `process_vm_writev` does not reach from."""
    return own_identity().known and identity.known and not same_pid_namespace(identity)


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
            # A thread of another process has the number, or no descriptor is free.
            ticks = _start_ticks(identity.pid)
            self._gone = ticks is not None and ticks != identity.start_ticks
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


with contextlib.suppress(OSError):  # while there are descriptors
    own_identity()
