"""One write of the `nixl` backend: its state as the owner sees it, and its pieces as the library gets them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import Transfer, TransferState
from sglang_pd.backends.library_segments import Side, ordinal
from sglang_pd.backends.nixl_library import Handle, Rows
from sglang_pd.backends.nixl_options import NixlOptions
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.errors import PdError, TransferError

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]


FREE_LOOKS = 2
"""Polls of a pending transfer that cost nothing; an owner that waits on `wakeup_fd` needs no more."""


class NixlTransfer(Transfer):
    """State of one batch. Written by the backend's thread and, past the deadline, by whoever looks first."""

    def __init__(self, peer: str, nbytes: int, deadline_s: float) -> None:
        self.nbytes = nbytes
        self.expires = time.monotonic() + deadline_s
        self._peer = peer
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._state = TransferState.PENDING
        self._error: PdError | None = None
        self._looks = 0

    def poll(self) -> TransferState:
        """The state now; see the contract. Never blocks; who asks again and again lets other threads run."""
        if self._state is TransferState.PENDING and not self.expired():
            self._looks += 1
            if self._looks > FREE_LOOKS:
                # A loop of polls would otherwise keep the interpreter from the very thread that it waits for.
                os.sched_yield()
        return self._state

    def poll_state(self) -> TransferState:
        """The state as last decided, without a look at the clock."""
        return self._state

    def expired(self) -> bool:
        """Whether the deadline has passed with the transfer undecided; the first to see it makes it UNKNOWN."""
        if time.monotonic() < self.expires:
            return False
        self.settle(
            TransferState.UNKNOWN,
            TransferError(
                f"not done within {self._deadline_s:g} s; unless the state says otherwise, bytes may still land",
                code="transfer_timeout",
                where=f"write to peer {self._peer}",
                backend="nixl",
            ),
        )
        return True

    def settle(self, state: TransferState, error: PdError | None = None) -> bool:
        """Move to `state`; True if that was news. DONE and FAILED are final, and UNKNOWN never becomes PENDING.

        The first cause stays: a proof that comes after an UNKNOWN turns the state, not the reason.
        """
        with self._lock:
            if self._state in (TransferState.DONE, TransferState.FAILED) or self._state is state:
                return False
            if state is TransferState.DONE:
                self._error = None
            elif self._error is None:
                self._error = error
            self._state = state
            return True

    @property
    def error(self) -> PdError | None:
        """The first cause when FAILED or UNKNOWN, else None."""
        return self._error


def kind_of(device: str) -> str:
    """`cpu` or `cuda`."""
    return device.partition(":")[0]


def single_piece(batch: WriteBatch, own: Side, peer: Side) -> Piece | None:
    """The piece of a batch of one descriptor, checked without arrays; None where it is not plainly in order.

    One descriptor is what latency is measured with, and a dozen calls on arrays of one element cost more than the copy.
    What this says None to, `check_batch` judges.
    """
    fields = (batch.src_region, batch.dst_region, batch.src_offset, batch.dst_offset, batch.length)
    if [(one.shape, one.dtype.char) for one in fields] != _ONE:
        return None
    source, target, src_offset, dst_offset, nbytes = (one.item() for one in fields)
    local = own.range(batch.src, source, src_offset, nbytes)
    remote = peer.range(batch.dst, target, dst_offset, nbytes)
    if local is None or remote is None:
        return None
    here, there = own.devices[local[1]], peer.devices[remote[1]]
    rows = [(local[0], nbytes, ordinal(here))], [(remote[0], nbytes, ordinal(there))]
    return Piece(rows, (kind_of(here), kind_of(there)), here)


_ONE = [((1,), np.dtype(kind).char) for kind in (np.uint32, np.uint32, np.uint64, np.uint64, np.uint64)]


