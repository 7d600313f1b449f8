"""Nothing is exposed to a peer before every own rank knows it; a rank that missed it all the same finds its proof."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_pair import IDS, KV, LocalPair

from sglang_pd import DecodeEndpoint, Network, RankEndpoint, RankSetup, create_backend, new_epoch
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.errors import BackendError, ErrorInfo, RoomError
from sglang_pd.protocol.manifest import RankId, Term, Topology
from sglang_pd.worker.control import InstanceControl
from sglang_pd.worker.peers.conversation import Conversation, Stage
from sglang_pd.worker.peers.link import Called
from sglang_pd.worker.ranks import agent as agents
from sglang_pd.worker.ranks.destination import DestinationSide
from sglang_pd.worker.ranks.orders import Pair, Paired, Revoked, Seek, Unpair
from sglang_pd.worker.ranks.roster import Ranks
from sglang_pd.worker.rooms.pending import PendingOpen
from sglang_pd.worker.settings import ControlConfig

PEER = 77
FIRST, SECOND = RankId(0, 0), RankId(0, 1)


class Deciding:
    """A control of two ranks in the middle of a conversation, and what it did."""

    def __init__(self) -> None:
        link: Any = SimpleNamespace(counts={})
        config = ControlConfig(instance_id="i", model="m", topology=Topology(tp=2), peer_wait_s=5.0)
        self.now_s, self.opened, self.ordered = 0.0, list[int](), list[Any]()
        self.control = InstanceControl(config, link, lambda event: None, clock=lambda: self.now_s)
        self.talk = Conversation(Called(1), source=False, address="tcp://10.0.0.1:1", stage=Stage.AGREED, epoch=PEER)
        self.talk.manifest = SimpleNamespace()  # type: ignore[assignment]
        control: Any = self.control
        control.peering = SimpleNamespace(
            call=lambda address, key, now_s: self.talk,
            talk_with=lambda epoch: self.talk if epoch == self.talk.epoch else None,
            all=lambda: [self.talk],
            own=SimpleNamespace(encoded=b"decode"),
        )
        self.seeking = control.seeking = SimpleNamespace(
            open=lambda epoch: False, lost=lambda epoch, manifest: None, owed=[]
        )
        control.desk = SimpleNamespace(
            open=lambda facts, epoch, now_s: self.opened.append(epoch),
            fail_all=lambda cause, now_s: None,
            repeat_orders=lambda rank: None,
            lose_peer=lambda epoch, error, now_s: None,
        )
        control.ranks.order = lambda order, rank=None: self.ordered.append((order, rank))
        self.pending = PendingOpen(SimpleNamespace(), "tcp://10.0.0.1:1", 5.0)  # type: ignore[arg-type]

    def tries(self) -> bool:
        return self.control._try(self.pending, self.now_s)


def test_a_room_opens_once_every_own_rank_knows_the_peer() -> None:
    at = Deciding()
    assert not at.tries()
    at.control._on_report(FIRST, Paired(peer_epoch=PEER))
    assert not at.tries() and not at.opened
    at.control._on_report(SECOND, Paired(peer_epoch=PEER))
    assert at.tries() and at.opened == [PEER]


def test_a_rank_that_comes_back_is_waited_for_again() -> None:
    at = Deciding()
    for rank in (FIRST, SECOND):
        at.control._on_report(rank, Paired(peer_epoch=PEER))
    at.control._rejoined(SECOND, "lost")
    assert not at.tries()
    assert [(type(order), rank) for order, rank in at.ordered] == [(Pair, SECOND)]
    at.control._on_report(SECOND, Paired(peer_epoch=PEER))
    assert at.tries()


def test_the_wait_for_own_ranks_is_bounded_and_names_them() -> None:
    at = Deciding()
    at.control._on_report(FIRST, Paired(peer_epoch=PEER))
    at.now_s = 5.0
    with pytest.raises(RoomError, match="not every rank") as raised:
        at.tries()
    error = raised.value.info()
    assert error.code == "peer_unknown" and str(SECOND) in error.actual and str(FIRST) not in error.actual


def test_a_lost_peer_is_not_unpaired_while_its_proof_is_sought() -> None:
    """A rank that lost the order to seek would take it for the end: it would be idle, and join another control."""
    at = Deciding()
    lost = ErrorInfo(code="peer_lost", message="gone")
    at.seeking.open = lambda epoch: True
    at.control.lost(at.talk, PEER, lost)
    assert not at.ordered
    at.seeking.open = lambda epoch: False
    at.control.lost(at.talk, PEER, lost)
    assert [order for order, _ in at.ordered] == [Unpair(peer_epoch=PEER)]


def test_an_order_to_seek_says_whom_a_rank_was_never_told_of() -> None:
    ranks, given = Ranks(Topology(), 5.0), list[Any]()
    ranks._ranks = {FIRST: SimpleNamespace(reach=given.append)}  # type: ignore[dict-item]
    for epoch in (1, 2):
        ranks.order(Pair(peer_epoch=epoch, source=False, prefill=b"p%d" % epoch, decode=b"d"))
    ranks.order(Pair(peer_epoch=3, source=True, prefill=b"p", decode=b"d"))
    ranks.keep_met(lambda epoch: epoch != 2)
    given.clear()
    for epoch in (1, 2, 3):
        ranks.order(Seek(peer_epoch=epoch))
    assert given == [Seek(peer_epoch=1, prefill=b"p1", decode=b"d"), Seek(peer_epoch=2), Seek(peer_epoch=3)]


class Proving:
    """A backend that knows who was admitted, and proves when told."""

    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.asked: list[int] = []
        self.proves, self.refuses = True, False
        self.capabilities = SimpleNamespace(revoke_within_s=60.0)

    def admit(self, epoch: int, blob: bytes) -> None:
        if self.refuses:
            raise BackendError("a blob that cannot be believed", code="message_malformed")
        self.admitted.append(epoch)

    def revoke(self, epoch: int) -> bool:
        self.asked.append(epoch)
        return self.proves


def rank_over(backend: Any, said: list[Any]) -> agents.RankAgent:
    """An agent with a destination side over that backend."""
    agent = agents.RankAgent.__new__(agents.RankAgent)
    agent._pairings, agent._report, agent.backend = {}, said.append, backend
    agent.destination = DestinationSide(FIRST, backend, said.append, digest=lambda *rows: None)  # type: ignore[arg-type,return-value]
    agent.source = SimpleNamespace(begun=False, leave_all=lambda: None, step=lambda: False)  # type: ignore[assignment]
    agent._next_control, agent._served, agent.control_epoch, agent._term = 0, 5, 5, Term(7, 1)
    agent.facts = SimpleNamespace(rank=FIRST)  # type: ignore[assignment]
    agent.join = lambda: said.append("joined")  # type: ignore[method-assign]
    return agent


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pairing of which two ranks write here."""
    ranks = [SimpleNamespace(rank=n, epoch=100 + n, transport=SimpleNamespace(connect=b"")) for n in range(3)]
    pairing = SimpleNamespace(
        prefill=SimpleNamespace(ranks=ranks), plan=lambda src, dst: SimpleNamespace(moves=src != 1)
    )
    monkeypatch.setattr(agents, "pairing_of", lambda prefill, decode: pairing)


