"""One GPU's copy stream: descriptors go up, kernels run in order, an event tells when a batch has landed.

An event recorded behind a kernel completes when the kernel's stores are visible to the whole system, the peer's GPU and
host included: that is what DONE promises.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_pd.backends.local.kernel import launch_copy, launch_grid
from sglang_pd.backends.local.launch import (
    ALIGN_SLOTS,
    BLOCKS,
    FEW_RANGES,
    GridAddresses,
    GridLaunch,
    Launch,
    LaunchRanges,
    plan_grid,
    plan_launches,
)
from sglang_pd.backends.shortage import start_thread
from sglang_pd.protocol.batch import U64
from sglang_pd.protocol.errors import BackendError, PdError, TransferError

SLICE_RANGES = 32_768
FIRST_SLICE_RANGES = 2048
"""A batch is prepared and launched in slices, the first a short one, so that the GPU works while the host prepares."""

PREPARE_ALONE_RANGES = 65_536
PREPARE_THREADS = 4
"""Batches of more ranges are prepared by this many threads."""

WARM_STAGINGS = 16
Resolve = Callable[[slice], tuple[U64, U64, U64]]
"""Rows of a batch -> source address, destination address and length of each, uint64."""

FewRanges = list[tuple[int, int, int]]
"""Source address, destination address and bytes of each."""

Enqueue = Callable[[FewRanges, int], None]
"""Put a copy of each range on a CUDA stream. Raises `BackendError`."""


@dataclass(eq=False)
class Staging:
    """Room for addresses and lengths, int64: pinned on the host (`words`: as uint64), and its image on the device.

    Three rows of as many slots as a launch needs lie one behind the other, so that one copy takes them up.
    """

    host: torch.Tensor
    device: torch.Tensor
    words: U64

    @property
    def slots(self) -> int:
        """Ranges it has room for."""
        return int(self.host.shape[0]) // 3

    def send(self, count: int) -> None:
        """Take the first words up, on the current stream."""
        self.device[:count].copy_(self.host[:count], non_blocking=True)


class DevicePart:
    """Ranges under way on the stream. `settled` once the event behind their kernels has completed."""

    def __init__(self, event: torch.cuda.Event, give_back: Callable[[], None]) -> None:
        self._event = event
        self._give_back: Callable[[], None] | None = give_back
        self._settled = False
        self.error: PdError | None = None
        self.doubt: PdError | None = None

    @property
    def settled(self) -> bool:
        """See `Part`. A CUDA error leaves it unsettled for ever, with `doubt` saying what it was."""
        if not self._settled and self.doubt is None:
            try:
                self._settled = self._event.query()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                self.doubt = TransferError("CUDA failed", code="transfer_unknown", where="cuda", actual=str(error))
            if self._settled and self._give_back is not None:
                self._give_back()
                self._give_back = None
        return self._settled

    def cancel(self, cause: PdError) -> None:
        """A kernel that was launched cannot be stopped."""

    def withdraw(self, cause: PdError) -> bool:
        """See `Part`. The stream has it, whether or not the event before it has happened."""
        return False

    def wait(self) -> None:
        """Block until the event completes, or CUDA fails."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            self.doubt = TransferError("CUDA failed", code="transfer_unknown", where="cuda", actual=str(error))


