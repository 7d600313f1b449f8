"""What this process's own system refuses it: descriptors and threads. Neither says anything about a peer."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

from sglang_pd.protocol.errors import BackendError, BackendUnavailable, PdError

_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def no_descriptor(error: OSError, where: str) -> BackendUnavailable:
    """The error for what is most often a missing descriptor."""
    return BackendUnavailable(
        "the system refuses this process a descriptor or a file",
        where=where,
        actual=str(error),
        hint="Raise the limit of open files (ulimit -n; `sglang-pd doctor` shows it).",
    )


def is_shortage(error: OSError) -> bool:
    """Whether a call failed for want of something of this process's own."""
    return error.errno in _SHORT


def in_words(error: Exception, where: str) -> PdError:
    """What went wrong in a thread of ours, to be kept and told: without its traceback, which keeps what it touched."""
    if isinstance(error, PdError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    if isinstance(error, OSError) and is_shortage(error):
        return no_descriptor(error, where)
    what = f"{type(error).__name__}: {error}"
    return BackendError("a defect in a thread of the backend", code="internal", where=where, actual=what[:500])


def check_descriptors(where: str) -> None:
    """Raise `BackendUnavailable` if no descriptor can be had now. For libraries that do not say why they failed."""
    try:
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        raise no_descriptor(error, where) from error


def start_thread(target: Callable[..., Any], name: str, where: str) -> threading.Thread:
    """A daemon thread that runs. Raises `BackendUnavailable` where the system has none."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise BackendUnavailable(
            "the system refuses this process a thread",
            where=where,
            actual=str(error),
            hint="Raise the limits of processes and of address space (ulimit -u, ulimit -v), or the container's.",
        ) from error
    return thread
