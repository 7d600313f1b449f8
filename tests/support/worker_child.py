"""A worker process for tests: a real endpoint over a real backend, an engine whose every byte is known in advance.

Run as `python worker_child.py` with a JSON configuration on the first line of standard input, then JSON commands, one
a line; answers and room events leave as JSON lines. The byte oracle: a live row is a function of (seed, region,
element) alone, every other byte is a canary, and memory that comes back is wiped to the canary at once, so that a late
byte shows for ever. Ends by `os._exit`, since a transport library may crash at interpreter exit.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.hybrid_state import capacity, hybrid_state

from sglang_pd.backends.registry import create_backend
from sglang_pd.memory.allocator import Allocator, Policy, instance_index_bytes
from sglang_pd.memory.layout import layout_rank
from sglang_pd.memory.lease import Lease
from sglang_pd.memory.live import element_slots
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.views import host_bytes
from sglang_pd.protocol.digest import mix64
from sglang_pd.protocol.errors import PdError
from sglang_pd.protocol.kinds import Prompt, kind_of
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.room import Limits
from sglang_pd.protocol.spaces import Page
from sglang_pd.worker.control import ControlConfig
from sglang_pd.worker.endpoint import DecodeEndpoint, Network, PrefillEndpoint, RankSetup, new_epoch
from sglang_pd.worker.events import EventKind, RoomEvent

CANARY = 0xA5


def content(seed: int, region: int, elements: np.ndarray, row_bytes: int) -> np.ndarray:
    """Expected bytes of live rows: uint8 [elements, row_bytes], never the canary alone."""
    words = -(-row_bytes // 8)
    base = mix64(elements.astype(np.uint64) + np.uint64((seed * 1_000_003 + region * 7_919) % 2**63))
    rows = mix64(base[:, None] + np.arange(words, dtype=np.uint64))
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(elements), words * 8)[:, :row_bytes]


@dataclass
class Room:
    """A room's memory and what its bytes must be."""

    room: int
    lease: Lease
    seed: int
    prompt: Prompt
    chunks: deque[tuple[int, int, bool]]
    pause_s: float = 0.0
    next_s: float = 0.0
    ended: bool = False


