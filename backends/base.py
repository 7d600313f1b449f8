"""The contract between sglang-pd and a transport.

A backend knows segments, offsets, lengths and peers. It does not know what a layer, a kind or a request is: whoever
needs such knowledge is in the wrong room.

The safety sentences
--------------------
1.  From `write` until the transfer is DONE or FAILED, the source ranges belong to the transport: whoever owns them must
    neither change nor free them. The destination ranges belong to the writer from before `write` until a fence.
2.  DONE promises that every byte of the batch is visible at the peer, also to kernels launched there afterwards.
3.  FAILED promises that nothing more of this transfer will land. Any part of it may have landed already.
4.  UNKNOWN promises nothing: bytes may still land, at any later time. It ends a room, never a quarantine. An error of
    a library that does not itself prove that it has drained is UNKNOWN. A deadline that passes is UNKNOWN.
    A transfer that is UNKNOWN may later become DONE or FAILED, when the proof arrives; it never goes back to PENDING.
5.  `Transfer.quiesced` is True exactly when the state is DONE or FAILED.
6.  `fence(peer)` is the writer's proof: True means that nothing this backend ever posted to that peer can still land.
7.  `revoke(epoch)` is the destination's proof: True means that nothing of that incarnation can still land here,
    whatever that process does or did. `Capabilities.revoke_proof` names the evidence. Where there is no evidence the
    answer stays False for ever. Deregistering memory is no evidence. A timer is no evidence.
8.  No method ends a thread, calls back from a thread of its own, or lets an exception of a library escape: errors are
    `sglang_pd.protocol.errors.PdError` with the library's words inside.

Forks: a backend belongs to the process that made it. In a fork of that process every method raises `PdError`, except
`close`, which gives back the fork's own descriptors and does nothing that the parent or a peer could notice; transfers
that had not ended are UNKNOWN there. A library's objects are never destroyed in a fork.

Threads: every method but `wakeup_fd` is called by one thread, the owner. None blocks it: `write` returns within 5 ms
for 65,536 descriptors, so a library whose submit blocks is driven by a thread of the backend's own. Nothing may raise
in the owner from outside, such as the handler of SIGINT in a main thread: a library may be left between two states.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.batch import U32, U64, Grid, GridBatch, RegionTable, WriteBatch, check_ranges
from sglang_pd.protocol.errors import BackendError, PdError

DEFAULT_DEADLINE_S = 30.0
"""Seconds after which a transfer that names no deadline of its own is UNKNOWN."""


class TransferState(Enum):
    """State of one transfer; the module's docstring says what each promises."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of memory a backend can export.

    number: place in the backend's segment table, given by `register`; -1 before. Peers name the segment by it.
    address: of the first byte, valid in this process (host pointer or device pointer).
    nbytes: length in bytes.
    device: `cpu` or `cuda:N`.
    keep_alive: whatever must live as long as the memory (a memmap, a tensor). The backend holds the segment, hence
        this, until `close`.
    """

    address: int
    nbytes: int
    device: str
    keep_alive: object = field(repr=False, compare=False, default=None)
    number: int = -1


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; part of the verdict on a pair of instances, and the source of the support matrix.

    host_memory, device_memory: segments may lie on `cpu` / on `cuda:N`.
    same_host_only: both processes must run on one host (and, where `revoke_proof` is `pidfd`, in one PID namespace).
    adopts_host, adopts_device: `adopt` accepts memory that the backend did not allocate.
    revoke_proof: evidence behind `revoke`: `pidfd` (the writer's process is gone), `engine_closed` (this side's engine
        is closed and joined), `qp_destroyed` (the library reports it), or `none`.
    revoke_scope: `peer`, or `backend` where the proof costs every connection: afterwards `describe` has changed and
        all peers connect anew.
    revoke_within_s: longest time, in seconds, from the evidence to True.
    verified_on: per transport, the hardware it was last run on, or that it has not been run.
    idle_cpu: share of a core an idle connected backend may use, with `idle_reason` when it is above 0.02.
    """

    name: str
    host_memory: bool
    device_memory: bool
    same_host_only: bool
    adopts_host: bool
    adopts_device: bool
    revoke_proof: Literal["pidfd", "engine_closed", "qp_destroyed", "none"]
    revoke_scope: Literal["peer", "backend"]
    revoke_within_s: float
    verified_on: Mapping[str, str]
    directions: tuple[str, ...] = ("write",)
    idle_cpu: float = 0.02
    idle_reason: str = ""


