"""Messages between the harness and its child processes: length-prefixed MessagePack over a socket pair."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 256 << 20
"""Longest message either side accepts."""

_HEADER = struct.Struct("<I")


class ChannelClosed(Exception):
    """The process at the other end is gone."""


class ChannelTimeout(Exception):
    """No complete message within the time given."""


class Channel:
    """One end of a socket pair, for one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._pending = bytearray()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send one message. Raises `ChannelClosed`."""
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"message of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}")
        try:
            self._socket.sendall(_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None) -> Any:
        """The next message. Raises `ChannelClosed` or, after `timeout_s` seconds, `ChannelTimeout`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        header = self._take(_HEADER.size, end)
        (length,) = _HEADER.unpack(header)
        if length > MAX_MESSAGE_BYTES:
            raise ChannelClosed(f"message of {length} bytes announced")
        return msgspec.msgpack.decode(self._take(length, end))

    def _take(self, count: int, end: float | None) -> bytes:
        while len(self._pending) < count:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                raise ChannelTimeout
            try:
                chunk = self._socket.recv(1 << 20)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not chunk:
                raise ChannelClosed("end of stream")
            self._pending += chunk
        taken = bytes(self._pending[:count])
        del self._pending[:count]
        return taken

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()
