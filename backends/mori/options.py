"""Options of the `mori` backend, and the `MORI_*` settings in force: checked once, before the library is touched."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_pd.backends.library.options import PATH, expect, expect_ranges, read_options, settings_in_force
from sglang_pd.protocol.errors import ConfigError

POLL_MODES = ("polling", "event")
RESERVED_PORT = 1
"""Port that the library keeps as a mark for engines without RDMA."""
LONGEST_BLOCK_BYTES = (1 << 32) - 1
"""The library refuses a longer block."""

_NOT_OFFERED = {
    "tcp": "the library lists TCP but has no such backend: asking for it aborts the process",
    "xgmi": "XGMI moves GPU memory inside one host and was never tried here",
    "fabric": "FABRIC moves GPU memory inside one super-node and was never tried here",
}


@dataclass(frozen=True, slots=True)
class MoriOptions:
    """What may stand under `$.backend.options`.

    transport: `rdma`, the only one.
    host: address of this machine, given as numbers, on which the library listens for its (unauthenticated) control
        connections and which it tells to peers. port: 0 picks a free one.
    insecure_data_plane: allow a `host` that is not in a private range.
    qp_per_transfer, num_worker_threads: queue pairs and posting threads that the library spreads one call over.
    poll_cq_mode: `polling` or `event`; the library spins in both.
    max_blocks_per_call, max_bytes_per_call, max_block_bytes: largest piece handed to the library in one call.
    calls_in_flight: pieces posted to one peer and not finished.
    connect_timeout_s: longest time in seconds that `connect` waits for the first contact.
    heartbeat_s: an idle peer is written to (8 bytes, its door) after so many seconds; 0: never.
    heartbeat_timeout_s: a heartbeat that takes longer loses the peer.
    drain_s: seconds that unfinished calls get at `close`; after that the engine is kept for ever, on purpose.
    max_engines: most engines at a time; each keeps a core busy. More than one exist only after a queue pair broke.
    probe_timeout_s: longest time in seconds for the child process that tries the library out.
    allow_untested_version: run with an amd-mori other than 1.2.4.
    """

    transport: str = "rdma"
    host: str = "127.0.0.1"
    port: int = 0
    insecure_data_plane: bool = False
    qp_per_transfer: int = 1
    num_worker_threads: int = 1
    poll_cq_mode: str = "polling"
    max_blocks_per_call: int = 2048
    max_bytes_per_call: int = 256 << 20
    max_block_bytes: int = 1 << 30
    calls_in_flight: int = 4
    connect_timeout_s: float = 15.0
    heartbeat_s: float = 5.0
    heartbeat_timeout_s: float = 15.0
    drain_s: float = 5.0
    max_engines: int = 4
    probe_timeout_s: float = 60.0
    allow_untested_version: bool = False


_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "qp_per_transfer": (1, 64),
    "num_worker_threads": (1, 64),
    "max_blocks_per_call": (1, 1 << 16),
    "max_bytes_per_call": (4096, 1 << 40),
    "max_block_bytes": (4096, LONGEST_BLOCK_BYTES),
    "calls_in_flight": (1, 64),
    "max_engines": (1, 64),
    "connect_timeout_s": (0.01, 3600),
    "heartbeat_s": (0, 3600),
    "heartbeat_timeout_s": (0.01, 3600),
    "drain_s": (0, 3600),
    "probe_timeout_s": (0.1, 3600),
}


def parse_options(options: Mapping[str, Any]) -> MoriOptions:
    """Check every option. Raises `ConfigError` naming the path and what is valid there."""
    parsed = read_options(MoriOptions, options)
    expect_ranges(parsed, _RANGES)
    expect(parsed.port != RESERVED_PORT, "port", "another port than 1, which the library reserves", parsed.port)
    expect(parsed.poll_cq_mode in POLL_MODES, "poll_cq_mode", " | ".join(POLL_MODES), parsed.poll_cq_mode)
    _check_transport(parsed.transport)
    _check_host(parsed)
    return parsed


def _check_transport(transport: object) -> None:
    if transport != "rdma":
        why = _NOT_OFFERED.get(str(transport).lower(), "no such transport")
        raise ConfigError(why, where=f"{PATH}.transport", expected="rdma", actual=repr(transport))


def _check_host(options: MoriOptions) -> None:
    """A wildcard would be told to peers as our address; a name might resolve to another machine, which is fatal."""
    where = f"{PATH}.host"
    try:
        address = ipaddress.ip_address(options.host)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast:
        raise ConfigError(
            "not one address of this machine", where=where, expected="an IP address, no name", actual=repr(options.host)
        )
    if not address.is_private and not address.is_link_local and not options.insecure_data_plane:
        raise ConfigError(
            "the library's control port has no authentication and would listen on a public address",
            code="insecure_refused",
            where=where,
            expected="an address of a private range",
            actual=options.host,
            hint=f"Use the address of the cluster's own network, or set {PATH}.insecure_data_plane: true.",
        )


def mori_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The `MORI_*` environment settings in force."""
    return settings_in_force("MORI_", environ=environ)


def check_environment(options: MoriOptions, settings: Mapping[str, str]) -> None:
    """Refuse settings by which the library would silently override what is configured here. Raises `ConfigError`."""
    ours = {
        "MORI_IO_ENABLE_NOTIFICATION": ("0", "false", "off", "no"),
        "MORI_IO_QP_PER_TRANSFER": (str(options.qp_per_transfer),),
        "MORI_IO_NUM_WORKER_THREADS": (str(options.num_worker_threads),),
        "MORI_IO_POLL_CQ_MODE": (options.poll_cq_mode,),
    }
    for name, allowed in ours.items():
        if name in settings and settings[name].strip().lower() not in allowed:
            raise _conflict(name, settings[name], f"unset, or {allowed[0]}")
    if settings.get("MORI_DISABLE_AUTO_XGMI") == "0":
        raise _conflict("MORI_DISABLE_AUTO_XGMI", "0", "unset, or 1: with 0 the library adds another transport itself")


def _conflict(name: str, value: str, expected: str) -> ConfigError:
    return ConfigError(
        "a setting of the environment would override the configuration without a word",
        where=f"{name} in the environment",
        expected=expected,
        actual=value,
        hint="Change it before the process starts; this library does not change the environment.",
    )
