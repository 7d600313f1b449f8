"""A Unix socket for the owner of the process: one line in, one line of JSON out. It asks nothing of the worker itself:
it calls the function it was given, on its own thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import stat
import struct
import threading
from collections.abc import Callable

from sglang_pd.protocol.errors import ConfigError

MAX_LINE_BYTES = 4096
MAX_ANSWER_BYTES = 64 << 20
CLIENT_TIMEOUT_S = 5.0

Answer = Callable[[str], bytes]
"""Takes the line without its end; returns JSON. Called on the server's thread, so it must be safe there."""

_log = logging.getLogger(__name__)


class AdminServer:
    """Serves one client at a time. Only this user and root may connect. Use as a context manager, or call `close`."""

    def __init__(self, path: str, answer: Answer) -> None:
        """Listen at `path`. A socket that nobody serves any more is replaced; anything else there is refused
        (`ConfigError`)."""
        self._path, self._answer = path, answer
        self._pid = os.getpid()
        self._listener = _listen(path)
        self._inode = os.stat(path).st_ino
        self._wake, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="sglang-pd-admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and remove the socket if it is still ours. Idempotent."""
        if self._wake_writer < 0:
            return
        ours = os.getpid() == self._pid  # a fork must neither stop the parent's thread nor remove its socket
        if ours:
            os.write(self._wake_writer, b"x")
            self._thread.join()
        self._listener.close()
        os.close(self._wake_writer)
        os.close(self._wake)
        self._wake_writer = -1
        with contextlib.suppress(OSError):
            if ours and os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    def __enter__(self) -> AdminServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._wake in ready:
                    return
                try:
                    client, _ = self._listener.accept()
                except OSError as error:
                    _log.debug("admin socket: %s", error)
                    continue
                with client:
                    self._one(client)

    def _one(self, client: socket.socket) -> None:
        try:
            client.settimeout(CLIENT_TIMEOUT_S)
            if not _may_ask(client):
                return
            line = _read_line(client)
            if line is None:
                return
            client.sendall(self._answer(line) + b"\n")
        except OSError as error:
            _log.debug("admin socket: %s", error)
        except Exception:
            _log.exception("admin socket: the answer failed")


def ask(path: str, command: str) -> bytes:
    """Ask a worker's admin socket; returns its JSON. Raises `ConfigError` where nobody answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(CLIENT_TIMEOUT_S)
            client.connect(path)
            client.sendall(command.encode() + b"\n")
            parts: list[bytes] = []
            size = 0
            while size <= MAX_ANSWER_BYTES and (part := client.recv(1 << 16)):
                parts.append(part)
                size += len(part)
    except OSError as error:
        raise ConfigError(
            f"nobody answers on the admin socket: {error.strerror or error}",
            where=path,
            expected="observe.admin_socket of a running worker",
        ) from None
    answer = b"".join(parts)
    if not answer.endswith(b"\n"):
        raise ConfigError("the admin socket's answer is cut short", where=path, actual=f"{len(answer)} bytes")
    return answer[:-1]


def _read_line(client: socket.socket) -> str | None:
    data = b""
    while b"\n" not in data:
        part = client.recv(MAX_LINE_BYTES)
        data += part
        if not part or len(data) > MAX_LINE_BYTES:
            return None
    return data.partition(b"\n")[0].decode("utf-8", "replace").strip()


def _may_ask(client: socket.socket) -> bool:
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return uid in (0, os.geteuid())


def _listen(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError("something that is no socket lies there", where="$.observe.admin_socket", actual=path)
        if _is_served(path):
            raise ConfigError(
                "another process serves this admin socket",
                where="$.observe.admin_socket",
                expected="a path of its own for each worker",
                actual=path,
            )
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # who slips in before is turned away by its credentials
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on the admin socket: {error.strerror}", where="$.observe.admin_socket", actual=path
        ) from None
    return listener


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except OSError as error:
            return error.errno != errno.ECONNREFUSED
    return True
