"""One index space's indices: which are free, held, or withheld until a fence. Knows no request and no byte."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from sglang_pd.protocol.errors import ConfigError, PdError, RoomError
from sglang_pd.protocol.idx import I64
from sglang_pd.protocol.spaces import AnySpace

Order = Literal["low", "high", "random"]
ORDERS: Final = ("low", "high", "random")


class LeaseError(PdError):
    """Memory was used in a state that forbids it, or the books of an allocator do not balance."""

    default_code = "lease_invalid"


class IndexPool:
    """Indices of one space that an allocator issues; the reserve is never among them.

    order: which are issued first, `low` (from the reserve up), `high` (from the top of the pool down) or `random`
    (a permutation of `seed`). Indices that come back are the next to go out: re-use pressure is as high as it can be.
    An index has a count of holders (shared prefixes), and is withheld while a peer may still write it.
    """

    def __init__(self, space: AnySpace, order: Order = "low", seed: int = 0) -> None:
        self.space = space
        first = np.arange(space.reserve, space.extent, dtype=np.int64)
        if order == "random":
            first = np.random.default_rng(seed).permutation(first)
        elif order == "low":
            first = first[::-1].copy()
        elif order != "high":
            raise ConfigError(
                "no such allocation order", where="memory.order", expected=" | ".join(ORDERS), actual=order
            )
        self._stack = first  # the free ones are _stack[:_free]; the next to go out is the last
        self._free = first.shape[0]
        self._holders = np.zeros(space.extent, dtype=np.int32)
        self._fences = np.zeros(space.extent, dtype=np.int32)

    @property
    def size(self) -> int:
        """Indices that can be issued at all."""
        return self._stack.shape[0]

    @property
    def free(self) -> int:
        """Indices nobody holds."""
        return self._free

    @property
    def withheld(self) -> int:
        """Indices that only wait for a fence."""
        return int(np.count_nonzero((self._fences > 0) & (self._holders == 0)))

    @property
    def held(self) -> int:
        """Indices with a holder."""
        return int(np.count_nonzero(self._holders))

    def take(self, count: int) -> I64:
        """Issue `count` indices, int64 [count]. Raises `RoomError` (`pool_exhausted`), having issued nothing."""
        if count > self._free:
            raise RoomError(
                "no memory is free for the request now",
                code="pool_exhausted",
                where=str(self.space),
                expected=f"{count} free",
                actual=f"{self._free} free, {self.withheld} withheld until a fence, of {self.size}",
            )
        taken = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self._holders[taken] = 1
        return taken

    def share(self, indices: I64) -> None:
        """One more holder for indices that are held. Raises `LeaseError` for one that is not."""
        self._require_holder(indices, "shared")
        self._holders[indices] += 1

    def is_shared(self, indices: I64) -> bool:
        """True where any of the indices has more than one holder, or waits for a fence as well."""
        return bool((self._holders[indices] > 1).any() or self._fences[indices].any())

    def give_back(self, indices: I64) -> None:
        """One holder less; an index that nobody holds or waits for is free. Raises `LeaseError` for one without."""
        self._require_holder(indices, "given back")
        self._holders[indices] -= 1
        self._push_idle(indices)

    def withhold(self, indices: I64) -> None:
        """One holder less, but the index stays out of use until a fence. Raises `LeaseError` for one without holder."""
        self._require_holder(indices, "withheld")
        self._holders[indices] -= 1
        self._fences[indices] += 1

    def fenced(self, indices: I64) -> None:
        """One fence less to wait for. Raises `LeaseError` for an index that was not withheld."""
        if indices.size and int(self._fences[indices].min()) < 1:
            raise LeaseError("memory was not withheld", where=str(self.space), actual=indices.tolist()[:8])
        self._fences[indices] -= 1
        self._push_idle(indices)

    def _require_holder(self, indices: I64, what: str) -> None:
        if indices.size and int(self._holders[indices].min()) < 1:
            nobody = indices[self._holders[indices] < 1].tolist()[:8]
            raise LeaseError(f"memory that nobody holds was {what}", where=str(self.space), actual=nobody)

    def _push_idle(self, indices: I64) -> None:
        idle = indices[(self._holders[indices] == 0) & (self._fences[indices] == 0)]
        self._stack[self._free : self._free + idle.shape[0]] = idle[::-1]
        self._free += idle.shape[0]

    def check_integrity(self, holders: I64, fences: I64) -> None:
        """Raise `LeaseError` unless every index is in its one state and has the holders and fences that others count.

        holders, fences: int64 [extent], how often leases and the quarantine list each index.
        """
        free = np.zeros(self.space.extent, dtype=np.int64)
        np.add.at(free, self._stack[: self._free], 1)
        wanted = ((self._holders == 0) & (self._fences == 0)).astype(np.int64)
        wanted[: self.space.reserve] = 0
        reserve = slice(0, self.space.reserve)
        for what, have, want in (
            ("free list", free, wanted),
            ("holders", self._holders, holders),
            ("fences", self._fences, fences),
            ("reserve", (self._holders + self._fences)[reserve], np.zeros(self.space.reserve, dtype=np.int64)),
        ):
            if not np.array_equal(have, want):
                bad = np.flatnonzero(have != want)[:8]
                raise LeaseError(
                    f"the books do not balance: {what}", where=str(self.space),
                    expected=want[bad].tolist(), actual=have[bad].tolist(), indices=bad.tolist(),
                )  # fmt: skip
        if self.free + self.held + self.withheld != self.size:
            raise LeaseError(
                "an index is lost or in two states", where=str(self.space), expected=self.size,
                actual=f"{self.free} free + {self.held} held + {self.withheld} withheld",
            )  # fmt: skip
