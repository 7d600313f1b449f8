"""Ways to spoil a state that arrived: what a planner or transport with a defect would do, one region at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.memory.layout import RegionKey
from sglang_pd.memory.lease import Lease
from sglang_pd.memory.live import element_slots
from sglang_pd.memory.pools import RankPools
from sglang_pd.protocol.kinds import Prompt, kind_of
from sglang_pd.protocol.spaces import RecurrentSlot, Ring

FILLER = 3.0
"""What pools hold before anything arrives: plausible numbers, so that only wrongness can be noticed."""


@dataclass(frozen=True)
class Scene:
    """Pools and leases at hand: the request at its source and destination, and another one of equal length there."""

    source: RankPools
    destination: RankPools
    sent: Lease
    other: Lease
    arrived: Lease
    prompt: Prompt

    def rows(self, pools: RankPools, key: RegionKey, lease: Lease) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """A region by slot, [rows, elements of a row], and the slots of the live rows."""
        array = pools.array(*key)
        _, space = pools.region(*key)
        elements = kind_of(key[0]).live(self.prompt, space)
        _, slots = element_slots(space, lease.lists(self.prompt), self.prompt, elements)
        return array.reshape(array.shape[0] * array.shape[1], -1), slots

    def there(self, key: RegionKey) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The same at the destination, for the request that arrived."""
        return self.rows(self.destination, key, self.arrived)


Spoil = Callable[[Scene, RegionKey], None]


def skip(scene: Scene, key: RegionKey) -> None:
    rows, slots = scene.there(key)
    rows[slots] = FILLER


def stale(scene: Scene, key: RegionKey) -> None:
    rows, slots = scene.there(key)
    theirs, at = scene.rows(scene.source, key, scene.other)
    rows[slots] = theirs[at]


def one_element(scene: Scene, key: RegionKey) -> None:
    """The smallest change there is: one grid unit, or one."""
    rows, slots = scene.there(key)
    where = slots[len(slots) // 2], rows.shape[1] // 2
    rows[where] += 2.0**-20 if rows.dtype.kind == "f" else 1


def one_element_wrong(scene: Scene, key: RegionKey) -> None:
    """One element is off by a quarter, or by one."""
    rows, slots = scene.there(key)
    rows[slots[0], rows.shape[1] // 2] += 0.25 if rows.dtype.kind == "f" else 1


def one_row_off(scene: Scene, key: RegionKey) -> None:
    """Rows move by one element; a state that is one row is taken from the neighbouring slot."""
    rows, slots = scene.there(key)
    theirs, at = scene.rows(scene.source, key, scene.sent)
    rows[slots] = theirs[np.roll(at, 1)] if len(at) > 1 else theirs[(at + 1) % len(theirs)]


def last_row_missing(scene: Scene, key: RegionKey) -> None:
    rows, slots = scene.there(key)
    rows[slots[-1]] = FILLER


def first_row_missing(scene: Scene, key: RegionKey) -> None:
    rows, slots = scene.there(key)
    rows[slots[0]] = FILLER


def ring_rotated(scene: Scene, key: RegionKey) -> None:
    """The whole row of the request moves by one slot."""
    rows, slots = scene.there(key)
    _, space = scene.destination.region(*key)
    assert isinstance(space, Ring)
    first = int(slots[0]) // space.width * space.width
    rows[first : first + space.width] = np.roll(rows[first : first + space.width], 1, axis=0)


def swapped(other: RegionKey) -> Spoil:
    """Two regions of equal shape, each with the other's bytes."""

    def spoil(scene: Scene, key: RegionKey) -> None:
        rows, slots = scene.there(key)
        theirs, at = scene.there(other)
        rows[slots], theirs[at] = theirs[at].copy(), rows[slots].copy()

    return spoil


def zeroed(scene: Scene, key: RegionKey) -> None:
    rows, slots = scene.there(key)
    rows[slots] = 0


def transposed_columns(scene: Scene, key: RegionKey) -> None:
    """Newest first instead of oldest first, or dv x dk instead of dk x dv."""
    rows, slots = scene.there(key)
    columns = scene.destination.layout.views[key].unit_shape or (rows.shape[1],)
    block = rows[slots].reshape(len(slots), -1, *columns)
    rows[slots] = np.ascontiguousarray(block[..., ::-1]).reshape(rows[slots].shape)


def spoils(pools: RankPools) -> Iterator[tuple[str, RegionKey, Spoil]]:
    """Every way that makes sense for every region: name, region, what to do."""
    for key in pools.keys:
        kind, layer, part = key
        _, space = pools.region(*key)
        ways: list[Spoil] = [skip, stale, one_element, one_element_wrong, one_row_off]
        if isinstance(space, Ring):
            ways.append(ring_rotated)
        if isinstance(space, RecurrentSlot):
            ways += [zeroed, transposed_columns]
        else:
            ways += [first_row_missing, last_row_missing]
        for way in ways:
            yield way.__name__, key, way
        for other in pools.keys:
            if other[0] == kind and other[2] == part and other[1] > layer:
                yield f"layer_swapped_with_{other[1]}", key, swapped(other)
            if kind in ("KV", "SWA") and other == (kind, layer, "v") and part == "k":
                yield "k_and_v_swapped", key, swapped(other)