@pytest.mark.usefixtures("writers")
@pytest.mark.parametrize("refuses", [False, True])
def test_the_proof_is_found_against_writers_that_a_rank_was_never_told_of(refuses: bool) -> None:
    backend, said = Proving(), list[Any]()
    agent = rank_over(backend, said)
    backend.refuses = refuses
    agent.order(Seek(peer_epoch=PEER, prefill=b"p", decode=b"d"))
    assert backend.admitted == ([] if refuses else [100, 102]) and not agent.destination.idle
    agent.destination.step()
    assert backend.asked == [100, 102] and said[-1] == Revoked(peer_epoch=PEER)
    agent.order(Seek(peer_epoch=PEER, prefill=b"p", decode=b"d"))
    assert said[-1] == Revoked(peer_epoch=PEER) and len(backend.admitted) in (0, 2), "told again, not sought again"


@pytest.mark.usefixtures("writers")
def test_a_rank_joins_another_control_only_once_nobody_may_write_to_it() -> None:
    backend, said = Proving(), list[Any]()
    agent = rank_over(backend, said)
    agent.order(Pair(peer_epoch=PEER, source=False, prefill=b"p", decode=b"d"))
    agent.rejoin(6)
    agent.order(Pair(peer_epoch=PEER + 1, source=False, prefill=b"p", decode=b"d"))  # it was on its way
    backend.progress = lambda: None  # type: ignore[attr-defined]
    agent._calls, agent._described = [], b""  # type: ignore[assignment]
    backend.describe = lambda: b""  # type: ignore[attr-defined]
    agent.step(lambda call: call())
    assert "joined" not in said and not agent.destination.idle
    agent.step(lambda call: call())
    assert said[-1] == "joined" and agent.control_epoch == 6 and agent._term == Term(7, 2)


