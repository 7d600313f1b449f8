"""Options of the `mooncake` backend and the `MC_*` environment they need: parsed, derived and checked, never changed.

Mooncake chooses its transport from environment variables, many of which it reads once, when it is imported or when an
engine starts; the protocol argument of its own `initialize` chooses nothing. So `environment` says what must be set,
our command line sets it before the import, and `check_environment` refuses a process in which it is missing or in
which something contradicts it. Most of these variables count by being set at all: `MC_FORCE_HCA=0` still forces.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_pd.backends.library.options import expect, expect_ranges, read_options, settings_in_force
from sglang_pd.protocol.errors import ConfigError

TRANSPORTS = ("tcp", "rdma", "nvlink_intra")
LOG_LEVELS = ("INFO", "WARNING", "ERROR")

QUEUE_LIMIT = 65_535
"""Descriptors one peer's queue is raised to, the most there is: overrunning the default of 1,024 breaks the engine."""

TRANSFER_TIMEOUT_S = 3_600
"""Seconds before the library gives up on a batch. Deadlines are ours, and its giving up would hide the truth."""

MIN_TRANSFER_TIMEOUT_S = 60

_NEVER = {
    "MC_LOG_DIR": "the library aborts the process when it is imported with a log directory (0.3.13)",
    "MC_DISABLE_METACACHE": "it asks the peer anew for every descriptor, ten times slower",
    "MC_LEGACY_RPC_PORT_BINDING": "sessions are named by the port that the library picks",
    "MC_USE_TENT": "another engine with other promises, with which this backend has not been tried",
    "MC_USE_TEV1": "another engine with other promises, with which this backend has not been tried",
    "MC_FORCE_MNNVL": "it selects a transport that this backend does not offer",
    "MC_FORCE_SHM": "it selects a transport that this backend does not offer",
}
_SELECTS = {
    "tcp": ("MC_FORCE_TCP",),
    "rdma": ("MC_FORCE_HCA",),
    "nvlink_intra": ("MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK"),
}


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """What a configuration may say under `$.backend.options`.

    transport: `tcp`, `rdma` or `nvlink_intra`.
    bind: address the library's ports shall listen on; a version that listens on all interfaces instead is refused
        unless `insecure_data_plane`.
    advertise: address peers connect to; `bind` where empty.
    ports: lowest and highest port the library may pick, or () for its own range (15000 to 17000). An engine needs two.
    devices: RDMA devices to use (`mlx5_0`), () for all. Of `rdma` alone, like `gid_index`, `traffic_class` and `mtu`.
    insecure_data_plane: accept data ports without authentication on all interfaces.
    max_descriptors_per_peer, max_bytes_per_peer: most that is outstanding in the library for one peer at a time.
    max_queued_transfers: most transfers that may wait here; a further `write` is refused as `queue_full`.
    connect_timeout_s: longest `connect` waits for the peer's library, in seconds.
    log_level: of the library (`INFO`, `WARNING`, `ERROR`); it logs to standard error.
    """

    transport: str = "tcp"
    bind: str = "127.0.0.1"
    advertise: str = ""
    ports: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    gid_index: int | None = None
    traffic_class: int | None = None
    mtu: int | None = None
    insecure_data_plane: bool = False
    max_descriptors_per_peer: int = 4096
    max_bytes_per_peer: int = 64 << 20
    max_queued_transfers: int = 65_536
    connect_timeout_s: float = 10.0
    log_level: str = "WARNING"

    @property
    def host(self) -> str:
        """The address that peers are told."""
        return self.advertise or self.bind


_RANGES: dict[str, tuple[float, float]] = {
    "max_descriptors_per_peer": (1, QUEUE_LIMIT),
    "max_bytes_per_peer": (1 << 20, 1 << 62),
    "max_queued_transfers": (1, 1 << 62),
    "connect_timeout_s": (0.1, 600),
}


def parse_options(options: Mapping[str, Any]) -> MooncakeOptions:
    """Check a mapping as it comes from a configuration. Raises `ConfigError` naming the path of the bad value."""
    parsed = read_options(MooncakeOptions, options)
    _check_values(parsed)
    return parsed


