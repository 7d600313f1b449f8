"""One GPU's copy stream: descriptors go up, kernels run in order, an event tells when a batch has landed.

An event recorded behind a kernel completes when the kernel's stores are visible to the whole system, the peer's GPU and
host included: that is what DONE promises.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_pd.backends.local_kernel import launch_copy, launch_grid
from sglang_pd.backends.local_launch import (
    ALIGN_SLOTS,
    BLOCKS,
    GridAddresses,
    GridLaunch,
    Launch,
    LaunchRanges,
    plan_grid,
    plan_launches,
)
from sglang_pd.protocol.batch import U64
from sglang_pd.protocol.errors import PdError, TransferError

SLICE_RANGES = 32_768
FIRST_SLICE_RANGES = 2048
"""A batch is prepared and launched in slices, the first a short one, so that the GPU works while the host prepares."""

PREPARE_ALONE_RANGES = 65_536
PREPARE_THREADS = 4
"""Batches of more ranges are prepared by this many threads."""

WARM_STAGINGS = 16
Resolve = Callable[[slice], tuple[U64, U64, U64]]
"""Rows of a batch -> source address, destination address and length of each, uint64."""


@dataclass(eq=False)
class Staging:
    """Three rows of int64 for addresses and lengths: pinned on the host, and their image on the device."""

    host: torch.Tensor
    device: torch.Tensor

    @property
    def slots(self) -> int:
        """Ranges it has room for."""
        return int(self.host.shape[1])


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

    def wait(self) -> None:
        """Block until the event completes, or CUDA fails."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            self.doubt = TransferError("CUDA failed", code="transfer_unknown", where="cuda", actual=str(error))


class CopyStream:
    """Copies between addresses that one GPU reaches. `notify` is called from a thread when a batch has landed."""

    def __init__(self, ordinal: int, notify: Callable[[], None]) -> None:
        self._ordinal = ordinal
        self._notify = notify
        self._free: list[Staging] = []
        self._stream = torch.cuda.Stream(device=ordinal)  # type: ignore[no-untyped-call]
        self._waiting: queue.SimpleQueue[DevicePart | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"pd-local-cuda-{ordinal}", daemon=True)
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="pd-local-prepare")
        self._warm_up()
        self._thread.start()

    @staticmethod
    def can_wait_for(event: Any) -> bool:
        """Whether the stream can be put behind it."""
        return isinstance(event, torch.cuda.Event)

    def copy(self, ranges: int, resolve: Resolve, after: Any) -> DevicePart:
        """Start copying `ranges` ranges behind the event `after`, if any, for which `can_wait_for` is true."""
        return self._start(after, (self._launch(plans) for plans in self._prepared(ranges, resolve)))

    def copy_grids(self, grids: list[GridAddresses], after: Any) -> DevicePart:
        """The same for grids, whose descriptors only the GPU ever sees one by one."""
        return self._start(after, (self._launch_grid(grid, plan_grid(grid)) for grid in grids))

    def _start(self, after: Any, launches: Iterator[Staging]) -> DevicePart:
        """Run launches on the stream, and record the event behind them."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        used: list[Staging] = []
        part = DevicePart(event, lambda: self._free.extend(used))
        try:
            with torch.cuda.stream(self._stream):
                if after is not None:
                    self._stream.wait_event(after)
                for staging in launches:
                    used.append(staging)
                event.record(self._stream)
        except RuntimeError as error:
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
            starts.append(-(-(starts[-1] + plan.launch.ranges) // ALIGN_SLOTS) * ALIGN_SLOTS)
        staging = self._take(starts[-1])
        host = staging.host.numpy().view(np.uint64)
        rows = 2
        for start, plan in zip(starts, plans, strict=False):
            stop = start + plan.launch.ranges
            host[0, start:stop], host[1, start:stop] = plan.src, plan.dst
            if not plan.launch.same_bytes:
                host[2, start:stop] = plan.length
                rows = 3
        for row in range(rows):
            staging.device[row, : starts[-1]].copy_(staging.host[row, : starts[-1]], non_blocking=True)
        for start, plan in zip(starts, plans, strict=False):
            src, dst, lengths = (staging.device[row, start:] for row in range(3))
            launch_copy(src, dst, lengths, plan.launch)
        return staging

    def _launch_grid(self, grid: GridAddresses, launch: GridLaunch) -> Staging:
        first = launch.first_block
        stop = first + launch.blocks
        staging = self._take(stop)
        host = staging.host.numpy().view(np.uint64)
        for row, (entries, blocks) in enumerate(((grid.src_entry, grid.src_block), (grid.dst_entry, grid.dst_block))):
            host[row, : launch.entries], host[row, first:stop] = entries, blocks
        at = slice(0, launch.entries) if launch.by_entry else slice(first, stop)
        host[2, at] = grid.length
        for row in range(3):
            staging.device[row, :stop].copy_(staging.host[row, :stop], non_blocking=True)
        launch_grid(staging.device, launch)
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
            host = torch.zeros((3, slots), dtype=torch.int64, pin_memory=True)
            return Staging(host, torch.zeros((3, slots), dtype=torch.int64, device=f"cuda:{self._ordinal}"))

    def _warm_up(self) -> None:
        """Compile every variant and make the first staging buffers, so that no write has to."""
        self._free += [self._staging(SLICE_RANGES) for _ in range(WARM_STAGINGS)]
        size = 64
        with torch.cuda.stream(self._stream):
            memory = torch.zeros(2 * size, dtype=torch.uint8, device=f"cuda:{self._ordinal}")
            address = memory.data_ptr()
            row = torch.tensor([[address], [address + size], [size]], device=memory.device)
            grid = self._free[0]
            grid.device[0, 0], grid.device[1, 0], grid.device[2, 0] = address, address + size, size
            grid.device[2, ALIGN_SLOTS] = size
            for word, blocks in BLOCKS.items():
                for block in blocks:
                    launch_copy(row[0], row[1], row[2], Launch(1, word, block, size))
                    for by_entry in (False, True):
                        launch_grid(grid.device, GridLaunch(1, 1, 1, size, ALIGN_SLOTS, by_entry, word, block))
        self._stream.synchronize()

    def _run(self) -> None:
        while (part := self._waiting.get()) is not None:
            part.wait()
            self._notify()
