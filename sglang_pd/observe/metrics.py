"""Our metrics, in a store of their own: embedded twice in one process they do not meet, and the global registry of
`prometheus_client` is never touched. That library is only imported to export.

Every metric is declared in `METRICS` with the roles that have it; one of the other role is absent, not zero. No label
ever names a room. Label values that others choose are bounded: past `MAX_SERIES` of a metric they become `other`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sglang_pd.observe.observer import Count
from sglang_pd.protocol.errors import BackendUnavailable, LocalProtocolError
from sglang_pd.protocol.room import Role

PREFIX: Final = "sglang_pd_"
MAX_SERIES: Final = 1024
"""Most label combinations of one metric; further ones are counted under `other`."""

OUR_LABELS: Final = frozenset({"stage", "result", "direction", "state"})
"""Labels whose few values are ours. All other values may come from a peer."""

_STEPS = (1, 2.5, 5)
SECONDS: Final = (*(step * 10.0**n for n in range(-4, 2) for step in _STEPS), 100.0)
BYTES: Final = tuple(float(4**n) for n in range(5, 19))
DESCRIPTORS: Final = tuple(float(4**n) for n in range(11))
RATES: Final = tuple(1e6 * 4**n for n in range(11))

BOTH: Final = frozenset({Role.PREFILL, Role.DECODE})
PREFILL: Final = frozenset({Role.PREFILL})
DECODE: Final = frozenset({Role.DECODE})


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric. buckets: of a histogram, upper bounds in the metric's unit."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    roles: frozenset[Role] = BOTH
    buckets: tuple[float, ...] = ()


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], *labels: str, roles: frozenset[Role] = BOTH
) -> Declared:
    return Declared(name, "histogram", text, labels, roles, buckets)


def _counter(name: str, text: str, *labels: str, roles: frozenset[Role] = BOTH) -> Declared:
    return Declared(name, "counter", text, labels, roles)


def _gauge(name: str, text: str, *labels: str, roles: frozenset[Role] = BOTH) -> Declared:
    return Declared(name, "gauge", text, labels, roles)


METRICS: Final[dict[str, Declared]] = {
    m.name: m
    for m in (
        _histogram("stage_seconds", "time of a room in each stage; stages sum to room_seconds", SECONDS,
                   "stage", "peer_pool"),
        _histogram("room_seconds", "from a room's first stage to its end", SECONDS, "result", "peer_pool"),
        _histogram("room_bytes", "bytes moved for a room that is done", BYTES),
        _histogram("room_bytes_per_second", "bytes of a room over its time on the wire", RATES),
        _histogram("room_descriptors", "pieces that a room was posted in", DESCRIPTORS, roles=PREFILL),
        _histogram("descriptor_bytes", "mean bytes of a room's pieces", BYTES, roles=PREFILL),
        _counter("rooms_total", "rooms that ended", "result"),
        _counter("failed_total", "rooms that failed or were aborted, by stage and first cause", "stage", "reason"),
        _counter("bytes_total", "bytes moved", "component", "direction", "peer_pool"),
        _counter("registration_total", "pairs judged", "result"),
        _counter("registration_rejected_total", "refused pairs, by differing field", "field"),
        _counter("verified_layers_total", "layers whose digests were compared", "result", roles=DECODE),
        _counter("lease_expired_total", "computed rooms that nobody claimed in time", roles=PREFILL),
        _counter("expired_then_used_total", "memory used after it was given back: must stay 0"),
        _counter("late_write_fenced_total", "writes that came after their room's end and met quarantined memory",
                 roles=DECODE),
        _counter("duplicate_room_total", "rooms that were open already"),
        _counter("unknown_room_total", "messages about rooms that do not exist here"),
        _counter("fallback_path_total", "times that a slower path was taken, where that is allowed", "kind"),
        _counter("retry_total", "attempts made again", "kind"),
        _counter("heartbeat_send_error_total", "heartbeats that could not be sent"),
        _counter("message_refused_total", "messages that were refused, by code", "code"),
        _counter("unknown_field_total", "optional fields of newer peers that were ignored", "message"),
        _counter("engine_replaced_total", "transport engines that were rebuilt", "reason"),
        _counter("observer_dropped_total", "things that an observer could not keep"),
        _gauge("rooms", "open rooms", "stage"),
        _gauge("oldest_room_seconds", "age of the oldest open room", "stage"),
        _gauge("queue_depth", "requests that wait"),
        _gauge("queue_limit", "requests that may wait"),
        _gauge("pool_units", "pages, rows and slots by state", "space", "state"),
        _gauge("quarantined_bytes", "memory that waits for a fence"),
        _gauge("quarantine_budget_bytes", "memory that may wait for a fence"),
        _gauge("quarantine_oldest_seconds", "age of the oldest piece of quarantined memory"),
        _gauge("staging_used_bytes", "staging ring in use"),
        _gauge("staging_lag_slots", "slots by which the staging ring's consumer is behind"),
        _gauge("peers", "peer instances", "state"),
        _gauge("ready", "1 while new requests should come here"),
        _gauge("stalled_seconds", "time for which own work waits and nothing moves"),
        _gauge("open_fds", "file descriptors of the process"),
        _gauge("threads", "threads of the process"),
    )
}  # fmt: skip
"""Every metric there is, without the prefix. `role` and `backend` are labels of all."""


@dataclass(slots=True)
class _Histogram:
    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class _Family:
    declared: Declared
    values: dict[tuple[str, ...], float] = field(default_factory=dict)
    histograms: dict[tuple[str, ...], _Histogram] = field(default_factory=dict)


class Metrics:
    """The store of one worker, and a collector for `prometheus_client` (it has `collect`). Safe from any thread.

    Metrics of the other role do not exist: `has` says so, and changing one does nothing.
    """

    def __init__(self, role: Role, backend: str, before_collect: Callable[[], None] = lambda: None) -> None:
        self._constant = {"role": role.value, "backend": backend}
        self._before_collect = before_collect
        self._lock = threading.Lock()
        self._families = {n: _Family(m) for n, m in METRICS.items() if role in m.roles}
        for family in self._families.values():
            # A counter starts at zero, so that its first increase is one. Empty labels are no labels to Prometheus.
            if family.declared.kind == "counter" or (family.declared.kind == "gauge" and not family.declared.labels):
                family.values[("",) * len(family.declared.labels)] = 0.0

    def has(self, name: str) -> bool:
        """Whether this role has the metric."""
        return name in self._families

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Increase a counter."""
        self._change(name, "counter", labels, lambda old: old + amount)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._change(name, "gauge", labels, lambda old: value)

    def reset(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Replace all series of a gauge."""
        with self._lock:
            if (family := self._family(name, "gauge")) is not None:
                family.values = {self._key(family, labels, {}): value for labels, value in values.items()}

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one value to a histogram."""
        with self._lock:
            family = self._family(name, "histogram")
            if family is None:
                return
            key = self._key(family, labels, family.histograms)
            buckets = family.declared.buckets
            histogram = family.histograms.setdefault(key, _Histogram([0] * (len(buckets) + 1)))
            histogram.total += value
            place = next((i for i, bound in enumerate(buckets) if value <= bound), len(buckets))
            histogram.counts[place] += 1

    def value(self, name: str, *labels: str) -> float:
        """A counter or gauge as it is, 0 where it has no such series."""
        with self._lock:
            family = self._families.get(name)
            return family.values.get(labels, 0.0) if family else 0.0

    def collect(self) -> Iterable[Any]:
        """`prometheus_client` metric families. Raises `BackendUnavailable` without that package."""
        core = _prometheus("prometheus_client.core")
        self._before_collect()
        constant = list(self._constant.values())
        with self._lock:
            families: list[Any] = []
            for family in self._families.values():
                d = family.declared
                names = [*self._constant, *d.labels]
                if d.kind == "histogram":
                    metric = core.HistogramMetricFamily(PREFIX + d.name, d.help, labels=names)
                    for key, histogram in family.histograms.items():
                        metric.add_metric([*constant, *key], _cumulative(d.buckets, histogram.counts), histogram.total)
                else:
                    made = core.CounterMetricFamily if d.kind == "counter" else core.GaugeMetricFamily
                    metric = made(PREFIX + d.name, d.help, labels=names)
                    for key, value in family.values.items():
                        metric.add_metric([*constant, *key], value)
                families.append(metric)
        return families

    def text(self) -> bytes:
        """The exposition format, for `/metrics`."""
        client = _prometheus("prometheus_client")
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        return bytes(client.generate_latest(registry))

    def _change(self, name: str, kind: str, labels: tuple[str, ...], new: Callable[[float], float]) -> None:
        with self._lock:
            family = self._family(name, kind)
            if family is not None:
                key = self._key(family, labels, family.values)
                family.values[key] = new(family.values.get(key, 0.0))

    def _family(self, name: str, kind: str) -> _Family | None:
        declared = METRICS.get(name)
        if declared is None or declared.kind != kind:
            raise LocalProtocolError(f"no such {kind}", code="internal", where="metrics", actual=name)
        return self._families.get(name)

    @staticmethod
    def _key(family: _Family, labels: tuple[str, ...], series: Mapping[tuple[str, ...], object]) -> tuple[str, ...]:
        if len(labels) != len(family.declared.labels):
            expected = family.declared.labels
            raise LocalProtocolError(
                "labels do not fit", code="internal", where=family.declared.name, expected=expected, actual=labels
            )
        if labels in series or len(series) < MAX_SERIES:
            return labels
        names = family.declared.labels
        return tuple(v if n in OUR_LABELS else "other" for n, v in zip(names, labels, strict=True))


for _count in Count:
    if METRICS[_count.value].kind != "counter" or len(METRICS[_count.value].labels) > 1:
        raise LocalProtocolError("a count has at most one label", code="internal", where=_count.value)


def _cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip((*(f"{b:g}" for b in bounds), "+Inf"), counts, strict=True):
        running += count
        found.append((bound, float(running)))
    return found


def _prometheus(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise BackendUnavailable(
            "metrics are exported by a package that is not here",
            where="prometheus-client",
            hint="pip install 'sglang-pd[server]'",
        ) from None
