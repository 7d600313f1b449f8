"""The only ways between index spaces: named, total functions; and doors, where an index stops being one.

`Localize` filters by owner *and* divides, in one operation: there is no function that does only one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.errors import IndexOutOfSpace, SpaceError
from sglang_pd.protocol.idx import I64, Idx, MaskedIdx, mismatch
from sglang_pd.protocol.spaces import (
    LocalTok,
    Page,
    RaggedScratch,
    RequestRow,
    Ring,
    Scaled,
    Space,
    SwaTok,
    VirtualTok,
)

S = TypeVar("S", bound=Space)
B = TypeVar("B", bound=Space)
T = TypeVar("T", VirtualTok, SwaTok)


@dataclass(frozen=True)
class Owned(Generic[B]):
    """Result of an owner filter: which positions of the input stayed, and where they are. Both of one length."""

    positions: I64
    """int64 [kept]: positions in the input list, ascending."""
    idx: Idx[B]
    """The kept indices in their new space."""


@dataclass(frozen=True)
class Identity(Generic[S]):
    """Same space in, same space out: for consumers that keep the index as it is (replicated index-K, draft KV)."""

    space: S

    def __call__(self, idx: Idx[S]) -> Idx[S]:
        """The index itself, once its space is checked."""
        _same(self.space, idx, "Identity")
        return idx


@dataclass(frozen=True)
class Localize:
    """Virtual token slots -> the local slots that one DCP rank owns: owner filter and division in one step.

    owner(loc) = loc // n % D and local(loc) = loc // (n * D) * n + loc % n, for D ranks and interleave n (D = dcp_size;
    n = 1 gives loc % D and loc // D). The padding slot 0 and absent entries are owned by nobody.
    """

    virtual: VirtualTok
    dcp_rank: int

    @property
    def target(self) -> LocalTok:
        """The rank's local space."""
        return LocalTok(virtual=self.virtual, dcp_rank=self.dcp_rank)

    def __call__(self, idx: Idx[VirtualTok]) -> Owned[LocalTok]:
        """Keep what this rank owns; the positions kept stay beside the local slots."""
        _same(self.virtual, idx, f"Localize(rank {self.dcp_rank})")
        values = idx.lower()
        owner, local = local_address(values, self.virtual)
        kept = np.flatnonzero((owner == self.dcp_rank) & (values != 0)).astype(np.int64)
        return Owned(kept, Idx._make(self.target, local[kept], f"Localize(rank {self.dcp_rank})"))

    def masked(self, idx: Idx[VirtualTok] | MaskedIdx[VirtualTok]) -> MaskedIdx[LocalTok]:
        """The same for a table that keeps its shape: what this rank does not own becomes absent."""
        _same(self.virtual, idx, f"Localize(rank {self.dcp_rank})", masked=True)
        present = np.ones(len(idx), dtype=np.bool_) if isinstance(idx, Idx) else idx.present
        values = idx.lower() if isinstance(idx, Idx) else idx.lower(absent=-1)
        values = np.where(present, values, 0)
        owner, local = local_address(values, self.virtual)
        here = present & (owner == self.dcp_rank) & (values != 0)
        return MaskedIdx._make(self.target, np.where(here, local, 0), here, f"Localize(rank {self.dcp_rank})")


def local_address(virtual_slots: I64, virtual: VirtualTok) -> tuple[I64, I64]:
    """Owner rank and local slot of every virtual slot: a bijection of [0, extent) with rank x [0, C + p).

    Arithmetic only: whether a rank may use the slot is for `Localize` to say.
    """
    n, d = virtual.interleave, virtual.dcp_size
    return virtual_slots // n % d, virtual_slots // (n * d) * n + virtual_slots % n


