"""Index spaces: an integer is not an index.

A `Space` says what an index counts and how far it reaches; its extent includes its reserve (the padding page, row or
slot that an allocator never hands out). An `Idx[S]` carries its space and allows no arithmetic. It comes from
`Space.ingest`, the one validated door for foreign arrays, or from a map of `space_maps.py`. Spaces are values: equal
facts make equal spaces, on one machine or two, and their 32-bit digest travels with every index list.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Final, TypeVar

import msgspec
import numpy as np
import xxhash

from sglang_pd.protocol.errors import SpaceError
from sglang_pd.protocol.idx import Idx, MaskedIdx, check_extent, integers

MAX_EXTENT: Final = 2**40
"""Largest extent of a space; far above any pool, far below where int64 arithmetic on byte offsets could wrap."""


def _require(condition: bool, space: str, field: str, expected: str, actual: object) -> None:
    if not condition:
        raise SpaceError("impossible index space", where=f"{space}.{field}", expected=expected, actual=actual)


def _count(space: object, field: str, value: object, least: int = 1) -> None:
    name = type(space).__name__
    good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_EXTENT
    _require(good, name, field, f"an integer from {least} to {MAX_EXTENT}", repr(value))


def _bounded(space: Space) -> None:
    # Facts that are each acceptable can multiply to an extent at which slot arithmetic would wrap.
    _require(space.extent <= MAX_EXTENT, type(space).__name__, "extent", f"at most {MAX_EXTENT}", space.extent)


Here = TypeVar("Here", bound="Space")
"""The space that `ingest` is called on."""


class Space(msgspec.Struct, frozen=True, kw_only=True, tag_field="space", forbid_unknown_fields=True):
    """Base of all spaces. Subclasses define `extent`, `reserve` and, for token spaces, `page_tokens`."""

    issued_by_allocator: ClassVar[bool] = False

    @property
    def extent(self) -> int:
        """One more than the largest legal index, reserve included."""
        raise NotImplementedError

    @property
    def reserve(self) -> int:
        """Indices [0, reserve) are padding: addressable, never issued to a request."""
        return 0

    @property
    def list_space(self) -> AnySpace:
        """The space in which a room's index list for this space is written: pages for token spaces."""
        raise NotImplementedError

    @property
    def page_len(self) -> int:
        """Indices of this space in one page of `list_space`; 1 where there are no pages."""
        return 1

    @property
    def digest(self) -> int:
        """32-bit digest of all the facts of the space, nested spaces included."""
        return _digest(self)

    def ingest(self: Here, array: Any, *, consumer: str = "ingest") -> Idx[Here]:
        """Take indices from outside: a 1-D integer array or list, each in [0, extent). The values are copied.

        Raises `IndexOutOfSpace` naming the space, its extent, the range seen, the consumer and the first bad element.
        """
        values = integers(array, self, consumer)
        check_extent(values, self, consumer)
        return Idx._make(self, values, consumer)

    def ingest_masked(self: Here, array: Any, *, absent: int = -1, consumer: str = "ingest") -> MaskedIdx[Here]:
        """Take indices in which the value `absent` (negative) means "not here". Any other negative is refused."""
        if absent >= 0:
            raise SpaceError("a sentinel for absence must be negative", where=consumer, expected="< 0", actual=absent)
        values = integers(array, self, consumer)
        present = values != absent
        values = np.where(present, values, 0)
        check_extent(values, self, consumer)
        return MaskedIdx._make(self, values, present, consumer)

    def __str__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({fields})"


class VirtualTok(Space, frozen=True, kw_only=True, tag="virtual_token"):
    """Token slots as the allocator issues them, over all DCP ranks.

    capacity_tokens: C, tokens of storage on one rank, without the reserve; a multiple of `page_tokens`.
    page_tokens: p, tokens of a page on one rank. A virtual page holds p * D tokens; page 0 is the reserve.
    dcp_size: D. interleave: n, neighbouring tokens that stay on one rank before the next rank's turn; divides p.
    Extent (C + p) * D, so that the largest legal slot is (C + p) * D - 1.
    """

    issued_by_allocator: ClassVar[bool] = True
    capacity_tokens: int
    page_tokens: int
    dcp_size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        for field in ("capacity_tokens", "page_tokens", "dcp_size", "interleave"):
            _count(self, field, getattr(self, field))
        _require(
            self.capacity_tokens % self.page_tokens == 0,
            "VirtualTok",
            "capacity_tokens",
            f"a multiple of page_tokens = {self.page_tokens}",
            self.capacity_tokens,
        )
        _require(
            self.page_tokens % self.interleave == 0,
            "VirtualTok",
            "interleave",
            f"a divisor of page_tokens = {self.page_tokens}",
            self.interleave,
        )
        _bounded(self)

    @property
    def extent(self) -> int:
        return (self.capacity_tokens + self.page_tokens) * self.dcp_size

    @property
    def reserve(self) -> int:
        return self.page_len

    @property
    def page_len(self) -> int:
        return self.page_tokens * self.dcp_size

    @property
    def list_space(self) -> Page:
        return Page(of=self)


class LocalTok(Space, frozen=True, kw_only=True, tag="local_token"):
    """Token slots of one DCP rank: what an owner filter and a division make of `virtual`. Extent C + p."""

    virtual: VirtualTok
    dcp_rank: int

    def __post_init__(self) -> None:
        _require(
            0 <= self.dcp_rank < self.virtual.dcp_size,
            "LocalTok",
            "dcp_rank",
            f"0 to {self.virtual.dcp_size - 1}",
            self.dcp_rank,
        )

    @property
    def extent(self) -> int:
        return self.virtual.extent // self.virtual.dcp_size

    @property
    def reserve(self) -> int:
        return self.virtual.page_tokens

    @property
    def page_len(self) -> int:
        return self.virtual.page_tokens

    @property
    def list_space(self) -> Page:
        return Page(of=self.virtual)


