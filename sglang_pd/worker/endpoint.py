"""The endpoints: what an engine author uses. Synchronous, non-blocking, safe to call from the engine's own thread.

A process with one rank holds control and rank together. An instance of several ranks has one such process, and a
`RankEndpoint` in each other rank's process: rank 0's endpoint names rooms and indices, every rank sends its own chunks.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from sglang_pd.backends.home import Home
from sglang_pd.memory.holding import hold, let_go
from sglang_pd.protocol.bind import Chunk, IndexLists
from sglang_pd.protocol.errors import ConfigError, ErrorInfo, RoomError, SpaceMismatch, wire_text
from sglang_pd.protocol.idx import Idx, mismatch
from sglang_pd.protocol.indices import IndexList, pack_indices, prompt_digest
from sglang_pd.protocol.messages import MAX_VALUE
from sglang_pd.worker.control import PEERS, RANKS, InstanceControl
from sglang_pd.worker.events import TERMINAL_EVENTS, EventKind, RoomEvent
from sglang_pd.worker.loop import WorkerLoop
from sglang_pd.worker.peers.link import CurveKeys, Link
from sglang_pd.worker.ranks.agent import RankAgent
from sglang_pd.worker.ranks.remote_rank import RemoteRank
from sglang_pd.worker.rooms.facts import RoomFacts
from sglang_pd.worker.settings import ControlConfig
from sglang_pd.worker.setup import UNTRACED, Network, RankSetup, TokenIds, Trace
from sglang_pd.worker.watch import Watch

log = logging.getLogger("sglang_pd.worker")

MAX_ROOM: Final = 2**63 - 1
MAX_PAST: Final = 65_536


class Endpoint:
    """What both roles share. Use `PrefillEndpoint` or `DecodeEndpoint`."""

    _called = True
    """Whether peers may call here."""

    def __init__(
        self, config: ControlConfig, setup: RankSetup, network: Network | None = None, watch: Watch | None = None
    ) -> None:
        network = network or Network()
        self._home = Home("the endpoint", "worker")
        self.watch = watch or Watch()
        self._events: deque[RoomEvent] = deque()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._told = False
        self._polling, self._entering = threading.Lock(), threading.Lock()
        self._handles = itertools.count(1 + (secrets.randbits(31) << 31))  # unlike those of an incarnation before
        self._closed = False
        self._active: dict[int, int] = {}
        """Handle of each room in use here."""
        self._open: set[int] = set()
        """These handles."""
        self._past: dict[int, None] = {}
        """Handles that are over, the latest `MAX_PAST`: what an engine still sends for them is ignored."""
        self._halves: set[int] = set()
        """Handles that gave one of their two last events, the terminal one and RELEASABLE."""
        self._holder = object()
        self._unreleased: set[int] = set()
        """Handles whose RELEASABLE has not come: their memory is not the engine's."""
        self.link = Link(network.curve)
        try:
            self.address = self.link.listen(PEERS, network.bind) if network.bind else ""
            self.ranks_address = self.link.listen(RANKS, network.ranks_bind) if network.ranks_bind else ""
            self._start(config, setup)
        except BaseException:  # the port and the backend must be free for the next attempt
            let_go(setup.backend, self._holder)
            self.link.close()
            os.close(self._event_fd)
            raise

    def _start(self, config: ControlConfig, setup: RankSetup) -> None:
        hold(setup.backend, self._holder, config.instance_id)
        self.control = InstanceControl(config, self.link, self._emit)
        self.agent = RankAgent(
            setup.facts(),
            setup.backend,
            self.control.report_of(setup.rank),
            wake=lambda: self._loop.ring(),
            deadline_s=setup.deadline_s,
            device_digest=setup.device_digest,
        )
        self.control.watch = self.watch
        self.control.called = self._called
        self.agent.source.on_posted = self.watch.posted
        self.control.attach(self.agent)
        self._loop = WorkerLoop(self.link, self.control, self.agent, name=f"pd-{config.instance_id}")
        self._loop.start()

    def _emit(self, event: RoomEvent) -> None:
        if event.kind is EventKind.RELEASABLE:
            self._unreleased.discard(event.handle)
        if event.kind is EventKind.RELEASABLE or event.kind in TERMINAL_EVENTS:
            half = event.handle in self._halves
            (self._halves.discard if half else self._halves.add)(event.handle)
            if half and self._active.get(event.room) == event.handle:
                self._leave(event.room, event.handle)
        self.watch.event(event)
        if not event.handle:
            return  # of a room that the engine has not named: a peer opened it, and gave it up
        self._events.append(event)
        if not self._told:
            self._told = True
            os.eventfd_write(self._event_fd, 1)

    def _enter(self, facts: RoomFacts, call: Callable[[], None]) -> int:
        """Begin a room by its call, unless it is in use here, or the handle ever was. A room whose call is refused was
        never in use.
        """
        with self._entering:
            if facts.handle in self._open or facts.handle in self._past:
                raise RoomError("that handle was given before", code="room_duplicate", where=f"handle {facts.handle}")
            if self._active.setdefault(facts.room, facts.handle) != facts.handle:
                raise RoomError("that room is already open here", code="room_duplicate", where=f"room {facts.room}")
            self._open.add(facts.handle)
        self._unreleased.add(facts.handle)
        try:
            self._loop.submit(call)
        except RoomError:
            del self._active[facts.room]
            self._open.discard(facts.handle)
            self._unreleased.discard(facts.handle)
            raise
        return facts.handle

    def _leave(self, room: int, handle: int) -> None:
        self._past[handle] = None
        del self._active[room]
        self._open.discard(handle)
        if len(self._past) > MAX_PAST:
            del self._past[next(iter(self._past))]

    def _is_open(self, handle: int) -> bool:
        """False for a room that has ended. Raises `RoomError` (`room_unknown`) for a handle that was never given."""
        self._home.check()
        if handle in self._open:
            return True
        if handle in self._past:
            return False
        raise RoomError(
            "no such handle here",
            code="room_unknown",
            where=f"handle {handle}",
            hint="Give `send`, `finish` and `abort` what `request` or `open` returned, not the room's id.",
        )

    def poll(self) -> list[RoomEvent]:
        """Events since the last call, in order; after `close` those that were left. Never blocks.

        From several threads: each event is given to one of them, and every caller sees its own in order.
        Raises `BackendUnavailable` in a fork, whose parent's descriptor it would make quiet.
        """
        self._home.check()
        with self._polling:
            if self._event_fd >= 0:
                try:
                    os.eventfd_read(self._event_fd)
                except BlockingIOError:
                    return []
                self._told = False  # after reading, before taking: an event that comes from here on wakes again
            events = []
            while self._events:
                events.append(self._events.popleft())
            return events

    def wakeup_fd(self) -> int:
        """A descriptor that turns readable when `poll` has events; -1 after `close`."""
        self._home.check()
        return self._event_fd

    def abort(
        self, handle: int, reason: str = "the room was aborted on request", *, code: str = "room_aborted"
    ) -> None:
        """Give a room up, in whatever state it is. Its memory comes back by RELEASABLE, after the fence.

        handle: what `request` or `open` returned. Ignored for a room that has ended. Raises `RoomError`
        (`room_unknown`) for a handle that was never returned.
        """
        error = RoomError(wire_text(reason), code=code).info()
        if self._is_open(handle):
            self._loop.submit(lambda: self.control.abort(handle, error))

    def drain(self, deadline_s: float = 30.0) -> None:
        """Take no new rooms; open ones have `deadline_s` seconds. `drained` turns True when none is left."""
        if not float(deadline_s) >= 0:
            raise RoomError("not a duration", code="config_invalid", where="deadline_s", actual=deadline_s)
        self._loop.submit(lambda: self.control.drain(deadline_s))

    @property
    def drained(self) -> bool:
        """True when draining and every room is settled, fences included: no peer waits for this one's proof. A write of
        which nothing is ever heard keeps it False; the process's end is the proof then.
        """
        return self.control.drained

    @property
    def ready(self) -> bool:
        """True when every rank has joined, no peer of a former control may write into one, and the control thread
        turns.
        """
        return self.control.ready and self._loop.alive

    def peers(self) -> list[dict[str, Any]]:
        """State of every peer: instance, stage, epoch, transports, mismatches."""
        return self.control.peers()

    def stats(self) -> dict[str, float]:
        """Counters and gauges, by name."""
        desk, source = self.control.desk, self.agent.source
        stats: dict[str, float] = {
            "rooms": float(desk.open_rooms if desk else 0),
            "source_rooms": float(source.rooms),
            "transfers_in_flight": float(source.in_flight),
            "bytes_written": float(source.bytes_written),
            "descriptors_written": float(source.descriptors_written),
            "count_engine_replaced": float(self.agent.backend.engines_replaced),
            "loop_turns": float(self._loop.turns),
            "loop_faults": float(self._loop.faults),
        }
        peering = self.control.peering
        tables = (desk.counts, desk.prefill.counts, desk.decode.counts) if desk else ()
        for counts in (self.link.counts, *((peering.counts,) if peering else ()), *tables):
            for name, value in list(counts.items()):  # the control thread may add one meanwhile
                stats[f"count_{name}"] = stats.get(f"count_{name}", 0.0) + value
        return stats

    def close(self) -> None:
        """Stop the control thread and the sockets. The backend stays the caller's to close; no other endpoint may have
        it where a room's RELEASABLE has not come. Idempotent.

        In a fork, whose parent has both, it gives back this process's descriptor.
        """
        if self._closed:
            return
        self._closed = True
        if not self._home.here:
            self._loop.stop()
            os.close(self._event_fd)
            self._event_fd = -1
            return
        if not self._loop.stop():
            log.error("the control thread does not end; its sockets stay open rather than being closed under it")
            return
        self.link.close()
        if not self._unreleased and not self.agent.source.reads:
            self.control.leave()
            let_go(self.agent.backend, self._holder)
        with self._polling:  # whoever reads it meanwhile must not read a descriptor that got its number
            fd, self._event_fd = self._event_fd, -1
            os.close(fd)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def pack_lists(lists: IndexLists) -> tuple[IndexList, ...]:
    """Typed index lists in their packed form, each with its space's digest.

    Raises `SpaceMismatch` for indices of another space than the one that they are given for, or of none.
    """
    for space, idx in lists.items():
        if not isinstance(idx, Idx):
            raise SpaceMismatch(
                "an index list without a space", where=f"lists[{space}]", expected="{space: space.ingest(indices)}",
                actual=type(idx).__name__,
            )  # fmt: skip
        if idx.space != space:
            raise mismatch(space, idx, f"lists[{space}]", "an endpoint's lists")
    return tuple(pack_indices(space.digest, idx.lower()) for space, idx in lists.items())