class Child:
    """One worker process."""

    def __init__(self, conf: dict[str, Any]) -> None:
        self.conf = conf
        self.role = conf["role"]
        self.backend = create_backend(conf["backend"], epoch=new_epoch(), options=conf.get("options", {}))
        state, size = hybrid_state(), capacity(conf.get("pages", 24), conf.get("rows", 8), conf.get("slots", 8))
        layout = layout_rank(state, size, Topology(), RankId(0, 0))
        scope = Scope(self.backend)
        segments = scope.allocate_layout(layout)
        self.pools = RankPools(layout, segments)
        for segment in segments:
            host_bytes(segment)[:] = CANARY
        policy = Policy(
            order=conf.get("order", "random"),
            seed=conf.get("seed", 1),
            quarantine_bytes=conf.get("quarantine_bytes"),
            on_over_budget=lambda held: self.endpoint.drain(conf.get("drain_s", 5.0)),
        )
        self.allocator = Allocator(layout.roots, policy, instance_index_bytes([layout]))
        setup = RankSetup(
            backend=self.backend,
            components=layout.components,
            segments=segments,
            deadline_s=conf.get("deadline_s", 10.0),
        )
        config = ControlConfig(
            instance_id=conf["id"],
            model="test",
            heartbeat_s=conf.get("heartbeat_s", 0.2),
            liveness_s=conf.get("liveness_s", 2.0),
            verify=conf.get("verify", "full"),
            limits=Limits(**conf.get("limits", {})),
        )
        network = Network(bind=conf.get("bind", "tcp://127.0.0.1:0"))
        kind = PrefillEndpoint if self.role == "prefill" else DecodeEndpoint
        self.endpoint: Any = kind(config, setup, network)
        self.by_handle: dict[int, Room] = {}
        self.wrong = 0

    # --- the engine --------------------------------------------------------------------------------------------------

    def rows(self, room: Room, wanted: Any) -> None:
        """Visit the live rows of a room: wanted(number of the region, rows view, slots, elements)."""
        lists = room.lease.lists(room.prompt)
        for number, key in enumerate(self.pools.keys):
            region, space = self.pools.region(*key)
            elements = kind_of(key[0]).live(room.prompt, space)
            if isinstance(space.list_space, Page) and not len(elements):
                continue
            numbers, slots = element_slots(space, lists, room.prompt, elements)
            view = self.pools.row_bytes(*key)
            wanted(number, view, (slots // region.rows_per_item, slots % region.rows_per_item), numbers)

    def write(self, room: Room) -> None:
        """What computing the prompt leaves in the pools."""

        def put(number: int, view: np.ndarray, at: Any, elements: np.ndarray) -> None:
            view[at] = content(room.seed, number, elements, view.shape[-1])

        self.rows(room, put)

    def wipe(self, room: Room) -> None:
        """Back to the canary: the memory is about to be somebody else's."""

        def clear(number: int, view: np.ndarray, at: Any, elements: np.ndarray) -> None:
            view[at] = CANARY

        self.rows(room, clear)

    def verify(self, room: Room) -> list[str]:
        """Regions of the room whose live rows are not what they must be."""
        bad: list[str] = []

        def check(number: int, view: np.ndarray, at: Any, elements: np.ndarray) -> None:
            if not np.array_equal(view[at], content(room.seed, number, elements, view.shape[-1])):
                bad.append("/".join(map(str, self.pools.keys[number])))

        self.rows(room, check)
        return bad

    def dirty_bytes(self) -> int:
        """Bytes that are neither canary nor part of a room that lives or waits for a fence. Exact when none does."""
        return sum(int((host_bytes(s) != CANARY).sum()) for s in self.pools.segments)

    # --- commands ----------------------------------------------------------------------------------------------------

    def command(self, order: dict[str, Any]) -> None:
        """One command; its answer carries the command's name."""
        name = order["cmd"]
        try:
            answer = getattr(self, f"do_{name}")(**{k: v for k, v in order.items() if k not in ("cmd", "n")})
        except PdError as error:
            answer = {"error": error.code, "message": str(error)}
        self.say({"answer": name, "n": order.get("n"), **(answer or {})})

    def say(self, line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def do_hello(self) -> dict[str, Any]:
        return {"address": self.endpoint.address, "pid": os.getpid(), "epoch": self.endpoint.control.epoch}

    def do_connect(self, address: str) -> None:
        self.endpoint.connect(address)

    def do_serve(
        self, room: int, tokens: int, seed: int, chunks: list[int] | None = None, pause_s: float = 0.0
    ) -> dict[str, Any]:
        """Prefill: request a room; its chunks follow, `pause_s` apart."""
        cuts = [0, *(chunks or []), tokens]
        plan = deque((a, b, b == tokens) for a, b in zip(cuts, cuts[1:], strict=False))
        entry = Room(room, self.allocator.lease(tokens), seed, Prompt(tokens), plan, pause_s)
        self.write(entry)
        handle = self.enter(entry, lambda lists: self.endpoint.request(room, prompt_ids(seed, tokens), lists))
        self.by_handle[handle] = entry
        return {"room": room, "handle": handle}

    def do_open(
        self, room: int, tokens: int, seed: int, address: str, prompt_seed: int | None = None
    ) -> dict[str, Any]:
        """Decode: lease memory and open the room."""
        entry = Room(room, self.allocator.lease(tokens), seed, Prompt(tokens), deque())
        entry.lease.arm()
        ids = prompt_ids(seed if prompt_seed is None else prompt_seed, tokens)
        handle = self.enter(entry, lambda lists: self.endpoint.open(room, address, ids, lists))
        self.by_handle[handle] = entry
        return {"room": room, "handle": handle}

    def enter(self, entry: Room, call: Any) -> int:
        """Hand a lease over to a room; a refusal gives it back."""
        try:
            return int(call(entry.lease.lists(entry.prompt)))
        except PdError:
            self.release(entry)
            raise

    def do_abort(self, room: int) -> None:
        self.endpoint.abort(room)

    def do_drain(self, deadline_s: float = 5.0) -> None:
        self.endpoint.drain(deadline_s)

    def do_stats(self) -> dict[str, Any]:
        return {
            "stats": self.endpoint.stats(),
            "peers": self.endpoint.peers(),
            "rooms": len(self.by_handle),
            "leases": len(self.allocator.leases),
            "quarantined": len(self.allocator.quarantine),
            "ready": self.endpoint.ready,
            "drained": self.endpoint.drained,
            "last_fault": self.endpoint._loop.last_fault,
        }

    def do_check(self) -> dict[str, Any]:
        """The conservation and byte oracles; exact when nothing is leased or withheld."""
        self.allocator.check_integrity()
        desk = self.endpoint.control.desk
        for table in (desk.prefill, desk.decode) if desk else ():
            table.check_integrity()
        return {
            "leases": len(self.allocator.leases),
            "quarantined": len(self.allocator.quarantine),
            "rooms": desk.open_rooms if desk else 0,
            "dirty": self.dirty_bytes(),
            "wrong": self.wrong,
            "fds": len(os.listdir("/proc/self/fd")),
            "rss": rss_bytes(),
        }

    # --- events ------------------------------------------------------------------------------------------------------

    def on_event(self, event: RoomEvent) -> None:
        entry = self.by_handle.get(event.handle)
        line: dict[str, Any] = {"event": event.kind.value, "room": event.room, "handle": event.handle}
        if event.error is not None:
            line["code"], line["message"], line["where"] = event.error.code, event.error.message, event.error.where
        if entry is not None and event.kind is EventKind.ADMITTED:
            bad = self.verify(entry)
            self.wrong += bool(bad)
            line["bad"], line["record"] = bad, event.record.decode()
        if entry is not None and event.kind in (EventKind.FAILED, EventKind.ABORTED):
            entry.ended = True
            entry.chunks.clear()
        if entry is not None and event.kind is EventKind.RELEASABLE:
            self.release(entry)
            del self.by_handle[event.handle]
        self.say(line)

    def release(self, entry: Room) -> None:
        """The fence is proven, or nothing was exposed: wipe, then give back."""
        self.wipe(entry)
        if entry.lease.is_armed:
            entry.lease.disarm()
        entry.lease.release()

    def send_due(self) -> float | None:
        """Send chunks that are due; seconds until the next, None for none."""
        now_s, soonest = time.monotonic(), None
        for entry in list(self.by_handle.values()):
            while entry.chunks and entry.next_s <= now_s:
                start, stop, last = entry.chunks.popleft()
                self.endpoint.send(entry.room, start, stop, last=last)
                if last:
                    self.endpoint.finish(entry.room, stop, f"seed {entry.seed}".encode())
                entry.next_s = now_s + entry.pause_s
            if entry.chunks:
                wait_s = entry.next_s - now_s
                soonest = wait_s if soonest is None else min(soonest, wait_s)
        return soonest

    def run(self) -> None:
        stdin = sys.stdin.fileno()
        buffer = b""
        while True:
            wait_s = self.send_due()
            readable, _, _ = select.select([stdin, self.endpoint.wakeup_fd()], [], [], wait_s)
            for event in self.endpoint.poll():
                self.on_event(event)
            if stdin in readable:
                data = os.read(stdin, 1 << 16)
                if not data:
                    return
                buffer += data
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    self.command(json.loads(line))


def prompt_ids(seed: int, tokens: int) -> list[int]:
    """The prompt of a seed: both sides derive it alike."""
    return [(seed * 31 + i * 7) % 50_000 for i in range(tokens)]


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    sys.setswitchinterval(0.0005)
    child = Child(json.loads(sys.stdin.readline()))
    child.say({"answer": "start", **child.do_hello()})
    try:
        child.run()
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