class Peer(abc.ABC):
    """One incarnation of a remote backend, as connected by `Backend.connect`. A new epoch is a new peer."""

    epoch: int
    """Random 64-bit identity of the remote incarnation."""

    segment_bytes: tuple[int, ...]
    """Length in bytes of each segment the peer registered, by segment number."""

    transport: str
    """The transport in use as far as the library tells (`memfd`, `cuda_ipc`, `cma`, `tcp`, ...)."""

    @property
    @abc.abstractmethod
    def lost(self) -> PdError | None:
        """Why the peer is known to be gone, or None. A peer once lost stays lost."""


class Connecting(abc.ABC):
    """A connection on its way, begun by `Backend.start_connect` and asked after by the backend's owner."""

    @abc.abstractmethod
    def poll(self) -> Peer | None:
        """The peer, or None while it is under way. Never blocks. Raises what `connect` raises, each time."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Nobody waits any more: what comes of it is left again. Not after `poll` gave the peer. Idempotent."""

    def wait(self) -> Peer:
        """Block until there is a peer. Raises as `poll`."""
        while (peer := self.poll()) is None:
            time.sleep(0.0005)
        return peer


class Connected(Connecting):
    """A connection that took no time."""

    def __init__(self, backend: Backend, peer: Peer) -> None:
        self._backend, self._peer = backend, peer

    def poll(self) -> Peer:
        """The peer."""
        return self._peer

    def cancel(self) -> None:
        """See `Connecting`."""
        self._backend.disconnect(self._peer)


class Transfer(abc.ABC):
    """One posted batch. The backend keeps what the library needs alive, whether or not the caller keeps this object."""

    nbytes: int
    """Bytes of the whole batch."""

    @abc.abstractmethod
    def poll(self) -> TransferState:
        """The state now. Never blocks. DONE and FAILED are final; UNKNOWN may still become one of them."""

    @property
    @abc.abstractmethod
    def error(self) -> PdError | None:
        """The first cause when FAILED or UNKNOWN (backend, peer, code, the library's words), else None."""

    @property
    def quiesced(self) -> bool:
        """True when nothing more of this transfer can land (DONE or FAILED)."""
        return self.poll() in (TransferState.DONE, TransferState.FAILED)

    @property
    def source_free(self) -> bool:
        """True when nothing reads the source any more, though what was taken from it may still land.

        True whenever `quiesced` is. A transport says it of an UNKNOWN transfer once it has let go of every part of it:
        the source may be used again, and the destination still needs its own proof.
        """
        return self.quiesced

    def cancel(self) -> None:
        """Give it up if nothing of it was handed over yet: soon FAILED (`TransferError` `transfer_failed`).

        No effect otherwise. Idempotent, from the owner's thread. A transfer behind an `after` event that has not
        happened is the case it is for, except where a device's own queue was put behind the event: that is handed over.
        """
        return None


