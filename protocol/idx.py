"""`Idx` and `MaskedIdx`: immutable indices that carry their space. Made by `Space.ingest` or by a map, nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.errors import IndexOutOfSpace, SpaceError, SpaceMismatch

if TYPE_CHECKING:
    from sglang_pd.protocol.spaces import Space

S = TypeVar("S", bound="Space", covariant=True)
I64 = NDArray[np.int64]

_PRIVATE: Final = object()


class Idx(Generic[S]):
    """An immutable list of indices of one space. No arithmetic, no conversion to int or array: use maps and doors."""

    __slots__ = ("_origin", "_space", "_values")

    def __init__(self, token: object, space: S, values: I64, origin: str) -> None:
        if token is not _PRIVATE:
            raise SpaceError("an Idx comes from Space.ingest or from a map", where="Idx()")
        self._space = space
        self._values = values
        self._origin = origin
        values.flags.writeable = False

    @classmethod
    def _make(cls, space: Any, values: I64, origin: str) -> Idx[Any]:
        return cls(_PRIVATE, space, values, origin)

    @property
    def space(self) -> S:
        """The space these indices count in."""
        return self._space

    @property
    def origin(self) -> str:
        """The operation that made them, for error messages."""
        return self._origin

    def __len__(self) -> int:
        return int(self._values.shape[0])

    def __getitem__(self, part: slice) -> Idx[S]:
        if not isinstance(part, slice):
            raise SpaceError("an Idx gives slices, not integers", where="Idx[]", expected="slice", actual=part)
        return Idx._make(self._space, self._values[part], self._origin)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Idx):
            return NotImplemented
        return bool(self._space == other._space and np.array_equal(self._values, other._values))

    def __hash__(self) -> int:
        return hash((self._space.digest, self._values.tobytes()))

    def lower(self) -> I64:
        """The int64 values, read-only, for a door, the planner or a kernel adapter. They carry no space any more."""
        return self._values

    def __repr__(self) -> str:
        return f"Idx[{self._space}]({self._values.tolist() if len(self) <= 8 else f'{len(self)} indices'})"


class MaskedIdx(Generic[S]):
    """Indices with explicit absence: a mask, never a number. Only readers that declare it accept one."""

    __slots__ = ("_origin", "_present", "_space", "_values")

    def __init__(self, token: object, space: S, values: I64, present: NDArray[np.bool_], origin: str) -> None:
        if token is not _PRIVATE:
            raise SpaceError("a MaskedIdx comes from Space.ingest_masked or from a map", where="MaskedIdx()")
        self._space = space
        self._values = values
        self._present = present
        self._origin = origin

    @classmethod
    def _make(cls, space: Any, values: I64, present: NDArray[np.bool_], origin: str) -> MaskedIdx[Any]:
        return cls(_PRIVATE, space, values, present, origin)

    @property
    def space(self) -> S:
        """The space these indices count in."""
        return self._space

    @property
    def origin(self) -> str:
        """The operation that made them, for error messages."""
        return self._origin

    @property
    def present(self) -> NDArray[np.bool_]:
        """True where there is an index. Shape [indices]."""
        return self._present.copy()

    def __len__(self) -> int:
        return int(self._values.shape[0])

    def lower(self, *, absent: int) -> I64:
        """The int64 values with `absent` (negative) in the holes: for a kernel adapter only."""
        if absent >= 0:
            raise SpaceError("a sentinel for absence must be negative", where="MaskedIdx.lower", actual=absent)
        return np.where(self._present, self._values, absent)

    def compress(self) -> tuple[I64, Idx[S]]:
        """Positions (int64) at which there is an index, and those indices."""
        kept = np.flatnonzero(self._present).astype(np.int64)
        return kept, Idx._make(self._space, self._values[kept], self._origin)


def mismatch(expected: Space, index: Idx[Any] | MaskedIdx[Any], consumer: str, operation: str) -> SpaceMismatch:
    """The error for an index that reached the wrong consumer: both spaces, extents, the range, who, and where."""
    values = index.lower() if isinstance(index, Idx) else index.lower(absent=-1)
    seen = f"[{int(values.min())}, {int(values.max())}]" if len(values) else "empty"
    return SpaceMismatch(
        f"an index of {type(index.space).__name__} reached a consumer of {type(expected).__name__}",
        where=consumer,
        expected=f"{expected} with extent {expected.extent}",
        actual=f"{index.space} with extent {index.space.extent}",
        hint=f"First offending operation: {operation}. Only a named map leads from one space to another.",
        index_range=seen,
        index_origin=index.origin,
    )


def integers(array: Any, space: Space, consumer: str) -> I64:
    """A fresh int64 copy of a 1-D integer array or list. Raises `IndexOutOfSpace` for anything else."""
    if isinstance(array, np.ma.MaskedArray):
        raise IndexOutOfSpace(
            "a masked array says of some indices that they are none",
            where=f"{consumer} for {space}",
            expected="an array or list of integers",
            actual="numpy.ma.MaskedArray",
            hint="Absent indices are a negative value: `ingest_masked`.",
        )
    values = np.asarray(array)
    if values.size == 0 and values.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise IndexOutOfSpace(
            "indices must be a one-dimensional array of integers",
            where=f"{consumer} for {space}",
            expected="integer dtype, 1 dimension",
            actual=f"dtype {values.dtype}, {values.ndim} dimensions",
        )
    if values.dtype == np.uint64 and int(values.max()) > np.iinfo(np.int64).max:
        raise _out_of_space(values, int(np.argmax(values)), space, consumer)
    return values.astype(np.int64, copy=True)


def check_extent(values: I64, space: Space, consumer: str) -> None:
    """Refuse values outside [0, extent) of their own space. Raises `IndexOutOfSpace`."""
    # One comparison for both ends: a negative int64 seen as uint64 is larger than any extent.
    if values.size and int(values.view(np.uint64).max()) >= space.extent:
        first = int(np.argmax(values.view(np.uint64) >= np.uint64(space.extent)))
        raise _out_of_space(values, first, space, consumer)


def _out_of_space(values: NDArray[Any], first: int, space: Space, consumer: str) -> IndexOutOfSpace:
    return IndexOutOfSpace(
        f"an index lies outside {type(space).__name__}",
        where=consumer,
        expected=f"0 <= index < {space.extent}, the extent of {space}",
        actual=f"{int(values[first])} at position {first}",
        hint="The bound is the index's own space's; -1 is no index (ingest_masked takes it where absence is legal).",
        index_range=f"[{int(values.min())}, {int(values.max())}]",
    )
