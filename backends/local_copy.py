"""Copy scattered ranges between mapped host memories: no compiled code, no Python loop over descriptors.

numpy copies a list of items through one fancy-indexed assignment, provided that all are of one length. So ranges are
cut into items of few lengths, each length is a *lane*, and a lane is copied in chunks small enough for the intermediate
buffer to stay in the cache. numpy holds the interpreter lock while it copies fewer than 501 items at once, hence pages
are cut into items of 2 KiB: the owner's thread runs on while copier threads copy.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.errors import PdError, TransferError

I64 = NDArray[np.int64]
Piece = Callable[[], object]

ITEM_BYTES = 2048
"""Longest item copied through numpy, in bytes."""

DIRECT_BYTES = 256 << 10
"""Ranges at least this long are moved whole by `memmove`, in pieces of `CHUNK_BYTES`."""

CHUNK_BYTES = 1 << 20
"""Bytes copied between two looks at the job's state."""

LANES_BY_LENGTH = 8
"""Tails of up to this many different lengths are lanes of their own; more are cut into powers of two."""

AWAIT_EVENT_S = 0.0002
"""Pause between two queries of a device event that source bytes depend on."""


@dataclass(frozen=True)
class Lane:
    """Ranges to copy in items of one length.

    src, dst: int64 addresses of shape [ranges]. item_bytes: length of one item. items: how many consecutive items each
    range has, the same for all.
    """

    src: I64
    dst: I64
    item_bytes: int
    items: int

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Slices of the ranges, each of about `CHUNK_BYTES`."""
        step = max(1, CHUNK_BYTES // (self.item_bytes * self.items))
        total = self.src.shape[0]
        return ((start, min(start + step, total)) for start in range(0, total, step))

    def copy(self, start: int, stop: int) -> None:
        """Copy ranges `start` to `stop`."""
        src, dst = self.src[start:stop], self.dst[start:stop]
        if self.items > 1:
            steps = np.arange(0, self.items * self.item_bytes, self.item_bytes, dtype=np.int64)
            src, dst = (src[:, None] + steps).ravel(), (dst[:, None] + steps).ravel()
        from_view, from_index = _view(src, self.item_bytes)
        to_view, to_index = _view(dst, self.item_bytes)
        to_view[to_index] = from_view[from_index]


class _Window:
    """Memory as numpy's array interface describes it: items of one length, one starting at every byte."""

    def __init__(self, address: int, items: int, item_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (items,),
            "strides": (1,),
            "typestr": f"|V{item_bytes}",
            "version": 3,
        }


def _view(addresses: I64, item_bytes: int) -> tuple[NDArray[np.void], I64]:
    """An array over the span of the addresses, and the index in it of each.

    The span is kept as small as the chunk's own addresses: numpy makes a safety copy wherever a view's span covers its
    intermediate buffer.
    """
    low = int(addresses.min())
    return np.asarray(_Window(low, int(addresses.max()) - low + 1, item_bytes)), addresses - low


def plan_lanes(src: I64, dst: I64, length: I64) -> list[Lane]:
    """Cut ranges of at most `DIRECT_BYTES` bytes into lanes. All arrays have shape [ranges]; addresses are int64."""
    whole, tail = np.divmod(length, ITEM_BYTES)
    counts = np.unique(whole)
    counts = counts[counts > 0]
    if counts.shape[0] <= LANES_BY_LENGTH:
        lanes = [Lane(src[whole == n], dst[whole == n], ITEM_BYTES, int(n)) for n in counts]
    else:
        lanes = [_single_items(src, dst, whole)]
    done = length - tail
    return lanes + _tails(src + done, dst + done, tail)


def _single_items(src: I64, dst: I64, whole: I64) -> Lane:
    first = np.cumsum(whole) - whole
    step = (np.arange(int(whole.sum()), dtype=np.int64) - np.repeat(first, whole)) * ITEM_BYTES
    return Lane(np.repeat(src, whole) + step, np.repeat(dst, whole) + step, ITEM_BYTES, 1)


def _tails(src: I64, dst: I64, tail: I64) -> list[Lane]:
    lengths = np.unique(tail)
    lengths = lengths[lengths > 0]
    if lengths.shape[0] <= LANES_BY_LENGTH:
        return [Lane(src[tail == n], dst[tail == n], int(n), 1) for n in lengths]
    lanes = []
    for bit in range(ITEM_BYTES.bit_length() - 2, -1, -1):
        has = (tail >> bit) & 1 == 1
        if has.any():
            # Higher bits were copied before: skip them.
            skip = tail[has] >> (bit + 1) << (bit + 1)
            lanes.append(Lane(src[has] + skip, dst[has] + skip, 1 << bit, 1))
    return lanes


