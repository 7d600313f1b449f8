"""One GPU's copy stream: descriptors go up, kernels run in order, an event tells when a batch has landed.

An event recorded behind a kernel completes when the kernel's stores are visible to the whole system, the peer's GPU and
host included: that is what DONE promises.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_pd.backends.local_kernel import launch_copy
from sglang_pd.backends.local_launch import BLOCKS, WORD_BYTES, Launch, LaunchRanges, plan_launches
from sglang_pd.protocol.batch import U64
from sglang_pd.protocol.errors import BackendError, PdError, TransferError

SMALLEST_SLOTS = 1024
WARM_SLOTS = 1 << 18
"""Ranges a staging buffer made at start has room for: two batches of 65,536 ranges need no allocation."""


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
        self._warm_up()
        self._thread.start()

    def copy(self, src: U64, dst: U64, length: U64, after: Any) -> DevicePart:
        """Start copying ranges (uint64 of shape [ranges]) behind the event `after`, if any.

        Raises `BackendError` for an event that a stream cannot wait for, and where CUDA refuses the launch.
        """
        if after is not None and not isinstance(after, torch.cuda.Event):
            raise BackendError(
                "device memory can only wait for a CUDA event",
                where="after",
                expected="torch.cuda.Event",
                actual=type(after).__name__,
            )
        plans = plan_launches(src, dst, length)
        try:
            return self._start(plans, after)
        except RuntimeError as error:
            raise BackendError("CUDA refused a launch", where=f"cuda:{self._ordinal}", actual=str(error)) from error

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
        self._free.clear()

    def _start(self, plans: list[LaunchRanges], after: torch.cuda.Event | None) -> DevicePart:
        total = sum(plan.launch.ranges for plan in plans)
        staging = self._take(total)
        host = staging.host.numpy().view(np.uint64)
        start = 0
        for plan in plans:
            stop = start + plan.launch.ranges
            host[0, start:stop], host[1, start:stop] = plan.src, plan.dst
            if not plan.launch.same_bytes:
                host[2, start:stop] = plan.length
            start = stop
        rows = 2 if all(plan.launch.same_bytes for plan in plans) else 3
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for row in range(rows):
                staging.device[row, :total].copy_(staging.host[row, :total], non_blocking=True)
            if after is not None:
                # Behind the upload: descriptors depend on nothing.
                self._stream.wait_event(after)
            start = 0
            for plan in plans:
                src, dst, lengths = (staging.device[row, start:] for row in range(3))
                launch_copy(src, dst, lengths, plan.launch)
                start += plan.launch.ranges
            event.record(self._stream)
        part = DevicePart(event, lambda: self._free.append(staging))
        self._waiting.put(part)
        return part

    def _take(self, ranges: int) -> Staging:
        fitting = [staging for staging in self._free if staging.slots >= ranges]
        if fitting:
            best = min(fitting, key=lambda staging: staging.slots)
            self._free.remove(best)
            return best
        return self._staging(max(SMALLEST_SLOTS, 1 << (ranges - 1).bit_length()))

    def _staging(self, slots: int) -> Staging:
        with torch.cuda.device(self._ordinal):
            host = torch.zeros((3, slots), dtype=torch.int64, pin_memory=True)
            return Staging(host, torch.zeros((3, slots), dtype=torch.int64, device=f"cuda:{self._ordinal}"))

    def _warm_up(self) -> None:
        """Compile every variant and make the first staging buffers, so that no write has to."""
        self._free += [self._staging(WARM_SLOTS), self._staging(WARM_SLOTS)]
        size = 64
        with torch.cuda.stream(self._stream):
            memory = torch.zeros(2 * size, dtype=torch.uint8, device=f"cuda:{self._ordinal}")
            address = memory.data_ptr()
            row = torch.tensor([[address], [address + size], [size]], device=memory.device)
            for word in WORD_BYTES:
                for block in BLOCKS:
                    launch_copy(row[0], row[1], row[2], Launch(1, word, block, size))
        self._stream.synchronize()

    def _run(self) -> None:
        while (part := self._waiting.get()) is not None:
            part.wait()
            self._notify()
