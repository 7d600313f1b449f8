"""Which process an object belongs to.

A fork has a copy of every object, none of the threads behind it, and shares with its parent what the kernel keeps:
sockets, event and epoll descriptors, exported memory. What it says on a shared socket, its parent is taken to have
said. So whatever acts on such things remembers the process that made it. In another one, calls are refused by name and
`close` gives back that process's own descriptors and nothing else: it says nothing to anybody, takes no lock that a
thread may have held when the fork came, and joins nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterable

from sglang_pd.protocol.errors import BackendUnavailable, PdError, TransferError

_forks = 0
_owners: weakref.WeakSet[object] = weakref.WeakSet()
_kept: list[object] = []


def _in_child() -> None:
    global _forks
    _forks += 1
    if owners := list(_owners):
        _kept.append(owners)
        # Nor may the interpreter's own end destroy them.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


os.register_at_fork(after_in_child=_in_child)


class Home:
    """The process that made this object, which its owner asks before it touches anything shared.

    what, where: how errors name the owner. A number of forks counts besides the pid, which may be used again.
    """

    __slots__ = ("_forks", "_pid", "_what", "_where")

    def __init__(self, what: str, where: str) -> None:
        self._what, self._where = what, where
        self._pid, self._forks = os.getpid(), _forks

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid and _forks == self._forks

    def check(self) -> None:
        """Raise `BackendUnavailable` in any other process."""
        if not self.here:
            raise BackendUnavailable(
                f"{self._what} belongs to the process that made it, not to its fork",
                where=self._where,
                expected=f"process {self._pid}",
                actual=f"process {os.getpid()}",
                hint="Make another one after the fork.",
            )


def keep_in_forks(owner: object) -> None:
    """In a fork, `owner` and all that it holds is never destroyed, whatever the fork does with its own references.

    For what holds a library's objects: their destructors would speak on the parent's sockets, and wait for threads that
    a fork does not have.
    """
    _owners.add(owner)


def fork_count() -> int:
    """How many forks lie between the first process and this one: less to ask for than `Home.here`."""
    return _forks


def unknown_in_fork(where: str) -> PdError:
    """Why a transfer that its process had not ended is UNKNOWN in a fork."""
    return TransferError(
        "the transfer is another process's, which this one was forked from", code="transfer_unknown", where=where
    )


def give_back(descriptors: Iterable[int]) -> None:
    """Close descriptors of this process; those that are closed already do not matter."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
