"""Same host, nothing to install: shared memory between processes, and CUDA IPC between GPUs.

Host segments are sealed memfds whose descriptors travel over a Unix socket; the writer maps them and copies with
threads of its own. Device segments are exported by CUDA IPC; a kernel of the writer stores into the peer's memory, or
the driver copies a few ranges there. That a writer is dead is what the operating system says of it, through a pidfd.
For a GPU as well, and where a fork of the writer lives on: on H200s a death was reported once the 12 kernels that were
queued had run and the store behind them was there, 6 s after the kill.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_pd.backends.base import (
    DEFAULT_DEADLINE_S,
    Backend,
    Capabilities,
    Peer,
    Segment,
    Transfer,
    batch_addresses,
    batch_rows,
    check_batch,
)
from sglang_pd.backends.home import Home, give_back, keep_in_forks
from sglang_pd.backends.local.connect import Connection, LocalConnecting
from sglang_pd.backends.local.copy import Copier, CopyJob, copy_now
from sglang_pd.backends.local.groups import HostGroups
from sglang_pd.backends.local.launch import FEW_RANGES, GridAddresses
from sglang_pd.backends.local.link import (
    Address,
    SegmentFacts,
    host_identity,
    pack_address,
    unpack_address,
)
from sglang_pd.backends.local.listener import Exports, Listener
from sglang_pd.backends.local.memory import HostMemory, create_memory
from sglang_pd.backends.local.options import LocalOptions, parse_options
from sglang_pd.backends.local.peer import LocalPeer, open_peer
from sglang_pd.backends.local.transfer import HeldPart, LocalTransfer, Part
from sglang_pd.backends.shortage import no_descriptor
from sglang_pd.backends.sides import Side, one_range
from sglang_pd.protocol.batch import U64, GridBatch, WriteBatch
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, TransferError

if TYPE_CHECKING:
    from sglang_pd.backends.local.cuda import CudaSide

INLINE_BYTES = 128 << 10
INLINE_DESCRIPTORS = 4096
"""Batches up to both are copied by the calling thread: a hand-over to another thread would take longer."""

REVOKE_WITHIN_S = 1.0


def create(*, epoch: int, options: Mapping[str, Any]) -> LocalBackend:
    """Build the backend. Raises `ConfigError` for an option it does not know, `BackendUnavailable` off Linux."""
    chosen = parse_options(options)
    for needed in ("memfd_create", "pidfd_open", "eventfd"):
        if not hasattr(os, needed):
            raise BackendUnavailable("this system lacks a call of Linux 5.3", where=f"os.{needed}")
    try:
        return LocalBackend(epoch, chosen)
    except OSError as error:
        raise no_descriptor(error, "local") from error


def _cuda_installed() -> bool:
    """True where device memory can be tried: the libraries and the driver's device node are there."""
    present = all(importlib.util.find_spec(name) is not None for name in ("torch", "triton", "cuda"))
    return present and os.path.exists("/dev/nvidiactl")


