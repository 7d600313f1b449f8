"""Each backend takes the keys of `network` its own way, or refuses them by name; nothing is ignored or overridden."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pd.backends.registry import BACKENDS
from sglang_pd.config import apply_environment, backend_settings, load_worker, missing_environment
from sglang_pd.config.network import FABRIC_KEYS, HONOURS, BackendSettings
from sglang_pd.protocol.errors import ConfigError

VALUES: dict[str, Any] = {
    "ports": "15000-15999",
    "devices": ["mlx5_0:1", "mlx5_1:1"],
    "gid_index": 3,
    "traffic_class": 104,
    "mtu": 4096,
}
RDMA = {"mooncake": {"transport": "rdma"}}


def settings(backend: str, **keys: Any) -> BackendSettings:
    options = keys.pop("options", RDMA.get(backend, {}))
    security = keys.pop("security", {"insecure_data_plane": True})
    data = {"role": "prefill", "backend": {"name": backend, "options": options}, "network": keys, "security": security}
    return backend_settings(load_worker(data, environ={}))


@pytest.mark.parametrize("key", FABRIC_KEYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_is_honoured_or_refused(backend: str, key: str) -> None:
    honours = HONOURS[backend]
    if key in honours.options or key in honours.environment:
        with_key, without = settings(backend, **{key: VALUES[key]}), settings(backend)
        assert with_key != without
        return
    with pytest.raises(ConfigError) as caught:
        settings(backend, **{key: VALUES[key]})
    assert caught.value.where == f"$.network.{key}" and backend in caught.value.message


def test_nixl_environment() -> None:
    found = settings("nixl", **VALUES)
    assert found.environment == {
        "UCX_TCP_PORT_RANGE": "15000-15999",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "UCX_IB_GID_INDEX": "3",
        "UCX_IB_TRAFFIC_CLASS": "104",
        "UCX_IB_PATH_MTU": "4096",
    }
    assert found.defaults == {}


def test_on_loopback_nixl_stays_on_loopback() -> None:
    assert settings("nixl").defaults == {"UCX_NET_DEVICES": "lo"}
    beyond = settings("nixl", bind="10.0.0.1", security={"insecure": True})
    assert beyond.defaults == {}


def test_mooncake_gets_options_and_what_they_need() -> None:
    found = settings("mooncake", **VALUES)
    assert found.options == {
        "transport": "rdma",
        "bind": "127.0.0.1",
        "insecure_data_plane": True,
        "ports": [15000, 15999],
        "devices": ["mlx5_0:1", "mlx5_1:1"],
        "gid_index": 3,
        "traffic_class": 104,
        "mtu": 4096,
    }
    assert found.defaults["MC_MIN_RPC_PORT"] == "15000" and found.defaults["MC_FORCE_HCA"] == "1"


def test_what_a_backend_says_of_a_key_names_the_key() -> None:
    with pytest.raises(ConfigError) as caught:
        settings("mooncake", devices=["mlx5_0"], options={"transport": "tcp"})
    assert caught.value.where == "$.network.devices"
    with pytest.raises(ConfigError) as caught:
        settings("mooncake", bind="::1")
    assert caught.value.where == "$.network.bind"
    with pytest.raises(ConfigError) as caught:
        settings("mori", bind="127.0.0.1", advertise="10.0.0.1")
    assert caught.value.where == "$.network.advertise"


def test_nothing_is_stated_twice() -> None:
    with pytest.raises(ConfigError) as caught:
        settings("mooncake", gid_index=3, options={"transport": "rdma", "gid_index": 4})
    assert caught.value.where == "$.backend.options.gid_index" and "network.gid_index" in str(caught.value.expected)
    assert settings("mooncake", gid_index=3, options={"transport": "rdma", "gid_index": 3}).options["gid_index"] == 3


def test_the_environment_is_set_only_where_it_says_nothing_else() -> None:
    found = settings("nixl", gid_index=3)
    environ = {"PATH": "x"}
    assert missing_environment(found, environ) == {"UCX_IB_GID_INDEX": "3"}
    apply_environment(found, environ)
    assert environ == {"PATH": "x", "UCX_IB_GID_INDEX": "3", "UCX_NET_DEVICES": "lo"}
    assert not missing_environment(found, environ)
    theirs = {"UCX_IB_GID_INDEX": "0", "UCX_NET_DEVICES": "eth0"}
    with pytest.raises(ConfigError) as caught:
        apply_environment(found, theirs)
    assert "UCX_IB_GID_INDEX" in caught.value.where and theirs == {"UCX_IB_GID_INDEX": "0", "UCX_NET_DEVICES": "eth0"}
    theirs.pop("UCX_IB_GID_INDEX")
    apply_environment(found, theirs)
    assert theirs["UCX_NET_DEVICES"] == "eth0"
