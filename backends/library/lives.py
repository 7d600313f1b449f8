"""What writers may still know of workers that have ended on this host: the ports they listened at, and process ids.

A writer that was stopped (SIGSTOP, a frozen container, a paused machine) goes on where it was. Its library connects to
the port, or copies into the process, that it was told of, at addresses of memory that is no more. Where a worker that
was started since has that port or process id, and memory of its own at those addresses, the bytes land there (measured
with Mooncake over TCP and with UCX over CMA). So nobody takes what another process had within `HOLD_S` of its end.

Every process that lets others write keeps one file, locked for as long as it lives: the kernel lets go of the lock when
the process ends, however it ends. The files lie in `$SGLANG_PD_STATE_DIR`, by default a folder of this user's in
/var/tmp, which must outlive the process: in a container that is made anew, a mounted one. `none` keeps nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sglang_pd.backends.library.boot import since_boot_s
from sglang_pd.backends.library.process import foreign_proc, own_identity, pid_namespace, same_namespace
from sglang_pd.backends.shortage import is_shortage, no_descriptor
from sglang_pd.protocol.errors import BackendUnavailable

STATE_DIR = "SGLANG_PD_STATE_DIR"
NOT_KEPT = "none"

HOLD_S = 3600.0
"""Seconds for which ports and process ids of a worker that was found to have ended stay nobody's: by far longer than a
stopped process is left standing by whoever watches over it."""

_SUFFIX = ".life"
_MAX_BYTES = 1 << 20


class Life(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process was known by. pids: with the PID namespace of each.

    ended: boot id and seconds since that boot, as the host counts, at which it was found to have ended; None before. A
    file has one of these a line, each adding to those before it, so that a write that fails half way takes nothing
    away.
    """

    ports: tuple[int, ...] = ()
    pids: tuple[tuple[str, int], ...] = ()
    ended: tuple[str, float] | None = None

    def with_more(self, more: Life) -> Life:
        """Both. Of two ends under one boot the first counts; who finds an end under another boot starts anew."""
        same_boot = self.ended is not None and more.ended is not None and self.ended[0] == more.ended[0]
        ended = self.ended if same_boot or more.ended is None else more.ended
        return Life(tuple(dict.fromkeys(self.ports + more.ports)), tuple(dict.fromkeys(self.pids + more.pids)), ended)


class Lives:
    """This process's own life, and those before it. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own, self._name = Life(), ""
        self._file = -1

    def others(self) -> list[Life]:
        """Those of other processes that live, or ended within `HOLD_S`.

        Raises `BackendUnavailable` where the folder cannot be used.
        """
        folder = _folder()
        if folder is None or not folder.exists():
            return []
        found = []
        with self._lock, _explained(folder):
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                life = _look(path) if path.name != self._name else None
                if life is not None:
                    found.append(life)
        return found

    def former_ports(self) -> frozenset[int]:
        """At which peers of workers that have ended may still write; those of the living are theirs all the same.
        Raises `BackendUnavailable`.
        """
        return frozenset(port for life in self.others() for port in life.ports)

    def had_this_pid(self) -> bool:
        """Whether a worker that has ended had the id of this process, or of a thread of it: the system copies by any.

        Never in the first process of a namespace: with it every process of that namespace ends, writers included.
        Raises `BackendUnavailable`.
        """
        here = _own_pid()
        if here is None:
            return False
        own = set(_thread_ids())
        had = (one for life in self.others() for one in life.pids)
        return any(pid in own and same_namespace(namespace, here[0]) for namespace, pid in had)

    def check_pid(self, where: str) -> None:
        """Raise `BackendUnavailable` if `had_this_pid`, or where that cannot be told."""
        if self.had_this_pid():
            raise BackendUnavailable(
                "this process was given the id of a worker that has ended, into which peers may still copy by that id",
                where=where,
                actual=f"process {os.getpid()}, or one of its threads",
                hint="Start it again: it gets other ones",
            )

    def check_kept(self) -> None:
        """Raise `BackendUnavailable` where nothing could be kept: a worker should not start that no peer can meet."""
        folder = _folder()
        if folder is None:
            return
        with _explained(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError("nothing can be written there")

    def keep_ports(self, ports: frozenset[int]) -> None:
        """From now on peers may write at these. Raises `BackendUnavailable` where that cannot be kept."""
        with self._lock:
            self._keep(Life(ports=tuple(sorted(ports - set(self._own.ports)))))

    def keep_pid(self) -> None:
        """From now on peers may write into this process by its id. Raises `BackendUnavailable`."""
        here = _own_pid()
        if here is not None:
            with self._lock:
                self._keep(Life(pids=() if here in self._own.pids else (here,)))

    def _keep(self, more: Life) -> None:
        folder = _folder() if more != Life() else None
        if folder is None:
            return
        with _explained(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._file < 0:
                self._name, self._file = _locked_file(folder)
            _append(self._file, more)
        self._own = self._own.with_more(more)

    def forget_parent(self) -> None:
        """In a fork: the file, and the lock on it, are the parent's."""
        self._lock = threading.Lock()
        self._own, self._name = Life(), ""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _own_pid() -> tuple[str, int] | None:
    """This process's id and its namespace; None for the first of a namespace, and where nothing is kept.

    Raises `BackendUnavailable` where they are not known: then nobody could be told apart.
    """
    if kept() == NOT_KEPT:
        return None
    with _explained(Path("/proc")):
        own, namespace, shown = own_identity(), pid_namespace(), foreign_proc()
    if not namespace:
        raise BackendUnavailable(
            "/proc is of another PID namespace" if shown else "/proc does not say which process this is",
            where="/proc",
            expected=f"this process there as {os.getpid()}, with its start, its namespaces and the boot id",
            actual=shown or "one of them cannot be read, or its time namespace is not known",
            hint="Mount a whole /proc in this namespace (`unshare --mount-proc`, or a container's own). "
            f"{STATE_DIR}={NOT_KEPT} does without, and then a writer that was stopped may write into a worker that was "
            "started again",
        )
    return (namespace, own.pid) if own.pid > 1 else None


