"""What each transport of each backend can do, and where it was run.

One entry a transport, because what is known about a backend over one transport says nothing about another. Where it was
last run comes from the backend itself; a test holds the rest against the backends that can be created here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sglang_pd.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Support:
    """One transport of a backend. device_memory: where the hardware and libraries are there. proof: what `revoke` can
    show after a writer's death, over this transport, for host memory."""

    backend: str
    transport: str
    options: Mapping[str, Any]
    host_memory: bool
    device_memory: bool
    same_host_only: bool
    adopts: str
    proof: str
    last_run: str


@dataclass(frozen=True, slots=True)
class _Fact:
    transport: str
    options: Mapping[str, Any]
    host_memory: bool = True
    device_memory: bool = True
    same_host_only: bool = False
    adopts: str = "host, device"
    proof: str = "none"


_FACTS: Final[dict[str, tuple[_Fact, ...]]] = {
    "local": (
        _Fact("memfd", {}, device_memory=False, same_host_only=True, adopts="-", proof="pidfd"),
        _Fact("cuda_ipc", {}, host_memory=False, same_host_only=True, adopts="device", proof="pidfd"),
    ),
    "nixl": (
        _Fact("cma", {"plugin": "UCX"}, device_memory=False, same_host_only=True, adopts="host", proof="engine_closed"),
        _Fact("tcp", {"plugin": "UCX"}, device_memory=False, adopts="host", proof="engine_closed"),
        _Fact("cuda_ipc", {"plugin": "UCX"}, host_memory=False, same_host_only=True, adopts="device"),
        _Fact("rdma", {"plugin": "UCX"}),
        _Fact("libfabric", {"plugin": "LIBFABRIC"}),
    ),
    "mooncake": (
        _Fact("tcp", {"transport": "tcp"}, device_memory=False, adopts="host", proof="engine_closed"),
        _Fact("rdma", {"transport": "rdma"}),
        _Fact("nvlink_intra", {"transport": "nvlink_intra"}, host_memory=False, same_host_only=True, adopts="device"),
    ),
    "mori": (_Fact("rdma", {"transport": "rdma"}),),
}


def support(only: str = "") -> tuple[Support, ...]:
    """Every transport of every backend, or of one, in the order of the matrix. Imports the backends it tells of."""
    return tuple(
        Support(
            backend,
            fact.transport,
            fact.options,
            fact.host_memory,
            fact.device_memory,
            fact.same_host_only,
            fact.adopts,
            fact.proof,
            verified_on(backend).get(fact.transport, "not yet run"),
        )
        for backend, facts in _FACTS.items()
        if backend == only or not only
        for fact in facts
    )


def verified_on(backend: str) -> Mapping[str, str]:
    """Transport -> the hardware that the backend was last run on over it, as the backend says."""
    module = importlib.import_module(f"sglang_pd.backends.{backend}.backend")
    found: Mapping[str, str] | None = getattr(module, "VERIFIED_ON", None)
    if found is None:
        with module.create(epoch=0, options={}) as made:
            found = made.capabilities.verified_on
    return found


def transports_of(backend: str, options: Mapping[str, Any]) -> Support:
    """What a backend with these options may do over any of its transports. Raises `ConfigError` for one not known."""
    chosen = [s for s in support(backend) if s.backend == backend and _selected(s, options)]
    if not chosen:
        raise ConfigError("nothing is known of that backend", where="$.backend.name", actual=backend)
    return Support(
        backend,
        " or ".join(s.transport for s in chosen),
        options,
        any(s.host_memory for s in chosen),
        any(s.device_memory for s in chosen),
        all(s.same_host_only for s in chosen),
        chosen[0].adopts,
        chosen[0].proof,
        chosen[0].last_run,
    )


def _selected(entry: Support, options: Mapping[str, Any]) -> bool:
    first = next(s for s in _FACTS[entry.backend])
    return all(options.get(key, first.options.get(key)) == value for key, value in entry.options.items())
