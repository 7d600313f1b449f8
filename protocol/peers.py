"""One incarnation of the other instance, as rooms see it: alive until when, draining or not, lost or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_pd.protocol.errors import ErrorInfo


@dataclass(slots=True)
class Peer:
    """A peer epoch that passed the verdict. Shared by all its rooms; times are this side's monotonic seconds.

    liveness_s: how long it may be silent. alive_until_s: last sign of life plus liveness_s. drain_until_s: when it said
    it would be gone, None while it does not drain. lost: why it was given up, None while it lives. own_epoch: under
    which epoch this side speaks to it. unproven: generations of rooms with it that ended and are not proven fenced.
    """

    epoch: int
    instance: str
    liveness_s: float
    alive_until_s: float
    drain_until_s: float | None = None
    lost: ErrorInfo | None = None
    own_epoch: int = 0
    unproven: set[int] = field(default_factory=set)

    @property
    def deadline_s(self) -> float:
        """When rooms give this peer up unless it is heard. A draining one gets one liveness past its own deadline."""
        if self.drain_until_s is None:
            return self.alive_until_s
        return min(self.alive_until_s, self.drain_until_s + self.liveness_s)

    def heard(self, now_s: float) -> None:
        """A sign of life; it never brings a lost incarnation back."""
        if self.lost is None:
            self.alive_until_s = max(self.alive_until_s, now_s + self.liveness_s)

    def silence(self, now_s: float) -> ErrorInfo:
        """The first cause of a room that gives this peer up now."""
        if self.lost is not None:
            return self.lost
        if now_s < self.alive_until_s:
            return ErrorInfo(
                code="draining", message="the peer stayed past its own drain deadline", where=self.instance
            )
        return ErrorInfo(
            code="peer_lost",
            message="the peer was silent for longer than its liveness duration",
            where=self.instance,
            expected=f"a heartbeat within {self.liveness_s:g} s",
            actual=f"silent since {now_s - self.alive_until_s + self.liveness_s:.3f} s",
            details={"epoch": f"{self.epoch:016x}"},
        )
