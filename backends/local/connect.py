"""A writer's way to a destination: every step is taken by `poll`, and none waits for the other process."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from sglang_pd.backends.base import Connecting
from sglang_pd.backends.home import Home, give_back
from sglang_pd.backends.local.link import (
    GOODBYE,
    LENGTH_BYTES,
    MAX_WELCOME_BYTES,
    VERSION,
    Address,
    Hello,
    SegmentFacts,
    Welcome,
    open_pidfd,
    pack_message,
    receive_group,
)
from sglang_pd.backends.local.peer import LocalPeer
from sglang_pd.backends.shortage import is_shortage, no_descriptor
from sglang_pd.protocol.errors import CODES, BackendError, PdError, TransferError

CONNECT_WITHIN_S = 5.0
"""A destination that has not answered by then counts as lost: it is stopped, or hopelessly behind."""


@dataclass(frozen=True)
class Connection:
    """A writer's connection: the socket, the destination's pidfd (None where it is not visible), table and descriptors.

    `fds` are the destination's host segments in order; they are the caller's to close.
    """

    sock: socket.socket
    pidfd: int | None
    segments: tuple[SegmentFacts, ...]
    fds: list[int]


class LocalConnecting(Connecting):
    """Connects as incarnation `epoch`. made: by the owner, from the connection, which is `made`'s then.

    `wakeup` watches `sock` until it is `over`, and tells when there is more to do, except where the destination's queue
    of callers is full.
    """

    def __init__(
        self, address: Address, epoch: int, wakeup: select.epoll, made: Callable[[Connection], LocalPeer]
    ) -> None:
        self._home = Home("the connection", "local")
        self._address, self._epoch, self._made = address, epoch, made
        self._until_s = time.monotonic() + CONNECT_WITHIN_S
        self._pidfd: int | None = None
        self._fds: list[int] = []
        self._wakeup = wakeup
        self.over = False
        self._failed: PdError | None = None
        self._peer: LocalPeer | None = None
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise no_descriptor(error, "local") from error
        # By edges: what has come stays readable until the owner polls, and must not keep it awake until then.
        wakeup.register(self.sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        self._steps = self._advance()

    def poll(self) -> LocalPeer | None:
        """See `Connecting`. Raises `BackendError` for a refusal, `TransferError` (`peer_lost`) for nobody."""
        self._home.check()
        if not self.over:
            try:
                found = next(self._steps)
                if found is not None:
                    self.over, self._fds, self._pidfd = True, [], None
                    self._wakeup.unregister(self.sock)
                    self._peer = self._made(found)
                elif time.monotonic() > self._until_s:
                    raise TransferError(
                        "the peer does not answer",
                        code="peer_lost",
                        where=f"local, {self._address.epoch:#x}",
                        expected=f"within {CONNECT_WITHIN_S:g} s",
                    )
            except Exception as error:
                self._failed = _as_ours(error)
                self._leave()
        if self._failed is not None:
            raise self._failed
        return self._peer

    def cancel(self) -> None:
        """See `Connecting`."""
        if self._failed is None and self._peer is None:
            self._failed = TransferError("the connection was given up", code="peer_lost", where="local")
        self._leave()

    def _leave(self) -> None:
        """Close what came so far. The destination may hold this side for a writer that has its memory, or soon will."""
        if self.over:
            return
        self.over = True
        give_back(self._fds)
        if self._home.here:
            self._wakeup.unregister(self.sock)  # closing it does not, where a fork has it too
            try:
                self.sock.send(GOODBYE)  # nothing was mapped, and what was not received now never will be
            except OSError:
                pass
        self.sock.close()
        give_back([self._pidfd] if self._pidfd is not None else [])

    def _advance(self) -> Iterator[Connection | None]:
        """Each `next` goes as far as it goes without waiting."""
        while not self._reached():
            yield None
        self._pidfd, uid = open_pidfd(self.sock)
        if uid != os.geteuid():
            raise BackendError("the peer runs as another user", expected=f"uid {os.geteuid()}", actual=f"uid {uid}")
        hello = pack_message(Hello(VERSION, self._epoch, self._address.epoch, self._address.admission))
        if self.sock.send(hello) != len(hello):
            raise ConnectionError("a new socket does not take a hello")
        taken = b""
        wanted = LENGTH_BYTES
        while len(taken) < wanted:
            part = self._received(wanted - len(taken))
            if part is None:
                yield None
                continue
            taken += part
            if len(taken) == LENGTH_BYTES:
                (length,) = struct.unpack("<I", taken)
                if length > MAX_WELCOME_BYTES:
                    raise ConnectionError(
                        f"a message of {length} bytes was announced, the limit is {MAX_WELCOME_BYTES}"
                    )
                wanted += length
        welcome = msgspec.msgpack.decode(taken[LENGTH_BYTES:], type=Welcome)
        if welcome.refusal:
            code = welcome.code if welcome.code in CODES else "backend_unsupported"
            raise BackendError(welcome.refusal, code=code, where="peer")
        count = sum(facts.device == "cpu" for facts in welcome.segments)
        while len(self._fds) < count:
            try:
                receive_group(self.sock, self._fds)
            except BlockingIOError:
                yield None
        if len(self._fds) != count:
            raise ConnectionError(f"{len(self._fds)} descriptors came where {count} were announced")
        yield Connection(self.sock, self._pidfd, welcome.segments, self._fds)

    def _reached(self) -> bool:
        try:
            self.sock.connect(self._address.socket_name)
        except BlockingIOError:
            return False  # its queue of callers is full: ask again
        return True

    def _received(self, count: int) -> bytes | None:
        try:
            part = self.sock.recv(count)
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        return part


def _as_ours(error: Exception) -> PdError:
    if isinstance(error, PdError):
        return error
    if isinstance(error, OSError) and is_shortage(error):
        return no_descriptor(error, "local")
    if isinstance(error, (OSError, msgspec.DecodeError, RecursionError)):
        lost = TransferError("the peer does not answer", code="peer_lost", where="local", actual=repr(error))
        lost.__cause__ = error
        return lost
    words = f"{type(error).__name__}: {error}"
    return TransferError("connecting failed", code="internal", where="local", actual=words[:500])
