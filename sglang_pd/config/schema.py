"""The configuration of a worker, for both roles: frozen structs whose defaults run on loopback.

Units are in the names; a `_bytes` field also takes text such as `512MiB`. What spans several fields is checked by
`checks.py`; `load.py` makes these structs from YAML or a dict and is the way in.
"""

from __future__ import annotations

import socket
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang_pd.config.address import Address, is_wildcard, parse_host

BYTES: dict[str, Any] = {"unit": "bytes"}
"""Marks a field of bytes: `load.py` then also takes text with a unit."""
NAME_FORM: dict[str, Any] = {"form": "letters, digits and _ . : @ -, the first a letter or a digit"}
DEVICE_FORM: dict[str, Any] = {"form": "cpu, cuda or cuda:N"}
PORTS_FORM: dict[str, Any] = {"form": "LOW-HIGH"}
NIC_FORM: dict[str, Any] = {"form": "a device's name, as eth0 or mlx5_0:1"}
"""What a field's pattern means: `load.py` says it instead of the pattern."""

DEFAULT_BOOTSTRAP_PORT = {"prefill": 8998, "decode": 8999}
DEFAULT_HTTP_PORT = {"prefill": 30000, "decode": 30001}
DEFAULT_TOKENS = 8192

Role = Literal["prefill", "decode"]
Bytes = Annotated[int, Meta(ge=1, le=2**52, extra=BYTES)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Seconds = Annotated[float, Meta(gt=0, le=1e7)]
Count = Annotated[int, Meta(ge=1, le=2**40)]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]*$", extra=NAME_FORM)]
Nic = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$", extra=NIC_FORM)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
LogLevel = Literal["debug", "info", "warning", "error"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: an unknown key is an error."""


class EngineSection(Section, frozen=True):
    """What computes. `options` belong to the engine, which checks them. chunk_tokens: prompt tokens that prefill
    computes, and sends, at a time. max_batch: requests that decode computes at a time."""

    name: Literal["reference", "transformers"] = "reference"
    options: dict[str, Any] = {}
    chunk_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 256
    max_batch: Annotated[int, Meta(ge=1, le=65_536)] = 64


class TopologySection(Section, frozen=True):
    """Shape of the instance: pp x tp ranks; dcp divides tp; this is replica dp_rank of dp_size."""

    pp: Annotated[int, Meta(ge=1, le=4096)] = 1
    tp: Annotated[int, Meta(ge=1, le=4096)] = 1
    dcp: Annotated[int, Meta(ge=1, le=4096)] = 1
    dp_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    dp_rank: Annotated[int, Meta(ge=0, le=4095)] = 0


class PoolsSection(Section, frozen=True):
    """State memory of each rank: a budget from which the token pools are sized, or capacities.

    memory_bytes: budget of one rank for all kinds of state. tokens: token slots on one rank, without the reserve page
    (8192 where neither is given). swa_tokens: slots of the sliding-window pool (default: as many as `rows` requests
    need). rows: requests that run at once. slots: recurrent slots (default: rows). page_tokens: tokens of a page.
    interleave: neighbouring tokens that stay on one DCP rank. device: `cpu`, `cuda` (the rank's own) or `cuda:N`.
    host_kinds: kinds, by name, that lie in host memory beside pools on a device (as PLE), where the engine can do so.
    order: how free units are handed out; `random` follows `seed`. poison: fill pools with this byte at start, so that
    state that nobody wrote shows (tests, demo).
    """

    memory_bytes: Bytes | None = None
    tokens: Count | None = None
    swa_tokens: Count | None = None
    rows: Annotated[int, Meta(ge=1, le=2**20)] = 16
    slots: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    page_tokens: Annotated[int, Meta(ge=1, le=65_536)] = 16
    interleave: Annotated[int, Meta(ge=1, le=65_536)] = 1
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:(0|[1-9]\d{0,3}))?)$", extra=DEVICE_FORM)] = "cpu"
    host_kinds: tuple[str, ...] = ()
    order: Literal["low", "high", "random"] = "low"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    poison: Annotated[int, Meta(ge=0, le=255)] | None = None


class BackendSection(Section, frozen=True):
    """What moves bytes. `options` belong to the backend, which checks them; nothing is ever substituted."""

    name: Annotated[str, Meta(min_length=1, max_length=64)] = "local"
    options: dict[str, Any] = {}


class NetworkSection(Section, frozen=True):
    """Addresses, ports, and what is asked of the fabric. See `network.py` for what each backend makes of the latter.

    bind: where control plane and HTTP listen. advertise: host that peers are told (default: bind). bootstrap_port: the
    control plane's (8998; decode 8999). http_port: the server's (30000; decode 30001). 0: any free port; the real one
    is advertised. ports: `LOW-HIGH`, for the data plane's own listeners. devices: NICs of the data plane. gid_index,
    traffic_class (0 to 255), mtu (bytes): of RDMA.
    """

    bind: str = "127.0.0.1"
    advertise: str = ""
    bootstrap_port: Port | None = None
    http_port: Port | None = None
    ports: Annotated[str, Meta(pattern=r"^(\d{1,5}-\d{1,5})?$", extra=PORTS_FORM)] = ""
    devices: tuple[Nic, ...] = ()
    gid_index: Annotated[int, Meta(ge=0, le=255)] | None = None
    traffic_class: Annotated[int, Meta(ge=0, le=255)] | None = None
    mtu: Literal[256, 512, 1024, 2048, 4096] | None = None

    @property
    def port_range(self) -> tuple[int, int] | None:
        """Lowest and highest port for the data plane, both included."""
        if not self.ports:
            return None
        low, high = self.ports.split("-")
        return int(low), int(high)


class CurveSection(Section, frozen=True):
    """Certificates of the control plane, as `sglang-pd keygen` writes them.

    secret_key_file: this instance's own pair. server_key_file: decode: the public key of the prefill controls that it
    connects to. allowed_key_files: prefill: public keys of the decode controls that may connect; others are dropped.
    """

    secret_key_file: Path
    server_key_file: Path | None = None
    allowed_key_files: tuple[Path, ...] = ()


class SecuritySection(Section, frozen=True):
    """Who may connect. CURVE protects the control plane only: data planes are *not* authenticated by it.

    insecure: listen beyond loopback without keys. insecure_data_plane: let a backend listen where it was not told to
    (a library that binds all interfaces, say). bearer_token: HTTP requests must carry it.
    """

    curve: CurveSection | None = None
    insecure: bool = False
    insecure_data_plane: bool = False
    bearer_token: Annotated[str, Meta(max_length=1024)] = ""

    def __repr__(self) -> str:
        token = "'...'" if self.bearer_token else "''"
        return (
            f"SecuritySection(curve={self.curve!r}, insecure={self.insecure}, "
            f"insecure_data_plane={self.insecure_data_plane}, bearer_token={token})"
        )


class LimitsSection(Section, frozen=True):
    """Bounds on what others can make this worker hold.

    max_rooms: open rooms. max_peers: instances with a verdict. queue_requests: requests that wait, more are 429.
    quarantine_bytes: memory that may wait for a fence; past it the worker drains. max_prompt_tokens: longer is 400
    (default: what the pools hold). max_body_bytes: of one HTTP request, more is 413 (default: 4 MiB, or 16 bytes
    for each token of the longest request, where that is more).
    """

    max_rooms: Annotated[int, Meta(ge=1, le=2**20)] = 1024
    max_peers: Annotated[int, Meta(ge=1, le=2**16)] = 1024
    queue_requests: Annotated[int, Meta(ge=1, le=2**20)] = 256
    quarantine_bytes: Bytes = 2**30
    max_prompt_tokens: Count | None = None
    max_body_bytes: Bytes | None = None


class LivenessSection(Section, frozen=True):
    """Durations, each finite; an inner one ends before the outer one that waits for it (`checks.py` has the pairs).

    heartbeat_s: between two heartbeats. liveness_s: silence after which a peer is lost. transfer_s: one transfer.
    status_interval_s, status_max_s: silence after which the other side is asked, first and at most. lease_s,
    lease_renew_s: a computed room waits to be claimed; how often decode renews. request_wait_s: an opened room waits
    for its request. alloc_wait_s: a request waits for memory. fence_alarm_s: quarantine that is reported. request_s: a
    whole request. drain_s: SIGTERM to the end. stall_s: no progress while own work waits turns health not-ready.
    """

    heartbeat_s: Seconds = 1.0
    liveness_s: Seconds = 10.0
    transfer_s: Seconds = 30.0
    status_interval_s: Seconds = 1.0
    status_max_s: Seconds = 8.0
    lease_s: Seconds = 60.0
    lease_renew_s: Seconds = 15.0
    request_wait_s: Seconds = 120.0
    alloc_wait_s: Seconds = 1800.0
    fence_alarm_s: Seconds = 30.0
    request_s: Seconds = 3600.0
    drain_s: Seconds = 60.0
    stall_s: Seconds = 30.0


class ObserveSection(Section, frozen=True):
    """What is told to operators. admin_socket: path of a Unix socket that answers `dump`, or empty for none.
    decisions: decisions of each rank that are kept for a dump.
    """

    metrics: bool = True
    admin_socket: Annotated[str, Meta(max_length=107)] = ""
    decisions: Annotated[int, Meta(ge=1, le=65_536)] = 256


class WorkerConfig(Section, frozen=True):
    """One worker. `role` is the only key without a default. verify: how much of the state is digested after arrival."""

    role: Role
    instance_id: Name | None = None
    engine: EngineSection = EngineSection()
    topology: TopologySection = TopologySection()
    pools: PoolsSection = PoolsSection()
    backend: BackendSection = BackendSection()
    network: NetworkSection = NetworkSection()
    security: SecuritySection = SecuritySection()
    limits: LimitsSection = LimitsSection()
    liveness: LivenessSection = LivenessSection()
    verify: Literal["off", "sampled", "full"] = "sampled"
    observe: ObserveSection = ObserveSection()
    log_level: LogLevel = "info"

    @property
    def bind(self) -> Address:
        """Host that control plane and HTTP listen on."""
        return Address(parse_host(self.network.bind, where="$.network.bind"))

    @property
    def advertised_host(self) -> str:
        """Host that peers are told: `advertise`, or `bind`."""
        if self.network.advertise:
            return parse_host(self.network.advertise, where="$.network.advertise")
        return self.bind.host

    @property
    def bootstrap_address(self) -> Address:
        """Where the control plane listens; port 0: any free one."""
        port = self.network.bootstrap_port
        return Address(self.bind.host, DEFAULT_BOOTSTRAP_PORT[self.role] if port is None else port)

    @property
    def http_address(self) -> Address:
        """Where the HTTP server listens; port 0: any free one."""
        port = self.network.http_port
        return Address(self.bind.host, DEFAULT_HTTP_PORT[self.role] if port is None else port)

    @property
    def name(self) -> str:
        """`instance_id`, or role, host and control port: distinct for every worker that listens."""
        if self.instance_id is not None:
            return self.instance_id
        host = socket.gethostname() if is_wildcard(self.advertised_host) else self.advertised_host
        return f"{self.role}-{host[:48]}-{self.bootstrap_address.port}".replace("%", ".")


class RouterPrefill(Section, frozen=True):
    """A prefill worker: its HTTP URL, its control port, and the host that decode workers reach its control at."""

    url: str
    bootstrap_port: Port = DEFAULT_BOOTSTRAP_PORT["prefill"]
    bootstrap_host: str = ""


class RouterDecode(Section, frozen=True):
    """A decode worker's HTTP URL."""

    url: str


class RouterLimits(Section, frozen=True):
    """max_inflight: requests at once, more are 429. max_body_bytes: of one request, more is 413. bodies_bytes: of all
    requests at once, without the first 64 KiB of each; more are 503. max_batch: sequences of one. hold_bytes: of one
    answer that may wait in the router (an event until it is whole, a JSON answer until it is complete); what is longer
    passes as it comes. merge_bytes: of an answer that input logprobs are merged into."""

    max_inflight: Annotated[int, Meta(ge=1, le=2**20)] = 1024
    max_body_bytes: Bytes = 4 * 2**20
    bodies_bytes: Bytes = 512 * 2**20
    max_batch: Annotated[int, Meta(ge=1, le=65_536)] = 256
    hold_bytes: Bytes = 2**20
    merge_bytes: Bytes = 32 * 2**20


class RouterBreaker(Section, frozen=True):
    """failures: of one worker in a row (5xx, connections) after which it gets no requests. open_s: until one is let
    through to see."""

    failures: Annotated[int, Meta(ge=1, le=1_000_000)] = 5
    open_s: Seconds = 5.0


class RouterTimeouts(Section, frozen=True):
    """connect_s: a TCP connection to a leg. request_s: a whole request. probe_s: between looks at workers' health.
    cancel_s: the other leg after the first failure."""

    connect_s: Seconds = 1.0
    request_s: Seconds = 3600.0
    probe_s: Seconds = 1.0
    cancel_s: Seconds = 1.0


class RouterConfig(Section, frozen=True):
    """A router. Workers are listed, or found behind a name: a host name stands for all its addresses with
    `resolve: dns`. bearer_token: requests must carry it; worker_bearer_token: what the workers want. insecure: serve
    others than this host without the one, although it holds the other."""

    prefill: Annotated[tuple[RouterPrefill | str, ...], Meta(min_length=1, max_length=4096)]
    decode: Annotated[tuple[RouterDecode | str, ...], Meta(min_length=1, max_length=4096)]
    policy: Literal["least_rooms", "round_robin"] = "least_rooms"
    resolve: Literal["static", "dns"] = "static"
    bind: str = "127.0.0.1"
    port: Port = 8000
    retries: Annotated[int, Meta(ge=0, le=16)] = 1
    bearer_token: Annotated[str, Meta(max_length=1024)] = ""
    worker_bearer_token: Annotated[str, Meta(max_length=1024)] = ""
    insecure: bool = False
    limits: RouterLimits = RouterLimits()
    breaker: RouterBreaker = RouterBreaker()
    timeouts: RouterTimeouts = RouterTimeouts()
    log_level: LogLevel = "info"

    def __repr__(self) -> str:
        return f"RouterConfig(prefill={self.prefill!r}, decode={self.decode!r}, policy={self.policy!r})"

    @property
    def prefill_workers(self) -> tuple[RouterPrefill, ...]:
        """The list with every short form written out."""
        return tuple(RouterPrefill(url=p) if isinstance(p, str) else p for p in self.prefill)

    @property
    def decode_workers(self) -> tuple[RouterDecode, ...]:
        """The list with every short form written out."""
        return tuple(RouterDecode(url=d) if isinstance(d, str) else d for d in self.decode)

    @property
    def address(self) -> Address:
        """Where the router listens."""
        return Address(parse_host(self.bind, where="$.bind"), self.port)