@dataclass(slots=True)
class Addresses:
    """Descriptors of a checked batch, all arrays of shape [descriptors].

    src, dst: uint64 addresses; length: uint64 bytes; src_segment, dst_segment: uint32 segment numbers.
    own, peer: the two sides' segments.
    """

    src: U64
    dst: U64
    length: U64
    src_segment: U32
    dst_segment: U32
    own: Side
    peer: Side

    def merged(self) -> Addresses:
        """Neighbours that continue each other on both sides, within one segment each, become one descriptor."""
        if self.length.shape[0] < 2:
            return self
        apart = self.src[:-1] + self.length[:-1] != self.src[1:]
        if apart.all():
            return self
        apart |= self.dst[:-1] + self.length[:-1] != self.dst[1:]
        apart |= self.src_segment[:-1] != self.src_segment[1:]
        apart |= self.dst_segment[:-1] != self.dst_segment[1:]
        if apart.all():
            return self
        first = np.flatnonzero(np.concatenate(([True], apart)))
        return self._taken(first, np.add.reduceat(self.length, first, dtype=np.uint64))

    def cut(self, limit_bytes: int) -> Addresses:
        """Descriptors longer than `limit_bytes` become several."""
        limit = np.uint64(limit_bytes)
        if int(self.length.max()) <= limit_bytes:
            return self
        parts = ((self.length + (limit - np.uint64(1))) // limit).astype(np.int64)
        row = np.repeat(np.arange(parts.shape[0]), parts)
        part = (np.arange(row.shape[0]) - np.repeat(np.cumsum(parts) - parts, parts)).astype(np.uint64)
        skip = part * limit
        taken = self._taken(row, np.minimum(self.length[row] - skip, limit))
        taken.src, taken.dst = taken.src + skip, taken.dst + skip
        return taken

    def _taken(self, rows: NDArray[np.int64], length: U64) -> Addresses:
        return Addresses(
            self.src[rows],
            self.dst[rows],
            length,
            self.src_segment[rows],
            self.dst_segment[rows],
            self.own,
            self.peer,
        )

    def pairs(self) -> Iterator[tuple[str, str, Addresses]]:
        """The descriptors by kind of memory: source `cpu` or `cuda`, destination likewise."""
        if self.own.host_only and self.peer.host_only:
            yield "cpu", "cpu", self
            return
        src = np.array([device != "cpu" for device in self.own.devices])
        dst = np.array([device != "cpu" for device in self.peer.devices])
        both = src[self.src_segment] * 2 + dst[self.dst_segment]
        for code in np.unique(both):
            rows = np.flatnonzero(both == code)
            kinds = ("cuda" if code & 2 else "cpu", "cuda" if code & 1 else "cpu")
            yield (*kinds, self._taken(rows, self.length[rows]))

    def pieces(self, options: NixlOptions) -> Iterator[Piece]:
        """What is handed to the library call by call: at most so many descriptors and, but for the last, bytes."""
        cut = self.merged().cut(options.max_bytes_per_post)
        for src_kind, dst_kind, part in cut.pairs():
            total = np.cumsum(part.length)
            start, count = 0, part.length.shape[0]
            while start < count:
                done = int(total[start - 1]) if start else 0
                end = int(np.searchsorted(total, np.uint64(done + options.max_bytes_per_post), "right"))
                end = min(max(end, start + 1), start + options.max_descriptors_per_post)
                yield part._piece(slice(start, min(end, count)), (src_kind, dst_kind))
                start = end

    def _piece(self, at: slice, kinds: tuple[str, str]) -> Piece:
        length = self.length[at]
        return Piece(
            (
                _rows(self.src[at], length, self.own.index, self.src_segment[at]),
                _rows(self.dst[at], length, self.peer.index, self.dst_segment[at]),
            ),
            kinds,
            self.own.devices[int(self.src_segment[at.start])],
        )


@dataclass(slots=True)
class Piece:
    """What one call hands to the library, all of one pair of memory kinds.

    rows: local and remote descriptors: address, length in bytes, device number; arrays of shape [rows, 3], uint64, or
        lists of tuples.
    kinds: `cpu` or `cuda`, each side. source_device: of the first row.
    """

    rows: tuple[Rows, Rows]
    kinds: tuple[str, str]
    source_device: str


def _rows(address: U64, length: U64, index: U64, segment: U32) -> Rows:
    rows = np.empty((address.shape[0], 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = length
    rows[:, 2] = index[segment]
    return rows


@dataclass(slots=True)
class Work:
    """A transfer on its way through the backend's thread.

    addresses, pieces: what is still to be handed over, one of them; upcoming: the next piece, looked at.
    handles: handed over and not finished.
    exhausted: no more will be handed over; complete: because all of it was. handed: the transport got some of it.
    broken: a piece ended without proof. failed: why no more goes.
    host_only: neither side is device memory.
    """

    transfer: NixlTransfer
    addresses: Addresses | None
    host_only: bool
    after: Any = None
    pieces: Iterator[Piece] | None = None
    upcoming: Piece | None = None
    handles: list[Handle] = field(default_factory=list)
    exhausted: bool = False
    complete: bool = False
    handed: bool = False
    broken: bool = False
    failed: PdError | None = None
