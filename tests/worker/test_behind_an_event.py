"""A chunk behind its device event when its room is over: the event may come much later, and then writes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.local_pair import IDS, LocalPair
from support.worker_pair import wait_until

POISON = 77.0


class Gate:
    """A device event that happens when told."""

    def __init__(self) -> None:
        self.open = False

    def query(self) -> bool:
        return self.open

    def synchronize(self) -> None:
        wait_until(self.query)


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair(liveness_s=1.5, heartbeat_s=0.3)
    yield both
    both.close()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_memory_comes_back_though_the_event_does_not(pair: LocalPair, who: str) -> None:
    gate = Gate()
    pair.prefill.pools.array("KV", 0, "k")[:] = 1.0
    pair.decode.pools.array("KV", 0, "k")[:] = POISON
    handle = pair.prefill.at.request(1, IDS, pair.prefill.lists())
    opened = pair.decode.at.open(1, pair.address, IDS, pair.decode.lists())
    pair.prefill.at.send(handle, 0, len(IDS), last=True, after=gate)
    wait_until(lambda: pair.prefill.at.stats()["transfers_in_flight"] == 1)
    if who == "prefill":
        pair.prefill.at.abort(handle)
    else:
        pair.decode.at.abort(opened)
    assert pair.decode.released(1, 5)[-1] == "releasable" and "releasable" in pair.prefill.released(1, 5)
    gate.open = True
    time.sleep(0.2)
    assert np.all(pair.decode.pools.array("KV", 0, "k") == POISON)
    pair.start(2)
    pair.complete(2)
