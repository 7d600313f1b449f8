"""Which processes may write here, as far as anybody said: `admit`, a greeting, or the peer that this side connects to.

A writer that uses CMA copies with its own system calls. Nothing of this side's can stop it, so its end is proven by the
kernel alone, and for that its process must be known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_pd.backends.library.process import ProcessIdentity, process_gone
from sglang_pd.backends.nixl.library import log

HELLO = b"PD-NIXL hello"
MAX_NOTE_BYTES = 1024
MAX_WRITERS = 65_536


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a writer says about itself when it connects, so that its death can be shown later."""

    epoch: int
    process: ProcessIdentity


def greeting(epoch: int, process: ProcessIdentity) -> bytes:
    """The note with which that process, as that incarnation, connects."""
    return HELLO + msgspec.msgpack.encode(Hello(epoch, process))


@dataclass(slots=True, eq=False)
class Revocation:
    """What an owner asked for. `closed`: the agent through which that epoch wrote has been closed since."""

    closed: bool = False


class Writers:
    """The processes that go by each epoch. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, set[ProcessIdentity]] = {}

    def add(self, epoch: int, process: ProcessIdentity) -> None:
        """That process goes by that epoch, whoever else does."""
        with self._lock:
            self._known.setdefault(epoch, set()).add(process)
            while len(self._known) > MAX_WRITERS:
                self._known.pop(next(iter(self._known)))

    def heard(self, note: bytes) -> None:
        """A note of a peer's; only a greeting says anything here."""
        if not note.startswith(HELLO) or len(note) > MAX_NOTE_BYTES:
            return
        try:
            hello = msgspec.msgpack.decode(note[len(HELLO) :], type=Hello)
        except (msgspec.MsgspecError, RecursionError) as error:
            log.warning("a writer's greeting does not decode: %s", error)
            return
        self.add(hello.epoch, hello.process)

    def gone(self, epoch: int, reachable: Callable[[ProcessIdentity], bool]) -> bool:
        """Whether every process that goes by `epoch`, and that could reach this memory itself, has exited.

        False where no process is known."""
        known = self._of(epoch)
        return bool(known) and all(not reachable(one) or process_gone(one) for one in known)

    def live(self, epoch: int, reachable: Callable[[ProcessIdentity], bool]) -> bool:
        """Whether a process that goes by `epoch`, and could reach this memory itself, is not known to have exited."""
        return any(reachable(one) and not process_gone(one) for one in self._of(epoch))

    def _of(self, epoch: int) -> tuple[ProcessIdentity, ...]:
        with self._lock:
            return tuple(self._known.get(epoch, ()))
