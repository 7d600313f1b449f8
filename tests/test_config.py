"""Configuration: strict keys, errors that name the path, one interpolation, typed overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.config import WorkerConfig, backend_settings, dump, load_router, load_worker
from sglang_pd.config.checks import NESTINGS, cautions
from sglang_pd.config.document import MAX_DEPTH, parse_document, scalar
from sglang_pd.config.schema import LivenessSection
from sglang_pd.protocol.errors import ConfigError

P: dict[str, Any] = {"role": "prefill"}


def refused(data: dict[str, Any], *sets: str, environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_worker(data, sets=sets, environ=environ or {})
    return caught.value


def test_the_role_is_enough() -> None:
    config = load_worker(P, environ={})
    assert config.bootstrap_address.port == 8998 and config.bind.host == "127.0.0.1" and config.verify == "sampled"
    other = load_worker({"role": "decode"}, environ={})
    addresses = [c.bootstrap_address for c in (config, other)] + [c.http_address for c in (config, other)]
    assert len(set(addresses)) == 4 and config.name != other.name


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_shipped_configs_load(path: Path) -> None:
    load = load_router if path.stem == "router" else load_worker
    config = load(path, environ={})
    assert load(dump(config), environ={}) == config
    if isinstance(config, WorkerConfig):
        backend, role = path.stem.split("-")
        assert (config.backend.name, config.role) == (backend, role)


def test_every_backend_has_both_configs(repository: Path) -> None:
    from sglang_pd.backends.registry import BACKENDS

    there = {path.stem for path in (repository / "configs").glob("*-*.yaml")}
    assert there == {f"{name}-{role}" for name in BACKENDS for role in ("prefill", "decode")}


# Errors name the path


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    error = refused({**P, "newtork": {}})
    assert error.where == "$.newtork" and "'network'" in error.hint
    error = refused({**P, "network": {"advertize": "x"}})
    assert error.where == "$.network.advertize" and "'advertise'" in error.hint


@pytest.mark.parametrize(
    ("backend", "option", "near"),
    [("nixl", "num_thread", "num_threads"), ("local", "copy_thread", "copy_threads"),
     ("mooncake", "transprot", "transport"), ("mori", "hots", "host")],
)  # fmt: skip
def test_an_unknown_backend_option_is_named(backend: str, option: str, near: str) -> None:
    error = refused({**P, "backend": {"name": backend, "options": {option: 1}}})
    assert error.where == f"$.backend.options.{option}" and repr(near) in error.hint


def test_a_wrong_backend_option_is_named() -> None:
    error = refused({**P, "backend": {"name": "nixl", "options": {"num_threads": "many"}}})
    assert error.where == "$.backend.options.num_threads"


@pytest.mark.parametrize(
    ("data", "where", "expected"),
    [
        ({}, "$.role", "decode or prefill"),
        ({**P, "pools": {"device": "gpu"}}, "$.pools.device", "cpu, cuda or cuda:N"),
        ({**P, "network": {"ports": "8-"}}, "$.network.ports", "LOW-HIGH"),
        ({**P, "network": {"devices": ["a b"]}}, "$.network.devices[0]", "eth0"),
        ({**P, "instance_id": "-"}, "$.instance_id", "the first a letter or a digit"),
        ({"role": "prefil"}, "$.role", "decode | prefill"),
        ({**P, "network": {"http_port": 70_000}}, "$.network.http_port", "int <= 65535"),
        ({**P, "network": {"devices": ["a", 1]}}, "$.network.devices[1]", "str"),
        ({**P, "network": {"mtu": 1500}}, "$.network.mtu", "256 | 512 | 1024 | 2048 | 4096"),
        ({**P, "pools": {"memory_bytes": "lots"}}, "$.pools.memory_bytes", "bytes"),
        ({**P, "topology": {"tp": 3, "dcp": 2}}, "$.topology.dcp", "a divisor of tp = 3"),
        ({**P, "liveness": {"lease_s": 0}}, "$.liveness.lease_s", "float > 0"),
        ({**P, "pools": {"tokens": 33}}, "$.pools.tokens", "multiple of page_tokens"),
        ({**P, "pools": {"tokens": 32, "memory_bytes": 1}}, "$.pools.tokens", "memory_bytes or tokens"),
        ({**P, "pools": {"rows": 4, "slots": 2}}, "$.pools.slots", "at least rows = 4"),
        ({**P, "network": {"http_port": 8998}}, "$.network.http_port", "not 8998"),
        ({**P, "network": {"ports": "9-8"}, "backend": {"name": "nixl"}}, "$.network.ports", "LOW-HIGH"),
        ({**P, "network": {"ports": "8000-9000"}, "backend": {"name": "nixl"}}, "$.network.bootstrap_port", "outside"),
        ({**P, "backend": {"name": "nxil"}}, "$.backend.name", "local | mooncake | mori | nixl"),
    ],
)
def test_an_error_names_the_path(data: dict[str, Any], where: str, expected: str) -> None:
    error = refused(data)
    assert error.where == where and expected in str(error.expected)


def test_a_bracketed_address_without_quotes_gets_a_hint(tmp_path: Path) -> None:
    for text in ("[::1]", "[::1]:8998"):
        path = tmp_path / "c.yaml"
        path.write_text(f"role: prefill\nnetwork:\n  bind: {text}\n")
        with pytest.raises(ConfigError, match="quotes"):
            load_worker(path, environ={})


def test_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text, where in (("role: x", "$.role"), ("a: [", "$"), ("- 1", "$"), ("role: prefill\nrole: decode", "$.role")):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_worker(path, environ={})
        assert caught.value.where.startswith(where) and caught.value.details["file"] == path
    with pytest.raises(ConfigError, match="No such file"):
        load_worker(tmp_path / "none.yaml", environ={})


def test_secrets_do_not_show() -> None:
    config = load_worker({**P, "security": {"bearer_token": "hush"}}, environ={})
    assert "hush" not in repr(config) and "hush" not in str(dump(config)) and "hush" in str(dump(config, redact=False))
    error = refused({**P, "security": {"bearer_token": ["hush"]}})
    assert "hush" not in str(error)


# YAML


def test_yaml_words_are_words(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("role: decode\nverify: off\n")
    assert load_worker(path, environ={}).verify == "off"
    read = parse_document("{a: no, b: 1:30, c: 010, d: 1e3, e: 0x10, f: true, g: ~, h: '1', i: 2001-01-01, j: }")
    assert read == {"a": "no", "b": "1:30", "c": 10, "d": 1000.0, "e": 16, "f": True, "g": None, "h": "1",
                    "i": "2001-01-01", "j": None}  # fmt: skip
    assert scalar("-.inf") == float("-inf") and scalar(".nan") != scalar(".nan")


@pytest.mark.parametrize(
    "text",
    ["a: &x 1\nb: *x", "a: &x [1]", "a: !!python/name:os.system", "a: !custom 1", "a: 1\na: 2", "? [a]\n: 1",
     "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "[" * 5000, "a: 1\n---\nb: 2", "a: \x00", "#" * (1 << 20) + "#"],
)  # fmt: skip
def test_yaml_that_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_document(text)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_document(text)
    except ConfigError:
        pass


# Interpolation and overrides


def test_the_environment_is_typed_by_the_schema() -> None:
    environ = {"PORT": "7000", "ID": "123", "SIZE": "2GiB", "N": "4", "NULL": "null", "DEVS": "[a, b]"}
    data = {
        **P,
        "instance_id": "${env:ID}",
        "network": {"http_port": "${env:PORT}", "devices": "${env:DEVS}"},
        "pools": {"memory_bytes": "${env:SIZE}", "tokens": "${env:NULL}"},
        "backend": {"name": "nixl", "options": {"num_threads": "${env:N}"}},
        "observe": {"admin_socket": "/run/${env:ID}/pd.${env:ID}.sock"},
    }
    config = load_worker(data, environ=environ)
    assert (config.network.http_port, config.instance_id, config.pools.memory_bytes) == (7000, "123", 2 << 30)
    assert config.pools.tokens is None and config.network.devices == ("a", "b")
    assert config.backend.options == {"num_threads": 4}
    assert config.observe.admin_socket == "/run/123/pd.123.sock"


def test_a_missing_variable_is_named() -> None:
    error = refused({**P, "network": {"advertise": "${env:POD_IP}"}})
    assert error.where == "$.network.advertise" and "POD_IP" in str(error.expected)


@pytest.mark.parametrize("text", ["${HOME}", "${env:}", "${env:A", "x${file:a}", "${env:A}${B}"])
def test_no_other_interpolation(text: str) -> None:
    assert refused({**P, "instance_id": text}, environ={"A": "a"}).where == "$.instance_id"


def test_what_the_environment_holds_is_not_interpolated_again() -> None:
    config = load_worker({**P, "observe": {"admin_socket": "${env:A}"}}, environ={"A": "${env:B}"})
    assert config.observe.admin_socket == "${env:B}"


def test_overrides_are_typed_and_later_ones_win() -> None:
    sets = ("instance_id=7", "network.http_port=1", "network.http_port=0", "network.devices=[mlx5_0]", "verify=off",
            "backend.name=nixl", "backend.options.num_threads=2", "pools.memory_bytes=1.5MiB", "$.log_level=debug",
            "security.insecure=true", "engine.options.a.b={c: 1}", "liveness.drain_s=90")  # fmt: skip
    config = load_worker({**P, "pools": {"rows": 2}}, sets=sets, environ={})
    assert config.instance_id == "7" and config.network.http_port == 0 and config.network.devices == ("mlx5_0",)
    assert config.verify == "off" and config.pools.memory_bytes == 3 << 19 and config.pools.rows == 2
    assert config.security.insecure and config.log_level == "debug" and config.liveness.drain_s == 90
    assert config.engine.options == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("network.htp_port=1", "$.network.htp_port"),
        ("network.http_port=x", "$.network.http_port"),
        ("role.x=1", "$.role"),
        ("network", "--set"),
        ("=1", "--set"),
        ("network.http_port=${env:NO}", "$.network.http_port"),
        ("network={htp_port: 1}", "$.network.htp_port"),
    ],
)
def test_a_bad_override_is_named(text: str, where: str) -> None:
    assert refused(P, text).where == where


def test_sizes() -> None:
    sizes = {"1": 1, "10B": 10, "1KiB": 1024, "1K": 1024, "1KB": 1000, "2 GiB": 2 << 30, "1.5MiB": 3 << 19, 77: 77}
    for text, nbytes in sizes.items():
        assert load_worker({**P, "pools": {"memory_bytes": text}}, environ={}).pools.memory_bytes == nbytes
    for text in ("", "-1", "1kb", "1XB", "0"):
        assert refused({**P, "pools": {"memory_bytes": text}}).where == "$.pools.memory_bytes"


# What spans fields


@pytest.mark.parametrize("nesting", NESTINGS, ids=lambda n: f"{n.inner}-{n.outer}")
def test_an_inner_deadline_ends_first(nesting: Any) -> None:
    outer = getattr(LivenessSection(), nesting.outer)
    error = refused({**P, "liveness": {nesting.inner: outer / nesting.factor * 1.01}})
    broken = [n for n in NESTINGS if n.inner == nesting.inner]
    assert error.where in {f"$.liveness.{n.outer}" for n in broken}
    assert nesting.inner in str(error.expected)


@pytest.mark.parametrize(
    "liveness",
    [
        {"heartbeat_s": 6, "liveness_s": 10},
        {"lease_renew_s": 31, "lease_s": 60},
        {"liveness_s": 31, "transfer_s": 30},
        {"transfer_s": 61, "drain_s": 60},
        {"alloc_wait_s": 3601, "request_s": 3600},
    ],
)
def test_deadlines_that_cross(liveness: dict[str, float]) -> None:
    inner, outer = liveness
    error = refused({**P, "liveness": liveness})
    assert error.where == f"$.liveness.{outer}" and inner in str(error.expected)


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "worker-0"])
def test_beyond_loopback_only_with_keys_or_by_name(bind: str) -> None:
    data = {**P, "network": {"bind": bind, "advertise": "10.0.0.1"}}
    error = refused(data)
    assert error.code == "insecure_refused" and error.where == "$.network.bind"
    told = load_worker({**data, "security": {"insecure": True}}, environ={})
    assert any("insecure" in text for text in cautions(told)) and any("bearer" in text for text in cautions(told))
    curve = {"secret_key_file": "a", "allowed_key_files": ["b"]}
    keyed = load_worker({**data, "backend": {"name": "nixl"}, "security": {"curve": curve}}, environ={})
    assert [text for text in cautions(keyed) if "not authenticated by CURVE" in text]


def test_keys_name_the_other_side() -> None:
    assert refused({**P, "security": {"curve": {"secret_key_file": "a"}}}).where.endswith("allowed_key_files")
    decode = {"role": "decode", "security": {"curve": {"secret_key_file": "a"}}}
    assert refused(decode).where.endswith("server_key_file")


def test_a_wildcard_cannot_be_advertised() -> None:
    for network in ({"bind": "::"}, {"bind": "10.0.0.1", "advertise": "0.0.0.0"}):
        assert refused({**P, "network": network, "security": {"insecure": True}}).where == "$.network.advertise"


def test_a_router_lists_no_worker_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        load_router({"prefill": ["http://[::1]:1"], "decode": ["http://a:80", {"url": "http://a"}]})
    with pytest.raises(ConfigError) as caught:
        load_router({"prefill": [{"url": "http://a", "bootstrap_prt": 1}], "decode": ["http://b"]})
    assert caught.value.where == "$.prefill[0].bootstrap_prt"


def test_frozen_and_comparable() -> None:
    config = load_worker(P, environ={})
    with pytest.raises(AttributeError):
        config.verify = "off"  # type: ignore[misc]
    assert backend_settings(config).options == {}


@pytest.mark.parametrize(
    ("source", "sets", "environ", "where"),
    [
        ('role: prefill\nengine: {name: "\\ud800"}\n', (), {}, "$.engine.name (line 2, column 16)"),
        ('role: prefill\n"\\udfff": 1\n', (), {}, "$ (line 2, column 1)"),
        ('role: prefill\nengine:\n  options: {a: ["b", "c\\udc80"]}\n', (), {}, "$.engine.options.a[1] (line 3"),
        ({"role": "prefill", "instance_id": "a\ud800"}, (), {}, "$.instance_id"),
        ({"role": "prefill", "engine": {"options": {"\ud800": 1}}}, (), {}, "$.engine.options"),
        ({"role": "prefill"}, ("instance_id=\udcff",), {}, "$.instance_id"),
        ({"role": "prefill"}, ("engine.options.a={b: \udcff}",), {}, "$.engine.options.a"),
        ({"role": "prefill"}, ("\udcff=1",), {}, "--set"),
        ({"role": "prefill", "instance_id": "${env:NAME}"}, (), {"NAME": "\udcff"}, "$.instance_id"),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_place(
    source: Any, sets: tuple[str, ...], environ: dict[str, str], where: str, tmp_path: Path
) -> None:
    """Bytes of a command line or of the environment that are no UTF-8 are such halves, too."""
    if isinstance(source, str):
        file = tmp_path / "x.yaml"
        file.write_text(source)
        source = file
    with pytest.raises(ConfigError) as caught:
        load_worker(source, sets=sets, environ=environ)
    assert caught.value.where.startswith(where)
    str(caught.value).encode(), caught.value.info()


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "10.0.0.1", "router.example"])
def test_a_router_lends_the_workers_token_to_nobody_unsaid(bind: str) -> None:
    base = {"prefill": ["http://a:1"], "decode": ["http://b:1"], "bind": bind}
    load_router(base)  # a front is there to be reached
    with pytest.raises(ConfigError) as caught:
        load_router({**base, "worker_bearer_token": "inner"})
    assert caught.value.code == "insecure_refused" and caught.value.where == "$.bearer_token"
    assert "inner" not in str(caught.value)
    for said in ({"bearer_token": "outer"}, {"insecure": True}, {"bind": "127.0.0.1"}, {"bind": "localhost"}):
        load_router({**base, "worker_bearer_token": "inner", **said})
