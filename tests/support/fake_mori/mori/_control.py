"""The control plane: one thread that serves one TCP connection at a time, and blocking questions to it."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

_HEAD = struct.Struct("<I")
_MAX_BYTES = 1 << 16


class _PollFd(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


_holding_the_lock = ctypes.PyDLL(None)
"""Calls through it do not release the interpreter lock."""


def timeout_ms() -> int:
    return int(os.environ.get("MORI_IO_CP_TIMEOUT_MS", "5000"))


def spin_for_ever() -> None:
    while True:
        _holding_the_lock.usleep(1_000_000)


def ask(address: tuple[str, int], question: Any, hold: bool = False) -> Any:
    """One question. Raises RuntimeError where nobody answers; with `hold` the interpreter stands still meanwhile."""
    wait_ms = timeout_ms()
    try:
        with socket.create_connection(address, wait_ms / 1000) as sock:
            body = msgspec.msgpack.encode(question)
            sock.sendall(_HEAD.pack(len(body)) + body)
            if hold:
                _holding_the_lock.poll(ctypes.byref(_PollFd(sock.fileno(), select.POLLIN, 0)), 1, wait_ms)
                sock.settimeout(0.01)
            return _receive(sock)
    except (OSError, EOFError) as error:
        raise RuntimeError(f"control plane of {address[0]}:{address[1]}: {error}") from None


def _receive(sock: socket.socket) -> Any:
    (length,) = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if length > _MAX_BYTES:
        raise EOFError("too long")
    return msgspec.msgpack.decode(_exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise EOFError("closed")
        data += chunk
    return data


class Server:
    def __init__(self, host: str, port: int, answer: Callable[[Any], Any]) -> None:
        try:
            self._socket = socket.create_server((host, port), backlog=64)
        except OSError as error:
            print(f"control plane: bind {host}:{port}: {error}", flush=True)
            os._exit(255)
        self.port: int = self._socket.getsockname()[1]
        self._answer = answer
        self._open = True
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._open:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            try:
                with sock:
                    sock.settimeout(timeout_ms() / 1000)  # a silent caller keeps everybody else waiting
                    body = msgspec.msgpack.encode(self._answer(_receive(sock)))
                    sock.sendall(_HEAD.pack(len(body)) + body)
            except (OSError, EOFError, msgspec.MsgspecError, struct.error):
                pass

    def close(self) -> None:
        self._open = False
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()
        self._thread.join(1)
