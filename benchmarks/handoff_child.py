"""One worker process of `handoff.py`: an endpoint whose engine computes nothing. Commands and answers are JSON lines.

Times are of CLOCK_MONOTONIC, which all processes of a host share, so that they can be compared across the two.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections import deque
from typing import Any

import numpy as np
from wake_floor import Floor

from sglang_pd import ControlConfig, DecodeEndpoint, EventKind, PrefillEndpoint, RankSetup, create_backend, new_epoch
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.memory.views import host_bytes
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.worker.wakeups import prefer_latency

PAGE_TOKENS = 16
PAGE_BYTES = 32 * 1024
ENDS = (EventKind.DONE, EventKind.FAILED, EventKind.ABORTED)


class Child:
    """An endpoint, and what is asked of it."""

    def __init__(self, conf: dict[str, Any]) -> None:
        prefer_latency()
        self.role, pages = conf["role"], conf["pages"]
        backend = create_backend(conf["backend"], epoch=new_epoch(), options=conf.get("options", {}))
        kv = ComponentSpec("KV", "tokens", (RegionSpec("k", (0,), "float32", 8, (64,)),))  # 2 KiB a token
        capacity = Capacity(tokens=pages * PAGE_TOKENS, page_tokens=PAGE_TOKENS)
        state, device = StateSpec(components=(kv,), layers=1), conf.get("device", "cpu")
        layout = layout_rank(state, capacity, Topology(), RankId(0, 0), device)
        segments = Scope(backend).allocate_layout(layout)
        for segment in segments:
            if device == "cpu":
                host_bytes(segment)[:] = 1  # touched: no page fault is measured
        self.pages, self.pool = layout.roots.tokens.list_space, pages
        setup = RankSetup(backend=backend, components=layout.components, segments=segments)
        config = ControlConfig(instance_id=conf["id"], model="bench", verify=conf.get("verify", "off"))
        kind = PrefillEndpoint if self.role == "prefill" else DecodeEndpoint
        self.endpoint: Any = kind(config, setup)
        self.heard: deque[Any] = deque()
        self.heard_s = 0.0
        self.spinning = False

    def lists(self, first: int, count: int, scattered: bool = False) -> Any:
        numbers = np.arange(first, first + count) if not scattered else np.random.default_rng(5).permutation(count)
        return {self.pages: self.pages.ingest(numbers + 1, consumer="bench")}

    def events(self, timeout_s: float = 30.0) -> list[Any]:
        """Sleeps until there are some."""
        select.select([self.endpoint.wakeup_fd()], [], [], timeout_s)
        return list(self.endpoint.poll())

    def until(self, room: int, kinds: tuple[EventKind, ...]) -> float:
        """Waits for an event of a room; gives the time at which the engine's thread had it."""
        while True:
            if not self.heard:
                self.heard.extend(self.events())
                self.heard_s = time.monotonic()
            while self.heard:
                event = self.heard.popleft()
                if event.room == room and event.kind in kinds:
                    return self.heard_s

    # --- one room -----------------------------------------------------------------------------------------------------

    def do_request(self, room: int, tokens: int, scattered: bool = False) -> None:
        ids = np.arange(tokens)
        self.handle = self.endpoint.request(room, ids, self.lists(0, -(-tokens // PAGE_TOKENS), scattered))

    def do_fire(self, room: int, tokens: int) -> dict[str, float]:
        """The last token of the prompt is computed."""
        began_s = time.monotonic()
        self.endpoint.send(self.handle, 0, tokens, last=True)
        self.endpoint.finish(self.handle, tokens, b"first token")
        return {"at_s": began_s}

    def do_open(self, room: int, tokens: int, address: str, scattered: bool = False) -> None:
        ids = np.arange(tokens)
        self.handle = self.endpoint.open(room, address, ids, self.lists(0, -(-tokens // PAGE_TOKENS), scattered))

    def do_await(self, room: int, kind: str) -> dict[str, float]:
        kinds = ENDS if kind == "end" else (EventKind(kind),)
        return {"at_s": self.until(room, kinds)}

    def do_abort(self, room: int) -> dict[str, float]:
        self.endpoint.abort(self.handle)
        return {"at_s": time.monotonic()}

    # --- many rooms ---------------------------------------------------------------------------------------------------

    def do_stream(self, first: int, rooms: int, in_flight: int, address: str = "") -> dict[str, float]:
        """Rooms of one page, so many at a time, to the end; seconds it took."""
        began_s, started, done = time.monotonic(), 0, 0
        ids = np.arange(PAGE_TOKENS)

        def start(number: int) -> None:
            room, lists = first + number, self.lists(number % in_flight, 1)
            if self.role == "decode":
                self.endpoint.open(room, address, ids, lists)
                return
            handle = self.endpoint.request(room, ids, lists)
            self.endpoint.send(handle, 0, PAGE_TOKENS, last=True)
            self.endpoint.finish(handle, PAGE_TOKENS, b"")

        while done < rooms:
            while started < rooms and started - done < in_flight:
                start(started)
                started += 1
            for event in self.events():
                if event.kind in (EventKind.FAILED, EventKind.ABORTED):
                    raise RuntimeError(str(event.error))
                done += event.kind is EventKind.DONE
        return {"seconds": time.monotonic() - began_s}

    # --- the rest -----------------------------------------------------------------------------------------------------

    def do_connect(self, address: str) -> dict[str, float]:
        """Handshake: until the verdict stands and every rank is connected."""
        began_s = time.monotonic()
        self.endpoint.connect(address)
        while not any(peer["stage"] == "agreed" and peer["ranks_paired"] for peer in self.endpoint.peers()):
            time.sleep(0.0002)
        return {"seconds": time.monotonic() - began_s}

    def do_floor(self, address: str = "") -> dict[str, str]:
        """Begin the floor: decode's side without an address, then prefill's with the one that decode gave."""
        self.floor = Floor(address)
        return {"address": self.floor.address}

    def do_floor_fire(self) -> dict[str, float]:
        return {"at_s": self.floor.fire()}

    def do_floor_await(self) -> dict[str, float]:
        return {"at_s": self.floor.heard()}

    def do_busy(self, on: bool) -> None:
        """A Python thread that never waits, as a scheduler beside the endpoint would be at worst; it comes and goes."""
        self.spinning = on

        def spin() -> None:
            number = 0
            while self.spinning:
                number += 1

        if on:
            threading.Thread(target=spin, daemon=True).start()

    def do_stats(self) -> dict[str, Any]:
        return dict(self.endpoint.stats())

    def run(self) -> None:
        for line in iter(sys.stdin.readline, ""):
            order = json.loads(line)
            name = order.pop("cmd")
            print(json.dumps(getattr(self, f"do_{name}")(**order) or {}), flush=True)


def main() -> None:
    child = Child(json.loads(sys.stdin.readline()))
    print(json.dumps({"address": child.endpoint.address}), flush=True)
    try:
        child.run()
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