@dataclass(frozen=True)
class DivideGroups:
    """Token slots -> slots of the groups they belong to (slot // ratio). A group never straddles a page."""

    target: Scaled

    def __call__(self, idx: Idx[Any]) -> Idx[Scaled]:
        """One group slot for each token slot."""
        _same(self.target.of, idx, "DivideGroups")
        return Idx._make(self.target, idx.lower() // self.target.ratio, "DivideGroups")


@dataclass(frozen=True)
class PageOf(Generic[T]):
    """Token slots -> pages of the same token space."""

    tokens: T

    def __call__(self, idx: Idx[T]) -> Idx[Page]:
        """One page for each token slot."""
        _same(self.tokens, idx, "PageOf")
        return Idx._make(Page(of=self.tokens), idx.lower() // self.tokens.page_len, "PageOf")


@dataclass(frozen=True)
class TokenAt(Generic[T]):
    """A request's pages and token positions -> token slots. `first_page` is the position // page_len of pages[0]."""

    tokens: T
    first_page: int = 0

    def __call__(self, pages: Idx[Page], positions: NDArray[np.integer[Any]]) -> Idx[T]:
        """`positions`: int64 [n], token positions within the prompt that the page list covers."""
        _same(Page(of=self.tokens), pages, "TokenAt")
        length = self.tokens.page_len
        position = _positions(positions, "TokenAt")
        place = position // length - self.first_page
        if position.size and not (0 <= int(place.min()) and int(place.max()) < len(pages)):
            raise IndexOutOfSpace(
                "a token position lies outside the page list",
                where="TokenAt",
                expected=f"[{self.first_page * length}, {(self.first_page + len(pages)) * length})",
                actual=f"[{int(position.min())}, {int(position.max())}]",
            )
        return Idx._make(self.tokens, pages.lower()[place] * length + position % length, "TokenAt")


@dataclass(frozen=True)
class RingAt:
    """A request row and token positions -> ring slots: row * width + position % width."""

    target: Ring

    def __call__(self, row: Idx[RequestRow], positions: NDArray[np.integer[Any]]) -> Idx[Ring]:
        """`row`: one row; `positions`: int64 [n], token positions, none negative."""
        _same(self.target.of, row, "RingAt")
        position = _positions(positions, "RingAt")
        if len(row) != 1 or (position.size and int(position.min()) < 0):
            raise IndexOutOfSpace(
                "a ring needs one row and positions that are not negative", where="RingAt", actual=f"{len(row)} rows"
            )
        values = row.lower()[0] * self.target.width + position % self.target.width
        return Idx._make(self.target, values, "RingAt")


@dataclass(frozen=True)
class Translate(Generic[S, B]):
    """A table from one allocator's slots to another's (full -> SWA). Slots without a partner become absent."""

    source: S
    target: B
    table: MaskedIdx[B]

    def __post_init__(self) -> None:
        _same(self.target, self.table, "Translate", masked=True)
        if len(self.table) != self.source.extent:
            raise SpaceError(
                "a translation table covers its whole source space",
                where="Translate",
                expected=self.source.extent,
                actual=len(self.table),
            )

    def __call__(self, idx: Idx[S]) -> MaskedIdx[B]:
        """The partners of the given slots."""
        _same(self.source, idx, "Translate")
        values = idx.lower()
        table = self.table.lower(absent=-1)[values]
        return MaskedIdx._make(self.target, np.where(table >= 0, table, 0), table >= 0, "Translate")


@dataclass(frozen=True)
class RaggedAt:
    """A request's number and token positions -> rows of a per-forward scratch."""

    target: RaggedScratch

    def __call__(self, request: int, positions: NDArray[np.integer[Any]]) -> Idx[RaggedScratch]:
        """`positions`: int64 [n], below the request's token count."""
        counts = self.target.token_counts
        position = _positions(positions, "RaggedAt")
        if not 0 <= request < len(counts) or (
            position.size and not (0 <= int(position.min()) and int(position.max()) < counts[request])
        ):
            raise IndexOutOfSpace(
                "a scratch position lies outside its request", where="RaggedAt", expected=str(counts), actual=request
            )
        return Idx._make(self.target, sum(counts[:request]) + position, "RaggedAt")


class Absence(Enum):
    """What a reader does with an absent entry. Writers never accept one."""

    FORBIDDEN = "forbidden"
    SKIP = "skip"
    NEUTRAL = "neutral"


@dataclass(frozen=True)
class Door(Generic[S]):
    """A read or write door of a buffer: the one space it accepts, and what absence means to it.

    The bound of every check is the extent of the index's own space; a door has no bound of its own to get wrong.
    """

    space: S
    consumer: str
    absence: Absence = Absence.FORBIDDEN

    def accept(self, idx: Idx[S]) -> I64:
        """The int64 values for the kernel behind the door. Raises `SpaceMismatch`."""
        _same(self.space, idx, f"accept at {self.consumer}", self.consumer)
        return idx.lower()

    def accept_masked(self, idx: MaskedIdx[S], *, absent: int = -1) -> I64:
        """The values with `absent` in the holes. Raises `SpaceError` where this door forbids absence."""
        if self.absence is Absence.FORBIDDEN:
            raise SpaceError(
                "this door forbids absent indices", where=self.consumer, expected="Idx", actual="MaskedIdx"
            )
        if not isinstance(idx, MaskedIdx):
            raise SpaceError(
                "a table that may have holes is a MaskedIdx", where=self.consumer, actual=type(idx).__name__
            )
        _same(self.space, idx, f"accept_masked at {self.consumer}", self.consumer, masked=True)
        return idx.lower(absent=absent)


def _same(expected: Space, index: Any, operation: str, consumer: str = "", masked: bool = False) -> None:
    if not isinstance(index, (Idx, MaskedIdx) if masked else Idx):
        raise SpaceError(
            "bare integers and masked indices have no business here",
            where=consumer or operation,
            expected=f"{'Idx or MaskedIdx' if masked else 'Idx'} of {expected}",
            actual=type(index).__name__,
        )
    if index.space is not expected and index.space != expected:
        raise mismatch(expected, index, consumer or operation, operation)


def _positions(positions: NDArray[np.integer[Any]], where: str) -> I64:
    """Positions as int64. A float would be cut to an integer without a word, so any other dtype is refused."""
    values = np.asarray(positions)
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise IndexOutOfSpace(
            "positions are a one-dimensional array of integers",
            where=where,
            expected="integer dtype, 1 dimension",
            actual=f"dtype {values.dtype}, {values.ndim} dimensions",
        )
    return values.astype(np.int64)
