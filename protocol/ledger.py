"""The range ledger: which bytes of a room have been reported written, by whom, and what is still missing.

Each (writer, component) pair has a live range, agreed before the first byte moves: a set of layers and a half-open
range of tokens. Its records must tile that range. The same record twice is harmless; any other overlap, and any record
outside the range, is a conflict, since two claims on one byte mean that somebody's plan is wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_pd.protocol.errors import LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.messages import Writer, Wrote

MAX_RECORDS = 65_536
"""Most distinct records of one (writer, component) pair."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The live range of one component at one writer: these layers, tokens [token_start, token_stop).

    An empty plan has no layers or no tokens; it still owes one record. Raises LocalProtocolError when layers are not
    strictly rising or the token range is backwards.
    """

    writer: Writer
    component: str
    layers: tuple[int, ...]
    token_start: int
    token_stop: int

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
        if not rising or not 0 <= self.token_start <= self.token_stop:
            raise LocalProtocolError(
                "an expected range has rising layers and a forward token range",
                code="internal",
                where=f"{self.writer}/{self.component}",
                actual=f"layers {self.layers}, tokens [{self.token_start}, {self.token_stop})",
            )

    @property
    def cells(self) -> int:
        """Layer-token cells in the range."""
        return len(self.layers) * (self.token_stop - self.token_start)


class _Pair:
    """What one writer has reported of one component."""

    __slots__ = ("covered", "expected", "last", "missing_cells", "seen")

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.missing_cells = expected.cells
        self.last = False
        self.seen: set[Wrote] = set()
        # For each layer the covered token ranges, disjoint, sorted and merged: [start, stop, start, stop, ...].
        self.covered: list[list[int]] = [[] for _ in expected.layers]

    @property
    def complete(self) -> bool:
        return self.last and self.missing_cells == 0

    def add(self, record: Wrote) -> bool:
        if record in self.seen:
            return False
        if len(self.seen) >= MAX_RECORDS:
            raise self._conflict(record, f"more than {MAX_RECORDS} records")
        if record.last and self.last:
            raise self._conflict(record, "another record was the last")
        rows = range(0)
        if not record.empty:
            layers = self.expected.layers
            rows = range(bisect_left(layers, record.layer_start), bisect_left(layers, record.layer_stop))
            if not rows:
                raise self._conflict(record, "no layer of this writer is in the range")
            if record.token_start < self.expected.token_start or record.token_stop > self.expected.token_stop:
                raise self._conflict(record, "outside the live token range")
            # All layers are judged before one is changed: a refused record leaves no trace.
            for row in rows:
                if not _is_free(self.covered[row], record.token_start, record.token_stop):
                    raise self._conflict(record, f"layer {layers[row]} is written there already")
        for row in rows:
            _cover(self.covered[row], record.token_start, record.token_stop)
        self.missing_cells -= len(rows) * (record.token_stop - record.token_start)
        self.last = self.last or record.last
        self.seen.add(record)
        return True

    def _conflict(self, record: Wrote, why: str) -> RemoteProtocolError:
        want = self.expected
        return RemoteProtocolError(
            f"the record does not fit its writer's ranges: {why}",
            code="range_conflict",
            where=f"room {record.room} {record.writer}/{record.component}",
            expected=f"{len(want.layers)} layers, tokens [{want.token_start}, {want.token_stop})",
            actual=f"layers [{record.layer_start}, {record.layer_stop}), "
            f"tokens [{record.token_start}, {record.token_stop}), last={record.last}",
        )

    def gap(self) -> str:
        """What is missing, for an error."""
        want = self.expected
        if self.missing_cells == 0:
            return f"{want.writer}/{want.component}: the last record"
        for row, layer in enumerate(want.layers):
            edges = [want.token_start, *self.covered[row], want.token_stop]
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                if start < stop:
                    return f"{want.writer}/{want.component}: layer {layer} tokens [{start}, {stop}) and more"
        return f"{want.writer}/{want.component}"


def _place(record: Wrote) -> tuple[int, int]:
    return record.token_start, record.layer_start


def _is_free(edges: list[int], start: int, stop: int) -> bool:
    """True when [start, stop) touches no covered range: both ends fall into the same gap."""
    if not edges or start >= edges[-1]:
        return True
    at = bisect_left(edges, start)
    if at % 2:  # inside a covered range, unless it begins exactly where that range ends
        if edges[at] != start:
            return False
        at += 1
    return at >= len(edges) or stop <= edges[at]


def _cover(edges: list[int], start: int, stop: int) -> None:
    """Add a range that `_is_free` accepted; neighbours that touch become one."""
    if not edges or start > edges[-1]:
        edges += (start, stop)
        return
    if start == edges[-1]:
        edges[-1] = stop
        return
    at = bisect_left(edges, start)
    at += at % 2  # first edge after the gap that [start, stop) lies in
    low = at - 1 if at and edges[at - 1] == start else at
    high = at + 1 if at < len(edges) and edges[at] == stop else at
    edges[low:high] = ([] if low < at else [start]) + ([] if high > at else [stop])


class RangeLedger:
    """The records of one room, judged against what each (writer, component) pair owes."""

    def __init__(self, expected: Iterable[Expected]) -> None:
        self._pairs: dict[tuple[Writer, str], _Pair] = {}
        self._incomplete: dict[Writer, int] = {}
        self._records = 0
        for item in expected:
            key = (item.writer, item.component)
            if key in self._pairs:
                raise LocalProtocolError(
                    "a pair is expected twice", code="internal", where=f"{item.writer}/{item.component}"
                )
            self._pairs[key] = _Pair(item)
            self._incomplete[item.writer] = self._incomplete.get(item.writer, 0) + 1

    @property
    def writers(self) -> frozenset[Writer]:
        """All writers that owe a record."""
        return frozenset(self._incomplete)

    @property
    def records(self) -> int:
        """Distinct records held."""
        return self._records

    def held(self) -> tuple[Wrote, ...]:
        """The distinct records with elements, pair by pair in the order of `expected`, rising within a pair."""
        records = (record for pair in self._pairs.values() for record in sorted(pair.seen, key=_place))
        return tuple(record for record in records if not record.empty)

    @property
    def complete(self) -> bool:
        """True when every pair's ranges tile its live range and its last record was seen."""
        return not any(self._incomplete.values())

    def writer_complete(self, writer: Writer) -> bool:
        """True when every component of that writer is complete: it writes no more in this room."""
        return self._incomplete.get(writer, 0) == 0

    def add(self, record: Wrote) -> bool:
        """Take a record; False for one that was seen before.

        Raises RemoteProtocolError (`range_conflict`), changing nothing, for a record of an unexpected pair, outside the
        live range, or overlapping another one.
        """
        pair = self._pairs.get((record.writer, record.component))
        if pair is None:
            raise RemoteProtocolError(
                "no record is expected of that writer and component",
                code="range_conflict",
                where=f"room {record.room}",
                actual=f"{record.writer}/{record.component}",
            )
        was_complete = pair.complete
        if not pair.add(record):
            return False
        self._records += 1
        if pair.complete and not was_complete:
            self._incomplete[record.writer] -= 1
        return True

    def missing(self, limit: int = 8) -> list[str]:
        """Up to `limit` sentences about pairs that are not complete."""
        return [pair.gap() for pair in self._pairs.values() if not pair.complete][:limit]
