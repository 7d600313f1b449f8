"""Both sides' registered memory as the writer reaches it, and the short way for a batch of one descriptor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import place
from sglang_pd.protocol.batch import U64, RegionTable, WriteBatch, single


class Placed(Protocol):
    """A segment: where the writer finds its first byte, how many bytes it has, and the device it lies on."""

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    @property
    def device(self) -> str:
        """`cpu`, `cuda:N`, or `cuda` where the number is of no use here."""


class Side:
    """One side's registered segments, by number.

    base, nbytes: uint64 of shape [segments], address of the first byte and length. devices: as in `Placed`.
    on_device: bool of shape [segments]. host_only: no segment is device memory. index: device numbers, uint64 of shape
    [segments], 0 on the host.
    """

    def __init__(self, segments: Sequence[Placed] = ()) -> None:
        self.devices = tuple(one.device for one in segments)
        self.base: U64 = np.array([one.address for one in segments], np.uint64)
        self.nbytes: U64 = np.array([one.nbytes for one in segments], np.uint64)
        self.on_device: NDArray[np.bool_] = np.array([device != "cpu" for device in self.devices], np.bool_)
        self.host_only = not self.on_device.any()
        self.index: U64 = np.array([ordinal(device) for device in self.devices], np.uint64)
        # The same as Python numbers, for a batch of one.
        self._addresses = tuple(one.address for one in segments)
        self._lengths = tuple(one.nbytes for one in segments)

    def span(self, segment: int) -> tuple[int, int]:
        """Address of a segment's first byte, and of the first one behind it."""
        address = self._addresses[segment]
        return address, address + self._lengths[segment]

    def range(self, table: RegionTable, region: int, offset: int, nbytes: int) -> tuple[int, int] | None:
        """Address and segment number of one range; None where it is not plainly inside its region and segment."""
        found = place(table, region, offset, nbytes, self._lengths)
        return None if found is None else (self._addresses[found[0]] + found[1], found[0])


OneRange = tuple[tuple[int, int], tuple[int, int], int]
"""Source and destination (address and segment number each) and bytes of a checked descriptor."""


def one_range(batch: WriteBatch, own: Side, peer: Side) -> OneRange | None:
    """The only descriptor of a batch, checked without arrays; None where it has others or is not plainly in order.

    One descriptor is what latency is measured with, and a dozen calls on arrays of one element cost more than the copy.
    What this says None to, `check_batch` judges.
    """
    one = single(batch)
    if one is None:
        return None
    src = own.range(batch.src, one.src_region, one.src_offset, one.length)
    dst = peer.range(batch.dst, one.dst_region, one.dst_offset, one.length)
    return None if src is None or dst is None else (src, dst, one.length)


def ordinal(device: str) -> int:
    """Number of a device; 0 where it has none."""
    return int(device.partition(":")[2] or 0)
