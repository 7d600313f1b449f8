"""A fork of the test's own process, for what must stay its parent's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

KILLED_AFTER_S = 20


def in_fork(act: Callable[[], object], *, threaded: bool = False) -> str:
    """What a fork of this process says of `act`; it is killed where it hangs."""
    read, write = os.pipe()

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(KILLED_AFTER_S)
            try:
                os.write(write, str(act()).encode())
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    thread = threading.Thread(target=fork)
    thread.start() if threaded else fork()
    thread.join() if threaded else None
    os.close(write)
    with os.fdopen(read) as stream:
        return stream.read()
