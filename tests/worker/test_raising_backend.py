"""A backend that raises where it must not costs what it was asked about, and holds up nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_pair import LocalPair

from sglang_pd.backends.local import backend as local
from sglang_pd.protocol.errors import BackendError
from sglang_pd.protocol.manifest import RankId
from sglang_pd.worker.ranks.destination import DestinationSide, _Writers
from sglang_pd.worker.ranks.orders import Through


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


def test_nothing_is_proven_against_a_peer_that_the_rank_was_never_told_of() -> None:
    """The order to meet it was lost; its writers hold this rank's address from the manifest all the same."""
    said: list[Any] = []
    backend: Any = SimpleNamespace(revoke=lambda epoch: True)
    side = DestinationSide(RankId(0, 0), backend, said.append, digest=lambda *rows: None)  # type: ignore[arg-type,return-value]
    side.seek(1)
    side.step()
    assert not said
    side._writers[1] = _Writers(SimpleNamespace(), open_epochs={11})  # type: ignore[arg-type]
    side.seek(1)
    side.step()
    side.seek(1)
    assert [report.peer_epoch for report in said] == [1, 1], "proven, and told again"


def test_a_writers_own_word_ends_the_search() -> None:
    asked: list[int] = []
    said: list[Any] = []
    rebuilding = True

    def describe() -> bytes:
        if rebuilding:
            raise BackendError("being replaced")
        return b"another"

    backend: Any = SimpleNamespace(revoke=lambda epoch: asked.append(epoch), describe=describe)
    side = DestinationSide(RankId(0, 0), backend, said.append, digest=lambda *rows: None)  # type: ignore[arg-type,return-value]
    side._writers[1] = _Writers(SimpleNamespace(), True, open_epochs={11})  # type: ignore[arg-type]
    side.unpair(1)
    side.step()
    assert asked == [11] and side.seeking, "losing the peer is no proof"
    side.through(Through(peer_epoch=1))
    side.step()
    assert asked == [11] and not said and side.seeking, "peers would meet an engine that is on its way out"
    rebuilding = False
    side.step()
    assert asked == [11] and len(said) == 1 and not side.seeking
    side.through(Through(peer_epoch=1))
    assert len(said) == 2, "told again"


def test_a_revocation_that_raises_holds_up_no_other_peer() -> None:
    said: list[Any] = []
    asked: list[int] = []

    def revoke(epoch: int) -> bool:
        asked.append(epoch)
        return raises() if epoch == 11 else True

    backend: Any = SimpleNamespace(revoke=revoke)
    side = DestinationSide(RankId(0, 0), backend, said.append, digest=lambda *rows: None)  # type: ignore[arg-type,return-value]
    for peer_epoch, epochs in ((1, {11, 12}), (2, {21})):
        side._writers[peer_epoch] = _Writers(SimpleNamespace(), True, open_epochs=epochs)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        side.step()
    assert [report.peer_epoch for report in said] == [2] and side.seeking
    asked.clear()
    with pytest.raises(RuntimeError):
        side.step()
    assert asked == [11], "what is proven is not asked again"
