"""One submission to the library and how its end is learnt, without ever blocking on a peer that hangs.

What a version offers decides the form: a scatter ticket (0.3.14) can be asked at any time; before that a batch can only
be waited for, spinning. There the chunk's last descriptor is submitted by itself and asked instead. A peer's queue is
first in, first out, so that when it has ended the batch before it has, but for what the other lanes have in hand, and
the wait is short. (It is also faster than waiting: the library's wait takes a core from its own I/O thread.)
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import numpy as np

from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.mooncake.library import Library

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


def merge(rows: Rows, max_bytes: int) -> Rows:
    """Sort by destination, join neighbours contiguous on both sides within one pair, cut what exceeds `max_bytes`."""
    if len(rows) == 1:
        return rows if rows.length.item() <= max_bytes else rows.cut(max_bytes)
    return rows.by_destination().merged().cut(max_bytes)


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

    def __init__(self, raw: Any, session: str, pieces: Rows) -> None:
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


def _submit_batch(library: Library, raw: Any, session: str, pieces: Rows) -> int:
    if library.has_arrays:
        columns = [np.ascontiguousarray(one.view(np.int64)) for one in (pieces.src, pieces.dst, pieces.length)]
        return int(raw.batch_transfer_async_write_arrays(session, *columns))
    lists = pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist()
    return int(raw.batch_transfer_async_write(session, *lists))


def _submit_ticket(raw: Any, session: str, pieces: Rows) -> Any:
    bases: list[list[int]] = [[], [], [], []]
    offsets: list[list[list[int]]] = [[], [], []]
    for part in pieces.grouped().slices(len(pieces), 1 << 63, one_pair=True):
        for column, values in enumerate((part.src, part.dst)):
            base = int(values.min())
            bases[2 * column].append(base)
            bases[2 * column + 1].append(int((values + part.length).max()) - base)
            offsets[column].append((values - np.uint64(base)).tolist())
        offsets[2].append(part.length.tolist())
    return raw.submit_scatter_write(session, *bases, *offsets)


def refused(reason: str) -> Chunk:
    """A LOST chunk for what could not even be tried."""
    return _Ended(reason)


def submit(library: Library, raw: Any, session: str, pieces: Rows, transport: str) -> Chunk:
    """Hand pieces to the library. Whatever it raises or refuses is a LOST chunk."""
    try:
        if library.has_tickets and transport != "tcp":
            # Copies of our own GPU's queue have really ended once drained; over a network nothing proves it.
            return _Ticket(_submit_ticket(raw, session, pieces), drained_is_proof=transport == "nvlink_intra")
        if len(pieces) <= _SINGLES:
            return _Singles(raw, session, pieces)
        last = len(pieces) - 1
        batch = _submit_batch(library, raw, session, pieces.take(slice(0, last)))
        if batch in _BAD_IDS:
            return _Ended(f"batch_transfer_async_write returned {batch}")
        return _Batch(raw, batch, _Singles(raw, session, pieces.take(slice(last, last + 1))))
    except Exception as error:
        return _Ended(f"{type(error).__name__}: {error}")
