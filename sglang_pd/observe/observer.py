"""What a worker tells. An observer never asks, never raises into the worker, and may be left out: `Observer` itself
does nothing.

All methods are called by the worker's control thread and must return quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sglang_pd.observe.stages import Stage
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.messages import Verdict


class RoomKey(NamedTuple):
    """What names a room: with the epoch, unique."""

    room: int
    generation: int


class Result(Enum):
    """How a room ended."""

    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


class PeerState(Enum):
    """What this side thinks of another instance."""

    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"
    LOST = "lost"


class Count(Enum):
    """Things that are counted, by the name of their metric. What each means is in `metrics.py`."""

    LEASE_EXPIRED = "lease_expired_total"
    EXPIRED_THEN_USED = "expired_then_used_total"
    LATE_WRITE_FENCED = "late_write_fenced_total"
    DUPLICATE_ROOM = "duplicate_room_total"
    UNKNOWN_ROOM = "unknown_room_total"
    FALLBACK_PATH = "fallback_path_total"
    RETRY = "retry_total"
    HEARTBEAT_SEND_ERROR = "heartbeat_send_error_total"
    MESSAGE_REFUSED = "message_refused_total"
    UNKNOWN_FIELD = "unknown_field_total"
    ENGINE_REPLACED = "engine_replaced_total"


@dataclass(frozen=True, slots=True)
class RoomFacts:
    """What is known of a room besides its times and bytes; told again when more is known.

    peer: the other instance; peer_epoch: its incarnation, 0 while unknown. ranks, peer_ranks: names of the ranks that
    take part. pages: pages (rows, slots) by list space.
    """

    request_id: str = ""
    traceparent: str = ""
    peer: str = ""
    peer_epoch: int = 0
    ranks: tuple[str, ...] = ()
    peer_ranks: tuple[str, ...] = ()
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    pages: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pool:
    """Units of one allocator: pages, rows or slots."""

    space: str
    free: int
    leased: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Memory that waits for a fence. oldest_since_ns: monotonic, of the oldest piece; None: nothing waits."""

    nbytes: int
    budget_bytes: int
    oldest_since_ns: int | None = None


class Observer:
    """The interface, and the implementation that does nothing."""

    def ready(self) -> None:
        """The worker serves."""

    def draining(self, reason: str) -> None:
        """The worker takes no new rooms."""

    def registration(self, own: InstanceManifest, peer: InstanceManifest, verdict: Verdict, transport: str) -> None:
        """A pair was judged. transport: what the backend says it uses, or empty."""

    def peer(self, instance: str, epoch: int, state: PeerState, reason: str = "") -> None:
        """A peer's state changed."""

    def room_opened(self, key: RoomKey, facts: RoomFacts, stage: Stage) -> None:
        """A room exists here, and is in `stage`."""

    def room_named(self, key: RoomKey, generation: int) -> None:
        """A room that was told of before anybody opened it (generation 0) got its generation."""

    def room_facts(self, key: RoomKey, facts: RoomFacts) -> None:
        """More is known of a room; replaces what was told before."""

    def stage(self, key: RoomKey, stage: Stage) -> None:
        """A room moved on."""

    def waits_for_peer(self, key: RoomKey, waits: bool) -> None:
        """Whether the room waits for what only the other side can do. At first none does."""

    def worked(self, tokens: int) -> None:
        """Tokens that the engine has computed so far. More than last time: it moves."""

    def bytes_moved(self, key: RoomKey, component: str, nbytes: int, descriptors: int = 0) -> None:
        """Bytes of a room are DONE: written by prefill, recorded by decode. descriptors: pieces they were posted in."""

    def verified(self, key: RoomKey, component: str, layers: int, wrong: int) -> None:
        """Digests of `layers` layers were compared, `wrong` of them differed."""

    def room_ended(self, key: RoomKey, result: Result, cause: ErrorInfo | None) -> None:
        """A room reached its terminal state. cause: the first one, None when done."""

    def queue(self, depth: int, limit: int) -> None:
        """Requests that wait, and how many may."""

    def pool(self, pool: Pool) -> None:
        """An allocator's units."""

    def quarantine(self, quarantine: Quarantine) -> None:
        """Memory that waits for a fence."""

    def staging(self, used_bytes: int, lag_slots: int) -> None:
        """Bytes of the staging ring in use, and slots by which its consumer is behind."""

    def count(self, what: Count, label: str = "", times: int = 1) -> None:
        """Something countable happened. label: the metric's one own label, where it has one."""

    def decision(self, rank: str, what: str, key: RoomKey | None = None, detail: str = "") -> None:
        """A rank decided something. The last ones of every rank are in a dump."""
