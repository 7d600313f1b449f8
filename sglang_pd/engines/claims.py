"""What every engine refuses of the memory that a call names: another lease's, and one request twice."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pd.engines.base import DecodeItem
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.memory.lease import Tables
from sglang_pd.protocol.errors import RoomError


def require_distinct(batch: Sequence[DecodeItem]) -> None:
    """Raise unless each request, and each lease, is in the batch once: both items would write one position.

    `RoomError` (`request_rejected`) for a request, `LeaseError` for a lease under two names.
    """
    names: set[str] = set()
    generations: dict[int, str] = {}
    for item in batch:
        if item.request_id in names:
            raise RoomError("a request is in the batch twice", code="request_rejected", where=item.request_id)
        names.add(item.request_id)
        other = generations.setdefault(item.tables.generation, item.request_id)
        if other != item.request_id:
            raise LeaseError(
                "two requests of a batch name one lease", where=item.request_id,
                expected="a generation of its own", actual=f"generation {item.tables.generation}, as {other}",
            )  # fmt: skip


def require_same_lease(request_id: str, known: Tables, given: Tables) -> None:
    """Raise `LeaseError` where a call names another lease than the one that the request's state lies in."""
    if given.generation != known.generation:
        raise LeaseError(
            "tables of another lease", where=request_id, expected=f"generation {known.generation}",
            actual=f"generation {given.generation}",
        )  # fmt: skip
