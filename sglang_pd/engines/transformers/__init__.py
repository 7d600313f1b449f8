"""Hugging Face hybrid models as an engine: their caches are copied into pools, and rebuilt from pools alone."""

from sglang_pd.engines.transformers.describe import describe_options
from sglang_pd.engines.transformers.engine import TransformersEngine
from sglang_pd.engines.transformers.options import Options, RandomModel
from sglang_pd.engines.transformers.whole import run_whole

__all__ = ["Options", "RandomModel", "TransformersEngine", "describe_options", "run_whole"]
