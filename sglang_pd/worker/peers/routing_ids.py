"""Where a ROUTER begins to number those who connect.

libzmq numbers peers that state no identity from a start that it takes of libc's `rand`, which nobody seeds: it is the
same in every process. A stranger may state the identity that comes next (a zero byte and a number, which libzmq takes),
and the process aborts in an assertion when the next peer connects (measured: libzmq 4.3.5). From a random start, of
which no peer is ever told, he must guess 32 bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import threading
from collections.abc import Iterator
from typing import Final

_STATE_BYTES: Final = 256
_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def scattered() -> Iterator[None]:
    """A ROUTER made in here starts at a random number. The process's own sequence of `random` goes on afterwards."""
    libc = ctypes.CDLL(None)
    libc.initstate.restype = libc.setstate.restype = ctypes.c_void_p
    libc.initstate.argtypes = (ctypes.c_uint, ctypes.c_char_p, ctypes.c_size_t)
    libc.setstate.argtypes = (ctypes.c_void_p,)
    ours = ctypes.create_string_buffer(_STATE_BYTES)
    with _one_at_a_time:
        before = libc.initstate(secrets.randbits(32), ours, _STATE_BYTES)
        try:
            yield
        finally:
            libc.setstate(before)
