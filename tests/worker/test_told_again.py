"""What is told again after a connection between control and rank was lost: who is there, and what was built anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import RankId, RankManifest, Topology, Transport
from sglang_pd.worker.control import InstanceControl
from sglang_pd.worker.ranks.destination import DestinationSide, _Writers
from sglang_pd.worker.ranks.meetings import Meeting, Meetings
from sglang_pd.worker.ranks.orders import Joined
from sglang_pd.worker.rooms.desk import RoomDesk
from sglang_pd.worker.settings import ControlConfig

RANK = RankId(0, 0)
GONE, THERE, SOUGHT = 1, 2, 3


def test_a_destination_forgets_peers_that_are_gone_unless_their_proof_is_sought() -> None:
    """Kept for a lost `Unpair`, one would hold the rank's memory for ever: nobody may write, nobody says so."""
    backend: Any = SimpleNamespace(revoke=lambda epoch: False)
    said: list[Any] = []
    side = DestinationSide(RANK, backend, said.append, digest=lambda *rows: None)  # type: ignore[arg-type,return-value]
    pairing: Any = SimpleNamespace()
    side._writers = {epoch: _Writers(pairing, open_epochs={epoch}) for epoch in (GONE, THERE, SOUGHT)}
    side.seek(SOUGHT)
    side.keep(frozenset(), frozenset({THERE}))
    assert set(side._writers) == {THERE, SOUGHT}
    side.keep(frozenset(), frozenset())
    assert set(side._writers) == {SOUGHT} and not side.idle, "a proof that is sought is not forgotten"


def test_a_source_leaves_peers_that_are_gone() -> None:
    left: list[Any] = []
    backend: Any = SimpleNamespace(disconnect=left.append)
    meetings = Meetings(RANK, backend, lambda report: None, lambda epoch: None)
    pairing: Any = SimpleNamespace()
    gone: Any = object()
    meetings._meetings = {GONE: Meeting(pairing, {RANK: gone}), THERE: Meeting(pairing, {RANK: SimpleNamespace()})}
    meetings.keep(frozenset({THERE}))
    meetings.step(set)
    assert left == [gone] and meetings.get(THERE) is not None and meetings.get(GONE) is None


def test_a_rank_that_comes_back_leaves_the_decodes_that_were_lost_meanwhile() -> None:
    """The order to leave one was lost with the connection, and its rooms still wait: kept, it could never be fenced."""
    gone = ErrorInfo(code="peer_lost", message="silent")
    orders: list[Any] = []
    desk = object.__new__(RoomDesk)
    desk._outside = SimpleNamespace(order=lambda order, rank: orders.append(order))  # type: ignore[assignment]
    desk.seeking = SimpleNamespace(open_at=lambda rank: [], settling_at=lambda rank: [], ended={})  # type: ignore[assignment]
    peers = {THERE: SimpleNamespace(lost=None), GONE: SimpleNamespace(lost=gone)}
    desk.prefill = SimpleNamespace(rooms={}, peers=peers, owed_by=lambda writer: [])  # type: ignore[assignment]
    desk.decode = SimpleNamespace(rooms={}, peers={SOUGHT: SimpleNamespace(lost=gone)})  # type: ignore[assignment]
    desk._owed_handles = {}
    desk.repeat_orders(RANK)
    assert [set(order.peers) for order in orders] == [{THERE, SOUGHT}]


def joined(connect: bytes, rebuilt: int) -> Joined:
    transport = Transport(backend="local", host_memory=True, host_id="h", connect=connect)
    manifest = RankManifest(rank=RANK, epoch=7, segments=(), components=(), transport=transport)
    return Joined(rank=RANK, epoch=7, term=manifest.term, manifest=msgspec.msgpack.encode(manifest), rebuilt=rebuilt)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([(b"two", 1)], ["anew"]),
        ([(b"two", 0)], ["restate"]),
        ([(b"two", 1), (b"two", 1)], ["anew"]),
        ([(b"two", 1), (b"three", 1)], ["anew", "restate"]),
        # The first report was lost with its connection: what peers had connected to is gone all the same.
        ([(b"three", 2)], ["anew"]),
    ],
)
def test_peers_meet_a_rank_anew_when_its_transport_was_rebuilt(
    monkeypatch: pytest.MonkeyPatch, reports: list[tuple[bytes, int]], expected: list[str]
) -> None:
    did: list[str] = []
    link: Any = SimpleNamespace(counts={})
    control = InstanceControl(ControlConfig(instance_id="i", model="m", topology=Topology()), link, lambda event: None)
    own: Any = SimpleNamespace()
    monkeypatch.setattr(control, "_own", lambda: own)
    monkeypatch.setattr(control, "_all_joined", lambda: None)
    control._join(joined(b"one", 0), lambda order: None, remote=False)
    control.desk, control.peering = own, own
    own.begin_anew = lambda stated, error: did.append("anew")
    own.restate = lambda stated: did.append("restate")
    for connect, rebuilt in reports:
        control._on_report(RANK, joined(connect, rebuilt))
    assert did == expected
