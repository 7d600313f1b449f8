"""Whose endpoint serves the memory behind a backend: one at a time, from when it is made until nothing moves any more.

A second one would know nothing of the writers that the first one let in, nor of its rooms, and give their memory to the
next. The same holds for the same memory behind another backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, ref

from sglang_pd.backends.base import Backend, Segment
from sglang_pd.protocol.errors import BackendError

_lock = threading.Lock()
_holders: WeakKeyDictionary[Backend, object] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Behind:
    """Memory behind a backend. alive: None once it was freed, after which its address may be anybody's."""

    segment: Segment
    alive: Callable[[], object]

    def overlaps(self, other: Segment) -> bool:
        mine = self.segment
        meet = mine.address < other.address + other.nbytes and other.address < mine.address + mine.nbytes
        return meet and mine.device == other.device and self.alive() is not None


_behind: WeakKeyDictionary[Backend, list[_Behind]] = WeakKeyDictionary()


def hold(backend: Backend, holder: object, what: str) -> None:
    """From here on `holder` alone serves that memory, until it lets go. Raises `BackendError` where another one does.

    holder: compared by identity, and kept. what: names it for the error.
    """
    with _lock:
        found = _holders.get(backend)
        if found is holder:
            return
        if found is not None:
            raise BackendError(
                "another endpoint serves the memory of this backend, or rooms of a former one may still be written",
                code="memory_refused", where=what, expected="a backend of its own", actual=f"{backend.epoch:016x}",
                hint="One endpoint a backend. Wait for `drained` before `close`; if it is too late, close the backend.",
            )  # fmt: skip
        for mine in _behind.get(backend, ()):
            if mine.alive() is not None:
                _check_apart(backend, mine.segment, what)
        _holders[backend] = holder


def let_go(backend: Backend, holder: object) -> None:
    """Nothing moves there for that holder any more. Nothing happens for one that held nothing."""
    with _lock:
        if _holders.get(backend) is holder:
            del _holders[backend]


def held(backend: Backend) -> bool:
    """Whether an endpoint serves that memory, or rooms of a former one may still be read or written."""
    return backend in _holders


def adopt(backend: Backend, segment: Segment, where: str) -> None:
    """That backend takes over memory of somebody else. Raises `BackendError` while another one that is held has it."""
    with _lock:
        _check_apart(backend, segment, where)
        _behind.setdefault(backend, []).append(_Behind(segment, lambda: segment))


def register(backend: Backend, segments: Iterable[Segment]) -> None:
    """That backend exports this memory from now on: what it allocated too, which another one may adopt."""
    with _lock:
        _behind.setdefault(backend, []).extend(_Behind(replace(one, keep_alive=None), _life(one)) for one in segments)


def forget(backend: Backend) -> None:
    """It was closed, and its memory given back."""
    with _lock:
        _behind.pop(backend, None)


def _life(segment: Segment) -> Callable[[], object]:
    """Not kept alive from here: a backend that is closed gives its memory back, whoever still has the backend."""
    try:
        return ref(segment.keep_alive) if segment.keep_alive is not None else lambda: True
    except TypeError:  # an object that cannot be asked
        return lambda: True


def _check_apart(backend: Backend, segment: Segment, where: str) -> None:
    """Raise `BackendError` where another backend that is held has some of that memory. Called with the lock held."""
    for other, theirs in _behind.items():
        if other is not backend and other in _holders and any(one.overlaps(segment) for one in theirs):
            raise BackendError(
                "that memory is behind another backend, whose peers may still write there",
                code="memory_refused", where=where, expected="memory of no other backend that is held",
                actual=f"{segment.nbytes} bytes of backend {other.epoch:016x}",
                hint="Drain and close the endpoint over it first.",
            )  # fmt: skip
