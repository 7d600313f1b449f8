"""The destination's end of the local backend: hands memory to writers, and knows which of them may still write."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from dataclasses import dataclass

import msgspec

from sglang_pd.backends.home import Home, give_back
from sglang_pd.backends.local.link import (
    FDS_A_MESSAGE,
    GOODBYE,
    MAX_HELLO_BYTES,
    VERSION,
    Hello,
    SegmentFacts,
    Welcome,
    is_dead,
    open_pidfd,
    pack_message,
    peer_pid,
    receive_from,
    send_descriptors,
)
from sglang_pd.backends.shortage import start_thread
from sglang_pd.protocol.errors import BackendUnavailable

MAX_CONNECTIONS = 4096
HELLO_WITHIN_S = 5.0
ADMIT_WITHIN_S = 4.0
"""A writer that the owner has not agreed with may be early, and waits so long: less than it waits for its answer."""
SEND_WITHIN_S = 2.0
ACCEPT_PAUSE_S = 0.2
"""Nobody is let in for so long once no descriptor is free: whoever waits keeps the socket readable."""


@dataclass(eq=False)
class Incoming:
    """A writer's connection. `epoch` is None until its hello came; `released`: it says that it has unmapped all.

    pid: of the process that connected. due: by when its hello must have come, its incarnation must be admitted (`hello`
    waits for that), and it must have taken what it is given, which is `out` and after that `fds`; None once that is
    done. refused: it is given nothing but the reason.
    """

    sock: socket.socket
    pidfd: int | None
    pid: int
    due: float | None
    pending: bytes = b""
    hello: Hello | None = None
    out: bytes = b""
    fds: tuple[int, ...] = ()
    epoch: int | None = None
    refused: bool = False
    released: bool = False

    def harmless(self) -> bool:
        """True when it is proven that this writer cannot write any more."""
        return self.released or (self.pidfd is not None and is_dead(self.pidfd))

    def close(self) -> None:
        """Close what is held of it."""
        self.sock.close()
        pidfd, self.pidfd = self.pidfd, None
        give_back([pidfd] if pidfd is not None else [])


@dataclass(frozen=True)
class Exports:
    """What writers are given: the segment table, and the descriptors of its host segments in order."""

    segments: tuple[SegmentFacts, ...] = ()
    fds: tuple[int, ...] = ()


class Listener:
    """The thread that hands this side's memory to writers of the same user, and the record of who has it."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._home = Home("the backend", "local")
        self.exports = Exports()
        self._lock = threading.Lock()
        self._open: dict[int, Incoming] = {}  # by descriptor of the socket
        self._holders: dict[int, list[Incoming]] = {}  # by epoch: everyone that was given memory and may still write
        self.admission = 0
        self._revoked: dict[int, int] = {}  # by epoch: the admission that was in force when it was revoked
        self._admitted: set[int] = set()  # agreed with and not revoked since; after a revocation, by a later admission
        self._stopping = False
        self.name = b"\0sglang-pd/" + os.urandom(16).hex().encode()
        self._paused_until: float | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)  # the thread is to stop, or somebody was admitted
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError:
            os.close(self._wake_fd)
            raise
        # Inherited by every connection: what a fork of a writer says on the socket that they share is not its word.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.name)
        self._socket.listen(128)
        self._socket.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)
        try:
            self._thread = start_thread(self._run, "pd-local-listen", "local")
        except BackendUnavailable:
            self._socket.close()
            os.close(self._wake_fd)
            raise

    def revoke(self, epoch: int) -> bool:
        """Serve that incarnation no more; True when everyone who was given memory under it is proven harmless.

        Should it live, and its owner agree with ours anew, it comes with a later admission than the one revoked here.
        """
        with self._lock:
            if epoch not in self._revoked or epoch in self._admitted:
                self._admitted.discard(epoch)
                self._revoked[epoch] = self.admission
                self.admission += 1
            self._forget_harmless(epoch)
            return epoch not in self._holders

    def admit(self, epoch: int) -> None:
        """Its owner agreed with ours and has the address of now: by that it may come until it is revoked."""
        with self._lock:
            self._admitted.add(epoch)
        os.eventfd_write(self._wake_fd, 1)  # it may be here already

    def close(self) -> None:
        """Stop serving and join the thread. Idempotent. In a fork, where that thread is not, only hang up."""
        if not self._home.here:
            self._socket.close()
            give_back([self._wake_fd])
            for one in {*self._open.values(), *(one for many in self._holders.values() for one in many)}:
                one.close()
            return
        if not self._thread.is_alive():
            return
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        # Else writers would not hear of it for as long as a fork of this process lives.
        for sock in (self._socket, *(one.sock for one in self._open.values())):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        os.close(self._wake_fd)
        with self._lock:
            for many in (list(self._open.values()), *self._holders.values()):
                for one in many:
                    one.close()
            self._open.clear()
            self._holders.clear()

    # The thread.

    def _run(self) -> None:
        while True:
            due = [one.due for one in self._open.values() if one.due is not None]
            late = min([*due, *([] if self._paused_until is None else [self._paused_until])], default=None)
            wait_ms = None if late is None else max(1, int((late - time.monotonic()) * 1000))
            for fd, events in self._poller.poll(wait_ms):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    if self._stopping:
                        return
                    for one in [one for one in self._open.values() if one.hello is not None]:
                        self._answer(one)
                if fd == self._socket.fileno():
                    self._accept()
                if events & select.POLLOUT and fd in self._open:
                    self._give(self._open[fd])
                if events & ~select.POLLOUT and fd in self._open:
                    self._heard(self._open[fd])
            now = time.monotonic()
            if self._paused_until is not None and self._paused_until <= now:
                self._paused_until = None
                self._poller.register(self._socket, select.POLLIN)
            for one in [one for one in self._open.values() if one.due is not None and one.due < now]:
                if one.hello is not None:
                    self._send(one, _not_admitted(one.hello))
                else:
                    self._drop(one)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                self._paused_until = time.monotonic() + ACCEPT_PAUSE_S
                self._poller.unregister(self._socket)
            return
        try:
            pid = peer_pid(sock)
            pidfd, uid = open_pidfd(sock)
        except OSError:
            sock.close()
            return
        one = Incoming(sock, pidfd, pid, time.monotonic() + HELLO_WITHIN_S)
        if uid != os.geteuid() or len(self._open) >= MAX_CONNECTIONS:
            one.close()
            return
        sock.setblocking(False)
        self._open[sock.fileno()] = one
        self._poller.register(sock, select.POLLIN)
        with self._lock:
            for epoch in list(self._holders):
                self._forget_harmless(epoch)

    def _heard(self, one: Incoming) -> None:
        try:
            data, sender = receive_from(one.sock, MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, sender = b"", one.pid
        if data and sender != one.pid:
            return
        if one.epoch is not None or one.refused or one.hello is not None:
            self._take_leave(one, data)
            return
        one.pending += data
        if not data or len(one.pending) > MAX_HELLO_BYTES:
            self._drop(one)
            return
        length = int.from_bytes(one.pending[:4], "little")
        if len(one.pending) >= 4 + length:
            body, rest = one.pending[4 : 4 + length], one.pending[4 + length :]
            try:
                one.hello = msgspec.msgpack.decode(body, type=Hello)
            except (msgspec.DecodeError, RecursionError):
                self._drop(one)
                return
            one.due = time.monotonic() + ADMIT_WITHIN_S
            self._answer(one)
            if rest and one.sock.fileno() in self._open:
                self._take_leave(one, rest)

    def _take_leave(self, one: Incoming, data: bytes) -> None:
        """A writer says one thing after its hello, before it closes."""
        one.released = one.released or data == GOODBYE
        if not data or not one.released:
            self._drop(one)

    def _answer(self, one: Incoming) -> None:
        """Judge the hello of a writer; who was not admitted waits."""
        hello = one.hello
        if hello is None:
            return
        with self._lock:
            exports = self.exports
            answer = self._judge(hello, exports)
            if answer is None:
                return
            if not answer.refusal:
                # Before the first descriptor leaves: `revoke` must know of it.
                one.epoch = hello.epoch
                self._holders.setdefault(hello.epoch, []).append(one)
        self._send(one, answer, exports.fds)

    def _send(self, one: Incoming, answer: Welcome, fds: tuple[int, ...] = ()) -> None:
        one.hello = None
        one.refused = bool(answer.refusal)
        one.out, one.fds = pack_message(answer), () if one.refused else fds
        one.due = time.monotonic() + SEND_WITHIN_S
        self._give(one)

    def _give(self, one: Incoming) -> None:
        """Send what is left for this writer as far as it takes it: the others do not wait for one that does not."""
        try:
            while one.out:
                one.out = one.out[one.sock.send(one.out) :]
            while one.fds:
                send_descriptors(one.sock, one.fds[:FDS_A_MESSAGE])
                one.fds = one.fds[FDS_A_MESSAGE:]
        except BlockingIOError:
            self._poller.modify(one.sock, select.POLLIN | select.POLLOUT)
            return
        except OSError:
            if one.refused:
                self._drop(one)
                return
            one.out, one.fds = b"", ()  # it hung up; its goodbye, if it said one, has still to be read
        one.due = None
        self._poller.modify(one.sock, select.POLLIN)
        if one.refused:
            self._drop(one)

    def _judge(self, hello: Hello, exports: Exports) -> Welcome | None:
        """The answer; None where that waits until the owner has agreed with this incarnation."""
        if hello.version != VERSION:
            return Welcome(f"local backend version {hello.version} is not {VERSION}", "version_unsupported")
        if hello.wants != self._epoch:
            return Welcome(f"incarnation {hello.wants:#x} is gone, this is {self._epoch:#x}", "epoch_stale")
        if hello.admission <= self._revoked.get(hello.epoch, -1):
            return Welcome(f"incarnation {hello.epoch:#x} was revoked here", "epoch_stale")
        # Else a third party could name this address to a writer that nobody here knows, and have it write.
        return Welcome(segments=exports.segments) if hello.epoch in self._admitted else None

    def _drop(self, one: Incoming) -> None:
        """Close the connection. Whoever was given memory stays on record until it is proven harmless."""
        self._open.pop(one.sock.fileno(), None)
        self._poller.unregister(one.sock)
        one.sock.close()
        with self._lock:
            if one.epoch is not None:
                self._forget_harmless(one.epoch)
            if one.epoch is None or one not in self._holders.get(one.epoch, ()):
                one.close()

    def _forget_harmless(self, epoch: int) -> None:
        """Take the proven off the record of those that may still write. Called with the lock held."""
        left = []
        for one in self._holders.get(epoch, ()):
            if not one.harmless():
                left.append(one)
            elif one.sock.fileno() < 0:
                one.close()  # else `_drop` closes it, when the hang-up is heard
        if left:
            self._holders[epoch] = left
        else:
            self._holders.pop(epoch, None)


def _not_admitted(hello: Hello) -> Welcome:
    return Welcome(f"incarnation {hello.epoch:#x} was not admitted here within {ADMIT_WITHIN_S:g} s", "peer_unknown")
