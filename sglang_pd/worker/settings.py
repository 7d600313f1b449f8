"""What an instance's control is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, get_args

from sglang_pd.protocol.errors import ConfigError, wire_text
from sglang_pd.protocol.manifest import InstanceManifest, RankManifest, Topology
from sglang_pd.protocol.room import Limits
from sglang_pd.worker.peers.conversation import Self
from sglang_pd.worker.rooms.verification import VerifyMode

MAX_DURATION_S: Final = 4_000_000
"""What a message can say, in milliseconds of 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """What an instance is and how patient it is. Durations in seconds.

    peer_wait_s: how long an open waits for the handshake with its peer. Raises `ConfigError` for durations that no
    handshake can state, and for a `verify` that is none.
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

    def __post_init__(self) -> None:
        for name in ("instance_id", "model", "revision"):
            text = getattr(self, name)
            if wire_text(text) != text:
                raise ConfigError("not a text that can travel", where=name, expected="UTF-8", actual=ascii(text))
        for name in ("heartbeat_s", "liveness_s", "rank_liveness_s", "peer_wait_s"):
            value = getattr(self, name)
            if not 0.001 <= value <= MAX_DURATION_S:
                raise ConfigError(
                    "not a duration", where=name, expected=f"0.001 to {MAX_DURATION_S} seconds", actual=value
                )
        if int(self.liveness_s * 1000) < 2 * int(self.heartbeat_s * 1000):
            raise ConfigError(
                "silence is shorter than two heartbeats",
                where="liveness_s",
                expected=f">= {2 * self.heartbeat_s:g}",
                actual=self.liveness_s,
            )
        if self.verify not in get_args(VerifyMode):
            raise ConfigError(
                "no such mode", where="verify", expected=", ".join(get_args(VerifyMode)), actual=self.verify
            )

    def introduce(self, ranks: tuple[RankManifest, ...], epoch: int) -> Self:
        """What the control of that epoch says of its instance, of which these are all the ranks, in order.

        Raises `ManifestError` for ranks that contradict each other.
        """
        manifest = InstanceManifest(
            instance_id=self.instance_id,
            topology=self.topology,
            model=self.model,
            revision=self.revision,
            max_tokens=self.max_tokens,
            ranks=ranks,
        )
        return Self(manifest, epoch, int(self.heartbeat_s * 1000), int(self.liveness_s * 1000))