class CopyStream:
    """Copies between addresses that one GPU reaches. `notify` is called from a thread when a batch has landed."""

    def __init__(self, ordinal: int, notify: Callable[[], None], enqueue: Enqueue) -> None:
        self._ordinal = ordinal
        self._enqueue = enqueue
        self._notify = notify
        self._free: list[Staging] = []
        self._stream = torch.cuda.Stream(device=ordinal)  # type: ignore[no-untyped-call]
        self._waiting: queue.SimpleQueue[DevicePart | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="pd-local-prepare")
        self._warm_up()
        self._thread = start_thread(self._run, f"pd-local-cuda-{ordinal}", "local")

    @staticmethod
    def can_wait_for(event: Any) -> bool:
        """Whether the stream can be put behind it."""
        return isinstance(event, torch.cuda.Event)

    def copy(self, ranges: int, resolve: Resolve, after: Any) -> DevicePart:
        """Start copying `ranges` ranges behind the event `after`, if any, for which `can_wait_for` is true."""
        if ranges <= FEW_RANGES:
            src, dst, length = resolve(slice(0, ranges))
            return self.copy_each(list(zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)), after)
        return self._start(after, (self._launch(plans) for plans in self._prepared(ranges, resolve)))

    def copy_each(self, ranges: FewRanges, after: Any) -> DevicePart:
        """The same for a few ranges, without a kernel."""
        return self._start(after, (), ranges)

    def copy_grids(self, grids: list[GridAddresses], after: Any) -> DevicePart:
        """The same for grids, whose descriptors only the GPU ever sees one by one."""
        return self._start(after, (self._launch_grid(grid, plan_grid(grid)) for grid in grids))

    def _start(self, after: Any, launches: Iterable[Staging], few: FewRanges | None = None) -> DevicePart:
        """Run launches on the stream, or put a few copies on it, and record the event behind them."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        used: list[Staging] = []
        part = DevicePart(event, lambda: self._free.extend(used))
        try:
            if after is not None:
                self._stream.wait_event(after)
            if few is None:
                with torch.cuda.stream(self._stream):
                    used.extend(launches)
            else:
                self._enqueue(few, self._stream.cuda_stream)
            event.record(self._stream)
        except (RuntimeError, BackendError) as error:
            # Slices before this one may be running: nobody may take the batch for not begun.
            part.doubt = TransferError("CUDA failed", code="transfer_unknown", where="cuda", actual=str(error))
            return part
        self._waiting.put(part)
        return part

    def drain(self) -> None:
        """Wait until all that was launched has run."""
        try:
            self._stream.synchronize()
        except RuntimeError:
            pass  # a failed context runs nothing more

    def close(self) -> None:
        """Drain and join the thread."""
        self.drain()
        self._waiting.put(None)
        self._thread.join()
        self._pool.shutdown()
        self._free.clear()

    def _prepared(self, ranges: int, resolve: Resolve) -> Iterator[list[LaunchRanges]]:
        first = min(FIRST_SLICE_RANGES, ranges)
        slices = [slice(0, first)]
        slices += [slice(at, min(at + SLICE_RANGES, ranges)) for at in range(first, ranges, SLICE_RANGES)]
        if ranges <= PREPARE_ALONE_RANGES:
            return (plan_launches(*resolve(rows)) for rows in slices)
        return self._pool.map(lambda rows: plan_launches(*resolve(rows)), slices)

    def _launch(self, plans: list[LaunchRanges]) -> Staging:
        starts = [0]
        for plan in plans:
            starts.append(_aligned(starts[-1] + plan.launch.ranges))
        row = starts[-1]
        staging = self._take(row)
        words, rows = staging.words, 2
        for start, plan in zip(starts, plans, strict=False):
            count = plan.launch.ranges
            words[start : start + count], words[row + start : row + start + count] = plan.src, plan.dst
            if not plan.launch.same_bytes:
                words[2 * row + start : 2 * row + start + count] = plan.length
                rows = 3
        staging.send(rows * row)
        for start, plan in zip(starts, plans, strict=False):
            src, dst, lengths = (staging.device[number * row + start :] for number in range(3))
            launch_copy(src, dst, lengths, plan.launch)
        return staging

    def _launch_grid(self, grid: GridAddresses, launch: GridLaunch) -> Staging:
        first = launch.first_block
        row = _aligned(first + launch.blocks)
        staging = self._take(row)
        words = staging.words
        for start, entries, blocks in ((0, grid.src_entry, grid.src_block), (row, grid.dst_entry, grid.dst_block)):
            words[start : start + launch.entries] = entries
            words[start + first : start + first + launch.blocks] = blocks
        at, count = (0, launch.entries) if launch.by_entry else (first, launch.blocks)
        words[2 * row + at : 2 * row + at + count] = grid.length
        staging.send(3 * row)
        launch_grid(staging.device, row, launch)
        return staging

    def _take(self, slots: int) -> Staging:
        fitting = [staging for staging in self._free if staging.slots >= slots]
        if fitting:
            best = min(fitting, key=lambda staging: staging.slots)
            self._free.remove(best)
            return best
        return self._staging(max(SLICE_RANGES, 1 << (slots - 1).bit_length()))

    def _staging(self, slots: int) -> Staging:
        with torch.cuda.device(self._ordinal):
            host = torch.zeros(3 * slots, dtype=torch.int64, pin_memory=True)
            device = torch.zeros(3 * slots, dtype=torch.int64, device=f"cuda:{self._ordinal}")
            return Staging(host, device, host.numpy().view(np.uint64))

    def _warm_up(self) -> None:
        """Compile every variant and make the first staging buffers, so that no write has to."""
        self._free += [self._staging(SLICE_RANGES) for _ in range(WARM_STAGINGS)]
        size = 64
        with torch.cuda.stream(self._stream):
            memory = torch.zeros(2 * size, dtype=torch.uint8, device=f"cuda:{self._ordinal}")
            address = memory.data_ptr()
            # Two grids of one descriptor, with the length beside the entry and beside the block.
            row = 2 * ALIGN_SLOTS
            image = torch.zeros(3 * row, dtype=torch.int64)
            image[0], image[row], image[2 * row], image[2 * row + ALIGN_SLOTS] = address, address + size, size, size
            words = image.to(memory.device)
            src, dst, lengths = words[:row], words[row : 2 * row], words[2 * row :]
            for word, blocks in BLOCKS.items():
                for block in blocks:
                    launch_copy(src, dst, lengths, Launch(1, word, block, size))
                    for by_entry in (False, True):
                        launch_grid(words, row, GridLaunch(1, 1, 1, size, ALIGN_SLOTS, by_entry, word, block))
        self._stream.synchronize()

    def _run(self) -> None:
        while (part := self._waiting.get()) is not None:
            part.wait()
            self._notify()


def _aligned(slots: int) -> int:
    return -(-slots // ALIGN_SLOTS) * ALIGN_SLOTS
