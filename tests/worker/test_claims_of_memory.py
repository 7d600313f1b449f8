"""Decode's memory belongs to one room at a time, until it is said to be releasable."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from support.local_pair import CONFIG, IDS, LocalPair

from sglang_pd import DecodeEndpoint, PrefillEndpoint, RankEndpoint
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.protocol.errors import BackendError
from sglang_pd.protocol.spaces import Page, VirtualTok
from sglang_pd.worker.ranks.destination import _Writers
from sglang_pd.worker.rooms.claims import Claims


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    yield both
    both.close()


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_room_over_another_ones_pages_is_refused(pair: LocalPair, first: int) -> None:
    pair.start(1)  # pages 1 to 3
    pair.decode.at.open(2, pair.address, IDS, pair.decode.lists(first))
    assert pair.decode.released(2) == ["failed:index_invalid", "releasable"]
    error = next(event.error for event in pair.decode.events if event.error is not None)
    assert f"[{first}" in str(error.actual) and "RELEASABLE" in error.hint
    pair.complete(1)
    pair.decode.at.open(2, pair.address, IDS, pair.decode.lists(4))
    pair.start(3)  # its pages are free again
    pair.complete(3)


def test_a_duplicate_takes_nothing_and_gives_nothing_back(pair: LocalPair) -> None:
    pair.start(1)
    desk = pair.decode.at.control.desk
    pair.decode.at._active.clear()  # past the endpoint's own check
    pair.decode.at.open(1, pair.address, IDS, pair.decode.lists(10))
    said = pair.decode.released(1)
    assert said[:1] == ["failed:room_duplicate"] and desk is not None
    assert len(desk._claims._rooms) == 1
    pair.decode.at.open(2, pair.address, IDS, pair.decode.lists(10))
    pair.decode.at.open(3, pair.address, IDS, pair.decode.lists(1))
    assert pair.decode.released(3) == ["failed:index_invalid", "releasable"]


def test_memory_is_not_given_back_under_a_room(pair: LocalPair) -> None:
    pair.start(1)
    for side in (pair.prefill, pair.decode):
        with pytest.raises(LeaseError, match="an endpoint serves"):
            side.scope.suspend()
    pair.complete(1)
    for side in (pair.prefill, pair.decode):
        side.at.close()
        side.scope.suspend()


def test_another_endpoint_waits_until_nothing_moves_any_more(pair: LocalPair) -> None:
    """It would know nothing of the writer that has the room's pages, and give them to the next one."""
    pair.start(1)
    pair.decode.at.close()
    with pytest.raises(BackendError, match="another endpoint"):
        DecodeEndpoint(CONFIG, pair.decode.setup)


def test_one_endpoint_a_backend(pair: LocalPair) -> None:
    """Also before the first has any room: what the second did not see could be written over its own."""
    for make in (
        lambda: DecodeEndpoint(CONFIG, pair.decode.setup),
        lambda: PrefillEndpoint(CONFIG, pair.decode.setup),
        lambda: RankEndpoint(pair.decode.setup, "tcp://127.0.0.1:9"),
    ):
        with pytest.raises(BackendError, match="another endpoint"):
            make()
    pair.start(1)
    pair.complete(1)
    pair.decode.at.close()
    DecodeEndpoint(CONFIG, pair.decode.setup).close()
    DecodeEndpoint(CONFIG, pair.decode.setup).close()


@pytest.mark.parametrize("paired", [False, True])
def test_a_ranks_memory_is_held_while_an_instance_may_write_there(pair: LocalPair, paired: bool) -> None:
    """Which rooms are open only its control knows: with none of its own it let go, and the next was overwritten."""
    setup = pair.decode.setup
    pair.decode.at.close()
    first = RankEndpoint(setup, "tcp://127.0.0.1:9")
    if paired:
        first.agent.destination._writers[1] = _Writers(SimpleNamespace(), open_epochs={11})  # type: ignore[arg-type]
    first.close()
    if paired:
        with pytest.raises(BackendError, match="another endpoint"):
            RankEndpoint(setup, "tcp://127.0.0.1:9")
    else:
        RankEndpoint(setup, "tcp://127.0.0.1:9").close()


def test_claims_against_a_model() -> None:
    space = Page(of=VirtualTok(capacity_tokens=1_024, page_tokens=16))
    claims, model, rng = Claims(), dict[int, set[int]](), np.random.default_rng(1)
    refused = 0
    for handle in range(3_000):
        if model and rng.random() < 0.5:
            gone = int(rng.choice(list(model)))
            claims.give_back(gone)
            del model[gone]
        wanted = rng.choice(np.arange(1, space.extent), size=rng.integers(0, 9), replace=False)
        taken = set().union(*model.values()) if model else set()
        try:
            claims.take(handle, {space: space.ingest(wanted)})
        except Exception:
            assert taken & set(wanted.tolist())
            refused += 1
        else:
            assert not taken & set(wanted.tolist())
            model[handle] = set(wanted.tolist())
    assert refused > 100
