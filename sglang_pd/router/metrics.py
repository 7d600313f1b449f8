"""The router's metrics, in a store of their own; the global registry is never touched. No label names a room.

Counters are kept here; gauges are read from the fleet when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from sglang_pd.router.fleet import Fleet

PREFIX: Final = "sglang_pd_router_"
MAX_SERIES: Final = 1024
"""Most label combinations of one metric; further ones are counted under `other`."""

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)

COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "requests_total": ("requests that ended", ("path", "result")),
    "attempts_total": ("attempts that were dispatched to both legs", ("path",)),
    "retries_total": ("attempts made again in new rooms", ("leg", "code")),
    "leg_failures_total": ("legs that failed, by first cause", ("role", "worker", "code")),
    "breaker_opened_total": ("times that a worker's breaker opened", ("role", "worker")),
    "worker_replaced_total": ("workers found replaced behind their URL", ("role", "worker")),
    "disconnects_total": ("clients that went away before their answer's end", ("path",)),
    "lingering_total": ("legs that went on without a client: their worker does not cancel there", ()),
}
HISTOGRAMS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "first_byte_seconds": ("from a request's arrival to its answer's beginning, retries included", ("path",)),
    "request_seconds": ("from a request's arrival to its end", ("path", "result")),
}


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total: float = 0.0


class RouterMetrics:
    """Counters, and a collector for `prometheus_client`. For one event loop, not for threads.

    inflight, inflight_limit: requests. fleet: read for the gauges.
    """

    def __init__(self, fleet: Fleet, inflight_limit: int) -> None:
        self._fleet = fleet
        self.inflight = 0
        self._limit = inflight_limit
        self._counters: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in COUNTERS}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {name: {} for name in HISTOGRAMS}

    def add(self, name: str, *labels: str) -> None:
        """Count one."""
        series = self._counters[name]
        key = labels if labels in series or len(series) < MAX_SERIES else ("other",) * len(labels)
        series[key] = series.get(key, 0.0) + 1.0

    def observe(self, name: str, value_s: float, *labels: str) -> None:
        """One duration in seconds."""
        histogram = self._histograms[name].setdefault(labels, _Histogram())
        histogram.total += value_s
        histogram.counts[next((i for i, bound in enumerate(BUCKETS_S) if value_s <= bound), len(BUCKETS_S))] += 1

    def value(self, name: str, *labels: str) -> float:
        """A counter as it is."""
        return self._counters[name].get(labels, 0.0)

    def text(self) -> bytes:
        """The exposition format, for `/metrics`."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterable[Any]:
        """The metric families."""
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name.removesuffix("_total"), text, labels=labels)
            series = self._counters[name] or ({} if labels else {(): 0.0})
            for key, value in series.items():
                counter.add_metric(key, value)
            yield counter
        for name, (text, labels) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            for key, histogram in self._histograms[name].items():
                family.add_metric(key, _cumulative(histogram.counts), histogram.total)
            yield family
        yield from self._gauges()

    def _gauges(self) -> Iterator[Any]:
        yield GaugeMetricFamily(PREFIX + "inflight", "requests that run", value=self.inflight)
        yield GaugeMetricFamily(PREFIX + "inflight_limit", "requests that may run", value=self._limit)
        ready = self._fleet.ready() is None
        yield GaugeMetricFamily(PREFIX + "ready", "1 while some pair takes requests", value=ready)
        labels = ("role", "worker")
        rooms = GaugeMetricFamily(PREFIX + "rooms", "open rooms of this router", labels=labels)
        up = GaugeMetricFamily(PREFIX + "worker_up", "1 while the worker answers", labels=labels)
        eligible = GaugeMetricFamily(PREFIX + "worker_eligible", "1 while it gets new rooms", labels=labels)
        breaker = GaugeMetricFamily(PREFIX + "breaker", "1 for the breaker's state", labels=(*labels, "state"))
        for worker in self._fleet.workers:
            key = (worker.role, worker.url)
            rooms.add_metric(key, worker.rooms)
            up.add_metric(key, worker.sight.up)
            eligible.add_metric(key, not worker.obstacle)
            breaker.add_metric((*key, worker.breaker.state.value), 1)
        yield from (rooms, up, eligible, breaker)


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    found, running = [], 0
    for bound, count in zip((*(f"{b:g}" for b in BUCKETS_S), "+Inf"), counts, strict=True):
        running += count
        found.append((bound, float(running)))
    return found
