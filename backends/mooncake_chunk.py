"""One submission to the library and how its end is learnt, without ever blocking on a peer that hangs.

What a version offers decides the form: a scatter ticket (0.3.14) can be asked at any time; before that a batch can only
be waited for, spinning. There the chunk's last descriptor is submitted by itself and asked instead. A peer's queue is
first in, first out, so that when it has ended the batch before it has, but for what the other lanes have in hand, and
the wait is short. (It is also faster than waiting: the library's wait takes a core from its own I/O thread.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from sglang_pd.backends.mooncake_library import Library
from sglang_pd.protocol.batch import I64, U64

_BAD_IDS = (0, -1, (1 << 64) - 1)
_SINGLES = 16
"""Up to so many descriptors are submitted and asked one by one, which never waits."""


class ChunkState(Enum):
    """RUNNING; DONE: all applied at the destination; DRAINED: failed, and the library proves that it has stopped;
    LOST: failed, and bytes may still land."""

    RUNNING = "running"
    DONE = "done"
    DRAINED = "drained"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Descriptors as the library gets them, by ascending destination. Arrays of shape [pieces].

    src, dst: uint64 addresses in the source's and the destination's process. length: uint64 bytes.
    pair: int64, the same for pieces of one (source segment, destination segment) pair.
    """

    src: U64
    dst: U64
    length: U64
    pair: I64

    def __len__(self) -> int:
        return int(self.length.shape[0])

    def part(self, first: int, last: int) -> Pieces:
        """Pieces `first` to `last - 1`."""
        cut = slice(first, last)
        return Pieces(self.src[cut], self.dst[cut], self.length[cut], self.pair[cut])


