"""A control is lost alone, its other rank lives and serves the next one, over a transport that proves nothing of a
writer that lives (process memory, RDMA of one host). What was written for the former control is proven all the same:
by the term that a rank states to peers, and by the word of those who wrote into it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.held_writes import HeldWrites
from support.local_pair import CONFIG, IDS, LocalPair
from support.two_ranks import SECOND, TWO, setup_of, until

from sglang_pd import DecodeEndpoint, Network, PrefillEndpoint, RankEndpoint
from sglang_pd.backends.base import Backend, TransferState
from sglang_pd.protocol.manifest import RankId, Term
from sglang_pd.worker.control import InstanceControl
from sglang_pd.worker.peers.seeking import Owed, Seeking
from sglang_pd.worker.ranks.destination import DestinationSide
from sglang_pd.worker.ranks.orders import Revoked

FIRST = RankId(0, 0)


class Outlived:
    """An instance of two ranks, of which the first is with the control, and may be lost with it."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.backends: list[Backend] = []
        self.setup = setup_of(SECOND)
        self.at = self._control("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self.rank = RankEndpoint(self.setup, self.at.ranks_address, heartbeat_s=0.1)
        until(lambda: self.at.ready)

    def _control(self, bind: str, ranks_bind: str) -> Any:
        config = replace(CONFIG, instance_id="two", topology=TWO, verify="off", liveness_s=1.0, heartbeat_s=0.2)
        first = setup_of(FIRST)
        self.backends.append(first.backend)
        return self.kind(replace(config, rank_liveness_s=2.0), first, Network(bind=bind, ranks_bind=ranks_bind))

    def lose_control(self) -> None:
        """As if its process had been killed: it says nothing more to anybody."""
        lost = self.at
        lost._loop.stop()
        lost.link.close()
        lost.agent.backend.close()

    def next_control(self, bind: str = "") -> None:
        """Another process has its place and its addresses. bind: other than the former's, for peers."""
        self.at = self._control(bind or self.at.address or "tcp://127.0.0.1:0", self.at.ranks_address)

    def close(self) -> None:
        """End it."""
        for one in (self.rank, self.at, self.setup.backend, *self.backends):
            one.close()


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair(verify="off", liveness_s=1.0, heartbeat_s=0.2)
    yield both
    both.close()


@pytest.fixture
def prefill() -> Iterator[Outlived]:
    found = Outlived(PrefillEndpoint)
    yield found
    found.close()


@pytest.fixture
def decode() -> Iterator[Outlived]:
    found = Outlived(DecodeEndpoint)
    yield found
    found.close()


def proves_nothing_of(epoch: int, backend: Backend, patch: pytest.MonkeyPatch) -> None:
    """That writer is never proven to have ended: it lives."""
    revoke = backend.revoke
    patch.setattr(backend, "revoke", lambda other: other != epoch and revoke(other))


def half_sent(prefill: Outlived, pair: LocalPair, room: int) -> None:
    """A room of which both ranks have written a part."""
    handle = prefill.at.request(room, IDS, pair.prefill.lists())
    pair.decode.at.open(room, prefill.at.address, IDS, pair.decode.lists())
    for rank in (prefill.at, prefill.rank):
        rank.send(handle, 0, 16, last=False)
    until(lambda: prefill.rank.agent.source.bytes_written)


def test_a_prefills_rank_is_through_with_what_its_former_control_had_it_write(
    prefill: Outlived, pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    proves_nothing_of(prefill.setup.backend.epoch, pair.decode.backend, monkeypatch)
    half_sent(prefill, pair, 1)
    prefill.lose_control()
    until(lambda: "failed:peer_lost" in pair.decode.of(1))
    time.sleep(0.5)
    assert "releasable" not in pair.decode.of(1), "its rank lives"
    prefill.next_control()
    assert pair.decode.released(1)[-1] == "releasable"
    handle = prefill.at.request(2, IDS, pair.prefill.lists())
    pair.decode.at.open(2, prefill.at.address, IDS, pair.decode.lists())  # in the same pages
    for rank in (prefill.at, prefill.rank):
        rank.send(handle, 0, len(IDS), last=True)
    prefill.at.finish(handle, len(IDS), b"record")
    assert pair.decode.released(2) == ["admitted", "done", "releasable"]


def test_it_goes_to_no_other_control_while_it_may_still_write(
    prefill: Outlived, pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    proves_nothing_of(prefill.setup.backend.epoch, pair.decode.backend, monkeypatch)
    held = HeldWrites(prefill.setup.backend, monkeypatch, TransferState.UNKNOWN)
    half_sent(prefill, pair, 1)
    until(lambda: any(said.startswith("failed") for said in pair.decode.of(1)))
    prefill.lose_control()
    prefill.next_control()
    time.sleep(2.0)  # some heartbeats, and longer than it waits for proofs
    assert not prefill.at.ready and "releasable" not in pair.decode.of(1)
    held.end()
    assert pair.decode.released(1)[-1] == "releasable"


def test_a_decodes_rank_serves_the_next_control_by_the_word_of_those_who_wrote(
    decode: Outlived, pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody opens a room there meanwhile: the control calls them by what the rank was told."""
    proves_nothing_of(pair.prefill.backend.epoch, decode.setup.backend, monkeypatch)
    first = pair.prefill.at.request(1, IDS, pair.prefill.lists())
    decode.at.open(1, pair.address, IDS, pair.decode.lists())
    until(lambda: pair.prefill.at.stats()["rooms"] and not decode.rank.agent.destination.idle)
    decode.lose_control()
    decode.next_control()
    until(lambda: decode.at.ready)
    pair.prefill.at.abort(first)  # the open may not have come before its sender was lost
    assert decode.rank.agent.destination.idle and "releasable" in pair.prefill.released(1)
    handle = pair.prefill.at.request(2, IDS, pair.prefill.lists())
    decode.at.open(2, pair.address, IDS, pair.decode.lists())
    pair.prefill.at.send(handle, 0, len(IDS), last=True)
    pair.prefill.at.finish(handle, len(IDS), b"record")
    until(lambda: any(event.kind.value == "done" for event in decode.at.poll()))


def test_no_room_opens_before_that(decode: Outlived, pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one at another prefill: its memory may be what the former control gave to a room of the first."""
    proves_nothing_of(pair.prefill.backend.epoch, decode.setup.backend, monkeypatch)
    held = HeldWrites(pair.prefill.backend, monkeypatch, TransferState.UNKNOWN)
    handle = pair.prefill.at.request(1, IDS, pair.prefill.lists())
    decode.at.open(1, pair.address, IDS, pair.decode.lists())
    pair.prefill.at.send(handle, 0, 16, last=False)
    until(lambda: held.held)
    other = LocalPair(verify="off")
    try:
        decode.lose_control()
        decode.next_control()
        until(lambda: decode.at.control.seeking.owed)
        assert not decode.at.ready and "prefill-0" in decode.at.control.why_not_ready
        other.prefill.at.request(5, IDS, other.prefill.lists())
        decode.at.open(5, other.address, IDS, other.decode.lists())
        time.sleep(1.0)
        desk = decode.at.control.desk
        assert desk is not None and not desk.open_rooms and not decode.at.ready
        until(lambda: (events := decode.at.poll()) and events[0].error is not None)  # it says so in the end
        held.end()
        until(lambda: decode.at.ready)
    finally:
        other.close()


def test_a_rank_that_returns_to_its_control_owes_that_one_nothing(decode: Outlived, pair: LocalPair) -> None:
    """What it was leaving is that control's own, and goes on or is lost as its rooms are."""
    agent = decode.rank.agent
    decode.at.connect(pair.address)
    until(lambda: not agent.destination.idle)
    seen: list[Any] = []

    def turn_back() -> None:
        first = agent.control_epoch
        agent.backend.revoke = lambda epoch: False
        agent.rejoin(first + 1)
        agent.rejoin(first)
        assert not agent.destination.seeking, "nobody asked for a proof"
        seen.append(agent.joined().owed)
        agent.rejoin(first + 1)
        agent.destination.control_epoch = agent.control_epoch = first + 1
        seen.append(agent.joined().owed)

    decode.rank._loop.submit(turn_back)
    until(lambda: len(seen) == 2)
    assert seen[0] == () and [one.instance for one in seen[1]] == ["prefill-0"]


def test_what_is_proven_before_the_other_ranks_have_joined_is_not_owed_any_more(decode: Outlived) -> None:
    """The report came to a control that was not complete yet, and was dropped: it never became ready."""
    link: Any = SimpleNamespace(counts={}, ring=lambda: None)
    control = InstanceControl(replace(CONFIG, topology=TWO), link, lambda event: None)
    owed = Owed(peer_epoch=5, address="", instance="p", writers={11: Term(7, 1)})
    control._join(msgspec.structs.replace(decode.rank.agent.joined(), owed=(owed,)), lambda order: None, remote=True)
    assert control.seeking.owed == [owed] and control.desk is None
    control._on_report(SECOND, Revoked(peer_epoch=5))
    control._join(decode.at.agent.joined(), lambda order: None, remote=False)
    assert control.ready and not control.why_not_ready


def test_of_a_writer_that_is_admitted_anew_nothing_is_proven() -> None:
    said: list[Any] = []
    backend: Any = SimpleNamespace(admit=lambda epoch, blob: None, revoke=lambda epoch: epoch == 11 and not said)
    side = DestinationSide(FIRST, backend, said.append, digest=lambda *rows: None)  # type: ignore[arg-type,return-value]
    writer = SimpleNamespace(epoch=11, rank=FIRST, transport=SimpleNamespace(connect=b""))
    pairing: Any = SimpleNamespace(
        prefill=SimpleNamespace(ranks=[writer]), plan=lambda src, dst: SimpleNamespace(moves=True)
    )
    side.admit(1, pairing)
    side.seek(1)
    side.step()
    assert said == [Revoked(peer_epoch=1)]
    side.admit(1, pairing)
    side.unpair(1)
    side.seek(1)
    assert len(said) == 1


def test_a_rank_that_has_ended_its_former_writes_is_met_though_another_has_not() -> None:
    """Its next control was held off for as long as the former one lived, whose own rank gives no word."""

    def of(**terms: int) -> Any:
        ranks = {"x": 11, "y": 12, "z": 13}
        return SimpleNamespace(ranks=[SimpleNamespace(epoch=ranks[r], term=Term(7, n)) for r, n in terms.items()])

    seeking = Seeking()
    seeking.add(5, room=1)
    seeking.lost(5, of(x=1, y=1))
    assert seeking.against(of(x=1, y=1)) and seeking.against(of(y=1, z=1)) and seeking.against(of(x=2, y=1))
    assert not seeking.against(of(x=2, z=1)) and seeking.open(5)
    assert seeking.ended_by(of(x=2, z=1)) == {5: (11,)}
    seeking.ended_by(of(y=2))
    assert seeking.ended == {5: (11, 12)} and seeking.sought
    seeking.drop(1)
    assert not seeking.ended and not seeking.sought


def test_a_rank_that_missed_who_has_ended_is_told_again(
    prefill: Outlived, pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said once, by the answer of the next control, which is not asked again once it agrees."""
    proves_nothing_of(prefill.setup.backend.epoch, pair.decode.backend, monkeypatch)
    half_sent(prefill, pair, 1)
    destination, missed = pair.decode.at.agent.destination, list[Any]()
    with monkeypatch.context() as deaf:
        deaf.setattr(destination, "through", missed.append)
        prefill.lose_control()
        prefill.next_control()
        until(lambda: missed and [peer["stage"] for peer in pair.decode.at.peers()] == ["agreed"])
        time.sleep(1.0)
        assert "releasable" not in pair.decode.of(1)
    control = pair.decode.at.control
    pair.decode.at._loop.submit(lambda: control._rejoined(FIRST, "orders were dropped"))
    assert pair.decode.released(1)[-1] == "releasable"


def test_one_that_drains_asks_all_whom_it_calls(
    prefill: Outlived, pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word may stand in what another address states, where the rank's next control is."""
    proves_nothing_of(prefill.setup.backend.epoch, pair.decode.backend, monkeypatch)
    half_sent(prefill, pair, 1)
    pair.decode.at.drain(60.0)
    prefill.lose_control()
    until(lambda: "failed:peer_lost" in pair.decode.of(1))
    prefill.next_control("tcp://127.0.0.1:0")
    until(lambda: prefill.at.ready)
    assert "releasable" not in pair.decode.of(1)
    pair.decode.at.connect(prefill.at.address)
    assert pair.decode.released(1)[-1] == "releasable"
    until(lambda: pair.decode.at.drained)


def test_a_rank_that_describes_itself_anew_when_another_is_lost_costs_no_turn(decode: Outlived) -> None:
    decode.rank.close()
    until(lambda: decode.at.control.failed)
    faults = decode.at.stats()["loop_faults"]
    agent = decode.at.agent

    def anew() -> None:
        agent._rebuilt += 1
        decode.at.control._renew(agent.joined(), rebuilt=True)

    decode.at._loop.submit(anew)
    until(lambda: agent._rebuilt)
    time.sleep(0.3)
    assert decode.at.stats()["loop_faults"] == faults


def test_a_term_ends_only_those_before_it_of_the_same_agent() -> None:
    second = Term(7, 2)
    assert second.ended(Term(7, 1))
    assert not second.ended(second) and not second.ended(Term(7, 3)) and not second.ended(Term(8, 1))
    assert not Term(0, 2).ended(Term(0, 1)), "who counts is not said"