class SwaTok(Space, frozen=True, kw_only=True, tag="swa_token"):
    """Token slots of the sliding-window pool, with an allocator of its own. Extent capacity_tokens + page_tokens."""

    issued_by_allocator: ClassVar[bool] = True
    capacity_tokens: int
    page_tokens: int
    window_tokens: int

    def __post_init__(self) -> None:
        for field in ("capacity_tokens", "page_tokens", "window_tokens"):
            _count(self, field, getattr(self, field))
        _require(
            self.capacity_tokens % self.page_tokens == 0,
            "SwaTok",
            "capacity_tokens",
            f"a multiple of page_tokens = {self.page_tokens}",
            self.capacity_tokens,
        )
        _bounded(self)

    @property
    def extent(self) -> int:
        return self.capacity_tokens + self.page_tokens

    @property
    def reserve(self) -> int:
        return self.page_tokens

    @property
    def page_len(self) -> int:
        return self.page_tokens

    @property
    def list_space(self) -> Page:
        return Page(of=self)


class RequestRow(Space, frozen=True, kw_only=True, tag="request_row"):
    """Rows of the request table, one a running request. `rows` can be issued; `reserved` more come first."""

    issued_by_allocator: ClassVar[bool] = True
    rows: int
    reserved: int = 1

    def __post_init__(self) -> None:
        _count(self, "rows", self.rows)
        _count(self, "reserved", self.reserved, least=0)
        _bounded(self)

    @property
    def extent(self) -> int:
        return self.rows + self.reserved

    @property
    def reserve(self) -> int:
        return self.reserved

    @property
    def list_space(self) -> RequestRow:
        return self


class RecurrentSlot(Space, frozen=True, kw_only=True, tag="recurrent_slot"):
    """Slots of recurrent state, one a request. `slots` can be issued; `reserved` more come first."""

    issued_by_allocator: ClassVar[bool] = True
    slots: int
    reserved: int = 1

    def __post_init__(self) -> None:
        _count(self, "slots", self.slots)
        _count(self, "reserved", self.reserved, least=0)
        _bounded(self)

    @property
    def extent(self) -> int:
        return self.slots + self.reserved

    @property
    def reserve(self) -> int:
        return self.reserved

    @property
    def list_space(self) -> RecurrentSlot:
        return self


class Page(Space, frozen=True, kw_only=True, tag="page"):
    """Pages of a token space: a space of their own. One page holds `of.page_len` tokens; page 0 is the reserve."""

    issued_by_allocator: ClassVar[bool] = True
    of: VirtualTok | LocalTok | SwaTok

    @property
    def extent(self) -> int:
        return self.of.extent // self.of.page_len

    @property
    def reserve(self) -> int:
        return 1

    @property
    def list_space(self) -> Page:
        return self


class Scaled(Space, frozen=True, kw_only=True, tag="scaled"):
    """Groups of `ratio` neighbouring tokens: QSA compressed keys, pooled index keys. A group never leaves its page."""

    of: VirtualTok | SwaTok
    ratio: int

    def __post_init__(self) -> None:
        _count(self, "ratio", self.ratio)
        _require(
            self.of.page_tokens % self.ratio == 0,
            "Scaled",
            "ratio",
            f"a divisor of page_tokens = {self.of.page_tokens}",
            self.ratio,
        )

    @property
    def extent(self) -> int:
        return -(-self.of.extent // self.ratio)

    @property
    def reserve(self) -> int:
        return self.page_len

    @property
    def page_len(self) -> int:
        return self.of.page_len // self.ratio

    @property
    def list_space(self) -> Page:
        return Page(of=self.of)


class Ring(Space, frozen=True, kw_only=True, tag="ring"):
    """Slots of a ring that each request row has: the token at position t lies in slot row * width + t % width.

    group_tokens: r, the group that the ring keeps open; only the L % r youngest tokens are live. width >= r (with
    speculation r + window - 1, or closing groups read keys of tokens that were rejected).
    """

    of: RequestRow
    width: int
    group_tokens: int

    def __post_init__(self) -> None:
        _count(self, "width", self.width)
        _count(self, "group_tokens", self.group_tokens)
        _require(
            self.width >= self.group_tokens, "Ring", "width", f"at least group_tokens = {self.group_tokens}", self.width
        )
        _bounded(self)

    @property
    def extent(self) -> int:
        return self.of.extent * self.width

    @property
    def reserve(self) -> int:
        return self.of.reserve * self.width

    @property
    def page_len(self) -> int:
        return self.width

    @property
    def list_space(self) -> RequestRow:
        return self.of


class RaggedScratch(Space, frozen=True, kw_only=True, tag="ragged_scratch"):
    """Rows of a per-forward scratch: the tokens of request i behind those of requests 0 to i - 1. Never registered."""

    token_counts: tuple[int, ...]

    def __post_init__(self) -> None:
        for count in self.token_counts:
            _count(self, "token_counts", count, least=0)
        _bounded(self)

    @property
    def extent(self) -> int:
        return sum(self.token_counts)


AnySpace = VirtualTok | LocalTok | SwaTok | RequestRow | RecurrentSlot | Page | Scaled | Ring | RaggedScratch
"""Every space; msgspec decodes the union by the field `space`."""


@lru_cache(maxsize=4096)
def _digest(space: Space) -> int:
    return xxhash.xxh32_intdigest(msgspec.msgpack.encode(space))
