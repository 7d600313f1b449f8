"""Where workers are: a list, or names whose addresses come and go. Anything else that can list targets fits too."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from sglang_pd.config import Address, RouterConfig, parse_address, parse_url
from sglang_pd.observe import RateLimited
from sglang_pd.protocol.errors import ConfigError

log = logging.getLogger("sglang_pd.router")

MAX_TARGETS: Final = 4096
"""Most workers of one role; further addresses are left out, with a warning."""

DNS_S: Final = 5.0
"""Seconds for one look-up of a name."""


@dataclass(frozen=True, slots=True)
class Target:
    """A worker to talk to. bootstrap_host, bootstrap_port: a prefill's control, as decode reaches it (port 0: the
    worker is asked)."""

    role: Literal["prefill", "decode"]
    address: Address
    bootstrap_host: str = ""
    bootstrap_port: int = 0

    @property
    def url(self) -> str:
        """The base URL as people write it; it names the worker."""
        return self.address.url()


class Resolver(Protocol):
    """Lists the workers that there are now."""

    async def resolve(self) -> Sequence[Target]:
        """All targets of both roles. A name that cannot be looked up keeps what it had; this never raises for it."""
        ...


class StaticResolver:
    """The workers of the configuration, as they stand there."""

    def __init__(self, config: RouterConfig) -> None:
        self._targets = _configured(config)

    async def resolve(self) -> Sequence[Target]:
        """The list."""
        return self._targets


class DnsResolver:
    """Each host name of the configuration stands for all its addresses, each of them a worker.

    Raises `ConfigError` at once for a `bootstrap_host`: one host cannot be that of every address.
    """

    def __init__(self, config: RouterConfig) -> None:
        for number, prefill in enumerate(config.prefill_workers):
            if prefill.bootstrap_host:
                raise ConfigError(
                    "one bootstrap host for all addresses of a name",
                    where=f"$.prefill[{number}].bootstrap_host",
                    expected="none with resolve: dns, where each worker's own address is used",
                    actual=prefill.bootstrap_host,
                )
        self._names = _configured(config)
        self._known: dict[Target, tuple[Target, ...]] = {}
        self._say = RateLimited(log)

    async def resolve(self) -> Sequence[Target]:
        """The addresses of all names; of a name that cannot be looked up, those it had."""
        found = await asyncio.gather(*(self._addresses(name) for name in self._names))
        return list(dict.fromkeys(target for targets in found for target in targets))

    async def _addresses(self, name: Target) -> tuple[Target, ...]:
        host, port = name.address.host, name.address.port or 80
        try:
            look_up = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            infos = await asyncio.wait_for(look_up, DNS_S)
        except (OSError, UnicodeError, asyncio.TimeoutError) as error:
            self._say.warning(host, "cannot look up %s: %s; its workers stay as they were", host, error or "timeout")
            return self._known.get(name, ())
        hosts = sorted({str(info[4][0]) for info in infos})
        if len(hosts) > MAX_TARGETS:
            self._say.warning(host, "%s has %d addresses; %d are used", host, len(hosts), MAX_TARGETS)
        targets = tuple(_at(name, text) for text in hosts[:MAX_TARGETS])
        self._known[name] = targets
        return targets


def _at(name: Target, host: str) -> Target:
    address = parse_address(host, where=name.address.host).with_port(name.address.port or 80)
    return Target(name.role, address, address.host if name.role == "prefill" else "", name.bootstrap_port)


def _configured(config: RouterConfig) -> list[Target]:
    targets = []
    for number, prefill in enumerate(config.prefill_workers):
        address = parse_url(prefill.url, where=f"$.prefill[{number}].url")
        address = address if address.port is not None else address.with_port(80)
        host = prefill.bootstrap_host or address.host
        host = parse_address(host, where=f"$.prefill[{number}].bootstrap_host").host
        targets.append(Target("prefill", address, host, prefill.bootstrap_port))
    for number, decode in enumerate(config.decode_workers):
        address = parse_url(decode.url, where=f"$.decode[{number}].url")
        targets.append(Target("decode", address if address.port is not None else address.with_port(80)))
    return targets


def resolver_of(config: RouterConfig) -> Resolver:
    """The resolver that the configuration asks for."""
    return DnsResolver(config) if config.resolve == "dns" else StaticResolver(config)
