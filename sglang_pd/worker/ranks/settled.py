"""Backends through which an endpoint wrote that is gone while something of it could still land: nobody asks after that
any more, so whoever writes through them next cannot say of what was before that it is over.
"""

from __future__ import annotations

from weakref import WeakSet

from sglang_pd.backends.base import Backend

_unsettled: WeakSet[Backend] = WeakSet()


def leave(backend: Backend, in_flight: int) -> None:
    """An endpoint over that backend ends. in_flight: its transfers that were not DONE or FAILED."""
    if in_flight:
        _unsettled.add(backend)


def settled(backend: Backend) -> bool:
    """Whether nothing can land any more of what endpoints over that backend wrote that are gone."""
    return backend not in _unsettled