class PrefillEndpoint(Endpoint):
    """Prefill's side: `request` a room, `send` its chunks, `finish` with the record, wait for RELEASABLE.

    A room's id may come again; the handle stands for one use of it. What is sent names the handle, so that it is never
    taken for another use, however late it comes.
    """

    def request(
        self, room: int, token_ids: TokenIds, lists: IndexLists, *, trace: Trace = UNTRACED, handle: int = 0
    ) -> int:
        """A request arrived for `room`. lists: the whole prompt's indices. Returns the handle: its events carry it, and
        every rank's `send` and `finish` name it.

        handle: where the engine chooses it, since each rank runs the same schedule and cannot be told: `handle_of` a
        unique request id. Never the same twice, across restarts as well. trace goes into this side's records.

        Lists of spaces that only after-last kinds use (a sliding window's pages) may come with the last `send`. Memory
        in `lists` must stay untouched by others until RELEASABLE.

        Raises `RoomError` (`room_duplicate`) for a room that is in use here or a handle that was; other refusals (it
        ended before, the worker drains) come as FAILED.
        """
        own = _room_id(handle, "handle") or next(self._handles)
        facts = _facts(own, room, token_ids, lists, trace)
        return self._enter(facts, lambda: self.control.request(facts))

    def send(
        self, handle: int, start: int, stop: int, *, last: bool, after: Any = None, lists: IndexLists | None = None
    ) -> None:
        """This rank's bytes of tokens [start, stop) are computed, once `after` (a device event) has happened.

        handle: what `request` returned. Chunks come in order, touch, and the last one ends the prompt. lists: source
        lists that `request` left out. Ignored for a room that has ended. Raises `RoomError` (`room_unknown`) for a
        handle that `request` never returned.
        """
        if not self._is_open(handle):
            return
        self.agent.send(handle, Chunk(start, stop, last), after=after, lists=lists)
        if last:
            self._loop.submit(lambda: self.control.computed(handle))

    def finish(self, handle: int, covered_tokens: int, record: bytes) -> None:
        """The handoff record (at most 64 KiB): from the last PP stage's TP rank 0, after its last `send`.

        handle: as for `send`.
        """
        if self._is_open(handle):
            self.agent.handoff(handle, covered_tokens, record)


