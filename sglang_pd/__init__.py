"""sglang-pd: exact, safe hand-over of a request's state from prefill workers to decode workers.

The names below are the public API for engine authors; they load on first use, so that `sglang_pd.protocol` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_pd.backends.registry import create_backend as create_backend
    from sglang_pd.worker.endpoint import DecodeEndpoint as DecodeEndpoint
    from sglang_pd.worker.endpoint import PrefillEndpoint as PrefillEndpoint
    from sglang_pd.worker.endpoint import RankEndpoint as RankEndpoint
    from sglang_pd.worker.events import EventKind as EventKind
    from sglang_pd.worker.events import RoomEvent as RoomEvent
    from sglang_pd.worker.settings import ControlConfig as ControlConfig
    from sglang_pd.worker.setup import Network as Network
    from sglang_pd.worker.setup import RankSetup as RankSetup
    from sglang_pd.worker.setup import Trace as Trace
    from sglang_pd.worker.setup import handle_of as handle_of
    from sglang_pd.worker.setup import new_epoch as new_epoch
    from sglang_pd.worker.wakeups import prefer_latency as prefer_latency

_WHERE = {
    "create_backend": "sglang_pd.backends.registry",
    "ControlConfig": "sglang_pd.worker.settings",
    "DecodeEndpoint": "sglang_pd.worker.endpoint",
    "Network": "sglang_pd.worker.setup",
    "PrefillEndpoint": "sglang_pd.worker.endpoint",
    "RankEndpoint": "sglang_pd.worker.endpoint",
    "RankSetup": "sglang_pd.worker.setup",
    "Trace": "sglang_pd.worker.setup",
    "handle_of": "sglang_pd.worker.setup",
    "new_epoch": "sglang_pd.worker.setup",
    "EventKind": "sglang_pd.worker.events",
    "RoomEvent": "sglang_pd.worker.events",
    "prefer_latency": "sglang_pd.worker.wakeups",
}
__all__ = sorted(_WHERE)  # noqa: PLE0605 - a list of the names above


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
