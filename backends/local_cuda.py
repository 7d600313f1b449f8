"""CUDA part of the local backend (under construction)."""

from __future__ import annotations
from typing import Any
from sglang_pd.protocol.errors import BackendUnavailable


class CudaSide:
    def __init__(self, *a: Any) -> None:
        raise BackendUnavailable("no CUDA device", where="cuda")
