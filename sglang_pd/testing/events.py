"""What an engine brings along: device events that happen late, and tensors that it allocated itself."""

from __future__ import annotations

import threading
import time
from typing import Any

from sglang_pd.backends.base import Segment
from sglang_pd.testing import memory


class HostEvent:
    """An event with the two methods that the contract asks for, set by a thread."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def set(self) -> None:
        """Let it happen."""
        self._happened.set()

    def query(self) -> bool:
        """Whether it happened."""
        return self._happened.is_set()

    def synchronize(self) -> None:
        """Block until it happened."""
        self._happened.wait()


def late_event(segment: Segment, value: int, late_s: float) -> Any:
    """An event behind which, `late_s` seconds from now, the segment is filled with `value`."""
    if segment.device != "cpu":
        return _late_on_device(segment, value, late_s)
    event = HostEvent()

    def happen() -> None:
        time.sleep(late_s)
        memory.fill(segment, 0, segment.nbytes, value)
        event.set()

    threading.Thread(target=happen, daemon=True).start()
    return event


def _late_on_device(segment: Segment, value: int, late_s: float) -> Any:
    import torch
    from cuda.bindings import runtime

    ordinal = int(segment.device.partition(":")[2])
    with torch.cuda.device(ordinal):
        stream = torch.cuda.Stream(device=ordinal)  # type: ignore[no-untyped-call]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            # Cycles of a clock of about 2 GHz; how long exactly does not matter.
            torch.cuda._sleep(int(late_s * 2e9))  # type: ignore[no-untyped-call]
            runtime.cudaMemsetAsync(segment.address, value, segment.nbytes, stream.cuda_stream)
            event.record(stream)
    return event


def device_tensor(nbytes: int, device: str, expandable: bool) -> Any:
    """A uint8 tensor of torch's own allocator, behind another one; in expandable segments if wanted."""
    import torch

    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    before = torch.empty(nbytes, dtype=torch.uint8, device=device)
    wanted = torch.empty(nbytes, dtype=torch.uint8, device=device)
    del before
    return wanted
