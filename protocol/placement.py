"""Who owns which bytes of a row, and who writes them.

A row is cut, per independently sharded sub-block, into elementary intervals: the largest pieces that every source rank
either owns whole or not at all, and every destination rank wants whole or not at all. For each interval, with owners O
and wanting ranks W in rank order, the writer for W[i] is O[i * |O| // |W|]. This one rule covers heads, replicated GQA
heads, convolution sub-blocks, recurrent state, replicated items, and tensor-parallel sizes that do not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sglang_pd.protocol.errors import PlanError


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank and size of one side's tensor parallelism, and of the context parallelism inside it (dcp divides tp)."""

    tp: int
    rank: int
    dcp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dcp < 1 or self.tp % self.dcp:
            raise PlanError("sizes are positive and dcp divides tp", where="placement", actual=str((self.tp, self.dcp)))
        if not 0 <= self.rank < self.tp:
            raise PlanError("rank out of range", where="placement", expected=f"0 to {self.tp - 1}", actual=self.rank)


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """How a whole row is built: `outer_count` repeats of units_total units of unit_bytes, in independent groups."""

    unit_bytes: int
    groups: tuple[int, ...]
    outer_count: int
    replicated: bool

    @property
    def units_total(self) -> int:
        """Units of the whole dimension."""
        return sum(self.groups)

    def units_on_rank(self, tp: int) -> int:
        """Units that each of `tp` ranks holds."""
        return self.units_total if self.replicated else sum(max(1, group // tp) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Interval:
    """One contiguous piece of a row that a source rank writes into a destination rank.

    Offsets in bytes from the row's start on each side; `length_bytes` each.
    """

    src_offset_bytes: int
    dst_offset_bytes: int
    length_bytes: int

    @property
    def bytes(self) -> tuple[int, int, int]:
        """The three numbers, in the order of the fields."""
        return self.src_offset_bytes, self.dst_offset_bytes, self.length_bytes


def elect(owners: Sequence[int], wanting: int, position: int) -> int:
    """The writer among `owners` for the destination at `position` of `wanting`, all in rank order.

    Raises `PlanError` for empty owners, a size of zero or below, or a position out of range.
    """
    if not owners or wanting < 1 or not 0 <= position < wanting:
        raise PlanError(
            "no writer can be elected",
            where="election",
            expected="owners, wanting >= 1, 0 <= position < wanting",
            actual=f"{len(owners)} owners, wanting {wanting}, position {position}",
        )
    return owners[position * len(owners) // wanting]


def replicated_writer(src_tp: int, dst_tp: int, dst_rank: int) -> int:
    """The source rank that writes a replicated item (dim == 0) into `dst_rank`: dst_rank * src_tp // dst_tp.

    Broadcast for src_tp <= dst_tp, the first rank of each group otherwise; sizes need not divide.
    """
    if src_tp < 1 or dst_tp < 1:
        raise PlanError("tensor-parallel sizes are positive", where="election", actual=str((src_tp, dst_tp)))
    if not 0 <= dst_rank < dst_tp:
        raise PlanError("rank out of range", where="election", expected=f"0 to {dst_tp - 1}", actual=dst_rank)
    return elect(range(src_tp), dst_tp, dst_rank)


def _held(group: int, tp: int, rank: int) -> tuple[int, int]:
    """Units [start, stop) of a group that a rank holds; a group smaller than tp is repeated over tp // group ranks."""
    if group >= tp:
        return rank * group // tp, (rank + 1) * group // tp
    unit = rank * group // tp
    return unit, unit + 1


def _holders(group: int, tp: int, unit: int) -> range:
    """Ranks that hold a unit, of a group that divides by tp or tp by it: the inverse of `_held`."""
    if group >= tp:
        rank = unit * tp // group
        return range(rank, rank + 1)
    return range(unit * tp // group, (unit + 1) * tp // group)


@lru_cache(maxsize=16_384)
def intervals(geometry: RowGeometry, src: Shard, dst: Shard) -> tuple[Interval, ...]:
    """What source rank `src` writes of a row into destination rank `dst`, by destination offset; () for nothing.

    Where the source shards its context (dcp > 1), only ranks with the token hold it: the election runs among the
    owners of this source rank's own context class, so that each class has one writer for each destination rank.
    Neighbours that touch on both sides are merged, repeats of a fully covered row too. Raises `PlanError` for a group
    that a side cannot hold evenly.
    """
    uneven = [(g, s.tp) for g in geometry.groups for s in (src, dst) if g % s.tp and s.tp % g]
    if uneven and not geometry.replicated:
        raise PlanError(
            "a group divides by tp, or tp by it",
            where="placement",
            expected="no remainder",
            actual=f"{uneven[0][0]} units over tp {uneven[0][1]}",
        )
    if geometry.replicated:
        peers = range(src.rank % src.dcp, src.tp, src.dcp)
        mine = elect(peers, dst.tp, dst.rank) == src.rank
        row = geometry.outer_count * geometry.units_total * geometry.unit_bytes
        return (Interval(0, 0, row),) if mine else ()
    pieces = _inner_pieces(geometry, src, dst)
    src_row = geometry.units_on_rank(src.tp) * geometry.unit_bytes
    dst_row = geometry.units_on_rank(dst.tp) * geometry.unit_bytes
    outer = [
        Interval(piece.src_offset_bytes + o * src_row, piece.dst_offset_bytes + o * dst_row, piece.length_bytes)
        for o in range(geometry.outer_count)
        for piece in pieces
    ]
    return tuple(_merge(outer))


def _inner_pieces(geometry: RowGeometry, src: Shard, dst: Shard) -> list[Interval]:
    pieces: list[Interval] = []
    src_base = dst_base = 0
    for group in geometry.groups:
        src_start, src_stop = _held(group, src.tp, src.rank)
        dst_start, dst_stop = _held(group, dst.tp, dst.rank)
        # Sizes divide, so that no other rank has an edge inside: the overlap is one elementary piece.
        start, stop = max(src_start, dst_start), min(src_stop, dst_stop)
        if start < stop and _writer(group, start, src, dst) == src.rank:
            pieces.append(
                Interval(
                    (src_base + start - src_start) * geometry.unit_bytes,
                    (dst_base + start - dst_start) * geometry.unit_bytes,
                    (stop - start) * geometry.unit_bytes,
                )
            )
        src_base += src_stop - src_start
        dst_base += dst_stop - dst_start
    return pieces


def _writer(group: int, unit: int, src: Shard, dst: Shard) -> int:
    holders, wanting = _holders(group, src.tp, unit), _holders(group, dst.tp, unit)
    first = holders.start + (src.rank - holders.start) % src.dcp
    owners = range(first, holders.stop, src.dcp)  # of this source rank's own context class
    return elect(owners, len(wanting), wanting.index(dst.rank))


def _merge(pieces: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.src_offset_bytes + last.length_bytes == piece.src_offset_bytes
            and last.dst_offset_bytes + last.length_bytes == piece.dst_offset_bytes
        ):
            merged[-1] = Interval(last.src_offset_bytes, last.dst_offset_bytes, last.length_bytes + piece.length_bytes)
        else:
            merged.append(piece)
    return merged


def context_classes_owned(geometry: RowGeometry, tp: int, dcp: int) -> bool:
    """True where every unit of the row is held by a rank of every context class, so that no token is without owner."""
    if geometry.replicated or dcp == 1:
        return True
    for group in geometry.groups:
        for unit in {_held(group, tp, r)[0] for r in range(tp)}:
            classes = {r % dcp for r in range(tp) if _held(group, tp, r)[0] <= unit < _held(group, tp, r)[1]}
            if len(classes) != dcp:
                return False
    return True
