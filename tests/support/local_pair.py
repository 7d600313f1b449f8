"""Two endpoints in one process over shared memory, for what a process of its own cannot be asked."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from sglang_pd import ControlConfig, DecodeEndpoint, PrefillEndpoint, RankSetup, RoomEvent, create_backend, new_epoch
from sglang_pd.memory.allocator import Allocator
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.protocol.bind import IndexLists
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.worker.events import TERMINAL_EVENTS

IDS = list(range(40))
PAGE = 16
KV = ComponentSpec("KV", "tokens", (RegionSpec("k", (0, 1), "float32", 2, (8,)),))
ENDS = {kind.value for kind in TERMINAL_EVENTS}
CONFIG = ControlConfig(instance_id="one", model="test", verify="full", peer_wait_s=2.0)


class Side:
    """One endpoint, and every event it gave."""

    def __init__(
        self, kind: type[Any], name: str, *, components: tuple[ComponentSpec, ...] = (KV,), **config: Any
    ) -> None:
        state, capacity = StateSpec(components, layers=2), Capacity(32 * PAGE, PAGE, rows=4, slots=4)
        layout = layout_rank(state, capacity, Topology(), RankId(0, 0))
        self.allocator = Allocator(layout.roots)
        self.backend = create_backend("local", epoch=new_epoch())
        self.scope = Scope(self.backend)
        segments = self.scope.allocate_layout(layout)
        self.pools = RankPools(layout, segments)
        self.setup = RankSetup(backend=self.backend, components=layout.components, segments=segments)
        self.space = layout.roots.tokens.list_space
        self.at = kind(replace(CONFIG, instance_id=name, **config), self.setup)
        self.events: list[RoomEvent] = []

    def lists(self, first: int = 1) -> IndexLists:
        """Pages for `IDS`."""
        return {self.space: self.space.ingest(np.arange(first, first + 3))}

    def of(self, room: int) -> list[str]:
        """What was said of a room, causes behind a colon."""
        self.events += self.at.poll()
        mine = [event for event in self.events if event.room == room]
        return [f"{event.kind.value}:{event.error.code}" if event.error else event.kind.value for event in mine]

    def released(self, room: int, timeout_s: float = 10.0) -> list[str]:
        """The same, once it has ended and its memory is back; which comes first differs."""
        deadline_s = time.monotonic() + timeout_s
        while "releasable" not in (said := self.of(room)) or not any(one.partition(":")[0] in ENDS for one in said):
            assert time.monotonic() < deadline_s, f"room {room}: {said}, {self.at.stats()}"
            time.sleep(0.01)
        return said

    def close(self) -> None:
        """End it."""
        self.at.close()
        self.backend.close()


class LocalPair:
    """A prefill and a decode that know each other."""

    def __init__(self, **config: Any) -> None:
        self.prefill = Side(PrefillEndpoint, "prefill-0", **config)
        self.decode = Side(DecodeEndpoint, "decode-0", **config)
        self.address = self.prefill.at.address
        self.handles: dict[int, int] = {}
        """Of prefill, by room."""

    def start(self, room: int) -> None:
        """Both legs of a room."""
        self.handles[room] = self.prefill.at.request(room, IDS, self.prefill.lists())
        self.decode.at.open(room, self.address, IDS, self.decode.lists())

    def complete(self, room: int) -> None:
        """A room that was started goes well."""
        self.prefill.at.send(self.handles[room], 0, len(IDS), last=True)
        self.prefill.at.finish(self.handles[room], len(IDS), b"record")
        assert self.decode.released(room) == ["admitted", "done", "releasable"]
        self.prefill.released(room)

    def close(self) -> None:
        """End both."""
        self.prefill.close()
        self.decode.close()