def copy_now(src: I64, dst: I64, length: I64) -> None:
    """Copy ranges in the calling thread; for batches of few bytes."""
    if length.shape[0] == 1:
        ctypes.memmove(int(dst[0]), int(src[0]), int(length[0]))
        return
    for lane in plan_lanes(src, dst, length):
        for start, stop in lane.chunks():
            lane.copy(start, stop)


class CopyJob:
    """Ranges on their way. `settled` turns True when nothing more of it will be copied; then `error` is final."""

    def __init__(self, src: I64, dst: I64, length: I64, after: Any = None) -> None:
        self.settled = False
        self.error: PdError | None = None
        self.after = after
        self._cancelled: PdError | None = None
        self._ranges = (src, dst, length)
        self._planned = False
        self._pieces: deque[Piece] = deque()
        self._running = 0

    def cancel(self, cause: PdError) -> None:
        """Copy nothing more than what is being copied; the job then settles with `cause`, unless all was copied."""
        self._cancelled = self._cancelled or cause

    def _plan(self) -> None:
        src, dst, length = self._ranges
        large = length >= DIRECT_BYTES
        if large.any():
            for at in np.flatnonzero(large).tolist():
                for start in range(0, int(length[at]), CHUNK_BYTES):
                    count = min(CHUNK_BYTES, int(length[at]) - start)
                    self._pieces.append(partial(ctypes.memmove, int(dst[at]) + start, int(src[at]) + start, count))
            src, dst, length = src[~large], dst[~large], length[~large]
        for lane in plan_lanes(src, dst, length):
            self._pieces.extend(partial(lane.copy, start, stop) for start, stop in lane.chunks())

    # The copier calls what follows with its lock held; the pieces themselves, the plan first of all, run outside it.

    def take(self) -> Piece | None:
        """The next piece of work, or None when there is none to be had now."""
        if self._cancelled or (self._planned and not self._pieces):
            return None
        if not self._planned and self._running:
            return None
        self._running += 1
        if not self._planned:
            return self._plan
        return self._pieces.popleft()

    def is_ready(self) -> bool:
        """False while the event that the bytes depend on has not happened."""
        if self.after is None or self._cancelled:
            return True
        try:
            if not self.after.query():
                return False
        except Exception as error:
            cause = TransferError("the event that the bytes depend on failed", where="after", actual=repr(error))
            self.cancel(cause)
        self.after = None
        return True

    def finish(self, failed: BaseException | None) -> None:
        """A piece that was taken is done."""
        self._running -= 1
        self._planned = True
        if failed is not None:
            self.cancel(TransferError("the copy failed", where="local copier", actual=repr(failed)))

    def try_settle(self) -> bool:
        """Settle if nothing is running and nothing is left or wanted; True when it did so now."""
        complete = self._planned and not self._pieces
        if self.settled or self._running or not (complete or self._cancelled):
            return False
        self.error = self._cancelled
        self._pieces.clear()
        self.after = None
        self.settled = True
        return True


class Copier:
    """Threads that copy jobs in order, several on one job at a time. `notify` is called when a job settles."""

    def __init__(self, threads: int, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._jobs: deque[CopyJob] = deque()
        self._condition = threading.Condition()
        self._closing = False

    def submit(self, job: CopyJob) -> None:
        """Queue a job. Starts the threads at the first one."""
        with self._condition:
            if not self._threads:
                for number in range(self._wanted):
                    thread = threading.Thread(target=self._run, name=f"pd-local-copy-{number}", daemon=True)
                    self._threads.append(thread)
                    thread.start()
            self._jobs.append(job)
            self._condition.notify_all()

    def close(self, cause: PdError) -> None:
        """Cancel what is queued and join the threads."""
        with self._condition:
            self._closing = True
            for job in self._jobs:
                job.cancel(cause)
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                found = self._next()
                if found is None:
                    if self._closing and not self._jobs:
                        return
                    # Jobs that remain wait for an event or for another thread's last piece.
                    self._condition.wait(AWAIT_EVENT_S if self._jobs else None)
                    continue
            job, piece = found
            failed: BaseException | None = None
            try:
                piece()
            except Exception as error:
                failed = error
            with self._condition:
                job.finish(failed)

    def _next(self) -> tuple[CopyJob, Piece] | None:
        """The first piece of the first job that is ready. Settles jobs that have nothing left."""
        for job in list(self._jobs):
            if not job.is_ready():
                continue
            piece = job.take()
            if piece is not None:
                return job, piece
            if job.try_settle():
                self._jobs.remove(job)
                self._notify()
        return None
