"""The router: one request to a prefill and a decode worker, decode's answer to the client.

    from sglang_pd.router import Router

An application to serve or mount (`Router(config).app`) and an async client (`async with Router(config) as router`).
"""

from sglang_pd.router.failures import Failure, RequestFailed
from sglang_pd.router.resolver import DnsResolver, Resolver, StaticResolver, Target
from sglang_pd.router.router import Router

__all__ = ["DnsResolver", "Failure", "RequestFailed", "Resolver", "Router", "StaticResolver", "Target"]
