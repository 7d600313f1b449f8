"""The proof that memory can be registered: really writing one byte out of it, over a second engine of this process.

The library registers at first contact, far too late to learn that an engine's pool cannot be exported.
"""

from __future__ import annotations

import time

from sglang_pd.backends.base import Segment
from sglang_pd.backends.mori_library import Blocks, EngineHost, Library
from sglang_pd.backends.mori_memory import refused
from sglang_pd.backends.mori_options import MoriOptions
from sglang_pd.protocol.errors import PdError


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
            raise refused("it cannot be registered", segment.nbytes, segment.device, actual=error.message) from error
        end = time.monotonic() + self._within_s
        while not call.finished and time.monotonic() < end:
            self._engine.wait(call, 0.01)
        if call.failed is not None or not call.finished:
            words = call.failed.message if call.failed is not None else f"no end within {self._within_s:g} s"
            raise refused("a write out of it does not succeed", segment.nbytes, segment.device, actual=words)

    def close(self) -> None:
        """Destroy the engine, or keep it for ever where a write has not ended."""
        self._engine.close()
