"""A worker process for tests: a real endpoint over a real backend, an engine whose every byte is known in advance.

Run as `python worker_child.py` with a JSON configuration on the first line of standard input, then JSON commands, one
a line; answers and room events leave as JSON lines. The byte oracle is in `worker_memory`. Ends by `os._exit`, since a
transport library may crash at interpreter exit.

Role `rank`: a further rank of an instance whose control is another process; it is told the lists of each room.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from support.worker_clock import real_monotonic  # first: it may put another clock into `time`
from support.worker_frames import BadLink
from support.worker_memory import Memory, prompt_ids, rss_bytes

from sglang_pd.backends.registry import create_backend
from sglang_pd.memory.allocator import Allocator, Policy, instance_index_bytes
from sglang_pd.memory.lease import Lease
from sglang_pd.protocol import messages as m
from sglang_pd.protocol.bind import IndexLists
from sglang_pd.protocol.errors import ErrorInfo, PdError
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.room import Limits
from sglang_pd.testing import faults
from sglang_pd.worker.endpoint import DecodeEndpoint, PrefillEndpoint, RankEndpoint
from sglang_pd.worker.events import EventKind, RoomEvent
from sglang_pd.worker.peers.link import CurveKeys
from sglang_pd.worker.settings import ControlConfig
from sglang_pd.worker.setup import Network, RankSetup, new_epoch
from sglang_pd.worker.wakeups import prefer_latency


@dataclass
class Room:
    """A room's memory and what its bytes must be."""

    room: int
    lease: Lease | None
    lists: IndexLists
    seed: int
    prompt: Prompt
    chunks: deque[tuple[int, int, bool]]
    finish: bool = True
    record: str = ""
    pause_s: float = 0.0
    next_s: float = 0.0
    covered: int | None = None
    """What the record claims to cover, where it lies."""
    handle: int = 0