class TwoRanks:
    """A decode of two ranks whose second one is deaf to orders to pair until told otherwise."""

    def __init__(self, pair: LocalPair) -> None:
        topology = Topology(tp=2)
        self.closing: list[Any] = []
        setups = []
        for rank in (FIRST, SECOND):
            backend = create_backend("local", epoch=new_epoch())
            layout = layout_rank(StateSpec((KV,), layers=2), Capacity(512, 16), topology, rank)
            segments = Scope(backend).allocate_layout(layout)
            setups.append(RankSetup(backend=backend, components=layout.components, segments=segments, rank=rank))
            self.closing.append(backend)
        config = ControlConfig(instance_id="d", model="test", topology=topology, verify="off", peer_wait_s=20.0)
        self.at = DecodeEndpoint(config, setups[0], Network(ranks_bind="tcp://127.0.0.1:0"))
        self.rank = RankEndpoint(setups[1], self.at.ranks_address, heartbeat_s=0.1)
        self.closing[:0] = [self.rank, self.at]
        self.missed: list[Pair] = []
        self._order, self.deaf = self.rank.agent.order, True
        self.rank.agent.order = self.order  # type: ignore[method-assign]

    def order(self, order: Any) -> None:
        if self.deaf and isinstance(order, Pair):
            self.missed.append(order)
        else:
            self._order(order)


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    yield both
    both.close()


def until(true: Any) -> None:
    deadline_s = time.monotonic() + 15
    while not true():
        assert time.monotonic() < deadline_s, "did not come true"
        time.sleep(0.01)


def test_prefill_is_told_of_no_room_while_a_rank_has_not_met_it(pair: LocalPair) -> None:
    decode = TwoRanks(pair)
    try:
        until(lambda: decode.at.ready)
        handle = pair.prefill.at.request(1, IDS, pair.prefill.lists())
        decode.at.open(1, pair.address, IDS, pair.decode.lists())
        pair.prefill.at.send(handle, 0, len(IDS), last=True)
        pair.prefill.at.finish(handle, len(IDS), b"record")
        until(lambda: decode.missed)
        time.sleep(0.3)
        assert pair.prefill.at.stats()["bytes_written"] == 0 and decode.at.stats()["rooms"] == 0
        decode.deaf = False
        for order in decode.missed:
            decode._order(order)
        events: list[str] = []
        until(lambda: events.extend(e.kind.value for e in decode.at.poll()) or "releasable" in events)
        assert events == ["admitted", "done", "releasable"]
    finally:
        for one in decode.closing:
            one.close()
