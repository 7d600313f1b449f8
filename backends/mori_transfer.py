"""One write of the `mori` backend: its state as the owner sees it, and its pieces as the library gets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import Transfer, TransferState
from sglang_pd.backends.mori_library import Blocks, Call
from sglang_pd.backends.mori_options import MoriOptions
from sglang_pd.protocol.batch import U32, U64, WriteBatch
from sglang_pd.protocol.errors import PdError, TransferError

FINAL = (TransferState.DONE, TransferState.FAILED)
DOOR = -1
"""Segment number of the door in a `Piece`."""


class MoriTransfer(Transfer):
    """State of one batch. Written by its link's thread and, past the deadline, by whoever looks first."""

    def __init__(self, peer: str, nbytes: int, deadline_s: float) -> None:
        self.nbytes = nbytes
        self.expires = time.monotonic() + deadline_s
        self._peer = peer
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._state = TransferState.PENDING
        self._error: PdError | None = None

    def poll(self) -> TransferState:
        """The state now; see the contract. While PENDING it lets other threads of this process run."""
        if self._state is TransferState.PENDING and not self.expired():
            # A caller that polls in a loop would otherwise keep the interpreter from the thread that it waits for.
            time.sleep(0)
        return self._state

    def decided(self) -> TransferState:
        """The state as last decided, without a look at the clock."""
        return self._state

    def expired(self) -> bool:
        """Whether the deadline has passed; the first to see it makes an undecided transfer UNKNOWN."""
        if time.monotonic() < self.expires:
            return False
        self.settle(
            TransferState.UNKNOWN,
            TransferError(
                f"not done within {self._deadline_s:g} s; unless the state says otherwise, bytes may still land",
                code="transfer_timeout",
                where=f"write to peer {self._peer}",
                backend="mori",
            ),
        )
        return True

    def settle(self, state: TransferState, error: PdError | None = None) -> bool:
        """Move to `state`; True if that was news. DONE and FAILED are final, and UNKNOWN never becomes PENDING."""
        with self._lock:
            if self._state in FINAL or self._state is state:
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


@dataclass(slots=True)
class Piece:
    """Blocks between one local and one remote segment (or door), for one call."""

    src_segment: int
    dst_segment: int
    blocks: Blocks


GREETING = Piece(DOOR, DOOR, Blocks([2048], [0], [8]))
"""Eight bytes from our door to the peer's."""


@dataclass(slots=True)
class Descriptors:
    """A checked batch, arrays of shape [descriptors]: segment numbers (uint32), byte offsets and lengths (uint64)."""

    src_segment: U32
    src_offset: U64
    dst_segment: U32
    dst_offset: U64
    length: U64

    @classmethod
    def of(cls, batch: WriteBatch) -> Descriptors:
        """Copies everything: the caller may reuse the batch's arrays at once."""
        return cls(*batch.src_addresses(), *batch.dst_addresses(), batch.length.copy())

    def pieces(self, options: MoriOptions) -> Iterator[Piece]:
        """What is handed to the library call by call: one pair of segments, at most so many blocks and bytes."""
        rows = self._grouped()._merged()._cut(min(options.max_block_bytes, options.max_bytes_per_call))
        total = np.cumsum(rows.length)
        start, count = 0, rows.length.shape[0]
        for end_of_pair in [*(np.flatnonzero(rows._pair_changes()) + 1).tolist(), count]:
            while start < end_of_pair:
                done = int(total[start - 1]) if start else 0
                end = int(np.searchsorted(total, np.uint64(done + options.max_bytes_per_call), "right"))
                end = min(max(end, start + 1), start + options.max_blocks_per_call, end_of_pair)
                yield rows._piece(start, end)
                start = end

    def _piece(self, start: int, end: int) -> Piece:
        at = slice(start, end)
        blocks = Blocks(self.src_offset[at].tolist(), self.dst_offset[at].tolist(), self.length[at].tolist())
        return Piece(int(self.src_segment[start]), int(self.dst_segment[start]), blocks)

    def _pair_changes(self) -> NDArray[np.bool_]:
        """Whether row i + 1 has another pair of segments than row i; shape [descriptors - 1]."""
        changes: NDArray[np.bool_] = self.src_segment[:-1] != self.src_segment[1:]
        changes |= self.dst_segment[:-1] != self.dst_segment[1:]
        return changes

    def _grouped(self) -> Descriptors:
        """Rows of one pair of segments stand together, otherwise in their order."""
        if not self._pair_changes().any():
            return self
        pair = self.src_segment.astype(np.uint64) << np.uint64(32) | self.dst_segment
        order = np.argsort(pair, kind="stable")
        return self._taken(order, self.length[order])

    def _merged(self) -> Descriptors:
        """Neighbours that continue each other on both sides become one row."""
        apart = self._pair_changes()
        apart |= self.src_offset[:-1] + self.length[:-1] != self.src_offset[1:]
        apart |= self.dst_offset[:-1] + self.length[:-1] != self.dst_offset[1:]
        if apart.all():
            return self
        first = np.flatnonzero(np.concatenate(([True], apart)))
        return self._taken(first, np.add.reduceat(self.length, first, dtype=np.uint64))

    def _cut(self, limit_bytes: int) -> Descriptors:
        """Rows longer than `limit_bytes` become several."""
        limit = np.uint64(limit_bytes)
        if int(self.length.max()) <= limit_bytes:
            return self
        parts = ((self.length + (limit - np.uint64(1))) // limit).astype(np.int64)
        row = np.repeat(np.arange(parts.shape[0]), parts)
        skip = (np.arange(row.shape[0]) - np.repeat(np.cumsum(parts) - parts, parts)).astype(np.uint64) * limit
        taken = self._taken(row, np.minimum(self.length[row] - skip, limit))
        taken.src_offset, taken.dst_offset = taken.src_offset + skip, taken.dst_offset + skip
        return taken

    def _taken(self, rows: NDArray[np.int64], length: U64) -> Descriptors:
        return Descriptors(
            self.src_segment[rows], self.src_offset[rows], self.dst_segment[rows], self.dst_offset[rows], length
        )


@dataclass(slots=True, eq=False)
class Work:
    """A transfer on its way through its link's thread.

    descriptors: what to move; None for a greeting at the peer's door.
    pieces: what is still to be handed over, None before the first look; head: the next of them.
    calls: handed over and not finished.
    exhausted: no more will be handed over; complete: because all of it was.
    broken: a call ended without success, or its end cannot be believed. failed: why no more goes.
    """

    transfer: MoriTransfer
    descriptors: Descriptors | None
    after: Any = None
    pieces: Iterator[Piece] | None = None
    head: Piece | None = None
    calls: list[Call] = field(default_factory=list)
    exhausted: bool = False
    complete: bool = False
    broken: bool = False
    failed: PdError | None = None


def greeting(peer: str, within_s: float) -> Work:
    """The first contact, and the heartbeat: `GREETING`."""
    return Work(MoriTransfer(peer, 8, within_s), None)
