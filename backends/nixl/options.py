"""Options of the `nixl` backend, and the `UCX_*` settings in force: checked once, before the library is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from sglang_pd.backends.library.options import PATH, expect, expect_ranges, read_options, settings_in_force, unknown
from sglang_pd.protocol.errors import ConfigError

PLUGINS = ("UCX", "LIBFABRIC")
"""Plugins of nixl that move memory to another process; its other plugins are storage."""

UCX_PARAMS = (
    "num_workers",
    "ucx_devices",
    "device_list",
    "split_batch_size",
    "engine_config",
    "ucx_ep_close_force",
    "ucx_num_device_channels",
    "ucx_error_handling_mode",
)
"""Parameters that the UCX plugin reads (some of them it does not advertise)."""

_OFF = ("n", "no", "0", "off")
_RDMA = ("ib", "rc", "ud", "dc", "gga", "srd", "mm_rdma")
# Settings that change how much UCX prints, not where bytes go.
_QUIET = ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO", "UCX_HANDLE_ERRORS")


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """What may stand under `$.backend.options`.

    plugin: `UCX` or `LIBFABRIC`.
    plugin_params: parameters of the plugin, name -> value. `ucx_error_handling_mode` may only be `peer`.
    num_threads: worker threads of the UCX plugin (0: this backend's one thread copies); they take lists of 1,024
        descriptors and more.
    progress_thread: let the library spin a thread of its own (a whole core, idle or not).
    max_descriptors_per_post, max_bytes_per_post: the largest piece handed to the library in one call; between pieces
        this backend's thread serves other peers and deadlines.
    max_deadline_s: longest deadline in seconds that a write gets, whatever it asks for; None: as asked.
    device_memory: let device memory be registered where there is a device. There is no proof of revocation for it, so
        false keeps that proof on a machine with a GPU.
    allow_tcp_for_device: let device memory travel over TCP, or over a transport that could not be found out.
    allow_untested_version: run with a nixl other than 1.5.
    probe_timeout_s: longest time in seconds for the child process that finds the transport in use.
    """

    plugin: str = "UCX"
    plugin_params: Mapping[str, str] = field(default_factory=dict)
    num_threads: int = 0
    progress_thread: bool = False
    max_descriptors_per_post: int = 4096
    max_bytes_per_post: int = 64 << 20
    max_deadline_s: float | None = None
    device_memory: bool = True
    allow_tcp_for_device: bool = False
    allow_untested_version: bool = False
    probe_timeout_s: float = 30.0

    def backend_params(self) -> dict[str, str]:
        """The parameters for the library's `create_backend`, peer error mode included."""
        params = dict(self.plugin_params)
        if self.plugin == "UCX":
            params["ucx_error_handling_mode"] = "peer"
        if self.num_threads:
            params["num_threads"] = str(self.num_threads)
        return params


_RANGES: dict[str, tuple[float, float]] = {
    "num_threads": (0, 256),
    "max_descriptors_per_post": (1, 1 << 20),
    "max_bytes_per_post": (4096, 1 << 40),
    "probe_timeout_s": (0.001, 1e9),
}


def parse_options(options: Mapping[str, Any]) -> NixlOptions:
    """Check every option. Raises `ConfigError` naming the path and what is valid there."""
    values = dict(options)
    plugin = _plugin(values.get("plugin", "UCX"))
    if "plugin_params" in values:
        values["plugin_params"] = _params(plugin, values["plugin_params"])
    parsed = read_options(NixlOptions, values)
    expect_ranges(parsed, _RANGES)
    if parsed.max_deadline_s is not None:
        expect(0 < parsed.max_deadline_s < 1e9, "max_deadline_s", "seconds above 0, or null", parsed.max_deadline_s)
    return parsed


def _plugin(value: object) -> str:
    if value not in PLUGINS:
        raise ConfigError(
            "no such plugin, or one that does not reach another process's memory",
            where=f"{PATH}.plugin",
            expected=" | ".join(PLUGINS),
            actual=repr(value),
        )
    return str(value)


def _params(plugin: str, value: object) -> dict[str, str]:
    where = f"{PATH}.plugin_params"
    if not isinstance(value, Mapping):
        raise ConfigError("plugin parameters are a mapping", where=where, expected="name: value", actual=repr(value))
    params: dict[str, str] = {}
    for name, given in value.items():
        if name == "num_threads":
            raise ConfigError(
                "set threads above the plugin", where=f"{where}.num_threads", expected=f"{PATH}.num_threads"
            )
        if plugin == "UCX" and name not in UCX_PARAMS:
            raise unknown(f"{where}.{name}", name, UCX_PARAMS)
        if not isinstance(given, (str, int, float, bool)):
            raise ConfigError("not a scalar", where=f"{where}.{name}", expected="text or a number", actual=repr(given))
        params[str(name)] = str(given).lower() if isinstance(given, bool) else str(given)
    mode = params.get("ucx_error_handling_mode", "peer")
    if mode != "peer":
        raise ConfigError(
            "without peer error handling a dead peer is never noticed and its transfers never end",
            where=f"{where}.ucx_error_handling_mode",
            expected="peer",
            actual=mode,
        )
    return params


def ucx_settings() -> dict[str, str]:
    """The `UCX_*` and `NIXL_*` environment settings in force."""
    return settings_in_force("UCX_", "NIXL_")


def settings_digest(options: NixlOptions, settings: Mapping[str, str]) -> int:
    """xxh3-64 of everything that decides which transport UCX picks; equal on two peers: they pick alike."""
    deciding = {k: v for k, v in settings.items() if k.startswith("UCX_") and k not in _QUIET}
    text = repr((options.plugin, sorted(options.backend_params().items()), sorted(deciding.items())))
    return xxhash.xxh3_64_intdigest(text.encode())


def rdma_devices() -> tuple[str, ...]:
    """Names of the RDMA devices of this machine."""
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(p.name for p in folder.iterdir())) if folder.is_dir() else ()


