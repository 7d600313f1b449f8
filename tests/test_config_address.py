"""CF-04: every way to write an address parses, and what is written back is the same address."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.config import load_router, load_worker
from sglang_pd.config.address import Address, is_loopback, is_wildcard, parse_address, parse_host, parse_url
from sglang_pd.config.document import parse_document
from sglang_pd.protocol.errors import ConfigError

FORMS = {
    "[::1]:8998": Address("::1", 8998),
    "[::1]": Address("::1"),
    "::1": Address("::1"),
    "::": Address("::"),
    "2001:db8::1": Address("2001:db8::1"),
    "2001:0db8:0:0:0:0:0:1": Address("2001:db8::1"),
    "[2001:db8::1]:80": Address("2001:db8::1", 80),
    "fe80::1%eth0": Address("fe80::1%eth0"),
    "[fe80::1%eth0]:8998": Address("fe80::1%eth0", 8998),
    "::ffff:10.0.0.1": Address("::ffff:a00:1"),
    "127.0.0.1": Address("127.0.0.1"),
    "10.0.0.1:0": Address("10.0.0.1", 0),
    "prefill-0.prefill.svc.cluster.local": Address("prefill-0.prefill.svc.cluster.local"),
    "only-aaaa.example": Address("only-aaaa.example"),
    "localhost:30000": Address("localhost", 30000),
}

REFUSED = ["", "[::1", "::1]", "[127.0.0.1]:80", "host:", "host:65536", "host:-1", "host:x", "1.2.3", "256.1.1.1",
           "2001:db8::g", ":::", "fe80::1%", "fe80::1%a b", "a b", "http://x", "-x", "x" * 300, "[::1]80", "[]:80",
           "10.0.0.1%eth0", "host%eth0", "1.2.3.4:5:6"]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_form(text: str) -> None:
    address = parse_address(text, where="$.x")
    assert str(address) == str(FORMS[text]) and address == FORMS[text]
    assert parse_address(str(address), where="$.x") == address


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text, where="$.network.bind")
    assert caught.value.where == "$.network.bind"


@pytest.mark.parametrize("text", [t for t in FORMS if FORMS[t].port is None])
def test_round_trip_through_yaml_config_and_router(text: str) -> None:
    host = FORMS[text].host
    quoted = parse_document(f"bind: '{text}'")["bind"]
    if text not in ("::", "[::1]"):  # those two need their quotes
        assert parse_document(f"bind: {text}")["bind"] == quoted
    insecure = {"insecure": True}
    worker = {"role": "decode", "network": {"bind": quoted, "advertise": "h"}, "security": insecure}
    config = load_worker(worker)
    assert config.bind.host == host
    assert parse_address(str(config.bootstrap_address), where="$") == config.bootstrap_address
    url = FORMS[text].with_port(30000).url()
    router = load_router({"prefill": [{"url": url, "bootstrap_host": quoted}], "decode": [url]})
    assert parse_url(router.decode_workers[0].url, where="$") == Address(host, 30000)


def test_urls() -> None:
    assert Address("fe80::1%eth0", 8000).url() == "http://[fe80::1%25eth0]:8000"
    assert Address("::1").url("ws") == "ws://[::1]" and Address("10.0.0.1", 1).url() == "http://10.0.0.1:1"
    assert parse_url("http://[fe80::1%25eth0]:8000/", where="$") == Address("fe80::1%eth0", 8000)
    assert parse_url("http://prefill", where="$") == Address("prefill", 80)
    for bad in (
        "http://[::1",
        "http://::1]:80",
        "https://x:1",
        "http://x:1/path",
        "http://u:p@x:1",
        "http://x:1?q",
        "ftp://x",
    ):
        with pytest.raises(ConfigError):
            parse_url(bad, where="$")


def test_zmq_endpoint() -> None:
    assert Address("::1", 8998).zmq() == "tcp://[::1]:8998"
    assert Address("fe80::1%eth0", 1).zmq() == "tcp://[fe80::1%eth0]:1"
    assert Address("10.0.0.1").zmq() == "tcp://10.0.0.1:0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "a.localhost", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%lo", "localhost.example", "notlocalhost", "::ffff:10.0.0.1"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_wildcards_and_hosts() -> None:
    assert is_wildcard(parse_host("[::]", where="$")) and is_wildcard("0.0.0.0")
    with pytest.raises(ConfigError, match="bootstrap_port"):
        parse_host("[::1]:8998", where="$.network.bind")


@given(st.ip_addresses(), st.none() | st.integers(0, 65_535))
def test_any_ip_round_trips(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int | None) -> None:
    address = Address(ip.compressed, port)
    assert parse_address(str(address), where="$") == address
    assert parse_url(address.with_port(1).url(), where="$") == address.with_port(1)


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        address = parse_address(text, where="$")
    except ConfigError:
        return
    assert parse_address(str(address), where="$") == address
