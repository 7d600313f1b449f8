"""The reference engine: a tiny hybrid model in exact fixed-point arithmetic, to judge hand-overs bit for bit.

The engine itself is imported on first use: its configuration and its state can be looked at without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.links import Links

if TYPE_CHECKING:
    from sglang_pd.engines.reference.engine import ReferenceEngine

__all__ = ["Links", "ReferenceConfig", "ReferenceEngine"]


def __getattr__(name: str) -> Any:
    if name == "ReferenceEngine":
        from sglang_pd.engines.reference.engine import ReferenceEngine

        return ReferenceEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