def may_use_rdma(options: NixlOptions, settings: Mapping[str, str], devices: tuple[str, ...]) -> bool:
    """Whether UCX could move bytes through an RDMA device here."""
    names, negated = _transports(_tls(options, settings))
    named = any(_is_rdma(n) for n in names)
    return bool(devices) and (not names or "all" in names or (not named if negated else named))


def check_environment(options: NixlOptions, settings: Mapping[str, str], devices: tuple[str, ...]) -> None:
    """Refuse settings with which UCX cannot work in peer error mode, or whose effect cannot be seen.

    Raises `ConfigError` naming the variable and why.
    """
    if options.plugin != "UCX":
        return
    tls = _tls(options, settings)
    names, negated = _transports(tls)
    if names and "all" not in names:
        tcp = ("tcp" not in names) if negated else ("tcp" in names)
        if not tcp and not may_use_rdma(options, settings, devices):
            raise ConfigError(
                "without tcp or an RDMA device UCX has no transport that reports a dead peer, and cannot start",
                where="UCX_TLS in the environment",
                expected="unset, or a list with tcp (cma,tcp,self; cuda_ipc,cuda_copy,sm,tcp,self)",
                actual=tls,
                hint="Change it before the process starts; this library does not change the environment.",
            )
    waiting = _in_force(options, settings, "TCP_CONN_NB")
    if waiting.lower() not in ("", *_OFF):
        raise ConfigError(
            "writes would wait for a connection that nobody took yet, and land in a target that gave the memory back",
            where="UCX_TCP_CONN_NB in the environment",
            expected="unset or n",
            actual=waiting,
        )
    if settings.get("UCX_PROTO_ENABLE", "y").lower() in _OFF:
        raise ConfigError(
            "UCX's older protocols do not report the transport in use",
            where="UCX_PROTO_ENABLE in the environment",
            expected="unset or y",
            actual=settings["UCX_PROTO_ENABLE"],
        )


def _tls(options: NixlOptions, settings: Mapping[str, str]) -> str:
    """The transport list in force."""
    return _in_force(options, settings, "TLS")


def _in_force(options: NixlOptions, settings: Mapping[str, str], wanted: str) -> str:
    """The value of a setting of UCX: the plugin's `engine_config` wins over the environment."""
    found = settings.get(f"UCX_{wanted}", "")
    for setting in options.plugin_params.get("engine_config", "").replace(";", ",").split(","):
        name, _, value = setting.partition("=")
        if name.strip().removeprefix("UCX_") == wanted:
            found = value.strip()
    return found


def _transports(tls: str) -> tuple[set[str], bool]:
    negated = tls.startswith("^")
    names = {name.strip().lstrip("\\").split(":")[0] for name in tls.lstrip("^").split(",")}
    return names - {""}, negated


def _is_rdma(name: str) -> bool:
    return any(name == known or name.startswith((known + "_", known + "v", known + "x")) for known in _RDMA)