class Backend(abc.ABC):
    """A transport of one worker incarnation. Use as a context manager, or call `close`."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What this backend can do here, with the options it was created with."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """Random 64-bit identity of this incarnation, given at creation."""

    @abc.abstractmethod
    def allocate(self, nbytes: int, device: str = "cpu") -> Segment:
        """Memory this backend can export, zeroed, aligned to at least 4,096 bytes on the host and 256 on a device.

        Raises `BackendError` (`memory_refused`) where that device or size cannot be had.
        """

    @abc.abstractmethod
    def adopt(self, segment: Segment) -> Segment:
        """Accept memory someone else allocated, after a probe that really exports it.

        Raises `BackendError` (`backend_unsupported`) where the capability is missing, (`memory_refused`) for memory
        that cannot be exported, naming why.
        """

    @abc.abstractmethod
    def register(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """Number the segments, in order, and export them. Once a pool, kept until `close`.

        Returns the segments with their numbers. Refuses overlap, zero length and memory that neither `allocate` nor
        `adopt` returned (`memory_refused`). Call before `describe`.
        """

    @abc.abstractmethod
    def describe(self) -> bytes:
        """What a peer needs to connect: opaque, at most 1 MiB, versioned by the backend, self-checking."""

    @abc.abstractmethod
    def connect(self, blob: bytes, epoch: int) -> Peer:
        """Connect to the backend that `blob` describes, whose incarnation is `epoch`.

        Raises `BackendError` for a blob of another backend, version or epoch, `TransferError` (`peer_lost`) when there
        is nobody. May take the library's connect time; does not wait for the peer's owner thread.
        """

    def start_connect(self, blob: bytes, epoch: int) -> Connecting:
        """Begin what `connect` does, for an owner that has others to serve: returns soon, however long it takes.

        `wakeup_fd` turns readable when `poll` may have news. Raises as `connect` for what can be seen at once. This one
        calls `connect`: right for a transport that connects within milliseconds or not at all.
        """
        return Connected(self, self.connect(blob, epoch))

    @abc.abstractmethod
    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        """Start copying the batch into the peer's segments.

        Both sides' ranges are checked here, before the library sees them. `after` is a device event (with `query()`
        and `synchronize()`, as torch.cuda.Event) on which the source bytes depend; None means that they are ready. A
        batch without descriptors is DONE at once. Past `deadline_s` seconds the transfer is UNKNOWN.

        Raises `BackendError` (`segment_invalid`) for a range outside its segment, nothing having moved. Anything that
        goes wrong later is in the transfer.
        """

    @abc.abstractmethod
    def fence(self, peer: Peer) -> bool:
        """Writer's proof that nothing this backend posted to `peer` can still land. Non-blocking: ask again."""

    @abc.abstractmethod
    def revoke(self, epoch: int) -> bool:
        """Destination's proof that nothing of incarnation `epoch` can still land here. Non-blocking: ask again.

        The first call starts whatever the proof needs: that incarnation can no longer write here afterwards, unless
        there is no proof. An epoch that never connected is True at once where connections are known, else as above.
        """

    def admit(self, epoch: int, blob: bytes) -> None:
        """The owner agreed with that incarnation, for the first time or again: it connects by the present `describe`.

        `blob` is what its own `describe` says. A later `revoke` must find in it all that the proof needs to know of
        that incarnation: it may die before it connects, or before anything it sent was heard.

        An earlier proof against it says nothing any more: the next `revoke` of it starts anew, also where it has not
        connected since. That one must keep it from connecting by the `describe` of before.

        Called before that incarnation is told of any memory here: a backend may refuse who was not admitted, at once
        or once that one has waited in vain. Raises `BackendError` as `connect` does, for a blob that the proof depends
        on and that is of another backend, version or epoch; nothing is admitted then.
        """
        return None

    @abc.abstractmethod
    def progress(self) -> None:
        """Let the library advance. The owner calls it at least every `progress_interval_s` while peers exist."""

    @property
    def progress_interval_s(self) -> float | None:
        """Longest time between two calls of `progress` while peers exist, in seconds; None: not needed."""
        return None

    @property
    def engines_replaced(self) -> int:
        """How often this backend has built another engine of its library in place of one that it could not trust."""
        return 0

    @abc.abstractmethod
    def wakeup_fd(self) -> int | None:
        """A file descriptor that turns readable when a `poll` may have news; None: poll by the interval."""

    @abc.abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Forget a peer and free what belongs to it. Proves nothing about bytes in flight. Idempotent."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop, join own threads, release the memory that `allocate` gave. Idempotent. Transfers left are UNKNOWN."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_batch(batch: WriteBatch, own_bytes: U64, peer_bytes: U64, *, peer: str) -> None:
    """Refuse a batch any of whose descriptors leaves its region, or whose region leaves its segment, on either side.

    `own_bytes` and `peer_bytes` have shape [segments]: the length of each registered segment. Costs a few reductions
    when offsets are plainly inside, one pass more when they are not. Raises `BackendError` (`segment_invalid`).
    """
    if isinstance(batch, GridBatch):
        for grid in batch.grids:
            _check_shapes(grid, peer)
            _check_grid(batch.src, grid, own_bytes, ("source", peer))
            _check_grid(batch.dst, grid, peer_bytes, ("destination", peer))
        return
    fields: tuple[NDArray[Any], ...] = (
        batch.src_region,
        batch.src_offset,
        batch.dst_region,
        batch.dst_offset,
        batch.length,
    )
    wanted = (np.uint32, np.uint64, np.uint32, np.uint64, np.uint64)
    for values, dtype in zip(fields, wanted, strict=True):
        if values.shape != (len(batch),) or values.dtype != dtype:
            raise BackendError(
                "a batch's arrays differ in shape or dtype",
                code="segment_invalid",
                where=f"batch for peer {peer}",
                expected=f"shape [{len(batch)}], {np.dtype(dtype)}",
                actual=f"shape {list(values.shape)}, {values.dtype}",
            )
    _check_side(batch.src, batch.src_region, batch.src_offset, batch.length, (own_bytes, "source", peer))
    _check_side(batch.dst, batch.dst_region, batch.dst_offset, batch.length, (peer_bytes, "destination", peer))


