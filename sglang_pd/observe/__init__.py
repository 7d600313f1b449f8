"""What a worker is doing, for people: records, metrics, health, dumps. It is told, and never asks.

A worker calls an `Observer`; `Recorder` is the one that keeps, `Observer()` the one that does nothing.
"""

from sglang_pd.observe.admin import AdminServer, ask
from sglang_pd.observe.health import Condition, HealthState
from sglang_pd.observe.logs import RateLimited, configure_logging
from sglang_pd.observe.observer import Count, Observer, PeerState, Pool, Quarantine, Result, RoomFacts, RoomKey
from sglang_pd.observe.recorder import Identity, Recorder, Settings
from sglang_pd.observe.stages import Stage

__all__ = [
    "AdminServer",
    "Condition",
    "Count",
    "HealthState",
    "Identity",
    "Observer",
    "PeerState",
    "Pool",
    "Quarantine",
    "RateLimited",
    "Recorder",
    "Result",
    "RoomFacts",
    "RoomKey",
    "Settings",
    "Stage",
    "ask",
    "configure_logging",
]