def merge(pieces: Pieces, max_bytes: int) -> Pieces:
    """Sort by destination, join neighbours contiguous on both sides within one pair, cut what exceeds `max_bytes`."""
    if len(pieces) == 1 and int(pieces.length[0]) <= max_bytes:
        return pieces
    src, dst, length, pair = pieces.src, pieces.dst, pieces.length, pieces.pair
    if (dst[1:] < dst[:-1]).any():
        order = np.argsort(dst, kind="stable")
        src, dst, length, pair = src[order], dst[order], length[order], pair[order]
    joined = (src[1:] == src[:-1] + length[:-1]) & (dst[1:] == dst[:-1] + length[:-1]) & (pair[1:] == pair[:-1])
    if joined.any():
        starts = np.flatnonzero(np.concatenate(([True], ~joined)))
        length = np.add.reduceat(length, starts)
        src, dst, pair = src[starts], dst[starts], pair[starts]
    if int(length.max()) > max_bytes:
        cuts = (length.astype(np.int64) + max_bytes - 1) // max_bytes
        row = np.repeat(np.arange(len(length)), cuts)
        within = np.arange(len(row)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        offset = (within * max_bytes).astype(np.uint64)
        length = np.minimum(length[row] - offset, np.uint64(max_bytes))
        src, dst, pair = src[row] + offset, dst[row] + offset, pair[row]
    return Pieces(src, dst, length, pair)


class Chunk(Protocol):
    """A submission under way."""

    reason: str
    """The library's words once DRAINED or LOST."""

    def poll(self) -> ChunkState:
        """The state now; the terminal states are final."""


class _Ended:
    """A submission that the library refused, perhaps after it admitted a part: bytes may land."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def poll(self) -> ChunkState:
        return ChunkState.LOST


class _Singles:
    """Descriptors with an id each."""

    def __init__(self, raw: Any, session: str, pieces: Pieces) -> None:
        self.reason = ""
        self._raw = raw
        self._ids: list[int] = []
        self._lost = False
        write = raw.transfer_submit_write
        for src, dst, length in zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist(), strict=True):
            found = write(session, src, dst, length)
            if found in _BAD_IDS:
                self._fail("transfer_submit_write", found)
                break
            self._ids.append(found)

    def _fail(self, call: str, code: int) -> None:
        self._lost = True
        self.reason = self.reason or f"{call} returned {code}"

    def poll(self) -> ChunkState:
        left = []
        for one in self._ids:
            code = self._raw.transfer_check_status(one)
            if code == 0:
                left.append(one)
            elif code != 1:
                self._fail("transfer_check_status", code)
        self._ids = left
        if left:
            return ChunkState.RUNNING
        self._raw = None
        return ChunkState.LOST if self._lost else ChunkState.DONE


class _Batch:
    """A batch, and one more piece as its sentinel."""

    def __init__(self, raw: Any, batch: int, sentinel: _Singles) -> None:
        self.reason = ""
        self._raw = raw
        self._batch = batch
        self._sentinel = sentinel

    def poll(self) -> ChunkState:
        state = self._sentinel.poll()
        if state is ChunkState.RUNNING:
            return state
        raw, self._raw = self._raw, None
        if state is ChunkState.LOST:
            # The batch is neither waited for (that may hang) nor freed; its engine is replaced.
            self.reason = self._sentinel.reason
            return state
        code = raw.get_batch_transfer_status([self._batch])
        self.reason = f"get_batch_transfer_status returned {code}" if code else ""
        return ChunkState.LOST if code else ChunkState.DONE


class _Ticket:
    """A scatter operation of 0.3.14."""

    def __init__(self, ticket: Any, *, drained_is_proof: bool) -> None:
        self.reason = ""
        self._ticket = ticket
        self._drained_is_proof = drained_is_proof

    def poll(self) -> ChunkState:
        # `status` and `drained` are only as fresh as the last `drain`; with 0 ms it does not wait.
        status = self._ticket.drain(0).name
        if status == "COMPLETED":
            self._ticket = None
            return ChunkState.DONE
        if status == "FAILED_DRAINED":
            self._ticket = None
            self.reason = "the scatter operation ended as FAILED_DRAINED"
            return ChunkState.DRAINED if self._drained_is_proof else ChunkState.LOST
        return ChunkState.RUNNING


def _submit_batch(library: Library, raw: Any, session: str, pieces: Pieces) -> int:
    if library.has_arrays:
        columns = [np.ascontiguousarray(one.view(np.int64)) for one in (pieces.src, pieces.dst, pieces.length)]
        return int(raw.batch_transfer_async_write_arrays(session, *columns))
    lists = pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist()
    return int(raw.batch_transfer_async_write(session, *lists))


def _submit_ticket(raw: Any, session: str, pieces: Pieces) -> Any:
    bases: list[list[int]] = [[], [], [], []]
    offsets: list[list[list[int]]] = [[], [], []]
    for pair in np.unique(pieces.pair):
        here = pieces.pair == pair
        src, dst, length = pieces.src[here], pieces.dst[here], pieces.length[here]
        for column, values in enumerate((src, dst)):
            base = int(values.min())
            bases[2 * column].append(base)
            bases[2 * column + 1].append(int((values + length).max()) - base)
            offsets[column].append((values - np.uint64(base)).tolist())
        offsets[2].append(length.tolist())
    return raw.submit_scatter_write(session, *bases, *offsets)


def refused(reason: str) -> Chunk:
    """A LOST chunk for what could not even be tried."""
    return _Ended(reason)


def submit(library: Library, raw: Any, session: str, pieces: Pieces, transport: str) -> Chunk:
    """Hand pieces to the library. Whatever it raises or refuses is a LOST chunk."""
    try:
        if library.has_tickets and transport != "tcp":
            # Copies of our own GPU's queue have really ended once drained; over a network nothing proves it.
            return _Ticket(_submit_ticket(raw, session, pieces), drained_is_proof=transport == "nvlink_intra")
        if len(pieces) <= _SINGLES:
            return _Singles(raw, session, pieces)
        last = len(pieces) - 1
        batch = _submit_batch(library, raw, session, pieces.part(0, last))
        if batch in _BAD_IDS:
            return _Ended(f"batch_transfer_async_write returned {batch}")
        return _Batch(raw, batch, _Singles(raw, session, pieces.part(last, last + 1)))
    except Exception as error:
        return _Ended(f"{type(error).__name__}: {error}")
