"""Writes that never move and stay in one state until they are let go, for what a transport does at its own time."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pd.backends.base import Backend, Transfer, TransferState


class HeldWrite(Transfer):
    """One of them."""

    error = None

    def __init__(self, state: TransferState, nbytes: int, let_go: bool) -> None:
        self.state, self.nbytes, self._let_go = state, nbytes, let_go

    def poll(self) -> TransferState:
        """See `Transfer`."""
        return self.state

    @property
    def source_free(self) -> bool:
        """See `Transfer`."""
        return self._let_go or self.quiesced


class HeldWrites:
    """All writes of a backend from here on, none of which it fences. source_free: nothing reads their source."""

    def __init__(
        self, backend: Backend, patch: pytest.MonkeyPatch, state: TransferState, *, source_free: bool = False
    ) -> None:
        self.held: list[HeldWrite] = []

        def write(peer: Any, batch: Any, **how: Any) -> HeldWrite:
            self.held.append(HeldWrite(state, batch.total_bytes, source_free))
            return self.held[-1]

        patch.setattr(backend, "write", write)
        patch.setattr(backend, "fence", lambda peer: False)

    def end(self) -> None:
        """All are FAILED."""
        for one in self.held:
            one.state = TransferState.FAILED