def _check_shapes(grid: Grid, peer: str) -> None:
    entries, blocks = grid.src_region.shape, grid.src_block.shape
    of_entries, of_blocks = [grid.src_inner, grid.dst_inner], [grid.src_block, grid.dst_block, grid.block_length]
    if grid.entry_length is not None:
        of_entries.append(grid.entry_length)
    wanted: list[tuple[NDArray[Any], tuple[int, ...], type[np.generic]]] = [
        *((values, entries, np.uint32) for values in (grid.src_region, grid.dst_region)),
        *((values, entries, np.uint64) for values in of_entries),
        *((values, blocks, np.uint64) for values in of_blocks),
    ]
    for values, shape, dtype in wanted:
        if values.shape != shape or values.ndim != 1 or values.dtype != dtype:
            raise BackendError(
                "a grid's arrays differ in shape or dtype",
                code="segment_invalid",
                where=f"batch for peer {peer}",
                expected=f"{list(entries)} entries, {list(blocks)} blocks: shape {list(shape)}, {np.dtype(dtype)}",
                actual=f"shape {list(values.shape)}, {values.dtype}",
            )


def _check_grid(table: RegionTable, grid: Grid, segment_bytes: U64, owner: tuple[str, str]) -> None:
    """The same for a grid, exactly, on its entries alone: the furthest block stands for all of them."""
    side, peer = owner
    if not len(grid):
        return
    region, inner, block = (
        (grid.src_region, grid.src_inner, grid.src_block)
        if side == "source"
        else (grid.dst_region, grid.dst_inner, grid.dst_block)
    )
    if grid.entry_length is None:
        furthest, length = int((block + grid.block_length).max()), np.zeros(inner.shape, np.uint64)
        lengths = grid.block_length
    else:
        furthest, length = int(block.max()), grid.entry_length
        lengths = grid.entry_length
    if not int(lengths.min()):
        raise BackendError("a descriptor is empty", code="segment_invalid", where=f"{side} of peer {peer}")
    # A sum that wraps would look like an offset inside.
    largest = int(inner.max()) + int(block.max()) + int(lengths.max())
    if largest >> 64:
        raise BackendError(
            "a descriptor's offset does not fit 64 bits",
            code="segment_invalid",
            where=f"{side} of peer {peer}",
            expected=f"inner + block + length < {2**64}",
            actual=f"{int(inner.max())} + {int(block.max())} + {int(lengths.max())} bytes",
        )
    # From 0 to the end of the furthest byte: inside for the longest stretch means inside for every descriptor.
    start, stretch = np.zeros_like(inner), inner + np.uint64(furthest) + length
    if inner.shape[0] <= FEW and _few_inside(table, region, start, stretch, segment_bytes):
        return
    check_ranges(region, start, stretch, table.size_bytes, side=f"regions, {side}", peer=peer)
    check_ranges(
        table.segment[region], table.base[region], table.size_bytes[region], segment_bytes,
        side=f"region table, {side}", peer=peer,
    )  # fmt: skip


