"""Digests of rows through torch are those of the host's code, wherever the rows lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_pd.backends.registry import create_backend
from sglang_pd.memory.views import segment_tensor
from sglang_pd.protocol.digest import digest_rows
from sglang_pd.worker.ranks.device_digest import ROWS_AT_ONCE, digest_device_rows

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, cuda])])
@pytest.mark.parametrize("count", [0, 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 9000])
def test_rows_anywhere_in_any_order(count: int, device: str) -> None:
    rng = np.random.default_rng(count)
    with create_backend("local", epoch=5) as backend:
        segment = backend.allocate(1 << 20, device)
        memory = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
        segment_tensor(segment).copy_(torch.from_numpy(memory))
        offsets = rng.permutation(9000)[:count] * 100
        elements = rng.permutation(9000)[:count].astype(np.int64)
        rows = np.array([memory[offset : offset + 77] for offset in offsets], dtype=np.uint8).reshape(count, 77)
        assert digest_device_rows(segment, offsets.astype(np.uint64), 77, elements) == digest_rows(rows, elements)
