"""Host memory that the library backends allocate."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pd.backends.library.segments import allocate_host
from sglang_pd.protocol.errors import BackendError


def test_pools_lie_anywhere_and_are_given_back() -> None:
    """Within the system's own choice a large pool of a process started again overlaps the one before."""
    many = [allocate_host("nixl", 1 << 20) for _ in range(16)]
    starts = sorted(segment.address for segment in many)
    assert starts[-1] - starts[0] > 1 << 42 and all(start % (2 << 20) == 0 for start in starts)
    for segment in many:
        view: Any = segment.keep_alive
        assert not view.any() and view.ctypes.data == segment.address
        view[:] = 7
    del many, segment, view
    with open("/proc/self/maps") as maps:
        mapped = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in maps]
    assert not any(low <= start < high for start in starts for low, high in mapped)
    with pytest.raises(BackendError, match="refuses the memory"):
        allocate_host("nixl", (1 << 47) - 4096)
