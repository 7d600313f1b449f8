"""Reads rows of registered host memory by region number, for verification."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import Segment
from sglang_pd.protocol.batch import U64, RegionTable
from sglang_pd.protocol.digest import digest_rows
from sglang_pd.protocol.errors import IntegrityError
from sglang_pd.protocol.verify import RowDigest

DeviceDigest = Callable[[Segment, U64, int, NDArray[np.int64]], int]
"""(segment, byte offsets [n] in it, row length, element numbers [n]) -> `digest_rows` of rows in device memory."""


class RegionReader:
    """Digests of rows by region. Host rows are read here; device rows go to `device_digest`, when there is one."""

    def __init__(
        self, segments: tuple[Segment, ...], table: RegionTable, device_digest: DeviceDigest | None = None
    ) -> None:
        self._segments = segments
        self._table = table
        self._device_digest = device_digest
        self._views: dict[int, NDArray[np.uint8]] = {}

    def digest(self, region: int, offsets: U64, length: int, elements: NDArray[np.int64]) -> int:
        """Digest of the rows at `offsets` (bytes from the region's base). Raises `IntegrityError` where it cannot."""
        number = int(self._table.segment[region])
        segment = self._segments[number]
        places = offsets + self._table.base[region]
        if segment.device != "cpu":
            if self._device_digest is None:
                raise IntegrityError(
                    "no digest for device memory here", code="backend_unsupported", where=segment.device
                )
            return self._device_digest(segment, places, length, elements)
        view = self._views.get(number)
        if view is None:
            block = (ctypes.c_uint8 * segment.nbytes).from_address(segment.address)
            view = self._views[number] = np.ctypeslib.as_array(block)
        # One void item per start byte, overlapping: numpy then gathers whole rows with one memcpy each.
        rows = np.ndarray(shape=(segment.nbytes - length + 1,), dtype=f"V{length}", buffer=view.data, strides=(1,))[
            places.astype(np.int64)
        ]
        return digest_rows(rows.view(np.uint8).reshape(len(places), length), elements)

    def as_row_digest(self) -> RowDigest:
        """The method as the callable that `protocol.verify` wants."""
        return self.digest
