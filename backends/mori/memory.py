"""Memory for the `mori` backend: a device's through a ROCm torch, and the proof that memory can be registered.

The library registers at first contact, far too late to learn that an engine's pool cannot be exported. So one byte is
really written out of adopted memory, over a second engine of this process.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from sglang_pd.backends.base import Segment
from sglang_pd.backends.library.segments import (
    allocate_host,
    allocate_torch,
    check_mapped,
    check_range,
    check_seen,
    check_size,
    refused,
)
from sglang_pd.backends.mori.library import Blocks, EngineHost, Library
from sglang_pd.backends.mori.options import MoriOptions
from sglang_pd.protocol.errors import PdError


def rocm_present() -> bool:
    """Whether this machine has a ROCm device. Starts nothing."""
    return Path("/dev/kfd").exists()


def allocate(nbytes: int, device: str) -> Segment:
    """Zeroed memory on `cpu` (page aligned) or on a ROCm device, which torch calls `cuda:N`.

    Raises `BackendError` (`memory_refused`).
    """
    check_size("mori", nbytes, device)
    if device == "cpu":
        return allocate_host("mori", nbytes)
    return allocate_torch("mori", _rocm_torch(Segment(address=0, nbytes=nbytes, device=device)), nbytes, device)


def check_adoptable(segment: Segment) -> None:
    """Refuse (`memory_refused`) what is no memory, not mapped, or on a device that is not here."""
    check_range("mori", segment)
    if segment.device == "cpu":
        check_mapped("mori", segment)
    else:
        _rocm_torch(segment)


def _rocm_torch(segment: Segment) -> Any:
    if not rocm_present():
        raise refused("mori", "this machine has no ROCm device (/dev/kfd)", segment)
    torch = importlib.import_module("torch")
    if not torch.version.hip:
        raise refused("mori", "this torch is no ROCm build", segment, actual=f"torch {torch.__version__}")
    check_seen("mori", torch, segment)
    return torch


class Prover:
    """An engine that writes to our own door. It costs a core while it lives: close it when the pools are registered."""

    def __init__(self, library: Library, options: MoriOptions, serving: EngineHost) -> None:
        self._serving = serving
        self._within_s = options.connect_timeout_s
        self._engine = EngineHost(library, options, 0)
        self._engine.add_peer(serving.desc)

    def prove(self, segment: Segment) -> None:
        """Register the segment and read its last byte with the device. Raises `BackendError` (`memory_refused`)."""
        try:
            self._engine.register(segment)
            blocks = Blocks([segment.nbytes - 1], [1024], [1])
            call = self._engine.post(self._engine.memories[-1], self._serving.door, blocks)
        except PdError as error:
            raise refused("mori", "it cannot be registered", segment, actual=error.message) from error
        end = time.monotonic() + self._within_s
        while not call.finished and time.monotonic() < end:
            self._engine.wait(call, 0.01)
        if call.failed is not None or not call.finished:
            words = call.failed.message if call.failed is not None else f"no end within {self._within_s:g} s"
            raise refused("mori", "a write out of it does not succeed", segment, actual=words)

    def close(self) -> None:
        """Destroy the engine, or keep it for ever where a write has not ended."""
        self._engine.close()