class Child:
    """One worker process."""

    def __init__(self, conf: dict[str, Any]) -> None:
        self.conf = conf
        self.role = conf["role"]
        faults.install()
        self.backend = create_backend(conf["backend"], epoch=new_epoch(), options=conf.get("options", {}))
        self.memory = Memory(self.backend, conf)
        roots = self.memory.layout.roots
        policy = Policy(
            order=conf.get("order", "random"),
            seed=conf.get("seed", 1),
            quarantine_bytes=conf.get("quarantine_bytes"),
            on_over_budget=lambda held: self.endpoint.drain(conf.get("drain_s", 5.0)),
        )
        self.allocator = Allocator(roots, policy, instance_index_bytes([self.memory.layout]))
        setup = RankSetup(
            backend=self.backend,
            components=self.memory.layout.components,
            segments=self.memory.pools.segments,
            rank=RankId(*conf.get("rank", (0, 0))),
            deadline_s=conf.get("deadline_s", 10.0),
        )
        self.last_rank = [Topology(**conf.get("topology", {})).pp - 1, 0] == list(conf.get("rank", (0, 0)))
        curve = conf.get("curve")
        keys = curve and CurveKeys(
            curve["public"].encode(),
            curve["secret"].encode(),
            frozenset(k.encode() for k in curve.get("authorized", ())),
        )
        if self.role == "rank":
            self.endpoint: Any = RankEndpoint(setup, conf["control"], curve=keys, heartbeat_s=0.2)
            self.link: Any = self.endpoint._remote.link
        else:
            self.endpoint = self._instance(setup, keys)
            self.link = self.endpoint.link
        self.bad_link = BadLink(self.link, conf.get("seed", 1)) if conf.get("bad_link") else None
        self.by_handle: dict[int, Room] = {}
        self.by_room: dict[int, Room] = {}
        self.handles: dict[int, int] = {}
        """The latest handle of every room there ever was."""
        self.wrong = 0

    def _instance(self, setup: RankSetup, keys: CurveKeys | None) -> Any:
        conf = self.conf
        config = ControlConfig(
            instance_id=conf["id"],
            model="test",
            topology=Topology(**conf.get("topology", {})),
            heartbeat_s=conf.get("heartbeat_s", 0.2),
            liveness_s=conf.get("liveness_s", 2.0),
            rank_liveness_s=conf.get("rank_liveness_s", 2.0),
            peer_wait_s=conf.get("peer_wait_s", 30.0),
            verify=conf.get("verify", "full"),
            limits=Limits(**conf.get("limits", {})),
        )
        network = Network(bind=conf.get("bind", "tcp://127.0.0.1:0"), ranks_bind=conf.get("ranks_bind"), curve=keys)
        kind = PrefillEndpoint if self.role == "prefill" else DecodeEndpoint
        return kind(config, setup, network)

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
        if self.role == "rank":
            return {"address": "", "ranks_address": "", "pid": os.getpid(), "epoch": self.backend.epoch}
        at = self.endpoint
        return {
            "address": at.address, "ranks_address": at.ranks_address, "pid": os.getpid(), "epoch": at.control.epoch,
        }  # fmt: skip

    def do_connect(self, address: str) -> None:
        self.endpoint.connect(address)

    def do_serve(
        self,
        room: int,
        tokens: int,
        seed: int,
        chunks: list[int] | None = None,
        pause_s: float = 0.0,
        record_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Prefill: request a room; its chunks follow, `pause_s` apart."""
        entry = self.entry(room, tokens, seed, cuts(tokens, chunks))
        entry.pause_s = pause_s
        entry.record = f"seed {seed}"
        if entry.lists:
            self.memory.write(entry.lists, entry.prompt, seed)
        entry.covered = record_tokens
        return self.enter(entry, lambda: self.endpoint.request(room, prompt_ids(seed, tokens), entry.lists))

    def do_open(
        self, room: int, tokens: int, seed: int, address: str, prompt_seed: int | None = None
    ) -> dict[str, Any]:
        """Decode: lease memory and open the room."""
        entry = self.entry(room, tokens, seed, deque())
        if entry.lease is not None:
            entry.lease.arm()
        ids = prompt_ids(seed if prompt_seed is None else prompt_seed, tokens)
        return self.enter(entry, lambda: self.endpoint.open(room, address, ids, entry.lists))

    def entry(self, room: int, tokens: int, seed: int, plan: deque[tuple[int, int, bool]]) -> Room:
        """A room with its lease; one without tokens has neither memory nor a valid prompt."""
        if not tokens:
            return Room(room, None, {}, seed, Prompt(1), deque())
        lease = self.allocator.lease(tokens)
        return Room(room, lease, lease.lists(Prompt(tokens)), seed, Prompt(tokens), plan, self.last_rank)

    def enter(self, entry: Room, call: Any) -> dict[str, Any]:
        """Hand a lease over to a room; a refusal gives it back."""
        try:
            handle = int(call())
        except PdError:
            self.release(entry)
            raise
        entry.handle = handle
        self.by_handle[handle] = self.by_room[entry.room] = entry
        self.handles[entry.room] = handle
        return {"room": entry.room, "handle": handle, "lists": self.memory.numbers(entry.lists)}

    def do_fill(
        self, handle: int, tokens: int, seed: int, lists: dict[str, list[int]],
        chunks: list[int] | None = None, pause_s: float = 0.0,
    ) -> None:  # fmt: skip
        """A rank of a prefill: its share of a room is computed and sent."""
        entry = Room(
            0, None, self.memory.lists(lists), seed, Prompt(tokens), cuts(tokens, chunks), self.last_rank,
            f"seed {seed}", pause_s, handle=handle,
        )  # fmt: skip
        self.memory.write(entry.lists, entry.prompt, seed)
        self.by_handle[handle] = entry

    def do_judge(self, room: int, tokens: int, seed: int, lists: dict[str, list[int]]) -> dict[str, Any]:
        """A rank: what is wrong with its share of a room."""
        return {"bad": self.memory.verify(self.memory.lists(lists), Prompt(tokens), seed)}

    def do_clear(self, tokens: int, lists: dict[str, list[int]]) -> None:
        """A rank: the room's memory is over."""
        self.memory.wipe(self.memory.lists(lists), Prompt(tokens))

    def do_abort(self, room: int) -> None:
        if room in self.handles:  # an engine cannot abort what it never began
            self.endpoint.abort(self.handles[room])

    def do_drain(self, deadline_s: float = 5.0) -> None:
        self.endpoint.drain(deadline_s)

    def do_frames(self, rules: list[dict[str, Any]]) -> dict[str, Any]:
        assert self.bad_link is not None
        self.bad_link.set(rules)
        return {"counts": dict(self.bad_link.counts)}

    def do_flood(self, times: int) -> None:
        """Messages of rooms that nobody opened, in this worker's own name, to everyone it agrees with."""
        peering = self.endpoint.control.peering
        error = ErrorInfo(code="room_aborted", message="z" * 300)
        left, batch = times, 500

        def send() -> None:
            for talk in peering.all():
                for number in range(left, left + batch):
                    base = {"room": 2**40 + number, "generation": 2**50 + number}
                    peering._say(talk, m.StatusQuery(**base, nonce=number % 2**32, have=0, after=0))
                    peering._say(talk, m.Abort(**base, error=error))
                    peering._say(talk, m.LeaseRenew(room=base["room"], lease_ms=1000))
                    opened = m.RoomOpen(
                        **base, to_epoch=talk.epoch, request_id="", traceparent="", prompt_tokens=8, prompt_digest=1,
                        prefix_tokens=0, index_lists=(),
                    )  # fmt: skip
                    peering._say(talk, opened)

        while left > 0:
            done = threading.Event()
            self.endpoint._loop.submit(lambda done=done: (send(), done.set()))
            done.wait(30)
            left -= 4 * batch

    def do_release_fences(self) -> None:
        self.backend.release_fences()  # type: ignore[attr-defined]

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
            "struck": len(getattr(self.backend, "struck", ())),
        }

    def do_check(self) -> dict[str, Any]:
        """The conservation and byte oracles; exact when nothing is leased or withheld."""
        self.allocator.check_integrity()
        desk = self.endpoint.control.desk if self.role != "rank" else None
        return {
            "leases": len(self.allocator.leases),
            "quarantined": len(self.allocator.quarantine),
            "rooms": desk.open_rooms if desk else 0,
            "source_rooms": self.endpoint.agent.source.rooms,
            "dirty": self.memory.dirty_bytes(),
            "wrong": self.wrong,
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "rss": rss_bytes(),
        }

    def do_dirty(self) -> dict[str, Any]:
        """Where memory that nobody holds is not the canary."""
        return {"places": self.memory.dirty_places()}

    def do_integrity(self) -> dict[str, Any]:
        """Room tables contradict themselves? Looked at on the control thread, which owns them."""
        found: list[str] = []

        def look() -> None:
            desk = self.endpoint.control.desk
            try:
                for table in (desk.prefill, desk.decode) if desk else ():
                    table.check_integrity()
                found.append("")
            except PdError as error:
                found.append(str(error))

        self.endpoint._loop.submit(look)
        while not found:
            time.sleep(0.001)
        return {"problem": found[0]}

    # --- events ------------------------------------------------------------------------------------------------------

    def on_event(self, event: RoomEvent) -> None:
        entry = self.by_handle.get(event.handle)
        line: dict[str, Any] = {"event": event.kind.value, "room": event.room, "handle": event.handle}
        if event.error is not None:
            line["code"], line["message"], line["where"] = event.error.code, event.error.message, event.error.where
        if entry is not None and event.kind is EventKind.ADMITTED:
            bad = self.memory.verify(entry.lists, entry.prompt, entry.seed)
            self.wrong += bool(bad)
            line["bad"], line["record"] = bad, event.record.decode()
        if entry is not None and event.kind in (EventKind.FAILED, EventKind.ABORTED):
            entry.chunks.clear()
            if entry.lease is not None:
                entry.lease.quarantine(event.kind.value, time.monotonic())
        if entry is not None and event.kind is EventKind.RELEASABLE:
            self.release(entry)
            del self.by_handle[event.handle]
            if self.by_room.get(event.room) is entry:
                del self.by_room[event.room]
        self.say(line)

    def release(self, entry: Room) -> None:
        """The fence is proven, or nothing was exposed: wipe, then give back."""
        if entry.lease is None:
            return
        self.memory.wipe(entry.lists, entry.prompt)
        if entry.lease.generation in self.allocator.quarantine:
            self.allocator.fenced(entry.lease.generation)
            return
        if entry.lease.is_armed:
            entry.lease.disarm()
        entry.lease.release()

    def send_due(self) -> float | None:
        """Send chunks that are due; seconds until the next, None for none."""
        now_s, soonest = real_monotonic(), None
        for entry in list(self.by_handle.values()):
            while entry.chunks and entry.next_s <= now_s:
                start, stop, last = entry.chunks.popleft()
                self.endpoint.send(entry.handle, start, stop, last=last)
                if last and entry.finish:
                    covered = stop if entry.covered is None else entry.covered
                    self.endpoint.finish(entry.handle, covered, entry.record.encode())
                entry.next_s = now_s + entry.pause_s
            if entry.chunks:
                wait_s = entry.next_s - now_s
                soonest = wait_s if soonest is None else min(soonest, wait_s)
        return soonest

    def run(self) -> None:
        stdin = sys.stdin.fileno()
        wakeups = [] if self.role == "rank" else [self.endpoint.wakeup_fd()]
        buffer = b""
        while True:
            wait_s = self.send_due()
            readable, _, _ = select.select([stdin, *wakeups], [], [], wait_s)
            for event in self.endpoint.poll() if wakeups else ():
                self.on_event(event)
            if stdin in readable:
                data = os.read(stdin, 1 << 16)
                if not data:
                    return
                buffer += data
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    self.command(json.loads(line))


def cuts(tokens: int, chunks: list[int] | None) -> deque[tuple[int, int, bool]]:
    """(start, stop, last) of every chunk."""
    at = [0, *(chunks or []), tokens]
    return deque((a, b, b == tokens) for a, b in zip(at, at[1:], strict=False))


def main() -> None:
    prefer_latency()
    child = Child(json.loads(sys.stdin.readline()))
    child.say({"answer": "start", **child.do_hello()})
    try:
        child.run()
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
