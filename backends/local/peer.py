"""The destination as a writer of the local backend sees it: mapped memory, liveness, transfers under way."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sglang_pd.backends.base import Peer, Segment
from sglang_pd.backends.home import Home, give_back
from sglang_pd.backends.local.link import GOODBYE, is_dead
from sglang_pd.backends.local.memory import HostMemory, map_peer_memory
from sglang_pd.backends.local.transfer import LocalTransfer
from sglang_pd.backends.sides import Side
from sglang_pd.protocol.errors import PdError, TransferError

if TYPE_CHECKING:
    from sglang_pd.backends.local.connect import Connection
    from sglang_pd.backends.local.cuda import CudaSide, PeerMemory


class LocalPeer(Peer):
    """One connected incarnation. `side`: its segments as mapped in this process."""

    def __init__(self, epoch: int, connection: Connection) -> None:
        self.epoch = epoch
        self.segment_bytes = tuple(facts.nbytes for facts in connection.segments)
        self.side = Side()
        self.transport = "cuda_ipc" if any(facts.device != "cpu" for facts in connection.segments) else "memfd"
        self.cuda: CudaSide | None = None
        self.host_memory: list[HostMemory] = []
        self.device_memory: PeerMemory | None = None
        self._home = Home("the peer", f"local, {epoch:#x}")
        self._sock = connection.sock
        self._pidfd = connection.pidfd
        self._lost: PdError | None = None
        self._active: list[LocalTransfer] = []

    @property
    def lost(self) -> PdError | None:
        """See `Peer`: its process is gone, or it closed its backend."""
        if self._lost is None and self._pidfd is not None and is_dead(self._pidfd):
            self._lost = TransferError("the peer's process is gone", code="peer_lost", where=f"{self.epoch:#x}")
        if self._lost is None:
            try:
                heard: bytes | None = self._sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                heard = None
            except OSError:
                heard = b""
            if heard == b"":
                self._lost = TransferError("the peer closed its backend", code="peer_lost", where=f"{self.epoch:#x}")
        return self._lost

    def watched(self) -> Iterator[int]:
        """Descriptors that turn readable when the peer is lost."""
        if self._sock.fileno() >= 0:
            yield self._sock.fileno()
        if self._pidfd is not None:
            yield self._pidfd

    def watch(self, transfer: LocalTransfer) -> None:
        """Remember a transfer until it is quiesced."""
        self._active = [one for one in self._active if not one.quiesced]
        if not transfer.quiesced:
            self._active.append(transfer)

    def quiet(self) -> bool:
        """True when nothing posted to this peer can still land."""
        self._active = [one for one in self._active if not one.quiesced]
        return not self._active

    def cancel(self, cause: PdError) -> None:
        """Start nothing more of what was posted."""
        for one in self._active:
            one.stop(cause)

    def close(self) -> None:
        """Unmap the peer's memory, tell it so, and hang up. Only when `quiet`. Idempotent.

        In a fork nothing is said: the parent may write on, and the peer would take its memory for free. Nor is anything
        unmapped: forks have no such mapping, and what lies at the same addresses is their own.
        """
        if self._sock.fileno() < 0:
            return
        if not self._home.here:
            self._hang_up()
            return
        self._lost = self._lost or TransferError(
            "the peer was disconnected", code="peer_lost", where=f"{self.epoch:#x}"
        )
        if self.device_memory is not None:
            self.device_memory.close()
        for memory in self.host_memory:
            memory.mapping.close()
        self.host_memory.clear()
        try:
            self._sock.send(GOODBYE)
            self._sock.shutdown(socket.SHUT_RDWR)  # a fork that has the socket too must not keep it open
        except OSError:
            pass  # it is gone, and needs no goodbye
        self._hang_up()

    def _hang_up(self) -> None:
        self._sock.close()
        pidfd, self._pidfd = self._pidfd, None
        give_back([pidfd] if pidfd is not None else [])


def open_peer(
    epoch: int, connection: Connection, own: Sequence[Segment], device_side: Callable[[bytes], CudaSide]
) -> LocalPeer:
    """Map what a connection brought. Raises `BackendError`; the connection is then closed.

    device_side: this backend's GPU; where it has none yet, the one with the UUID given, or the first.
    """
    peer = LocalPeer(epoch, connection)
    fds = iter(connection.fds)
    try:
        for facts in connection.segments:
            if facts.device == "cpu":
                peer.host_memory.append(map_peer_memory(next(fds), facts.nbytes))
        host = iter([memory.address for memory in peer.host_memory])
        device: Iterator[int] = iter(())
        if peer.transport == "cuda_ipc" or any(segment.device != "cpu" for segment in own):
            from sglang_pd.backends.local.cuda import open_peer_memory

            uuids = [facts.device_uuid for facts in connection.segments if facts.device != "cpu"]
            side = device_side(uuids[0] if uuids else b"")
            theirs = [(memory.address, memory.nbytes) for memory in peer.host_memory]
            peer.device_memory = open_peer_memory(side, connection.segments, theirs, own)
            peer.cuda = side
            device = iter(peer.device_memory.addresses)
        found = ((host if facts.device == "cpu" else device, facts) for facts in connection.segments)
        peer.side = Side([Segment(next(addresses), facts.nbytes, facts.device) for addresses, facts in found])
    except BaseException:
        for fd in fds:
            os.close(fd)
        peer.close()
        raise
    return peer