class DecodeEndpoint(Endpoint):
    """Decode's side: `open` a room at a prefill instance, wait for ADMITTED."""

    _called = False

    def connect(self, address: str) -> None:
        """Shake hands with the prefill instance at `address` (`tcp://host:port`) before the first room needs it.

        Raises `ConfigError` for what is no such address.
        """
        host, _, port = address.removeprefix("tcp://").rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isdecimal() or not address.isascii() or not address.startswith("tcp://"):
            raise ConfigError("not an address", where="connect", expected="tcp://host:port", actual=ascii(address)[:99])
        self._loop.submit(lambda: self.control.call(address))

    def open(
        self,
        room: int,
        address: str,
        token_ids: TokenIds,
        lists: IndexLists,
        *,
        prefix_tokens: int = 0,
        trace: Trace = UNTRACED,
    ) -> int:
        """Open `room` at the prefill instance behind `address`. lists: indices of tokens [prefix_tokens, L).

        The memory in `lists` belongs to the room until RELEASABLE. Returns the handle that its events carry.
        trace goes into this side's records, and to prefill.
        """
        facts = _facts(next(self._handles), room, token_ids, lists, trace, prefix_tokens)
        return self._enter(facts, lambda: self.control.open(facts, address))

    def decline(self, room: int, address: str, error: ErrorInfo) -> None:
        """Refuse a room before it is opened: prefill behind `address` fails it with this cause instead of waiting."""
        facts = RoomFacts(handle=0, room=_room_id(room), prompt_tokens=1, prompt_digest=0, lists=())
        self._loop.submit(lambda: self.control.open(facts, address, declined=error))