def _check_values(options: MooncakeOptions) -> None:
    expect(options.transport in TRANSPORTS, "transport", " | ".join(TRANSPORTS), options.transport)
    for name in ("bind", "advertise"):
        address = getattr(options, name)
        expect(name == "advertise" and not address or _is_ipv4(address), name, "an IPv4 address", address)
    expect(options.host != "0.0.0.0", "advertise", "an address that peers can reach", options.host)
    span = options.ports
    in_range = len(span) in (0, 2) and all(1024 <= port <= 65_535 for port in span)
    expect(in_range and (not span or span[1] - span[0] >= 7), "ports", "[lowest, highest], at least 8 ports", span)
    expect_ranges(options, _RANGES)
    expect(options.log_level in LOG_LEVELS, "log_level", " | ".join(LOG_LEVELS), options.log_level)
    if options.transport != "rdma":
        for name in ("devices", "gid_index", "traffic_class", "mtu"):
            value = getattr(options, name)
            expect(value in ((), None), name, "unset: only transport rdma has it", value)


def _is_ipv4(text: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(text), ipaddress.IPv4Address)
    except ValueError:
        return False


def environment(options: Mapping[str, Any] | MooncakeOptions) -> dict[str, str]:
    """The variables that must be in the environment before Mooncake is imported, for these options. Changes nothing.

    Raises `ConfigError` for options that are not acceptable.
    """
    wanted = options if isinstance(options, MooncakeOptions) else parse_options(options)
    found = dict.fromkeys(_SELECTS[wanted.transport], "1")
    if wanted.transport == "tcp":
        found["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = str(QUEUE_LIMIT)
    if wanted.ports:
        found["MC_MIN_RPC_PORT"], found["MC_MAX_RPC_PORT"] = map(str, wanted.ports)
    for name, value in (("MC_GID_INDEX", wanted.gid_index), ("MC_IB_TC", wanted.traffic_class), ("MC_MTU", wanted.mtu)):
        if value is not None:
            found[name] = str(value)
    found["MC_TRANSFER_TIMEOUT"] = str(TRANSFER_TIMEOUT_S)
    found["MC_LOG_LEVEL"] = wanted.log_level
    return found


def check_environment(options: MooncakeOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The `MC_*` settings in force, after refusing what is missing or contradicts the options.

    Raises `ConfigError` naming the variable, with the line that sets all of them as the hint.
    """
    in_force = settings_in_force("MC_", environ=environ)
    wanted = environment(options)
    for name, why in _NEVER.items():
        if name in in_force:
            raise _conflict(name, "unset", in_force[name], why)
    for transport, names in _SELECTS.items():
        for name in names:
            if transport != options.transport and name in in_force:
                why = f"it selects {transport}, and the option says {options.transport}"
                raise _conflict(name, "unset", in_force[name], why)
    _check_tcp(in_force)
    for name, value in wanted.items():
        actual = in_force.get(name)
        if not _acceptable(name, value, actual, options):
            line = " ".join(f"{n}={v}" for n, v in wanted.items())
            raise ConfigError(
                "Mooncake needs an environment variable" if actual is None else "an environment variable is in the way",
                where=f"environment {name}",
                expected=value,
                actual="unset" if actual is None else actual,
                hint=f"Set before the process imports mooncake, as our command line does: {line}",
            )
    return in_force


def _acceptable(name: str, wanted: str, actual: str | None, options: MooncakeOptions) -> bool:
    if name == "MC_LOG_LEVEL":
        return True
    if actual is None:
        return False
    if name == "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER":
        return actual.isdigit() and options.max_descriptors_per_peer <= int(actual) <= QUEUE_LIMIT
    if name == "MC_TRANSFER_TIMEOUT":
        return actual.isdigit() and int(actual) >= MIN_TRANSFER_TIMEOUT_S
    if name in _SELECTS[options.transport]:
        return True
    return actual == wanted


def _check_tcp(in_force: Mapping[str, str]) -> None:
    if in_force.get("MC_TCP_PROTO") == "1":
        why = "its writes are not acknowledged, so DONE would not mean that the bytes are there"
        raise _conflict("MC_TCP_PROTO", "unset or 2", "1", why)
    pool = in_force.get("MC_TCP_ENABLE_CONNECTION_POOL", "1")
    if pool.lower() in ("0", "false", "no"):
        raise _conflict("MC_TCP_ENABLE_CONNECTION_POOL", "unset or 1", pool, "without the pool the library hangs")


def _conflict(name: str, expected: str, actual: str, why: str) -> ConfigError:
    where = f"environment {name}"
    return ConfigError(f"an environment variable is in the way: {why}", where=where, expected=expected, actual=actual)
