"""Which processes may write here, as far as anybody said: `admit`, a greeting, or the peer that this side connects to.

A writer that uses CMA copies with its own system calls. Nothing of this side's can stop it. So its end is proven by the
kernel, which knows that its process has exited, or by its own word, which it gives once it has left (`nixl.partings`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from sglang_pd.backends.library.process import ProcessIdentity, process_gone
from sglang_pd.backends.nixl.library import log

HELLO = b"PD-NIXL hello"
BYE = b"PD-NIXL bye"
MAX_NOTE_BYTES = 1024
MAX_WRITERS = 65_536
MAX_PROCESSES = 64
"""Processes kept that go by one epoch. An honest one has one; where there were more, nothing is proven."""


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a writer says about itself when it connects and when it has left. number: of its connection, counted by the
    writer's process over all its peers; so a greeting and the word of having left may come in any order."""

    epoch: int
    process: ProcessIdentity
    number: Annotated[int, msgspec.Meta(ge=1)]


def greeting(note: Note) -> bytes:
    """What a writer sends when it connects."""
    return HELLO + msgspec.msgpack.encode(note)


def parting(note: Note) -> bytes:
    """What a writer sends when nothing of it, up to that connection, can land any more."""
    return BYE + msgspec.msgpack.encode(note)


@dataclass(slots=True, eq=False)
class Revocation:
    """What an owner asked for. `closed`: the agent through which that epoch wrote has been closed since."""

    closed: bool = False


@dataclass(slots=True)
class _Writer:
    """Numbers of connections; 0 for none. greeted, left: the newest that was heard of. admitted: the newest that was
    heard of, one way or the other, when it was admitted last: the connection meant by that comes after it."""

    greeted: int = 0
    left: int = 0
    admitted: int = 0

    def has_left(self) -> bool:
        return self.left > self.admitted and self.left >= self.greeted


class Writers:
    """The processes that go by each epoch. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, dict[ProcessIdentity, _Writer]] = {}

    def add(self, epoch: int, process: ProcessIdentity) -> None:
        """That process goes by that epoch, whoever else does."""
        with self._lock:
            self._entry(epoch, process)

    def admit(self, epoch: int, process: ProcessIdentity) -> None:
        """That process will connect as that epoch, so that its word of having left before says nothing any more."""
        with self._lock:
            one = self._entry(epoch, process)
            one.admitted = max(one.admitted, one.greeted, one.left)

    def _entry(self, epoch: int, process: ProcessIdentity) -> _Writer:
        known = self._known.setdefault(epoch, {})
        if process not in known and len(known) <= MAX_PROCESSES:  # one too many is kept: it tells that there were
            known[process] = _Writer()
        while len(self._known) > MAX_WRITERS:
            self._known.pop(next(iter(self._known)))
        return known.get(process) or _Writer()

    def heard(self, message: bytes) -> int | None:
        """A note of a peer's; only a greeting and the word of having left say anything here. The epoch that greets."""
        prefix = next((one for one in (HELLO, BYE) if message.startswith(one)), None)
        if prefix is None or len(message) > MAX_NOTE_BYTES:
            return None
        try:
            note = msgspec.msgpack.decode(message[len(prefix) :], type=Note)
        except (msgspec.MsgspecError, RecursionError) as error:
            log.warning("a writer's note does not decode: %s", error)
            return None
        with self._lock:
            one = self._entry(note.epoch, note.process)
            if prefix == BYE:
                one.left = max(one.left, note.number)
                return None
            one.greeted = max(one.greeted, note.number)
        return note.epoch

    def gone(self, epoch: int, reachable: Callable[[ProcessIdentity], bool]) -> bool:
        """Whether every process that goes by `epoch`, and that could reach this memory itself, has exited or left.

        False where no process is known."""
        with self._lock:
            known = bool(self._known.get(epoch))
        return known and not self.live(epoch, reachable)

    def live(self, epoch: int, reachable: Callable[[ProcessIdentity], bool]) -> bool:
        """Whether a process that goes by `epoch`, and could reach this memory itself, may not have exited nor left."""
        with self._lock:
            known = self._known.get(epoch, {})
            crowded = len(known) > MAX_PROCESSES
            here = [process for process, one in known.items() if not one.has_left()]
        return crowded or any(reachable(one) and not process_gone(one) for one in here)
