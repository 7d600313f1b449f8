"""Addresses as people write them: one parser for YAML, the command line, the router and logs.

Accepted: `host`, `host:port`, `127.0.0.1:80`, `::1`, `[::1]`, `[::1]:80`, `2001:db8::1`, `fe80::1%eth0`,
`[fe80::1%eth0]:80`. What is written back is always read again as the same address.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from sglang_pd.protocol.errors import ConfigError

MAX_ADDRESS = 300
"""Longest address text, in characters: a DNS name has at most 253."""

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}\.?)*")
_ZONE = re.compile(r"[A-Za-z0-9_.@:-]{1,32}")
_FORMS = "host | host:port | ipv6 | [ipv6]:port, a zone as in fe80::1%eth0"


@dataclass(frozen=True, slots=True)
class Address:
    """A host, without brackets, and a port, or None where none was given."""

    host: str
    port: int | None = None

    @property
    def is_ipv6(self) -> bool:
        """True for a literal IPv6 host (a name may still resolve to one)."""
        return ":" in self.host

    def __str__(self) -> str:
        """The text that parses back: `host`, `host:port`, `::1`, `[::1]:port`."""
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    def url(self, scheme: str = "http") -> str:
        """A URL without a path. A zone's `%` is written `%25`, as RFC 6874 wants."""
        host = self.host.replace("%", "%25", 1)
        host = f"[{host}]" if self.is_ipv6 else host
        return f"{scheme}://{host}" + ("" if self.port is None else f":{self.port}")

    def zmq(self) -> str:
        """A ZeroMQ TCP endpoint; the socket needs its IPV6 option for IPv6 literals and for most names."""
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"tcp://{host}:{0 if self.port is None else self.port}"

    def with_port(self, port: int) -> Address:
        """The same host with `port`, unless it has one already."""
        return self if self.port is not None else Address(self.host, port)


def parse_address(text: str, *, where: str) -> Address:
    """Read an address. Raises `ConfigError` naming `where` for anything that is none of the accepted forms."""
    host, port_text = _split(text.strip(), where)
    bare, percent, zone = host.partition("%")
    if ":" in host or percent:
        try:
            parsed = ipaddress.IPv6Address(bare)
        except ValueError:
            raise _refused(where, text, "not an IPv6 address") from None
        if percent and not _ZONE.fullmatch(zone):
            raise _refused(where, text, "not a zone (the name or number of an interface)")
        host = f"{parsed.compressed}%{zone}" if percent else parsed.compressed
    elif re.fullmatch(r"[0-9.]+", host):
        try:
            host = str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _refused(where, text, "not an IPv4 address") from None
    elif not _NAME.fullmatch(host):
        raise _refused(where, text, "not a host name")
    return Address(host, None if port_text is None else parse_port(port_text, where=where))


def parse_port(text: str, *, where: str) -> int:
    """A TCP port from 0 (let the system choose) to 65535. Raises `ConfigError`."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65_535:
        raise ConfigError("not a port", where=where, expected="0 to 65535", actual=repr(text[:40]))
    return int(text)


def parse_host(text: str, *, where: str) -> str:
    """A host alone, in any of the forms. Raises `ConfigError` when a port came with it."""
    address = parse_address(text, where=where)
    if address.port is not None:
        raise ConfigError(
            "a host, without a port",
            where=where,
            expected=address.host,
            actual=text,
            hint="Ports have keys of their own: network.bootstrap_port, network.http_port.",
        )
    return address.host


def parse_url(text: str, *, where: str) -> Address:
    """The address of `http://HOST[:PORT]` (or of a bare address). Port 80 where none is given.

    Raises `ConfigError` for another scheme, a path, a query or credentials.
    """
    if "://" not in text:
        return parse_address(text, where=where)
    scheme, _, rest = text.partition("://")
    authority = rest.removesuffix("/")
    if scheme.lower() != "http" or any(c in authority for c in "/?#@"):
        raise ConfigError(
            "not the URL of a worker", where=where, expected="http://HOST:PORT", actual=text[:MAX_ADDRESS]
        )
    return parse_address(re.sub("%25", "%", authority, count=1), where=where).with_port(80)


def is_wildcard(host: str) -> bool:
    """True for an address that means every interface."""
    return host in ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """True where only this host can connect. A name counts only if it is `localhost`: others may change their mind."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        name = host.rstrip(".").lower()
        return name in ("localhost", "ip6-localhost") or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _split(text: str, where: str) -> tuple[str, str | None]:
    if not text or len(text) > MAX_ADDRESS:
        raise _refused(where, text, "empty or too long")
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")) or ":" not in host:
            raise _refused(where, text, "unbalanced or misplaced brackets")
        return host, rest[1:] if rest else None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, None


def _refused(where: str, text: str, why: str) -> ConfigError:
    return ConfigError(f"not an address: {why}", where=where, expected=_FORMS, actual=repr(text[:80]))
