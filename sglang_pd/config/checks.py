"""What spans several fields of a configuration. `load.py` calls these; each raises `ConfigError` with the path."""

from __future__ import annotations

from typing import NamedTuple

from sglang_pd.config.address import is_loopback, is_wildcard, parse_host, parse_url
from sglang_pd.config.network import backend_settings
from sglang_pd.config.schema import RouterConfig, WorkerConfig
from sglang_pd.protocol.errors import ConfigError, ManifestError
from sglang_pd.protocol.manifest import Topology


class Nesting(NamedTuple):
    """`inner` times `factor` must not exceed `outer`, because of `why`."""

    inner: str
    outer: str
    factor: float
    why: str


NESTINGS = (
    Nesting("heartbeat_s", "liveness_s", 2, "a peer is lost only after it missed a heartbeat"),
    Nesting("liveness_s", "transfer_s", 1, "a dead peer is named before its transfer merely times out"),
    Nesting("transfer_s", "drain_s", 1, "a drain outlives the transfers in flight"),
    Nesting("status_interval_s", "status_max_s", 1, "the interval doubles up to the longest"),
    Nesting("status_max_s", "liveness_s", 1, "the other side is asked before it is given up"),
    Nesting("lease_renew_s", "lease_s", 2, "a lease survives one lost renewal"),
    Nesting("liveness_s", "lease_s", 1, "a lease outlives a peer that is found dead"),
    Nesting("liveness_s", "request_wait_s", 1, "a dead peer is named before the wait for its request ends"),
    Nesting("request_wait_s", "request_s", 1, "a request outlives its own waits"),
    Nesting("alloc_wait_s", "request_s", 1, "a request outlives its own waits"),
    Nesting("transfer_s", "request_s", 1, "a request outlives its transfers"),
)
"""Every inner deadline and the outer one that must not end first."""


def check_worker(config: WorkerConfig) -> None:
    """Everything that can be known about a worker before it starts."""
    check_topology(config)
    check_pools(config)
    check_deadlines(config)
    check_network(config)
    check_binding(config)
    backend_settings(config)


def check_topology(config: WorkerConfig) -> None:
    """The topology exists, as the protocol defines it."""
    try:
        topology_of(config)
    except ManifestError as error:
        raise ConfigError(
            error.message, where=f"$.{error.where}", expected=error.expected, actual=error.actual
        ) from None


def topology_of(config: WorkerConfig) -> Topology:
    """The protocol's `Topology` of this configuration. Raises `ManifestError`."""
    t = config.topology
    return Topology(pp=t.pp, tp=t.tp, dcp=t.dcp, dp_size=t.dp_size, dp_rank=t.dp_rank)


def check_pools(config: WorkerConfig) -> None:
    """A budget or a capacity, not both; whole pages."""
    pools = config.pools
    if pools.memory_bytes is not None and pools.tokens is not None:
        raise ConfigError(
            "two answers to one question: the budget decides the tokens",
            where="$.pools.tokens",
            expected="memory_bytes or tokens",
            actual="both",
        )
    for field in ("tokens", "swa_tokens"):
        value = getattr(pools, field)
        if value is not None and value % pools.page_tokens:
            raise ConfigError(
                "not whole pages",
                where=f"$.pools.{field}",
                expected=f"a multiple of page_tokens = {pools.page_tokens}",
                actual=value,
            )
    if pools.page_tokens % pools.interleave:
        raise ConfigError(
            "pages must be whole turns of the DCP ranks",
            where="$.pools.interleave",
            expected=f"a divisor of page_tokens = {pools.page_tokens}",
            actual=pools.interleave,
        )
    if pools.slots is not None and pools.slots < pools.rows:
        raise ConfigError(
            "every running request holds a recurrent slot",
            where="$.pools.slots",
            expected=f"at least rows = {pools.rows}",
            actual=pools.slots,
        )


def check_deadlines(config: WorkerConfig) -> None:
    """Inner deadlines end before outer ones."""
    for inner, outer, factor, why in NESTINGS:
        inner_s, outer_s = getattr(config.liveness, inner), getattr(config.liveness, outer)
        if inner_s * factor > outer_s:
            times = "" if factor == 1 else f"{factor:g} times "
            raise ConfigError(
                f"the deadline inside does not end first: {why}",
                where=f"$.liveness.{outer}",
                expected=f"at least {times}{inner} = {inner_s * factor:g} s",
                actual=f"{outer_s:g} s",
            )