def _thread_ids() -> list[int]:
    """Of this process; the first of them is its own."""
    with _explained(Path("/proc/self/task")):
        return [int(name) for name in os.listdir("/proc/self/task")]


def kept() -> str:
    """Where lives are kept, for reports; `none`."""
    return os.environ.get(STATE_DIR, "") or f"/var/tmp/sglang-pd-{os.getuid()}"


def _folder() -> Path | None:
    if kept() == NOT_KEPT:
        return None
    folder = Path(kept())
    with _explained(folder), contextlib.suppress(FileNotFoundError):
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"it belongs to user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}")
    return folder


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_shortage(error):
            raise no_descriptor(error, str(folder)) from error
        raise BackendUnavailable(
            "what peers know of workers that have ended cannot be kept",
            where=str(folder),
            expected="a folder of this user's own that nobody else may write to, and that outlives this process",
            actual=str(error),
            hint=f"Set {STATE_DIR} to such a folder; {NOT_KEPT} does without, and then a stopped writer may write into "
            "a worker that was started again",
        ) from error


def _locked_file(folder: Path) -> tuple[str, int]:
    """A file of our own, locked before anybody can find it: its name and descriptor."""
    name = folder / f"{uuid.uuid4().hex}.new"
    file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(name, name.with_suffix(_SUFFIX))
    except OSError:
        os.close(file)
        raise
    return name.with_suffix(_SUFFIX).name, file


def _append(file: int, more: Life) -> None:
    data = b"\n" + msgspec.json.encode(more)
    if os.write(file, data) != len(data):
        raise OSError("the file system took only a part")


def _look(path: Path) -> Life | None:
    """The life in a file; None, and the file is gone, if it ended too long ago to count."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        life = _read(file)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others look at the same time
        except BlockingIOError:
            return life  # it lives
        boot_id, now_s = own_identity().boot_id, since_boot_s()
        if not boot_id or now_s is None:
            return life  # who cannot tell the time ends no hold
        if life.ended is None or life.ended[0] != boot_id:
            _append(file, Life(ended=(boot_id, now_s)))
        elif now_s - life.ended[1] > HOLD_S:
            os.unlink(path)
            return None
        return life
    finally:
        os.close(file)


def _read(file: int) -> Life:
    life = Life()
    for line in os.pread(file, _MAX_BYTES, 0).splitlines():
        # A line is written before anybody is told what it says: who could not finish it told nobody.
        with contextlib.suppress(msgspec.MsgspecError):
            life = life.with_more(msgspec.json.decode(line, type=Life))
    return life


lives = Lives()
"""Of this process."""

os.register_at_fork(after_in_child=lives.forget_parent)
