"""Which indices of decode's memory belong to rooms that are not over: no two rooms may be written to one place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.bind import IndexLists
from sglang_pd.protocol.errors import RoomError
from sglang_pd.protocol.spaces import AnySpace


class Claims:
    """One bit an index of every list space. Control thread only."""

    def __init__(self) -> None:
        self._taken: dict[AnySpace, NDArray[np.bool_]] = {}
        self._rooms: dict[int, IndexLists] = {}
        """By handle."""

    def take(self, handle: int, lists: IndexLists) -> None:
        """A room's lists, checked against their spaces, are its own until `give_back`. Raises `RoomError`
        (`index_invalid`), having taken nothing, where another room has one of the indices.
        """
        for space, idx in lists.items():
            taken = self._taken.get(space)
            if taken is None:
                taken = self._taken[space] = np.zeros(space.extent, dtype=np.bool_)
            values = idx.lower()
            both = values[taken[values]]
            if len(both):
                raise RoomError(
                    "that memory belongs to another room, which may still be written to",
                    code="index_invalid",
                    where=str(space),
                    expected=f"indices of no room ({self._holder(space, both[0])} has these)",
                    actual=f"{both[:8].tolist()}{'...' if len(both) > 8 else ''}",
                    hint="Memory of a room may be used again once its RELEASABLE has come.",
                )
        for space, idx in lists.items():
            self._taken[space][idx.lower()] = True
        self._rooms[handle] = lists

    def give_back(self, handle: int) -> None:
        """The room's memory is nobody's, or the request's alone."""
        for space, idx in self._rooms.pop(handle, {}).items():
            self._taken[space][idx.lower()] = False

    def _holder(self, space: AnySpace, index: Any) -> str:
        handles = (h for h, lists in self._rooms.items() if space in lists and index in lists[space].lower())
        return f"the one with handle {next(handles, '?')}"
