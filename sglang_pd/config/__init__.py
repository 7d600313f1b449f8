"""Configuration of workers and routers: one schema, every error with its path."""

from sglang_pd.config.address import Address, parse_address, parse_url
from sglang_pd.config.checks import cautions, check_binding, topology_of
from sglang_pd.config.keys import CurveKeys, load_keys
from sglang_pd.config.load import dump, load_router, load_worker, read_options
from sglang_pd.config.network import BackendSettings, apply_environment, backend_settings, missing_environment
from sglang_pd.config.nics import require_nics
from sglang_pd.config.schema import RouterConfig, WorkerConfig

__all__ = [
    "Address",
    "BackendSettings",
    "CurveKeys",
    "RouterConfig",
    "WorkerConfig",
    "apply_environment",
    "backend_settings",
    "cautions",
    "check_binding",
    "dump",
    "load_keys",
    "load_router",
    "load_worker",
    "missing_environment",
    "parse_address",
    "parse_url",
    "read_options",
    "require_nics",
    "topology_of",
]
