"""A backend that only holds memory: enough for a scope, and it adopts host memory, which `local` cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from sglang_pd.backends.base import Backend, Capabilities, Peer, Segment, Transfer
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.errors import BackendError


class StubBackend(Backend):
    """Memory without a transport."""

    def __init__(self, epoch: int = 1, *, adopts: bool = True, probe: str = "") -> None:
        self._epoch, self._adopts, self._probe = epoch, adopts, probe
        self.closed = False
        self.adopted: list[Segment] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="stub",
            host_memory=True,
            device_memory=False,
            same_host_only=True,
            adopts_host=self._adopts,
            adopts_device=False,
            revoke_proof="none",
            revoke_scope="peer",
            revoke_within_s=0.0,
            verified_on={},
        )

    @property
    def epoch(self) -> int:
        return self._epoch

    def allocate(self, nbytes: int, device: str = "cpu") -> Segment:
        if device != "cpu":
            raise BackendError("no device here", code="memory_refused", where=device)
        room = np.zeros(nbytes + 4096, np.uint8)
        start = -int(room.ctypes.data) % 4096
        memory = room[start : start + nbytes]
        return Segment(int(memory.ctypes.data), nbytes, device, memory)

    def adopt(self, segment: Segment) -> Segment:
        if self._probe:
            raise BackendError(self._probe, code="memory_refused", where=f"{segment.nbytes} bytes")
        self.adopted.append(segment)
        return segment

    def register(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        return tuple(dataclasses.replace(segment, number=number) for number, segment in enumerate(segments))

    def describe(self) -> bytes:
        return b""

    def connect(self, blob: bytes, epoch: int) -> Peer:
        raise BackendError("a stub connects to nobody")

    def write(self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = 0.0) -> Transfer:
        raise BackendError("a stub writes nothing")

    def fence(self, peer: Peer) -> bool:
        return False

    def revoke(self, epoch: int) -> bool:
        return False

    def progress(self) -> None:
        return None

    def wakeup_fd(self) -> int | None:
        return None

    def disconnect(self, peer: Peer) -> None:
        return None

    def close(self) -> None:
        self.closed = True
