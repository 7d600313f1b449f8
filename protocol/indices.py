"""Index lists as they travel: one list a space, packed, whichever of two forms is smaller.

An `IndexList` names its index space by the space's 32-bit digest and holds its indices in order, as
- `array`: each index as an unsigned 32-bit little-endian integer, or
- `ranges`: pairs (first, length) of such integers, each standing for `first, first + 1, ... first + length - 1`.

A list means nothing before its consumer has looked the digest up and let the space itself judge the values
(`spaces.ingest`): the bounds here protect memory, not meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from sglang_pd.protocol.errors import LocalProtocolError

MAX_INDICES = 2**21
"""Most indices in one list, after ranges are expanded."""

MAX_INDICES_PER_OPEN = 2**22
"""Most indices in all lists of one room, after ranges are expanded (16 MiB as an array)."""

MAX_LISTS = 32
"""Most index lists, and so most index spaces, of one room."""

_U32 = np.dtype("<u4")


class IndexList(msgspec.Struct, frozen=True, kw_only=True):
    """One index list of one index space.

    space: the space's digest, 32 bits.
    count: how many indices, at most `MAX_INDICES`.
    form: "array" (4 bytes an index) or "ranges" (8 bytes a run of consecutive indices).
    data: packed little-endian u32, at most 4 x MAX_INDICES bytes.

    Raises ValueError when the three do not fit one another (a ranges form must expand to exactly `count` indices, none
    of its lengths is 0, and no index exceeds 2**32 - 1).
    """

    space: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    count: Annotated[int, Meta(ge=0, le=MAX_INDICES)]
    form: Literal["array", "ranges"]
    data: Annotated[bytes, Meta(max_length=4 * MAX_INDICES)]

    def __post_init__(self) -> None:
        if self.form == "array":
            if len(self.data) != 4 * self.count:
                raise ValueError(f"an array of {self.count} indices takes {4 * self.count} bytes, not {len(self.data)}")
            return
        if len(self.data) % 8:
            raise ValueError(f"ranges take 8 bytes each, {len(self.data)} bytes are not whole ranges")
        runs = np.frombuffer(self.data, _U32).reshape(-1, 2)
        total = int(runs[:, 1].sum(dtype=np.uint64))
        if total != self.count:
            raise ValueError(f"the ranges hold {total} indices, the list says {self.count}")
        if len(runs) and (int(runs[:, 1].min()) == 0 or int(runs.astype(np.uint64).sum(axis=1).max()) > 2**32):
            raise ValueError("a range is empty or runs past index 2**32 - 1")

    def indices(self) -> NDArray[np.uint32]:
        """The indices in order, shape [count], uint32. For the array form a read-only view of `data`."""
        if self.form == "array":
            return np.frombuffer(self.data, _U32).astype(np.uint32, copy=False)
        runs = np.frombuffer(self.data, _U32).reshape(-1, 2).astype(np.int64)
        first, length = runs[:, 0], runs[:, 1]
        shift = first - (np.cumsum(length) - length)
        return (np.repeat(shift, length) + np.arange(self.count, dtype=np.int64)).astype(np.uint32)


def pack_indices(space: int, indices: NDArray[np.integer] | Sequence[int]) -> IndexList:
    """Pack indices (shape [count], any integer dtype, order kept, repeats allowed) in the smaller form; ties: array.

    Raises LocalProtocolError for an index outside 0 .. 2**32 - 1 or more than `MAX_INDICES` of them.
    """
    wide = np.asarray(indices)
    if wide.size == 0:
        return IndexList(space=space, count=0, form="array", data=b"")
    if wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer) or wide.size > MAX_INDICES:
        raise LocalProtocolError(
            "an index list is a flat integer array of bounded length",
            code="index_invalid",
            expected=f"[<= {MAX_INDICES}] of integers",
            actual=f"{list(wide.shape)} of {wide.dtype}",
        )
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high > 2**32 - 1:
        raise LocalProtocolError(
            "an index does not fit the wire", code="index_invalid", expected="0 .. 2**32 - 1", actual=f"{low} .. {high}"
        )
    flat = np.ascontiguousarray(wide, dtype=_U32)
    # The difference may wrap from 2**32 - 1 to 0, which looks like a run; then it is taken in 64 bits.
    steps = np.diff(flat if high < 2**32 - 1 else flat.astype(np.int64)) != 1
    if 8 * (int(np.count_nonzero(steps)) + 1) >= 4 * flat.size:
        return IndexList(space=space, count=flat.size, form="array", data=flat.tobytes())
    starts = np.flatnonzero(steps) + 1
    first = np.concatenate(([0], starts))
    runs = np.empty((len(first), 2), _U32)
    runs[:, 0] = flat[first]
    runs[:, 1] = np.diff(np.concatenate((first, [flat.size])))
    return IndexList(space=space, count=flat.size, form="ranges", data=runs.tobytes())


def prompt_digest(token_ids: NDArray[np.integer] | Sequence[int]) -> int:
    """xxh3-64 of the token ids as packed little-endian u32: what `RoomOpen.prompt_digest` holds.

    Raises LocalProtocolError for an id outside 0 .. 2**32 - 1, and for what is no flat list of integers.
    """
    return xxhash.xxh3_64_intdigest(_packed_ids(token_ids))


class PromptDigest:
    """`prompt_digest` of token ids that come piece by piece, in order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, token_ids: NDArray[np.integer] | Sequence[int]) -> None:
        """The next ids, a flat list of integers. Raises as `prompt_digest`, nothing added."""
        self._hash.update(_packed_ids(token_ids))

    @property
    def value(self) -> int:
        """The digest of all ids so far, 64 bits."""
        return self._hash.intdigest()


def _packed_ids(token_ids: NDArray[np.integer] | Sequence[int]) -> bytes:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        # A float would be cut, rows would be joined: another prompt, with the digest of this one.
        raise LocalProtocolError(
            "token ids are a flat array of integers", code="index_invalid", actual=f"{list(ids.shape)} of {ids.dtype}"
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 2**32 - 1):
        raise LocalProtocolError("a token id does not fit 32 bits", code="index_invalid")
    return np.ascontiguousarray(ids, dtype=_U32).tobytes()
