"""The reference engine: a tiny hybrid model in exact fixed-point arithmetic, to judge hand-overs bit for bit."""

from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.engine import ReferenceEngine
from sglang_pd.engines.reference.links import Links

__all__ = ["Links", "ReferenceConfig", "ReferenceEngine"]
