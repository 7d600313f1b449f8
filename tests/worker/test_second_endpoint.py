"""Another endpoint over a backend whose first one is through: peers meet it as the one that is there now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_pair import CONFIG, LocalPair
from support.worker_pair import wait_until

from sglang_pd import PrefillEndpoint
from sglang_pd.protocol.manifest import Term
from sglang_pd.worker.peers.seeking import Issued, Seeking


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair(liveness_s=30.0, heartbeat_s=0.2)
    yield both
    both.close()


def again(pair: LocalPair, name: str) -> None:
    """The first one closes, another one begins over the same memory."""
    pair.prefill.at.close()
    pair.prefill.at = PrefillEndpoint(replace(CONFIG, instance_id=name, heartbeat_s=0.2), pair.prefill.setup)
    pair.prefill.events.clear()
    pair.address = pair.prefill.at.address


def test_a_room_at_the_second_endpoint_does_not_go_to_the_first(pair: LocalPair) -> None:
    """Decode knows these ranks, at an address where nobody answers any more and nobody is missed yet."""
    pair.start(1)
    pair.complete(1)
    for number in (2, 3):
        again(pair, f"prefill-{number}")
        pair.start(number)
        pair.complete(number)


def test_the_second_endpoint_speaks_for_what_the_first_one_was_through_with(pair: LocalPair) -> None:
    """Decode did not hear that its room ended: the word was lost with the connection, or the process ended before."""
    pair.start(1)
    wait_until(lambda: pair.decode.at.stats()["rooms"] == 1 and pair.prefill.at.stats()["source_rooms"] == 1)
    frames = pair.prefill.at.link.send
    pair.prefill.at.link.send = lambda party, frame: None  # type: ignore[method-assign]
    pair.prefill.at.abort(pair.handles[1])
    pair.prefill.released(1)
    pair.prefill.at.link.send = frames  # type: ignore[method-assign]
    assert pair.decode.of(1) == []
    again(pair, "prefill-2")
    pair.start(2)
    assert pair.decode.released(1) == ["failed:peer_lost", "releasable"]
    pair.complete(2)


def test_a_control_says_nothing_for_one_that_was_not_through(pair: LocalPair) -> None:
    issued = Issued()
    for epoch in (11, 12):
        issued.add(epoch)
    issued.leave(lambda epoch: epoch == 11)
    assert Issued.was_through(11) and not Issued.was_through(12)
    pair.start(1)
    own = pair.prefill.at.control.peering
    wait_until(lambda: [talk.stage.value for talk in own.all()] == ["agreed"])
    epoch = own.all()[0].own_epoch
    pair.prefill.at.close()  # with an open room
    assert not Issued.was_through(epoch)


def test_who_may_speak_for_lost_writers() -> None:
    """The same ranks, or none of them: of a part, the others may still write."""
    seeking = Seeking()
    seeking.add(5, room=1)
    seeking.lost(5, of_ranks(21, 22))
    assert [seeking.wrote(5, of_ranks(*ranks)) for ranks in ((21, 22), (31, 32), (21, 32))] == [True, True, False]
    assert not seeking.wrote(6, of_ranks(21, 22))


def of_ranks(*epochs: int) -> Any:
    return SimpleNamespace(ranks=[SimpleNamespace(epoch=epoch, term=Term()) for epoch in epochs])
