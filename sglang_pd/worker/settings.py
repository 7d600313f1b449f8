"""What an instance's control is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_pd.protocol.manifest import Topology
from sglang_pd.protocol.room import Limits
from sglang_pd.worker.verification import VerifyMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """What an instance is and how patient it is. Durations in seconds.

    peer_wait_s: how long an open waits for the handshake with its peer.
    """

    instance_id: str
    model: str
    topology: Topology = field(default_factory=Topology)
    revision: str = ""
    max_tokens: int = 2**31 - 1
    heartbeat_s: float = 0.5
    liveness_s: float = 3.0
    rank_liveness_s: float = 5.0
    peer_wait_s: float = 30.0
    limits: Limits = field(default_factory=Limits)
    verify: VerifyMode = "sampled"
