"""A prefill of two ranks in one process, the second with an endpoint of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_pd import Network, PrefillEndpoint, RankEndpoint, RankSetup, create_backend, new_epoch
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.manifest import RankId, Topology

from .local_pair import CONFIG, IDS, KV, LocalPair

TWO = Topology(tp=2)
SECOND = RankId(0, 1)


def until(true: Callable[[], Any]) -> None:
    """Wait for it."""
    deadline_s = time.monotonic() + 15
    while not true():
        assert time.monotonic() < deadline_s, "did not come true"
        time.sleep(0.01)


def setup_of(rank: RankId) -> RankSetup:
    """A rank of two over shared memory."""
    backend = create_backend("local", epoch=new_epoch())
    layout = layout_rank(StateSpec((KV,), layers=2), Capacity(512, 16), TWO, rank)
    segments = Scope(backend).allocate_layout(layout)
    return RankSetup(backend=backend, components=layout.components, segments=segments, rank=rank)


class TwoRanks:
    """The prefill, towards the decode of a pair. orders: to the second rank."""

    def __init__(self, pair: LocalPair) -> None:
        self.pair, self.orders = pair, list[Any]()
        self.said: dict[int, list[str]] = {}
        self.setup = setup_of(RankId(0, 0))
        config = replace(CONFIG, instance_id="p", topology=TWO, rank_liveness_s=2.0, verify="off", liveness_s=1.0)
        network = Network(bind="tcp://127.0.0.1:0", ranks_bind="tcp://127.0.0.1:0")
        self.at = PrefillEndpoint(replace(config, heartbeat_s=0.2), self.setup, network)
        self.second = setup_of(SECOND)
        self.rank = RankEndpoint(self.second, self.at.ranks_address, heartbeat_s=0.1)
        order = self.rank.agent.order
        self.rank.agent.order = lambda one: (self.orders.append(one), order(one))[1]  # type: ignore[method-assign]
        until(lambda: self.at.ready)

    def begin(self, room: int) -> int:
        """Both legs of a room."""
        handle = self.at.request(room, IDS, self.pair.prefill.lists())
        self.pair.decode.at.open(room, self.at.address, IDS, self.pair.decode.lists())
        return handle

    def start(self, room: int) -> None:
        """A room, and all its bytes."""
        handle = self.begin(room)
        for rank in (self.at, self.rank):
            rank.send(handle, 0, len(IDS), last=True)
        self.at.finish(handle, len(IDS), b"record")

    def ends(self, room: int) -> list[str]:
        """How a room ended at decode, once both sides have its memory back."""
        until(lambda: "releasable" in self.of(room))
        return self.pair.decode.released(room)

    def of(self, room: int) -> list[str]:
        """What prefill said of a room."""
        for event in self.at.poll():
            self.said.setdefault(event.room, []).append(event.kind.value)
        return self.said.get(room, [])

    def close(self) -> None:
        """End it."""
        for one in (self.rank, self.at, self.setup.backend, self.second.backend):
            one.close()