class LocalBackend(Backend):
    """The local transport of one worker incarnation."""

    def __init__(self, epoch: int, options: LocalOptions) -> None:
        self._epoch = epoch
        self._home = Home("the backend", "local")
        keep_in_forks(self)
        self._closed = False
        self._scope: dict[tuple[int, int, str], HostMemory | None] = {}
        self._segments: list[Segment] = []
        self._facts: list[SegmentFacts] = []
        self._side = Side()
        self._cuda: CudaSide | None = None
        self._peers: list[LocalPeer] = []
        self._leaving: list[LocalPeer] = []
        self._connecting: list[LocalConnecting] = []
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._wakeup = select.epoll()
            self._listener = Listener(epoch)
        except (OSError, BackendUnavailable):
            os.close(self._news)
            raise
        self._wakeup.register(self._news, select.EPOLLIN)
        self._copier = Copier(options.copy_threads, self._notify)

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend`. Device memory is claimed where the libraries and the driver are installed."""
        return Capabilities(
            name="local",
            host_memory=True,
            device_memory=_cuda_installed(),
            same_host_only=True,
            adopts_host=False,
            adopts_device=_cuda_installed(),
            revoke_proof="pidfd",
            revoke_scope="peer",
            revoke_within_s=REVOKE_WITHIN_S,
            verified_on={"memfd": "x86-64 Linux", "cuda_ipc": "two H200s of one host over NVLink, 2026-11-30"},
        )

    @property
    def epoch(self) -> int:
        """See `Backend`."""
        return self._epoch

    def allocate(self, nbytes: int, device: str = "cpu") -> Segment:
        """See `Backend`."""
        self._check_usable()
        if device == "cpu":
            memory = create_memory(nbytes)
            segment = Segment(memory.address, nbytes, device, memory.mapping)
            self._scope[(memory.address, nbytes, device)] = memory
            return segment
        segment = self._device_side(device).allocate(nbytes)
        self._scope[(segment.address, nbytes, device)] = None
        return segment

    def adopt(self, segment: Segment) -> Segment:
        """See `Backend`. Device memory of `cudaMalloc` only: host memory cannot be given to another process later."""
        self._check_usable()
        if segment.device == "cpu":
            raise BackendError(
                "the local backend cannot adopt host memory: another process could not map it",
                where=f"{segment.nbytes} bytes on cpu",
                hint="Take the memory from this backend's allocate().",
            )
        adopted = self._device_side(segment.device).adopt(segment)
        self._scope[(segment.address, segment.nbytes, segment.device)] = None
        return adopted

    def register(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """See `Backend`."""
        self._check_usable()
        wanted = list(segments)
        self._check_registrable(wanted)
        numbered = []
        for segment in wanted:
            number = len(self._segments)
            numbered.append(Segment(segment.address, segment.nbytes, segment.device, segment.keep_alive, number))
            self._segments.append(numbered[-1])
            if segment.device == "cpu":
                self._facts.append(SegmentFacts(segment.nbytes, "cpu"))
            else:
                self._facts.append(self._device_side(segment.device).export(segment))
        self._side = Side(self._segments)
        memories = (self._scope[_key(segment)] for segment in self._segments)
        self._listener.exports = Exports(tuple(self._facts), tuple(m.fd for m in memories if m is not None))
        return tuple(numbered)

    def describe(self) -> bytes:
        """See `Backend`."""
        self._check_usable()
        return pack_address(Address(self._epoch, self._listener.name, host_identity(), self._listener.admission))

    def connect(self, blob: bytes, epoch: int) -> LocalPeer:
        """See `Backend`."""
        peer = self.start_connect(blob, epoch).wait()
        assert isinstance(peer, LocalPeer)
        return peer

    def start_connect(self, blob: bytes, epoch: int) -> LocalConnecting:
        """See `Backend`. A destination that takes its time, or is stopped, holds up nobody here."""
        self._check_usable()
        address = unpack_address(blob)
        if address.epoch != epoch:
            raise BackendError(
                "the blob describes another incarnation",
                code="epoch_stale",
                expected=f"{epoch:#x}",
                actual=f"{address.epoch:#x}",
            )
        here = host_identity()
        if address.host != here:
            raise BackendError(
                "the peer is not on this host, or not in this network namespace",
                where="local",
                expected=here,
                actual=address.host,
                hint="Choose a transport that leaves the host.",
            )
        connecting = LocalConnecting(address, self._epoch, self._wakeup, lambda made: self._joined(epoch, made))
        self._connecting = [*(one for one in self._connecting if not one.over), connecting]
        return connecting

    def _joined(self, epoch: int, connection: Connection) -> LocalPeer:
        peer = open_peer(epoch, connection, self._segments, self._side_for)
        self._peers.append(peer)
        for fd in peer.watched():
            self._wakeup.register(fd, select.EPOLLIN | select.EPOLLRDHUP)
        return peer

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        """See `Backend`."""
        self._check_usable()
        if not isinstance(peer, LocalPeer) or peer not in self._peers:
            raise BackendError("not a connected peer of this backend", where=repr(peer))
        deadline = time.monotonic() + deadline_s
        cause = peer.lost
        nbytes, parts = self._start_one(peer, batch, after) if cause is None else (0, [])
        if not nbytes:
            check_batch(batch, self._side.nbytes, peer.side.nbytes, peer=f"{peer.epoch:#x}")
            nbytes = batch.total_bytes
            if cause is not None and nbytes:
                return LocalTransfer(nbytes, deadline, [], cause)
            parts = self._start(peer, batch, nbytes, after) if nbytes else []
        transfer = LocalTransfer(nbytes, deadline, parts)
        if parts:
            peer.watch(transfer)
        return transfer

    def _start_one(self, peer: LocalPeer, batch: WriteBatch, after: Any) -> tuple[int, list[Part]]:
        """Start a batch of one descriptor by its numbers: its bytes and parts. 0 bytes: nothing was done, because it is
        no such batch, not plainly in order, or the copier's."""
        found = one_range(batch, self._side, peer.side)
        if found is None:
            return 0, []
        (src, src_segment), (dst, dst_segment), nbytes = found
        if self._side.devices[src_segment] != "cpu" or peer.side.devices[dst_segment] != "cpu":
            ranges = [(src, dst, nbytes)]
            return nbytes, [self._behind(peer, after, lambda cuda, event: cuda.copy_each(ranges, event))]
        if after is not None or nbytes > INLINE_BYTES:
            return 0, []
        ctypes.memmove(dst, src, nbytes)
        return nbytes, []

    def _start(self, peer: LocalPeer, batch: WriteBatch, nbytes: int, after: Any) -> list[Part]:
        if not self._any_device(peer):
            return self._start_host(peer, batch, nbytes, after)
        if isinstance(batch, GridBatch) and len(batch) > FEW_RANGES and self._only_device(peer, batch):
            return self._start_grids(peer, batch, after)
        from_device = self._side.on_device[batch.src.segment][batch.src_region]
        device = from_device | peer.side.on_device[batch.dst.segment][batch.dst_region]
        if device.all():
            return self._start_device(peer, batch, after)
        host = batch_rows(batch, ~device)
        parts = self._start_device(peer, batch_rows(batch, device), after) if device.any() else []
        return parts + self._start_host(peer, host, host.total_bytes, after)

    def _start_device(self, peer: LocalPeer, batch: WriteBatch, after: Any) -> list[Part]:

        def resolve(rows: slice) -> tuple[U64, U64, U64]:
            part = batch_rows(batch, rows)
            return (*batch_addresses(part, self._side.base, peer.side.base), part.length)

        if self._held(peer, after):
            # It is copied long after this call, when the batch's arrays may be somebody else's again.
            src, dst, length = resolve(slice(0, len(batch)))
            length = length.copy()

            def resolved(rows: slice) -> tuple[U64, U64, U64]:
                return src[rows], dst[rows], length[rows]

            return [self._behind(peer, after, lambda cuda, event: cuda.copy(src.shape[0], resolved, event))]
        return [self._behind(peer, after, lambda cuda, event: cuda.copy(len(batch), resolve, event))]

    def _behind(self, peer: LocalPeer, after: Any, start: Callable[[CudaSide, Any], Part]) -> Part:
        """A device's copy behind an event: on its stream, or, for an event of another kind, started by us after it."""
        cuda = peer.cuda
        if cuda is None:
            raise BackendError("a device segment, and no device was opened", code="backend_unavailable")
        if not self._held(peer, after):
            return start(cuda, after)
        gate = CopyJob(lambda: (), after)
        self._copier.submit(gate)
        return HeldPart(gate, lambda: start(cuda, None))

    @staticmethod
    def _held(peer: LocalPeer, after: Any) -> bool:
        """Whether a device's copy must be held back by us until an event."""
        return after is not None and not (peer.cuda is not None and peer.cuda.can_wait_for(after))

    def _only_device(self, peer: LocalPeer, batch: GridBatch) -> bool:
        """True when a GPU must carry every descriptor."""
        src, dst = self._side.on_device[batch.src.segment], peer.side.on_device[batch.dst.segment]
        return all(bool((src[grid.src_region] | dst[grid.dst_region]).all()) for grid in batch.grids)

    def _start_grids(self, peer: LocalPeer, batch: GridBatch, after: Any) -> list[Part]:
        src_base = self._side.base[batch.src.segment] + batch.src.base
        dst_base = peer.side.base[batch.dst.segment] + batch.dst.base
        grids = [
            GridAddresses(
                src_base[grid.src_region] + grid.src_inner,
                dst_base[grid.dst_region] + grid.dst_inner,
                grid.src_block.copy(),
                grid.dst_block.copy(),
                (grid.block_length if grid.entry_length is None else grid.entry_length).copy(),
                by_entry=grid.entry_length is not None,
            )
            for grid in batch.grids
            if len(grid)
        ]
        return [self._behind(peer, after, lambda cuda, event: cuda.copy_grids(grids, event))]

    def _start_host(self, peer: LocalPeer, batch: WriteBatch, nbytes: int, after: Any) -> list[Part]:
        groups = HostGroups.of(batch, self._side, peer.side)
        if after is None and nbytes <= INLINE_BYTES and len(batch) <= INLINE_DESCRIPTORS:
            copy_now(groups.split())
            return []
        job = CopyJob(groups.split, after)
        self._copier.submit(job)
        return [job]

    def fence(self, peer: Peer) -> bool:
        """See `Backend`: True when no copy to that peer is running or queued."""
        self._home.check()
        return isinstance(peer, LocalPeer) and peer.quiet()

    def revoke(self, epoch: int) -> bool:
        """See `Backend`: True when that incarnation's process is gone, or says that it has unmapped this memory.

        `describe` changes: with the blob of before that incarnation is refused, with the later one it may come back.
        """
        self._check_usable()
        return self._listener.revoke(epoch)

    def admit(self, epoch: int, blob: bytes) -> None:
        """See `Backend`. Nobody else is given memory: who comes before this call waits a while at the door.

        Who was given memory is known from the socket it was given over; the blob tells no more.
        """
        self._check_usable()
        self._listener.admit(epoch)

    def progress(self) -> None:
        """See `Backend`. Needed only when `wakeup_fd` is readable."""
        if self._closed:
            return
        self._home.check()
        for fd, _ in self._wakeup.poll(0):
            if fd == self._news:
                os.eventfd_read(self._news)
            elif all(one.over or fd != one.sock.fileno() for one in self._connecting):
                # A lost peer stays readable for ever: heard once is enough, `lost` remembers.
                self._wakeup.unregister(fd)
        for peer in [peer for peer in self._leaving if peer.quiet()]:
            self._leaving.remove(peer)
            peer.close()

    def wakeup_fd(self) -> int | None:
        """See `Backend`."""
        if self._closed:
            return None
        self._home.check()
        return self._wakeup.fileno()

    def disconnect(self, peer: Peer) -> None:
        """See `Backend`. What is still queued for the peer is dropped."""
        self._home.check()
        if not isinstance(peer, LocalPeer) or peer not in self._peers:
            return
        self._peers.remove(peer)
        peer.cancel(TransferError("the peer was disconnected", where=f"{peer.epoch:#x}"))
        self._unwatch(peer)
        self._leaving.append(peer)
        self.progress()

    def close(self) -> None:
        """See `Backend`. Transfers left are cancelled and joined, hence FAILED."""
        if self._closed:
            return
        if not self._home.here:
            self._leave_to_parent()
            return
        cause = TransferError("the backend was closed", where="local")
        for connecting in self._connecting:
            connecting.cancel()
        self._connecting.clear()
        for peer in self._peers:
            peer.cancel(cause)
            self._unwatch(peer)
        self._copier.close(cause)
        if self._cuda is not None:
            self._cuda.drain()
        for peer in self._peers + self._leaving:
            peer.close()
        self._closed = True
        self._listener.close()
        if self._cuda is not None:
            self._cuda.close()
        for memory in self._scope.values():
            if memory is not None:
                os.close(memory.fd)
        self._scope.clear()
        self._segments.clear()
        self._wakeup.close()
        os.close(self._news)

    def _leave_to_parent(self) -> None:
        """What `close` is in a fork. The epoll is the parent's too: nothing is taken out of it."""
        self._closed = True
        for connecting in self._connecting:
            connecting.cancel()
        for peer in self._peers + self._leaving:
            peer.close()
        self._listener.close()
        give_back([memory.fd for memory in self._scope.values() if memory is not None])
        self._wakeup.close()
        os.close(self._news)

    # Inside.

    def _any_device(self, peer: LocalPeer) -> bool:
        return self._cuda is not None or peer.cuda is not None

    def _notify(self) -> None:
        os.eventfd_write(self._news, 1)

    def _unwatch(self, peer: LocalPeer) -> None:
        for fd in peer.watched():
            try:
                self._wakeup.unregister(fd)
            except FileNotFoundError:
                pass  # heard before

    def _device_side(self, device: str) -> CudaSide:
        if self._cuda is None:
            if not device.startswith("cuda"):
                raise BackendError("no such device", code="memory_refused", expected="cpu or cuda:N", actual=device)
            from sglang_pd.backends.local.cuda import CudaSide

            self._cuda = CudaSide(device, self._notify)
        self._cuda.check_device(device)
        return self._cuda

    def _side_for(self, uuid: bytes) -> CudaSide:
        """This backend's GPU; a backend without one works with the GPU that has this UUID."""
        if self._cuda is not None:
            return self._cuda
        from sglang_pd.backends.local.cuda import device_of

        return self._device_side(device_of(uuid))

    def _check_registrable(self, wanted: list[Segment]) -> None:
        taken = [_key(segment) for segment in self._segments]
        for segment in wanted:
            if _key(segment) not in self._scope:
                problem = "memory comes from neither allocate nor adopt"
            elif _key(segment) in taken:
                problem = "memory is registered already"
            else:
                taken.append(_key(segment))
                continue
            where = f"{segment.nbytes} bytes at {segment.address:#x} on {segment.device}"
            raise BackendError(problem, code="memory_refused", where=where)

    def _check_usable(self) -> None:
        if self._closed:
            raise BackendUnavailable("the backend is closed", where="local")
        self._home.check()


def _key(segment: Segment) -> tuple[int, int, str]:
    return (segment.address, segment.nbytes, segment.device)
