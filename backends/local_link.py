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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import xxhash

from sglang_pd.backends.shortage import is_shortage, no_descriptor
from sglang_pd.protocol.errors import CODES, BackendError, PdError, TransferError

VERSION = 1
"""Version of the blob and of the messages. Raise it when either changes."""

MAX_BLOB_BYTES = 1 << 20
MAX_HELLO_BYTES = 4096
MAX_WELCOME_BYTES = 1 << 20
MAX_SEGMENT_BYTES = 1 << 52
CONNECT_WITHIN_S = 1.0
"""The owner's thread waits so long for a peer that does not answer (a stopped process): shorter than any liveness."""
FDS_A_MESSAGE = 200

GOODBYE = b"B"
"""What a writer sends when it has unmapped everything: from then on it cannot write, and says so itself."""

_MAGIC = b"SPDL"
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("iII")
_SO_PEERPIDFD = 77

T = TypeVar("T")


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


def send_message(sock: socket.socket, message: msgspec.Struct) -> None:
    """Send one length-prefixed message."""
    body = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive_exactly(sock: socket.socket, count: int, end: float) -> bytes:
    taken = b""
    while len(taken) < count:
        sock.settimeout(max(0.001, end - time.monotonic()))
        part = sock.recv(count - len(taken))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        taken += part
    return taken


def receive_message(sock: socket.socket, kind: type[T], limit: int, within_s: float) -> T:
    """Receive one message. Raises `OSError` (timeouts are), `msgspec.DecodeError`, `RecursionError`."""
    end = time.monotonic() + within_s
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, end))
    if length > limit:
        raise ConnectionError(f"a message of {length} bytes was announced, the limit is {limit}")
    return msgspec.msgpack.decode(_receive_exactly(sock, length, end), type=kind)


def send_descriptors(sock: socket.socket, fds: Sequence[int]) -> None:
    """Send descriptors, some at a time, each group on one byte."""
    for start in range(0, len(fds), FDS_A_MESSAGE):
        group = array.array("i", fds[start : start + FDS_A_MESSAGE])
        sock.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, group)])


def receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    """Receive exactly `count` descriptors. Raises `OSError`; what came until then is closed."""
    fds: list[int] = []
    try:
        while len(fds) < count:
            space = socket.CMSG_SPACE(FDS_A_MESSAGE * array.array("i").itemsize)
            data, ancillary, flags, _ = sock.recvmsg(1, space)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds += array.array("i", payload[: len(payload) // 4 * 4])
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "the peer's descriptors were cut off")
            if not data:
                raise ConnectionResetError("the peer closed the connection")
        if len(fds) != count:
            raise ConnectionError(f"{len(fds)} descriptors came where {count} were announced")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


@dataclass(frozen=True)
class Connection:
    """A writer's connection: the socket, the destination's pidfd (None where it is not visible), table and descriptors.

    `fds` are the destination's host segments in order; they are the caller's to close.
    """

    sock: socket.socket
    pidfd: int | None
    segments: tuple[SegmentFacts, ...]
    fds: list[int]


def open_connection(address: Address, epoch: int) -> Connection:
    """Connect as incarnation `epoch`. Raises `BackendError` for a refusal, `TransferError` (`peer_lost`) for nobody."""
    sock: socket.socket | None = None
    pidfd: int | None = None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.settimeout(CONNECT_WITHIN_S)
        sock.connect(address.socket_name)
        pidfd, uid = open_pidfd(sock)
        if uid != os.geteuid():
            raise BackendError("the peer runs as another user", expected=f"uid {os.geteuid()}", actual=f"uid {uid}")
        send_message(sock, Hello(VERSION, epoch, address.epoch, address.admission))
        welcome = receive_message(sock, Welcome, MAX_WELCOME_BYTES, CONNECT_WITHIN_S)
        if welcome.refusal:
            code = welcome.code if welcome.code in CODES else "backend_unsupported"
            raise BackendError(welcome.refusal, code=code, where="peer")
        fds = receive_descriptors(sock, sum(facts.device == "cpu" for facts in welcome.segments))
        sock.setblocking(False)
        return Connection(sock, pidfd, welcome.segments, fds)
    except (OSError, msgspec.DecodeError, RecursionError, PdError) as error:
        if sock is not None:
            sock.close()
        if pidfd is not None:
            os.close(pidfd)
        if isinstance(error, PdError):
            raise
        if isinstance(error, OSError) and is_shortage(error):
            raise no_descriptor(error, "local") from error
        raise TransferError("the peer does not answer", code="peer_lost", actual=repr(error)) from error
