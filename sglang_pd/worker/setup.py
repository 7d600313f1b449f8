"""What an engine author brings to an endpoint: a rank, a place in the network, names for a request."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from sglang_pd.backends.base import DEFAULT_DEADLINE_S, Backend, Segment
from sglang_pd.protocol.manifest import Component, RankId
from sglang_pd.worker.peers.link import CurveKeys
from sglang_pd.worker.ranks.agent import RankFacts
from sglang_pd.worker.ranks.memory_view import DeviceDigest

DEFAULT_BIND: Final = "tcp://127.0.0.1:0"
TokenIds = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank brings: its backend, and the components on segments that this backend registered.

    epoch: the backend's epoch, random 64 bits for each process incarnation. deadline_s: after which a transfer is
    UNKNOWN. device_digest: digests of device memory, for `verify`.
    """

    backend: Backend
    components: tuple[Component, ...]
    segments: tuple[Segment, ...]
    rank: RankId = field(default_factory=lambda: RankId(0, 0))
    deadline_s: float = DEFAULT_DEADLINE_S
    device_digest: DeviceDigest | None = None

    def facts(self) -> RankFacts:
        """The rank's facts, with this host's identity for backends that work on one host only."""
        return RankFacts(self.rank, self.backend.epoch, self.components, self.segments, host_identity())


@dataclass(frozen=True, kw_only=True)
class Network:
    """Where a control listens. bind: for peers; ranks_bind: for own ranks of other processes, None: there are none."""

    bind: str | None = DEFAULT_BIND
    ranks_bind: str | None = None
    curve: CurveKeys | None = None


def host_identity() -> str:
    """Names this boot of this host and this process's PID and network namespaces.

    Within the first a pidfd proves a death; sockets that pass memory descriptors do not leave the second.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net"))])
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Trace:
    """How records and traces name a request. parent: W3C `traceparent`. Both are cut after 512 characters."""

    request_id: str = ""
    parent: str = ""


UNTRACED: Final = Trace()


def handle_of(request_id: str) -> int:
    """The same handle on every rank, 63 bits, for a request id that is unique for each try."""
    return xxhash.xxh3_64_intdigest(request_id.encode()) >> 1 or 1


def new_epoch() -> int:
    """A random 64-bit epoch for a backend of this process incarnation."""
    return secrets.randbits(64) or 1
