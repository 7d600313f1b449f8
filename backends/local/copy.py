"""Copy scattered ranges between mapped host memories: no compiled code, no Python loop over descriptors.

numpy copies a list of items through one fancy-indexed assignment, provided that all are of one length. So ranges of one
length are a *lane*, and a lane is copied in chunks small enough for the intermediate buffer to stay in the cache. numpy
holds the interpreter lock while it copies fewer than 501 items at once, unless each item is an array itself: then it
gives the lock away, and other threads run. Hence long ranges are seen as two halves.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.shortage import start_thread
from sglang_pd.protocol.errors import BackendUnavailable, PdError, TransferError

I64 = NDArray[np.int64]
Piece = Callable[[], object]

HALVES_FROM_BYTES = 2048
"""Ranges at least this long are copied as two halves each, shorter ones as one item and at least 512 at once."""

DIRECT_BYTES = 256 << 10
"""Ranges at least this long are moved whole by `memmove`, in pieces of `MOVE_BYTES`."""

CHUNK_BYTES = 512 << 10
MOVE_BYTES = 1 << 20
"""Bytes copied between two looks at the job's state."""

LANES_BY_LENGTH = 8
"""Up to this many different lengths are lanes of their own."""

ITEM_BYTES = 8192
"""More different lengths are cut into items of this length and powers of two."""

AWAIT_EVENT_S = 0.0002
"""Pause between two queries of a device event that source bytes depend on."""


@dataclass(frozen=True)
class Ranges:
    """Ranges to copy between two stretches of memory.

    src, dst: int64 addresses of shape [ranges]. length: int64 bytes of shape [ranges]. src_span, dst_span: lowest and
    one past the highest address of the memory they lie in (a segment's, so that nothing else lies between them).
    """

    src: I64
    dst: I64
    length: I64
    src_span: tuple[int, int]
    dst_span: tuple[int, int]

    def chosen(self, rows: NDArray[np.bool_]) -> Ranges:
        """Some of the ranges."""
        return Ranges(self.src[rows], self.dst[rows], self.length[rows], self.src_span, self.dst_span)


