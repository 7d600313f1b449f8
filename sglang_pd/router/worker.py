"""One worker as the router knows it: where it is, which incarnation, whether it takes rooms, what went wrong before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sglang_pd.config import Address
from sglang_pd.router.breaker import Breaker
from sglang_pd.router.failures import Failure
from sglang_pd.router.resolver import Target

SATURATED_S: Final = 1.0
"""How long a worker that said it is full is asked only when no other can be."""


@dataclass(eq=False)
class Incarnation:
    """One life of a worker. Rooms are pinned to it: when it ends, whoever watches is told why.

    epoch: 16 hexadecimal digits (or what the worker calls it); empty where the worker tells none.
    """

    epoch: str = ""
    instance_id: str = ""
    watchers: set[Callable[[str], None]] = field(default_factory=set)

    def end(self, reason: str) -> None:
        """Another one has taken its place."""
        watchers, self.watchers = self.watchers, set()
        for watcher in watchers:
            watcher(reason)


@dataclass(frozen=True, slots=True)
class PeerView:
    """One entry of a decode's `/peers`: what it thinks of a prefill."""

    instance_id: str
    epoch: str
    address: str
    stage: str


class PeerBook:
    """What a decode says of all prefills, so kept that a pair is found without a walk over the others."""

    def __init__(self, views: Iterable[PeerView] = ()) -> None:
        self._by_epoch: dict[str, list[PeerView]] = {}
        self._by_name: dict[str, list[PeerView]] = {}
        self._by_address: dict[str, list[PeerView]] = {}
        for view in views:
            for index, key in (
                (self._by_epoch, view.epoch),
                (self._by_name, view.instance_id),
                (self._by_address, view.address),
            ):
                if key:
                    index.setdefault(key, []).append(view)

    def about(self, identity: Incarnation, control: tuple[str, int]) -> list[PeerView]:
        """The entries of that prefill: by its epoch, else its name, else (where a side tells no name) its control's
        address."""
        found = list(self._by_epoch.get(identity.epoch, ()))
        found += self._by_name.get(identity.instance_id, ())
        at = self._by_address.get(str(Address(*control)), ())
        return found + [view for view in at if not (identity.instance_id and view.instance_id)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What the last look at a worker found. up: it answers. ready: it takes rooms. reason: why not."""

    up: bool = False
    ready: bool = False
    draining: bool = False
    reason: str = "not looked at yet"


class Worker:
    """State of one worker across all requests.

    rooms: open rooms of this router, counted in sequences. turn: of the policy. cancellable: stages at which it
    declares that a request can be cancelled; None: it declares nothing, so all. failures: blamed ones of its life.
    """

    def __init__(self, target: Target, breaker: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self.breaker = breaker
        self._clock = clock
        self.sight = Sight()
        self.incarnation = Incarnation()
        self.bootstrap_port = target.bootstrap_port
        self.peers = PeerBook()
        self.cancellable: frozenset[str] | None = None
        self.rooms = 0
        self.turn = 0
        self.failures = 0
        self.replaced = 0
        self.last_failure = ""
        self.removed = False
        self._saturated_until_s = 0.0

    @property
    def role(self) -> Literal["prefill", "decode"]:
        """Its leg."""
        return self.target.role

    @property
    def url(self) -> str:
        """Its base URL as people write it: its name."""
        return self.target.url

    @property
    def base(self) -> str:
        """Its base URL for connecting: a zone's `%` stays as it is."""
        address = self.target.address
        return f"http://{Address(address.host, address.port)}" if address.port is not None else address.url()

    @property
    def host_header(self) -> str:
        """Its `Host` header: without a zone, which means nothing elsewhere."""
        address = self.target.address
        return str(Address(address.host.partition("%")[0], address.port))

    @property
    def obstacle(self) -> str:
        """Why it takes no new rooms; empty when it does."""
        if self.removed:
            return "no longer listed"
        if not self.sight.up or self.sight.draining or not self.sight.ready:
            return self.sight.reason or "not ready"
        if not self.breaker.allows:
            return f"{self.breaker.consecutive} failures in a row, the last: {self.last_failure}"
        return ""

    @property
    def saturated(self) -> bool:
        """It said lately that it is full."""
        return self._clock() < self._saturated_until_s

    def judge(self, failure: Failure, request: object) -> bool:
        """A leg of this worker failed. Returns True when that opened the breaker."""
        if failure.code == "draining":
            self.sight = Sight(up=True, draining=True, reason="draining")
        if failure.status == 429 or failure.elsewhere and not failure.blamed:
            self._saturated_until_s = self._clock() + min(failure.retry_after_s or SATURATED_S, 10 * SATURATED_S)
        if not failure.blamed:
            self.breaker.neutral(request)
            return False
        self.failures += 1
        self.last_failure = f"{failure.code}: {failure.message}"[:300]
        return self.breaker.failure(request)

    def identify(self, epoch: str, instance_id: str) -> bool:
        """The worker said who it is. Returns True when it is another than before: its rooms are told, and nothing is
        held against the new one."""
        known = self.incarnation
        if known.epoch == epoch and ("" in (known.instance_id, instance_id) or known.instance_id == instance_id):
            known.instance_id = known.instance_id or instance_id
            return False
        first = not known.epoch and not known.instance_id
        if first:
            known.epoch, known.instance_id = epoch, instance_id
            return False
        self.incarnation = Incarnation(epoch, instance_id)
        self.peers, self.last_failure = PeerBook(), ""
        self.breaker.reset()
        self._saturated_until_s = 0.0
        self.replaced += 1
        known.end(f"{self.url} was replaced: epoch {known.epoch or '?'} is now {epoch or '?'}")
        return True

    def describe(self) -> dict[str, Any]:
        """For `/workers`."""
        return {
            "role": self.role,
            "url": self.url,
            "instance_id": self.incarnation.instance_id or None,
            "epoch": self.incarnation.epoch or None,
            "eligible": not self.obstacle,
            "obstacle": self.obstacle or None,
            "up": self.sight.up,
            "ready": self.sight.ready,
            "draining": self.sight.draining,
            "saturated": self.saturated,
            "breaker": self.breaker.state.value,
            "consecutive_failures": self.breaker.consecutive,
            "failures": self.failures,
            "last_failure": self.last_failure or None,
            "replaced": self.replaced,
            "rooms": self.rooms,
        }


def verdict(decode: Worker, prefill: Worker) -> Literal["accepted", "refused", "lost", "unknown"]:
    """What decode thinks of prefill, by its `/peers`. An entry of another epoch than prefill's present one refuses
    nothing; a pair that agreed under an epoch of its own (they lost each other once) is accepted."""
    identity, control = prefill.incarnation, (prefill.target.bootstrap_host, prefill.bootstrap_port)
    views = decode.peers.about(identity, control)
    current = [view for view in views if identity.epoch and view.epoch == identity.epoch]
    stages = {view.stage for view in current or views}
    if "agreed" in stages:
        return "accepted"
    if "refused" in stages and (current or not identity.epoch):
        return "refused"
    return "lost" if "lost" in stages else "unknown"