def _room_id(room: int, name: str = "room") -> int:
    """The id as it travels. Another one must not get as far as memory that only a message about it can free."""
    plain = operator.index(room)
    if not 0 <= plain <= MAX_ROOM:
        raise RoomError(f"not a {name} id", code="request_rejected", where=name, expected="0 to 2**63 - 1", actual=room)
    return plain


def _facts(
    handle: int, room: int, token_ids: TokenIds, lists: IndexLists, trace: Trace, prefix_tokens: int = 0
) -> RoomFacts:
    return RoomFacts(
        handle=handle,
        room=_room_id(room),
        prompt_tokens=len(token_ids),
        prompt_digest=prompt_digest(token_ids),
        lists=pack_lists(lists),
        prefix_tokens=operator.index(prefix_tokens),
        request_id=wire_text(trace.request_id)[:MAX_VALUE],
        traceparent=wire_text(trace.parent)[:MAX_VALUE],
    )


class RankEndpoint:
    """A rank of an instance whose control lives in another process, at `control_address` (its `ranks_address`)."""

    def __init__(
        self, setup: RankSetup, control_address: str, *, curve: CurveKeys | None = None, heartbeat_s: float = 0.5
    ) -> None:
        self._home = Home("the endpoint", "worker")
        self._holder = object()
        self._remote = RemoteRank(control_address, curve=curve, heartbeat_s=heartbeat_s)
        try:
            self._start(setup)
        except BaseException:
            let_go(setup.backend, self._holder)
            self._remote.link.close()
            raise

    def _start(self, setup: RankSetup) -> None:
        hold(setup.backend, self._holder, str(setup.rank))
        self.agent = RankAgent(
            setup.facts(),
            setup.backend,
            self._remote.report,
            wake=lambda: self._loop.ring(),
            deadline_s=setup.deadline_s,
            device_digest=setup.device_digest,
        )
        self._remote.agent = self.agent
        self._loop = WorkerLoop(self._remote.link, self._remote, self.agent, name=f"pd-rank-{setup.rank}")
        self._loop.submit(self.agent.join)
        self._loop.start()

    def send(
        self, handle: int, start: int, stop: int, *, last: bool, after: Any = None, lists: IndexLists | None = None
    ) -> None:
        """See `PrefillEndpoint.send`. handle: the one of rank 0's `request`; it may come before that call."""
        self._home.check()
        self.agent.send(handle, Chunk(start, stop, last), after=after, lists=lists)

    def finish(self, handle: int, covered_tokens: int, record: bytes) -> None:
        """See `PrefillEndpoint.finish`."""
        self._home.check()
        self.agent.handoff(handle, covered_tokens, record)

    def close(self) -> None:
        """Stop the control thread and the sockets. No other endpoint may have the backend while a peer may write there;
        which rooms are open only its control knows.
        """
        if not self._loop.stop():
            log.error("the control thread does not end; its sockets stay open rather than being closed under it")
            return
        self._remote.link.close()
        if self._home.here and not self.agent.source.reads and self.agent.destination.idle:
            let_go(self.agent.backend, self._holder)
