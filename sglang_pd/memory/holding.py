"""Whose endpoint serves the memory behind a backend: one at a time, from when it is made until nothing moves any more.

A second one would know nothing of the writers that the first one let in, nor of its rooms, and give their memory to the
next. The same holds for the same memory behind another backend.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from sglang_pd.backends.base import Backend, Segment
from sglang_pd.protocol.errors import BackendError

_lock = threading.Lock()
_holders: WeakKeyDictionary[Backend, object] = WeakKeyDictionary()
_adopted: WeakKeyDictionary[Backend, list[Segment]] = WeakKeyDictionary()


def hold(backend: Backend, holder: object, what: str) -> None:
    """From here on `holder` alone serves that memory, until it lets go. Raises `BackendError` where another one does.

    holder: compared by identity, and kept. what: names it for the error.
    """
    with _lock:
        if _holders.setdefault(backend, holder) is not holder:
            raise BackendError(
                "another endpoint serves the memory of this backend, or rooms of a former one may still be written",
                code="memory_refused", where=what, expected="a backend of its own", actual=f"{backend.epoch:016x}",
                hint="One endpoint a backend. Wait for `drained` before `close`; if it is too late, close the backend.",
            )  # fmt: skip


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
    start, stop = segment.address, segment.address + segment.nbytes
    with _lock:
        for other, segments in _adopted.items():
            clash = any(
                s.device == segment.device and s.address < stop and start < s.address + s.nbytes for s in segments
            )
            if other is not backend and other in _holders and clash:
                raise BackendError(
                    "that memory is behind another backend, whose peers may still write there",
                    code="memory_refused", where=where, expected="memory of no other backend that is held",
                    actual=f"{segment.nbytes} bytes of backend {other.epoch:016x}",
                    hint="Drain and close the endpoint over it first.",
                )  # fmt: skip
        _adopted.setdefault(backend, []).append(segment)
