"""A pair that lost each other and lives: the writer's own word, in the next handshake, gives decode its memory back.

Here decode's transport proves nothing by itself, as over process memory or RDMA on one host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.local_pair import LocalPair
from support.worker_pair import wait_until

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import InstanceManifest, Term
from sglang_pd.worker.ranks.source import SourceSide


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPair]:
    both = LocalPair()
    monkeypatch.setattr(both.decode.backend, "revoke", lambda epoch: False)
    yield both
    both.close()


def lose_prefill(pair: LocalPair) -> None:
    """Decode heard nothing for too long, say."""
    peering = pair.decode.at.control.peering
    assert peering is not None
    gone = ErrorInfo(code="peer_lost", message="the peer was silent")
    for talk in peering.all():
        pair.decode.at._loop.submit(lambda epoch=talk.epoch: peering.give_up(epoch, gone))


def half_sent(pair: LocalPair, room: int) -> None:
    """A room of which prefill still owes the rest."""
    pair.start(room)
    written = pair.prefill.at.stats()["bytes_written"]
    pair.prefill.at.send(pair.handles[room], 0, 16, last=False)
    wait_until(lambda: pair.prefill.at.stats()["bytes_written"] > written)


def test_decode_has_its_memory_back_and_the_pair_goes_on(pair: LocalPair) -> None:
    for room in (1, 3):
        half_sent(pair, room)
        lose_prefill(pair)
        assert pair.decode.released(room) == ["failed:peer_lost", "releasable"]
        assert pair.prefill.released(room)[-1] == "releasable"
        pair.start(room + 1)  # in the same pages
        pair.complete(room + 1)


@pytest.mark.parametrize("first", ["drain", "cut"])
def test_one_that_drains_asks_for_it_too(pair: LocalPair, first: str) -> None:
    """It said nothing to anybody any more, and its memory was withheld for as long as prefill lived."""
    half_sent(pair, 1)
    for step in ("drain", "cut") if first == "drain" else ("cut", "drain"):
        if step == "drain":
            pair.decode.at.drain(60.0)
        else:
            lose_prefill(pair)
    assert pair.decode.released(1) == ["failed:peer_lost", "releasable"]
    wait_until(lambda: pair.decode.at.drained)
    assert not [peer for peer in pair.decode.at.peers() if peer["stage"] == "agreed"], "it meets nobody any more"


def test_not_before_the_writer_is_through(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    half_sent(pair, 1)
    with monkeypatch.context() as held:
        held.setattr(SourceSide, "_check_fence", lambda self, entry: None)
        lose_prefill(pair)
        wait_until(lambda: "failed:peer_lost" in pair.decode.of(1))
        time.sleep(2.0)  # some handshakes
        assert "releasable" not in pair.decode.of(1)
    assert pair.decode.released(1)[-1] == "releasable"
    pair.start(2)
    pair.complete(2)


def test_not_by_the_word_of_some_of_the_writers(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that answers now has only one of the ranks that wrote: it cannot speak for the other."""
    half_sent(pair, 1)
    desk = pair.decode.at.control.desk
    assert desk is not None
    lost = desk.seeking.lost

    def lost_another(epoch: int, manifest: InstanceManifest) -> None:
        lost(epoch, manifest)
        desk.seeking._writers[epoch] |= {12345: Term()}

    monkeypatch.setattr(desk.seeking, "lost", lost_another)
    lose_prefill(pair)
    wait_until(lambda: "failed:peer_lost" in pair.decode.of(1))
    time.sleep(2.0)
    assert "releasable" not in pair.decode.of(1)


@pytest.mark.parametrize("failed", [False, True])
def test_one_that_stops_or_has_failed_says_it_too_and_meets_nobody(pair: LocalPair, failed: bool) -> None:
    """Its process may last, and nobody else could say it."""
    half_sent(pair, 1)
    at, control = pair.prefill.at, pair.prefill.at.control
    frames = at.link.send
    at.link.send = lambda party, frame: None  # type: ignore[method-assign]
    at._loop.submit((lambda: control._fail("a rank is gone")) if failed else (lambda: control.drain(600.0)))
    wait_until(lambda: control.peering is not None and control.peering.draining)
    lose_prefill(pair)
    wait_until(lambda: "failed:peer_lost" in pair.decode.of(1))
    at.link.send = frames  # type: ignore[method-assign]
    assert pair.decode.released(1)[-1] == "releasable"
    assert pair.prefill.released(1)[-1] == "releasable"
    assert all(peer["stage"] == "calling" for peer in pair.decode.at.peers())


def test_one_that_stops_does_not_say_it_before_the_writer_is_through(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_sent(pair, 1)
    pair.prefill.at.drain(600.0)
    with monkeypatch.context() as held:
        held.setattr(SourceSide, "_check_fence", lambda self, entry: None)
        lose_prefill(pair)
        wait_until(lambda: "failed:peer_lost" in pair.decode.of(1))
        time.sleep(1.5)
        assert "releasable" not in pair.decode.of(1)
    assert pair.decode.released(1)[-1] == "releasable"
