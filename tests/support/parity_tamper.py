"""A transport that does not do what it was told: one region's rows are left out, or are read where others lie.

Every way changes what arrives, and is judged by what is live: dead rows may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import DEFAULT_DEADLINE_S, Peer, Transfer
from sglang_pd.memory.layout import RegionKey
from sglang_pd.memory.lease import Lease
from sglang_pd.memory.live import element_slots
from sglang_pd.memory.pools import RankPools
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.kinds import Prompt, kind_of
from sglang_pd.protocol.spaces import Ring
from sglang_pd.testing.faults import WrappedBackend

Change = Callable[[WriteBatch], WriteBatch]
I64 = NDArray[np.int64]


class TamperingBackend(WrappedBackend):
    """Passes writes through `change`, where one is set."""

    change: Change | None = None
    changed: int = 0
    """Writes that were not posted as they were asked for."""

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        """See `Backend`."""
        if self.change is not None and len(batch):
            wrong = self.change(batch)
            self.changed += not same(batch, wrong)
            batch = wrong
        return self.inner.write(peer, batch, after=after, deadline_s=deadline_s)


def same(a: WriteBatch, b: WriteBatch) -> bool:
    """True where both ask for the same copies in the same order."""
    names = ("src_region", "src_offset", "dst_region", "dst_offset", "length")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@dataclass(frozen=True)
class Target:
    """One region of a request at its source, and another request of equal length there.

    prompt: may be shorter than the request's; then only the live rows of its beginning are meant.
    """

    pools: RankPools
    key: RegionKey
    sent: Lease
    other: Lease
    prompt: Prompt

    @property
    def number(self) -> int:
        """The region's number in the source's table."""
        return number_of(self.pools, self.key)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.pools.region(*self.key)[0].row_bytes

    def slots(self, lease: Lease) -> I64:
        """Slots of a request's live rows."""
        _, space = self.pools.region(*self.key)
        elements = kind_of(self.key[0]).live(self.prompt, space)
        lists = lease.lists(self.prompt, windows=self.key[0] == "SWA")
        return element_slots(space, lists, self.prompt, elements)[1].astype(np.int64)

    def row(self, slot: int) -> NDArray[np.uint8]:
        """A row's bytes."""
        rows = self.pools.row_bytes(*self.key)
        found: NDArray[np.uint8] = rows[slot // rows.shape[1], slot % rows.shape[1]]
        return found


def number_of(pools: RankPools, key: RegionKey) -> int:
    """A region's number in its rank's table."""
    return pools.keys.index(key)


def by_row(batch: WriteBatch, number: int, row_bytes: int) -> tuple[WriteBatch, NDArray[np.bool_]]:
    """The same copies, those from one region cut into rows; and which descriptors these are."""
    mine = batch.src_region == number
    counts = np.where(mine, batch.length // row_bytes, 1).astype(np.int64)
    if np.any(batch.length[mine] % row_bytes) or np.any(batch.src_offset[mine] % row_bytes):
        raise ValueError(f"region {number} is not copied by whole rows")
    at = np.repeat(np.arange(len(mine)), counts)
    step = (np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    step = np.where(mine[at], step * np.uint64(row_bytes), np.uint64(0))
    length = np.where(mine[at], np.uint64(row_bytes), batch.length[at])
    cut = WriteBatch(
        src=batch.src, dst=batch.dst, src_region=batch.src_region[at], src_offset=batch.src_offset[at] + step,
        dst_region=batch.dst_region[at], dst_offset=batch.dst_offset[at] + step, length=length,
    )  # fmt: skip
    return cut, mine[at]


def _with(batch: WriteBatch, **arrays: Any) -> WriteBatch:
    fields = {name: getattr(batch, name) for name in
              ("src", "dst", "src_region", "src_offset", "dst_region", "dst_offset", "length")}  # fmt: skip
    return WriteBatch(**{**fields, **arrays})


def _kept(batch: WriteBatch, keep: NDArray[np.bool_]) -> WriteBatch:
    names = ("src_region", "src_offset", "dst_region", "dst_offset", "length")
    return _with(batch, **{name: getattr(batch, name)[keep] for name in names})


def _moved(target: Target, rows: I64, to: I64) -> Change:
    """Read row to[i] where row rows[i] was to be read."""

    def change(batch: WriteBatch) -> WriteBatch:
        cut, mine = by_row(batch, target.number, target.row_bytes)
        offset = cut.src_offset.copy()
        asked = (offset[mine] // np.uint64(target.row_bytes)).astype(np.int64)
        table = dict(zip(rows.tolist(), to.tolist(), strict=True))
        offset[mine] = np.array([table.get(row, row) for row in asked.tolist()], np.uint64) * target.row_bytes
        return _with(cut, src_offset=offset)

    return change


def skip(target: Target) -> Change:
    """The region is not written at all."""
    return lambda batch: _kept(batch, batch.src_region != target.number)


def last_row_missing(target: Target) -> Change:
    """The last live row is not written."""
    last = int(target.slots(target.sent)[-1])

    def change(batch: WriteBatch) -> WriteBatch:
        cut, mine = by_row(batch, target.number, target.row_bytes)
        return _kept(cut, ~(mine & (cut.src_offset == last * target.row_bytes)))

    return change


def stale(target: Target) -> Change:
    """Another request's rows."""
    return _moved(target, target.slots(target.sent), target.slots(target.other))


def one_row_off(target: Target) -> Change:
    """Rows move by one; a state that is one row is read from the neighbouring slot."""
    slots = target.slots(target.sent)
    rows = target.pools.row_bytes(*target.key)
    neighbours = np.roll(slots, 1) if len(slots) > 1 else (slots + 1) % (rows.shape[0] * rows.shape[1])
    return _moved(target, slots, neighbours)


def ring_rotated(target: Target) -> Change:
    """The ring of the request is read one slot further."""
    slots = target.slots(target.sent)
    _, space = target.pools.region(*target.key)
    assert isinstance(space, Ring)
    first = slots // space.width * space.width
    return _moved(target, slots, first + (slots - first + 1) % space.width)


def one_byte(target: Target) -> Change:
    """One byte of one row is its neighbour's, which is another."""
    for slot in target.slots(target.sent).tolist():
        places = np.flatnonzero(np.diff(target.row(slot)))
        if len(places):
            return _one_byte(target, slot, int(places[len(places) // 2]))
    raise ValueError(f"all bytes of every row of {target.key} are equal")


def _one_byte(target: Target, slot: int, at: int) -> Change:
    def change(batch: WriteBatch) -> WriteBatch:
        cut, mine = by_row(batch, target.number, target.row_bytes)
        hit = np.flatnonzero(mine & (cut.src_offset == slot * target.row_bytes))
        pieces = [(0, 0, at), (at + 1, at, 1), (at + 1, at + 1, target.row_bytes - at - 1)]
        pieces = [piece for piece in pieces if piece[2]]
        order = np.concatenate([np.delete(np.arange(len(mine)), hit), np.repeat(hit, len(pieces))])
        offsets = {name: getattr(cut, name)[order].copy() for name in ("src_offset", "dst_offset", "length")}
        for number, (src, dst, length) in enumerate(pieces * len(hit)):
            place = len(order) - len(pieces) * len(hit) + number
            offsets["src_offset"][place] += np.uint64(src)
            offsets["dst_offset"][place] += np.uint64(dst)
            offsets["length"][place] = length
        return _with(cut, src_region=cut.src_region[order], dst_region=cut.dst_region[order], **offsets)

    return change


def swapped(target: Target, other: RegionKey) -> Change:
    """Each of two regions is read where the other was to be read."""
    a, b = target.number, number_of(target.pools, other)

    def change(batch: WriteBatch) -> WriteBatch:
        region = batch.src_region
        return _with(batch, src_region=np.where(region == a, b, np.where(region == b, a, region)).astype(np.uint32))

    return change


Way = Callable[[Target], Change]


def tampers(pools: RankPools) -> Iterator[tuple[str, RegionKey, Way]]:
    """Every way that makes sense for every region: name, region, what to do."""
    for key in pools.keys:
        kind, layer, part = key
        _, space = pools.region(*key)
        ways: list[Way] = [skip, last_row_missing, stale, one_row_off, one_byte]
        if isinstance(space, Ring):
            ways.append(ring_rotated)
        for way in ways:
            yield way.__name__, key, way
        for other in pools.keys:
            if other[0] == kind and other[2] == part and other[1] > layer:
                yield f"layer_swapped_with_{other[1]}", key, _swap_with(other)
            if kind in ("KV", "SWA") and other == (kind, layer, "v") and part == "k":
                yield "k_and_v_swapped", key, _swap_with(other)


def _swap_with(other: RegionKey) -> Way:
    return lambda target: swapped(target, other)
