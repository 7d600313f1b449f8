"""A worker that has drained owes nobody anything: it may end, and its peers have what they need."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.held_writes import HeldWrites
from support.local_pair import LocalPair
from support.worker_pair import wait_until

from sglang_pd.backends.base import TransferState
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import RankId

GONE = ErrorInfo(code="peer_lost", message="gone")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPair]:
    both = LocalPair(verify="off", liveness_s=20.0)
    monkeypatch.setattr(both.decode.backend, "revoke", lambda epoch: False)
    yield both
    both.close()


def owing(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> HeldWrites:
    """A room whose source is free at prefill while its write may still land; then it drains."""
    writes = HeldWrites(pair.prefill.backend, monkeypatch, TransferState.UNKNOWN, source_free=True)
    pair.start(1)
    pair.prefill.at.send(pair.handles[1], 0, 16, last=False)
    wait_until(lambda: writes.held)
    pair.prefill.at.abort(pair.handles[1])
    assert pair.prefill.released(1)[-1] == "releasable"
    pair.prefill.at.drain(60.0)
    wait_until(lambda: pair.prefill.at.control.draining_until_s is not None)
    return writes


def test_not_while_decode_waits_for_a_proof_which_it_has_when_the_worker_ends(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = owing(pair, monkeypatch)
    time.sleep(0.5)
    assert not pair.prefill.at.drained and "releasable" not in pair.decode.of(1)
    writes.end()
    while not pair.prefill.at.drained:
        time.sleep(0.0001)
    pair.prefill.at.close()  # at once
    assert pair.decode.released(1)[-1] == "releasable"


def test_nobody_is_waited_for_who_is_gone(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    owing(pair, monkeypatch)
    peering: Any = pair.prefill.at.control.peering
    pair.prefill.at._loop.submit(lambda: peering.give_up_decodes(GONE))
    wait_until(lambda: pair.prefill.at.drained)


def test_a_rank_that_is_dead_gives_no_proof_to_wait_for(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    owing(pair, monkeypatch)
    desk: Any = pair.prefill.at.control.desk
    pair.prefill.at._loop.submit(lambda: desk.rank_dead(RankId(0, 0), time.monotonic()))
    wait_until(lambda: pair.prefill.at.drained)