def check_network(config: WorkerConfig) -> None:
    """Addresses parse, peers can be told where to go, ports do not collide."""
    network = config.network
    host = parse_host(network.bind, where="$.network.bind")
    advertised = parse_host(network.advertise, where="$.network.advertise") if network.advertise else host
    if is_wildcard(advertised):
        raise ConfigError(
            "peers cannot connect to an address that means every interface",
            where="$.network.advertise",
            expected="a host that peers reach, such as ${env:POD_IP}",
            actual=advertised,
        )
    control, http = config.bootstrap_address.port, config.http_address.port
    if control == http and control != 0:
        raise ConfigError(
            "one port for two listeners", where="$.network.http_port", expected=f"not {control}", actual=http
        )
    if network.port_range is None:
        return
    low, high = network.port_range
    if not 1 <= low <= high <= 65_535:
        raise ConfigError("not a range of ports", where="$.network.ports", expected="LOW-HIGH", actual=network.ports)
    for field, port in (("bootstrap_port", control), ("http_port", http)):
        if port is not None and low <= port <= high:
            raise ConfigError(
                "the data plane's ports contain a port of the control plane or the server",
                where=f"$.network.{field}",
                expected=f"outside {network.ports}",
                actual=port,
            )


def check_binding(config: WorkerConfig) -> None:
    """Beyond loopback only with keys, or when told so. Raises `ConfigError` (`insecure_refused`)."""
    security = config.security
    curve = security.curve
    if curve is not None and config.role == "prefill" and not curve.allowed_key_files:
        raise ConfigError(
            "keys, but nobody may connect", where="$.security.curve.allowed_key_files", expected="decode's public keys"
        )
    if curve is not None and config.role == "decode" and curve.server_key_file is None:
        raise ConfigError(
            "keys, but not those of the prefill side",
            where="$.security.curve.server_key_file",
            expected="prefill's public key",
        )
    if curve is None and not security.insecure and not is_loopback(config.bind.host):
        raise ConfigError(
            "listening beyond this host without keys lets anybody open rooms",
            code="insecure_refused",
            where="$.network.bind",
            expected="a loopback address, or keys in security.curve",
            actual=config.bind.host,
            hint="Make keys with `sglang-pd keygen`, or say `security.insecure: true`.",
        )


def cautions(config: WorkerConfig) -> list[str]:
    """What is allowed but should be said once at start."""
    found: list[str] = []
    if is_loopback(config.bind.host):
        return found
    if config.security.curve is None:
        found.append("security.insecure: the control plane accepts anybody who reaches it")
    if not config.security.bearer_token:
        found.append("security.bearer_token is empty: the HTTP server accepts anybody who reaches it")
    if config.backend.name != "local":
        found.append(f"the data plane of {config.backend.name} is not authenticated by CURVE: keep its ports private")
    return found


def check_router(config: RouterConfig) -> None:
    """Every worker's URL parses, no worker stands twice in a list, and the workers' token is lent to nobody unsaid."""
    host = parse_host(config.bind, where="$.bind")
    if config.worker_bearer_token and not config.bearer_token and not config.insecure and not is_loopback(host):
        raise ConfigError(
            "a router that holds the workers' token and asks for none lends it to whoever reaches it",
            code="insecure_refused",
            where="$.bearer_token",
            expected="a token for clients, or a loopback address in bind",
            actual=f"none, and bind: {host}",
            hint="Where something in front of it asks for one, say `insecure: true`.",
        )
    lists = {
        "prefill": [worker.url for worker in config.prefill_workers],
        "decode": [worker.url for worker in config.decode_workers],
    }
    for side, urls in lists.items():
        seen: dict[str, int] = {}
        for number, text in enumerate(urls):
            where = f"$.{side}[{number}].url"
            url = parse_url(text, where=where).url()
            if url in seen:
                raise ConfigError("the same worker twice", where=where, expected=f"not {side}[{seen[url]}]", actual=url)
            seen[url] = number
    for number, prefill in enumerate(config.prefill_workers):
        if prefill.bootstrap_host:
            parse_host(prefill.bootstrap_host, where=f"$.prefill[{number}].bootstrap_host")
    timeouts = config.timeouts
    if timeouts.connect_s > timeouts.request_s:
        raise ConfigError(
            "the deadline inside does not end first",
            where="$.timeouts.request_s",
            expected=f"at least connect_s = {timeouts.connect_s:g} s",
            actual=f"{timeouts.request_s:g} s",
        )
