"""The fence of a rank's writes: what is proven is said, even where the last write ends while it is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pd.backends.base import TransferState
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.manifest import RankId
from sglang_pd.worker.ranks.flights import Flight
from sglang_pd.worker.ranks.source import SourceSide, _Room


class Ending:
    """UNKNOWN until it was looked at `looks` times, then DONE. let_go: nothing reads its source any more."""

    error = None

    def __init__(self, looks: int, *, let_go: bool = False) -> None:
        self.looks, self.let_go = looks, let_go

    def poll(self) -> TransferState:
        self.looks -= 1
        return TransferState.UNKNOWN if self.looks >= 0 else TransferState.DONE

    @property
    def quiesced(self) -> bool:
        return self.poll() is TransferState.DONE

    @property
    def source_free(self) -> bool:
        return self.let_go or self.quiesced


def fence_of(transfer: Ending) -> list[tuple[bool, bool]]:
    said: list[Any] = []
    backend: Any = SimpleNamespace(fence=lambda peer: False)
    side = SourceSide(RankId(0, 0), backend, said.append, digest=lambda *rows: None, deadline_s=1.0)  # type: ignore[arg-type,return-value]
    begun: Any = SimpleNamespace(room=1, generation=7)
    entry = _Room(1, begun=begun, halted=True)
    entry.flights.append(Flight(Chunk(0, 1, True), [(SimpleNamespace(), transfer)]))  # type: ignore[list-item]
    side._check_fence(entry)
    return [(report.fenced, report.source_free) for report in said]


def test_a_write_that_ends_between_two_looks_is_a_proof() -> None:
    """Said to be free of its source only, the room would be forgotten, and its destination withheld for ever."""
    for looks in range(2, 8):
        assert fence_of(Ending(looks)) in ([(True, True)], [(False, False)]), looks


def test_a_write_that_was_let_go_frees_its_source_and_proves_nothing() -> None:
    assert fence_of(Ending(100, let_go=True)) == [(False, True)]


@pytest.mark.parametrize("let_go", [True, False])
def test_memory_that_no_transfer_reads_is_free_for_another_endpoint(let_go: bool) -> None:
    """What was let go stays UNKNOWN where it may land: at its peer, who asks for proof; here nothing moves."""
    backend: Any = SimpleNamespace(fence=lambda peer: False)
    side = SourceSide(RankId(0, 0), backend, lambda report: None, digest=lambda *rows: None, deadline_s=1.0)  # type: ignore[arg-type,return-value]
    entry = _Room(1)
    entry.flights.append(Flight(Chunk(0, 1, True), [(SimpleNamespace(), Ending(100, let_go=let_go))]))  # type: ignore[list-item]
    side._rooms[1] = entry
    assert side.in_flight == 1 and side.reads is not let_go
