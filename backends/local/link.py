"""How two processes of one host meet: a Unix socket that carries epochs, segment tables and memory descriptors.

The socket's name is abstract and random, so that nothing is left on disk when a process dies. Only processes of the
same user are served. Whatever comes in is bounded in size and in time. Each side holds a pidfd of the other: it turns
readable when every thread of that process is gone, which is the proof behind `revoke`.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

from sglang_pd.backends.shortage import is_shortage, no_descriptor
from sglang_pd.protocol.errors import BackendError

VERSION = 1
"""Version of the blob and of the messages. Raise it when either changes."""

MAX_BLOB_BYTES = 1 << 20
MAX_HELLO_BYTES = 4096
MAX_WELCOME_BYTES = 1 << 20
MAX_SEGMENT_BYTES = 1 << 52
FDS_A_MESSAGE = 200

GOODBYE = b"B"
"""What a writer sends when it has unmapped everything: from then on it cannot write, and says so itself."""

_MAGIC = b"SPDL"
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
_CREDENTIALS = struct.Struct("iII")
_SO_PEERPIDFD = 77


class SegmentFacts(msgspec.Struct, frozen=True):
    """One exported segment. On a device: the exported handle of its allocation and the offset in it, else empty."""

    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_BYTES)]
    device: str
    handle: bytes = b""
    handle_offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEGMENT_BYTES)] = 0
    device_uuid: bytes = b""


class Address(msgspec.Struct, frozen=True):
    """Body of the connect blob. admission: rises with every revocation; a revoked writer needs a later one."""

    epoch: int
    socket_name: bytes
    host: str
    admission: int = 0


class Hello(msgspec.Struct, frozen=True):
    """A writer's first and only message."""

    version: int
    epoch: int
    wants: int
    admission: int = 0


class Welcome(msgspec.Struct, frozen=True):
    """The answer: the segment table, or why not."""

    refusal: str = ""
    code: str = ""
    segments: tuple[SegmentFacts, ...] = ()


def host_identity() -> str:
    """Boot and network namespace of this process: abstract sockets and memory descriptors do not leave either."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError as error:
        raise no_descriptor(error, "local") from error


def pack_address(address: Address) -> bytes:
    """Magic, version, digest, body."""
    body = msgspec.msgpack.encode(address)
    return _MAGIC + bytes([VERSION]) + xxhash.xxh3_64_digest(body) + body


def unpack_address(blob: bytes) -> Address:
    """The address in a blob. Raises `BackendError` for what is no intact blob of this backend and version."""
    head = len(_MAGIC) + 1
    if len(blob) > MAX_BLOB_BYTES or blob[: len(_MAGIC)] != _MAGIC or len(blob) < head + 8:
        raise BackendError("not a connect blob of the local backend", where="blob", actual=f"{len(blob)} bytes")
    if blob[len(_MAGIC)] != VERSION:
        raise BackendError(
            "the peer's local backend speaks another version",
            where="blob",
            expected=VERSION,
            actual=blob[len(_MAGIC)],
            hint="Run the same release of sglang-pd on both sides.",
        )
    body = blob[head + 8 :]
    if xxhash.xxh3_64_digest(body) != blob[head : head + 8]:
        raise BackendError("a connect blob is damaged", where="blob", expected="its digest", actual="another")
    try:
        return msgspec.msgpack.decode(body, type=Address)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BackendError("a connect blob does not decode", where="blob", actual=str(error)) from error


def peer_pid(sock: socket.socket) -> int:
    """Number of the process that connected, as seen here: 0 where it is in another PID namespace."""
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


def receive_from(sock: socket.socket, limit: int) -> tuple[bytes, int]:
    """Bytes that one process sent, and its number as in `peer_pid`; -1 where the kernel does not tell.

    The socket must have SO_PASSCRED. What two processes sent is never given together.
    """
    data, ancillary, _, _ = sock.recvmsg(limit, socket.CMSG_SPACE(_CREDENTIALS.size))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(payload) >= _CREDENTIALS.size:
            return data, int(_CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[0])
    return data, -1


def open_pidfd(sock: socket.socket) -> tuple[int | None, int]:
    """A pidfd of the process at the other end (None where its process is not visible here), and its user id."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD), uid
    except OSError as error:
        if is_shortage(error):
            raise  # a writer without a proof would be let in for want of a descriptor
        # before Linux 6.5, or another PID namespace: try by number
    if pid <= 0:
        return None, uid
    try:
        # The number may have been reused; then its first owner, the peer, is dead, and so is the proof asked for later.
        return os.pidfd_open(pid), uid
    except OSError as error:
        if is_shortage(error):
            raise
        return None, uid


def is_dead(pidfd: int) -> bool:
    """True when every thread of the process is gone."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def pack_message(message: msgspec.Struct) -> bytes:
    """One message, with its length before it."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def send_descriptors(sock: socket.socket, fds: Sequence[int]) -> None:
    """Send descriptors, some at a time, each group on one byte."""
    for start in range(0, len(fds), FDS_A_MESSAGE):
        group = array.array("i", fds[start : start + FDS_A_MESSAGE])
        sock.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, group)])


def receive_group(sock: socket.socket, fds: list[int]) -> None:
    """Add one group of descriptors to `fds`, which are the caller's to close. Raises `OSError`."""
    space = socket.CMSG_SPACE(FDS_A_MESSAGE * array.array("i").itemsize)
    # A process that is started meanwhile must not inherit a peer's memory.
    data, ancillary, flags, _ = sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += array.array("i", payload[: len(payload) // 4 * 4])
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, "the peer's descriptors were cut off")
    if not data:
        raise ConnectionResetError("the peer closed the connection")