FEW = 8
"""Up to this many descriptors are checked one by one: array operations would take longer."""


def _check_side(table: RegionTable, region: U32, offset: U64, length: U64, owner: tuple[U64, str, str]) -> None:
    count = length.shape[0]
    segment_bytes, side, peer = owner
    if not count or (count <= FEW and _few_inside(table, region, offset, length, segment_bytes)):
        return
    plainly_inside = (
        int(region.max()) < table.size_bytes.shape[0]
        and int(length.min()) > 0
        and int(offset.max()) + int(length.max()) <= int(table.size_bytes.min())
    )
    if not plainly_inside:
        check_ranges(region, offset, length, table.size_bytes, side=f"regions, {side}", peer=peer)
    where = f"region table, {side}"
    try:
        check_ranges(table.segment, table.base, table.size_bytes, segment_bytes, side=where, peer=peer)
    except BackendError:
        # A row that no descriptor uses harms nobody.
        used = np.zeros(table.segment.shape[0], np.bool_)
        used[region] = True
        rows = (table.segment[used], table.base[used], table.size_bytes[used])
        check_ranges(*rows, segment_bytes, side=where, peer=peer)


def place(
    table: RegionTable, row: int, start: int, nbytes: int, segment_bytes: U64 | Sequence[int]
) -> tuple[int, int] | None:
    """Segment number and byte offset in it of `nbytes` bytes from `start` in a region; None where they are not plainly
    inside the region, or it is not inside its segment."""
    if row >= table.segment.shape[0] or nbytes == 0:
        return None
    segment, base, size = table.segment.item(row), table.base.item(row), table.size_bytes.item(row)
    if segment >= len(segment_bytes) or base + size > int(segment_bytes[segment]) or start + nbytes > size:
        return None
    return segment, base + start


def _few_inside(table: RegionTable, region: U32, offset: U64, length: U64, segment_bytes: U64) -> bool:
    """True when every descriptor is inside; where it is False, the arrays' check finds which is not, and says so."""
    rows = zip(region.tolist(), offset.tolist(), length.tolist(), strict=True)
    return all(place(table, row, start, nbytes, segment_bytes) is not None for row, start, nbytes in rows)


def batch_rows(batch: WriteBatch, rows: NDArray[np.bool_] | slice) -> WriteBatch:
    """Some descriptors of a batch, chosen by a mask of shape [descriptors] or a slice."""
    return WriteBatch(
        src=batch.src,
        dst=batch.dst,
        src_region=batch.src_region[rows],
        src_offset=batch.src_offset[rows],
        dst_region=batch.dst_region[rows],
        dst_offset=batch.dst_offset[rows],
        length=batch.length[rows],
    )


def batch_addresses(batch: WriteBatch, own_base: U64, peer_base: U64) -> tuple[U64, U64]:
    """Source and destination addresses, uint64 of shape [descriptors], of a batch that `check_batch` accepted.

    `own_base` and `peer_base` have shape [segments]: the address of each segment's first byte, as this process's
    transport names it.
    """
    src, dst = _region_bases(batch.src, own_base), _region_bases(batch.dst, peer_base)
    return src[batch.src_region] + batch.src_offset, dst[batch.dst_region] + batch.dst_offset


def _region_bases(table: RegionTable, base: U64) -> U64:
    if not base.shape[0]:
        return table.base
    # A row that no descriptor uses may name a segment that does not exist: `check_batch` lets it pass.
    bases: U64 = base[np.minimum(table.segment, np.uint32(base.shape[0] - 1))] + table.base
    return bases
