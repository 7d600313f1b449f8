"""Digests of rows in device memory: gathered on the device, summed on the host by the same code as host rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import Segment
from sglang_pd.memory.views import segment_tensor
from sglang_pd.protocol.batch import U64
from sglang_pd.protocol.digest import digest_rows

ROWS_AT_ONCE = 4096
"""Bounds the copy: this many rows are on the host at a time."""


def digest_device_rows(segment: Segment, offsets: U64, length: int, elements: NDArray[np.int64]) -> int:
    """`digest_rows` of the rows at `offsets` (bytes, [n]) of `length` bytes. elements: int64 [n], their numbers."""
    import torch

    raw = segment_tensor(segment)
    within = torch.arange(length, device=raw.device)
    total = 0
    for start in range(0, len(offsets), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        places = torch.from_numpy(offsets[part].astype(np.int64)).to(raw.device)
        rows = raw[places[:, None] + within].cpu().numpy()
        total = (total + digest_rows(rows, elements[part])) % 2**64
    return total
