"""What each backend makes of `network` and `security`: options, and environment that its library reads.

The library never changes the environment of somebody's process: whoever owns the process calls `apply_environment`
before the transport's library is imported (our command line does), or finds out with `missing_environment` what to set.
A key that the chosen backend cannot honour is an error, never ignored.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from sglang_pd.backends.registry import check_known
from sglang_pd.config.address import is_loopback
from sglang_pd.config.schema import WorkerConfig
from sglang_pd.protocol.errors import ConfigError

FABRIC_KEYS = ("ports", "devices", "gid_index", "traffic_class", "mtu")
"""Keys of `network` that speak of the data plane alone."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """A backend as it is to be created.

    options: for `create_backend`. environment: what keys of `network` became; must be in force before the library is
    imported. defaults: what the backend needs or had better have; set where the variable is unset, and the backend
    itself judges what it finds.
    """

    name: str
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)


class Honours(NamedTuple):
    """How one backend takes the keys of the data plane: as options, or as environment variables, by key."""

    options: Mapping[str, str] = {}
    environment: Mapping[str, tuple[str, ...]] = {}
    hints: Mapping[str, str] = {}


HONOURS: dict[str, Honours] = {
    "local": Honours(),
    # Each shows up in the configuration of nixl 1.5.1's UCX; those with IB_ reach all of its RDMA transports.
    "nixl": Honours(
        environment={
            "ports": ("UCX_TCP_PORT_RANGE",),
            "devices": ("UCX_NET_DEVICES",),
            "gid_index": ("UCX_IB_GID_INDEX",),
            "traffic_class": ("UCX_IB_TRAFFIC_CLASS",),
            "mtu": ("UCX_IB_PATH_MTU",),
        },
    ),
    "mooncake": Honours(options={key: key for key in FABRIC_KEYS}),
    "mori": Honours(
        environment={
            "devices": ("MORI_RDMA_DEVICES",),
            "gid_index": ("MORI_IB_GID_INDEX",),
            "traffic_class": ("MORI_RDMA_TC", "MORI_IO_TC"),
        },
        hints={"ports": "Set backend.options.port: the library listens on one."},
    ),
}
"""Backend -> how it takes each key. A backend that is not listed (a third party's) takes none of them."""


def backend_settings(config: WorkerConfig) -> BackendSettings:
    """Translate a configuration for its backend. Raises `ConfigError` for a key that the backend cannot honour, for an
    option it does not have, and for one that is stated twice."""
    name = config.backend.name
    check_known(name)
    options = dict(config.backend.options)
    honours = HONOURS.get(name, Honours())
    environment: dict[str, str] = {}
    added: dict[str, str] = {}
    for key in FABRIC_KEYS:
        value = _stated(config, key)
        if value is None:
            continue
        if key in honours.options:
            added[honours.options[key]] = key
            _add(options, honours.options[key], list(value) if isinstance(value, tuple) else value, key)
        elif key in honours.environment:
            environment.update(dict.fromkeys(honours.environment[key], _text(value, key)))
        else:
            raise ConfigError(
                f"the backend {name!r} cannot honour this key",
                where=f"$.network.{key}",
                expected="unset",
                actual=value,
                hint=honours.hints.get(key, ""),
            )
    if name in _ADDRESSES:
        for option, (key, value) in _ADDRESSES[name](config).items():
            added[option] = key
            _add(options, option, value, key)
    defaults = _checked(name, options, added)
    if name == "nixl" and is_loopback(config.bind.host) and "UCX_NET_DEVICES" not in environment:
        defaults["UCX_NET_DEVICES"] = "lo"  # else UCX listens on every interface, whatever `bind` says
    return BackendSettings(name, options, environment, defaults)


def missing_environment(settings: BackendSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are unset or different, with the value that they must have."""
    return {name: value for name, value in settings.environment.items() if environ.get(name) != value}


def apply_environment(settings: BackendSettings, environ: MutableMapping[str, str]) -> None:
    """Set what the backend's library will read. For the owner of the process, before anything imports that library.

    Raises `ConfigError` when a variable is set already to something else: nobody's choice is overridden.
    """
    for name, value in settings.environment.items():
        if environ.get(name, value) != value:
            raise ConfigError(
                "the environment contradicts the configuration",
                where=f"{name} in the environment",
                expected=value,
                actual=environ[name],
                hint="Unset it, or take the key out of the configuration.",
            )
    environ.update(settings.environment)
    for name, value in settings.defaults.items():
        environ.setdefault(name, value)


# Addresses, for backends whose libraries are told where to listen: option -> (key it comes from, value)


def _mooncake_addresses(config: WorkerConfig) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {"bind": ("network.bind", _numeric(config.bind.host))}
    if config.network.advertise:
        found["advertise"] = ("network.advertise", config.advertised_host)
    if config.security.insecure_data_plane:
        found["insecure_data_plane"] = ("security.insecure_data_plane", True)
    return found


def _mori_addresses(config: WorkerConfig) -> dict[str, tuple[str, Any]]:
    if config.advertised_host != config.bind.host:
        raise ConfigError(
            "the backend 'mori' listens on the address that it advertises",
            where="$.network.advertise",
            expected=config.bind.host,
            actual=config.advertised_host,
        )
    found: dict[str, tuple[str, Any]] = {"host": ("network.bind", _numeric(config.bind.host))}
    if config.security.insecure_data_plane:
        found["insecure_data_plane"] = ("security.insecure_data_plane", True)
    return found


_ADDRESSES: dict[str, Callable[[WorkerConfig], dict[str, tuple[str, Any]]]] = {
    "mooncake": _mooncake_addresses,
    "mori": _mori_addresses,
}


def _numeric(host: str) -> str:
    """`localhost` as a number, for libraries that take no names; anything else as it is."""
    return "127.0.0.1" if host == "localhost" else host


def _stated(config: WorkerConfig, key: str) -> Any:
    value = config.network.port_range if key == "ports" else getattr(config.network, key)
    return None if value in ((), "") else value


def _text(value: Any, key: str) -> str:
    if key == "ports":
        return f"{value[0]}-{value[1]}"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _add(options: dict[str, Any], option: str, value: Any, key: str) -> None:
    key = key if "." in key else f"network.{key}"
    if option in options and options[option] != value:
        raise ConfigError(
            "stated twice",
            where=f"$.backend.options.{option}",
            expected=f"unset, or as {key} = {value}",
            actual=options[option],
        )
    options[option] = value


# Options are checked when the configuration is read, by the backend's own rules, without its library


def _checked(name: str, options: Mapping[str, Any], added: Mapping[str, str]) -> dict[str, str]:
    """Check the options; returns the environment that they need. `added` maps options to the keys they came from."""
    if name not in HONOURS:
        return {}
    try:
        if name == "local":
            return _check_local(options)
        module = importlib.import_module(f"sglang_pd.backends.{name}.options")
        parsed = module.parse_options(options)
        return dict(module.environment(parsed)) if hasattr(module, "environment") else {}
    except ConfigError as error:
        option = error.where.rpartition(".")[2]
        key = added.get(option, "")
        if not error.where.startswith("$.backend.options.") or not key:
            raise
        raise ConfigError(
            f"the backend {name!r} cannot honour this key: {error.message}",
            code=error.code,
            where=f"$.{key if '.' in key else 'network.' + key}",
            expected=error.expected,
            actual=error.actual,
            hint=error.hint,
        ) from None
    except msgspec.ValidationError as error:
        raise ConfigError("an option has the wrong type", where="$.backend.options", actual=str(error)) from None


def _check_local(options: Mapping[str, Any]) -> dict[str, str]:
    schema = importlib.import_module("sglang_pd.backends.local.backend").LocalOptions
    for option in options:
        if option not in schema.__struct_fields__:
            close = difflib.get_close_matches(option, schema.__struct_fields__, n=1)
            raise ConfigError(
                "no such option",
                where=f"$.backend.options.{option}",
                expected=" | ".join(schema.__struct_fields__),
                actual=option,
                hint=f"Did you mean {close[0]!r}?" if close else "",
            )
    msgspec.convert(dict(options), schema)
    return {}