class Lane:
    """Ranges of one length; `src` and `dst` are offsets from the spans' starts.

    numpy copies its intermediate buffer once more wherever a view might overlap it, hence views of spans, not of all
    memory.
    """

    def __init__(self, ranges: Ranges, src: I64, dst: I64, nbytes: int) -> None:
        self._from = np.asarray(_Window(ranges.src_span, nbytes))
        self._to = np.asarray(_Window(ranges.dst_span, nbytes))
        self._src = src - ranges.src_span[0]
        self._dst = dst - ranges.dst_span[0]
        self._chunk = max(CHUNK_BYTES // nbytes, 1 if nbytes >= HALVES_FROM_BYTES else 512)

    def chunks(self) -> Iterator[Piece]:
        """Copies of slices of the ranges, each of about `CHUNK_BYTES`."""
        for start in range(0, self._src.shape[0], self._chunk):
            yield partial(self._copy, slice(start, start + self._chunk))

    def _copy(self, rows: slice) -> None:
        self._to[self._dst[rows]] = self._from[self._src[rows]]


class _Window:
    """Memory as numpy's array interface describes it: items of `nbytes`, one starting at every byte of the span.

    Long items are rows of two halves, which overlap by a byte where `nbytes` is odd: that byte is copied twice.
    """

    def __init__(self, span: tuple[int, int], nbytes: int) -> None:
        items = span[1] - span[0] - nbytes + 1
        halves = nbytes >= HALVES_FROM_BYTES
        half = -(-nbytes // 2)
        self.__array_interface__ = {
            "data": (span[0], False),
            "shape": (items, 2) if halves else (items,),
            "strides": (1, nbytes - half) if halves else (1,),
            "typestr": f"|V{half if halves else nbytes}",
            "version": 3,
        }


def plan_lanes(ranges: Ranges) -> list[Lane]:
    """Cut ranges into lanes."""
    src, dst, length = ranges.src, ranges.dst, ranges.length
    lengths = _different(length)
    if len(lengths) <= LANES_BY_LENGTH:
        return [Lane(ranges, src[length == n], dst[length == n], n) for n in lengths]
    whole, tail = np.divmod(length, ITEM_BYTES)
    if not whole.any():  # and the memory may be smaller than an item
        return _tails(ranges, src, dst, tail)
    first = np.cumsum(whole) - whole
    step = (np.arange(int(whole.sum()), dtype=np.int64) - np.repeat(first, whole)) * ITEM_BYTES
    lanes = [Lane(ranges, np.repeat(src, whole) + step, np.repeat(dst, whole) + step, ITEM_BYTES)]
    done = length - tail
    return lanes + _tails(ranges, src + done, dst + done, tail)


def _tails(ranges: Ranges, src: I64, dst: I64, tail: I64) -> list[Lane]:
    lanes = []
    for bit in range(ITEM_BYTES.bit_length() - 2, -1, -1):
        has = (tail >> bit) & 1 == 1
        if has.any():
            # The higher bits' bytes are in other lanes: skip them.
            skip = tail[has] >> (bit + 1) << (bit + 1)
            lanes.append(Lane(ranges, src[has] + skip, dst[has] + skip, 1 << bit))
    return lanes


def _different(values: I64) -> list[int]:
    """The positive values that occur, each once."""
    if values.shape[0] and int(values.min()) == int(values.max()):
        return [int(values[0])] if values[0] > 0 else []
    found: list[int] = np.unique(values[values > 0]).tolist()
    return found


def plan_pieces(ranges: Ranges) -> Iterator[Piece]:
    """All that must be called, in any order and on any thread, to copy the ranges."""
    large = ranges.length >= DIRECT_BYTES
    if large.any():
        for at in np.flatnonzero(large).tolist():
            src, dst, length = int(ranges.src[at]), int(ranges.dst[at]), int(ranges.length[at])
            for start in range(0, length, MOVE_BYTES):
                yield partial(ctypes.memmove, dst + start, src + start, min(MOVE_BYTES, length - start))
        ranges = ranges.chosen(~large)
    for lane in plan_lanes(ranges):
        yield from lane.chunks()


def copy_now(groups: Sequence[Ranges]) -> None:
    """Copy in the calling thread; for batches of few bytes."""
    for ranges in groups:
        for piece in plan_pieces(ranges):
            piece()


class CopyJob:
    """Ranges on their way. `settled` turns True when nothing more of it will be copied; then `error` is final."""

    def __init__(self, grouped: Callable[[], Sequence[Ranges]], after: Any = None) -> None:
        """`grouped` is called by a copier thread."""
        self.settled = False
        self.error: PdError | None = None
        self.doubt: PdError | None = None
        self.after = after
        self._cancelled: PdError | None = None
        self._grouped: Callable[[], Sequence[Ranges]] | None = grouped
        self._planned = False
        self._pieces: deque[Piece] = deque()
        self._running = 0
        self._begun = False
        self._beginning = threading.Lock()

    def cancel(self, cause: PdError) -> None:
        """Copy nothing more than what is being copied; the job then settles with `cause`, unless all was copied."""
        self._cancelled = self._cancelled or cause

    def withdraw(self, cause: PdError) -> bool:
        """Copy nothing of it, and True; False, and no effect, where a copier has begun."""
        with self._beginning:
            if not self._begun:
                self.cancel(cause)
            return not self._begun

    def _plan(self) -> None:
        if self._grouped is not None:
            for ranges in self._grouped():
                self._pieces.extend(plan_pieces(ranges))
            self._grouped = None

    # The copier calls what follows with its lock held; the pieces themselves, the plan first of all, run outside it.

    def take(self) -> Piece | None:
        """The next piece of work, or None when there is none to be had now."""
        with self._beginning:
            if self._cancelled or (self._planned and not self._pieces):
                return None
            self._begun = True
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
        """Queue a job. Starts the threads at the first one. Raises `BackendUnavailable` where the system has none."""
        with self._condition:
            for number in range(len(self._threads), self._wanted):
                try:
                    self._threads.append(start_thread(self._run, f"pd-local-copy-{number}", "local"))
                except BackendUnavailable:
                    if not self._threads:
                        raise
                    break  # those that run do it; the next job asks again
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
