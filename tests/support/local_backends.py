"""Backends of shared memory in the test's own process, and strangers at their door."""

from __future__ import annotations

import socket
import struct
import time

import msgspec

from sglang_pd.backends.local import link as local_link
from sglang_pd.backends.local.backend import LocalBackend
from sglang_pd.backends.local.link import Hello, Welcome, unpack_address
from sglang_pd.backends.registry import create_backend

SIZE = 1 << 22
WRITERS = (11, 22, 33, 77)
"""Incarnations that every backend made here agrees with."""


def make(epoch: int) -> LocalBackend:
    backend = create_backend("local", epoch=epoch)
    assert isinstance(backend, LocalBackend)
    backend.register([backend.allocate(SIZE)])
    for writer in WRITERS:
        backend.admit(writer, b"")
    return backend


def eventually(condition: object, within_s: float = 10.0) -> bool:
    assert callable(condition)
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def door(target: LocalBackend) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5.0)
    sock.connect(unpack_address(target.describe()).socket_name)
    return sock


def answer(sock: socket.socket) -> Welcome:
    sock.settimeout(5.0)
    with sock.makefile("rb") as stream:
        (length,) = struct.unpack("<I", stream.read(4))
        return msgspec.msgpack.decode(stream.read(length), type=Welcome)


def hello(version: int = local_link.VERSION, wants: int = 22) -> bytes:
    body = msgspec.msgpack.encode(Hello(version, 77, wants))
    return struct.pack("<I", len(body)) + body
