"""A backend that raises where it must not costs what it was asked about, and holds up nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_pair import LocalPair

from sglang_pd.backends import local
from sglang_pd.protocol.manifest import RankId
from sglang_pd.worker.destination import DestinationSide, _Writers


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    yield both
    both.close()


def raises(*given: object) -> bool:
    raise RuntimeError("a defect of the transport")


def test_progress_that_raises_holds_up_no_transfer(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.start(1)
    pair.complete(1)
    for side in (pair.prefill, pair.decode):
        monkeypatch.setattr(side.backend, "progress", raises)
        monkeypatch.setattr(type(side.backend), "progress_interval_s", property(lambda self: 0.01))
    monkeypatch.setattr(local, "INLINE_BYTES", 0)  # the copy ends on a thread: somebody must look
    pair.start(2)
    pair.complete(2)
    assert pair.prefill.at.stats()["loop_faults"] > 0, "it is counted"


def test_a_revocation_that_raises_holds_up_no_other_peer() -> None:
    said: list[Any] = []
    asked: list[int] = []

    def revoke(epoch: int) -> bool:
        asked.append(epoch)
        return raises() if epoch == 11 else True

    backend: Any = SimpleNamespace(revoke=revoke)
    side = DestinationSide(RankId(0, 0), backend, said.append, digest=lambda *rows: None)  # type: ignore[arg-type,return-value]
    for peer_epoch, epochs in ((1, {11, 12}), (2, {21})):
        side._writers[peer_epoch] = _Writers(SimpleNamespace(), True, epochs)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        side.step()
    assert [report.peer_epoch for report in said] == [2] and side.seeking
    asked.clear()
    with pytest.raises(RuntimeError):
        side.step()
    assert asked == [11], "what is proven is not asked again"
