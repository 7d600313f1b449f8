"""Every query of the dashboard and of the alerts, and the table of metrics, against what a real run exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deploy.files import DEPLOY, ROOT, document, walk
from deploy.live import metrics_of_a_run
from prometheus_client.parser import text_string_to_metric_families

from sglang_pd.observe.metrics import METRICS, PREFIX
from sglang_pd.observe.observer import PeerState, Result
from sglang_pd.observe.stages import Stage
from sglang_pd.router.breaker import BreakerState
from sglang_pd.router.metrics import COUNTERS
from sglang_pd.router.metrics import PREFIX as ROUTER_PREFIX

pytestmark = pytest.mark.timeout(180)

TARGET_LABELS = {"instance", "job"}
"""What Prometheus itself adds."""
VALUES = {
    "result": {r.value for r in Result} | {"ok", "saturated", "unavailable", "rejected", "failed", "cancelled"},
    "stage": {s.value for s in Stage},
    "state": {s.value for s in (*PeerState, *BreakerState)} | {"free", "leased", "quarantined"},
    "role": {"prefill", "decode"},
    "direction": {"sent", "received"},
}
FUNCTIONS = {
    "sum", "max", "min", "by", "rate", "increase", "deriv", "histogram_quantile", "without", "on", "ignoring",
}  # fmt: skip


@dataclass
class Exposed:
    """labels: metric sample -> its labels. kinds: family -> type. values: label -> values that were seen."""

    labels: dict[str, set[str]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, set[str]] = field(default_factory=dict)
    roles: dict[str, set[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    found = Exposed()
    for who, text in metrics_of_a_run(tmp_path_factory.mktemp("live")).items():
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            found.kinds[name] = family.type
            found.roles.setdefault(name, set()).add(who)
            for sample in family.samples:
                found.labels.setdefault(sample.name, set()).update(sample.labels)
                for label, value in sample.labels.items():
                    found.values.setdefault(label, set()).add(value)
    for name, (_, labels) in COUNTERS.items():  # of events that a short run does not have: labels as declared
        if ROUTER_PREFIX + name in found.kinds:
            found.labels.setdefault(ROUTER_PREFIX + name, set(labels))
    return found


@dataclass
class Query:
    """A PromQL expression taken apart: selectors with their matchers, and all labels that are grouped by."""

    text: str
    selectors: list[tuple[str, dict[str, tuple[str, str]]]]
    grouped: set[str]


def taken_apart(text: str) -> Query:
    """Raises AssertionError for a word that is neither a function nor a metric: a misspelt one, say."""
    matchers = r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"'
    selectors = []
    rest = text
    for name, braces in re.findall(r"(sglang_pd_\w+)\s*(\{[^}]*\})?", text):
        selectors.append((name, {k: (op, v) for k, op, v in re.findall(matchers, braces)}))
    rest = re.sub(r"sglang_pd_\w+\s*(\{[^}]*\})?", " ", rest)
    grouped: set[str] = set()
    for labels in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", rest):
        grouped |= {label.strip() for label in labels.split(",")}
    rest = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", rest)
    rest = re.sub(r"\[[^\]]*\]", " ", rest)
    words = set(re.findall(r"[A-Za-z_]\w*", rest))
    assert words <= FUNCTIONS, f"{text}: what is {sorted(words - FUNCTIONS)}?"
    assert selectors, f"{text}: no metric"
    return Query(text, selectors, grouped)


def wrong(query: Query, exposed: Exposed) -> Iterator[str]:
    """What does not hold of a query, by what was exposed."""
    for name, matchers in query.selectors:
        if name not in exposed.labels:
            yield f"{name}: no such metric has a sample"
            continue
        labels = exposed.labels[name] | TARGET_LABELS
        yield from (f"{name} has no label {label}" for label in (set(matchers) | query.grouped) - labels)
        for label, (op, value) in matchers.items():
            known = VALUES.get(label, set()) | exposed.values.get(label, set())
            wanted = {value} if op in ("=", "!=") else set(value.split("|"))
            wanted = {v for v in wanted if v and not v.startswith("$") and v != ".*"}
            if label != "reason":  # those are codes
                yield from (f"{name}{{{label}}} is never {v}" for v in wanted - known)
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        counts = exposed.kinds.get(name) == "counter" or exposed.kinds.get(family) == "histogram"
        used_as_rate = re.search(rf"(rate|increase)\({name}\b", query.text)
        if bool(used_as_rate) != counts:
            yield f"{name}: rate and increase are for counters, and counters for them"
    if "histogram_quantile" in query.text and "le" not in query.grouped:
        yield "histogram_quantile needs le"


def dashboard() -> list[dict[str, object]]:
    found = json.loads((DEPLOY / "grafana/sglang-pd.json").read_text(encoding="utf-8"))
    return [panel for panel in found["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, str]]:
    """Where, expression, legend."""
    for panel in dashboard():
        for target in panel["targets"]:  # type: ignore[attr-defined]
            yield str(panel["title"]), target["expr"], target["legendFormat"]
    for group in document(DEPLOY / "prometheus/alerts.yaml")["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], str(rule["annotations"])


def test_every_query_finds_its_metrics_and_labels(exposed: Exposed) -> None:
    found = []
    for where, text, legend in queries():
        query = taken_apart(text)
        found += [f"{where}: {problem}" for problem in wrong(query, exposed)]
        aggregated = re.match(r"(1 - )?(sum|max|min|histogram_quantile)\b", text.strip()) is not None
        labels = query.grouped if aggregated else exposed.labels.get(query.selectors[0][0], set()) | TARGET_LABELS
        shown = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", legend))
        found += [f"{where}: {label} is shown and not there" for label in shown - labels]
    assert not found, "\n".join(found)


def test_metrics_are_seen_by_somebody(exposed: Exposed) -> None:
    """A metric that no panel and no alert shows is one that nobody looks at, unless the runbook says when to."""
    shown = {re.sub(r"_(bucket|sum|count)$", "", n) for _, text, _ in queries() for n, _ in taken_apart(text).selectors}
    runbook = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    unseen = [n for n in exposed.kinds if n not in shown and f"`{n}`" not in runbook]
    assert not unseen


def test_the_table_of_metrics_is_what_is_exposed(exposed: Exposed) -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(sglang_pd_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", text, re.MULTILINE)
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels)), who.strip()) for name, kind, labels, who, _ in rows}
    assert len(told) == len(rows), "a metric stands twice"
    assert set(told) == set(exposed.kinds)
    for name, (kind, labels, who) in told.items():
        assert kind == exposed.kinds[name], name
        assert who == " ".join(sorted(exposed.roles[name], key=["prefill", "decode", "router"].index)), name
        samples = [s for s in (name, f"{name}_count") if s in exposed.labels]
        if samples:
            assert labels == exposed.labels[samples[0]] - {"role", "backend"} | (labels & {"role"}), name


def test_every_declared_metric_has_a_sample(exposed: Exposed) -> None:
    missing = [n for n in METRICS if not {PREFIX + n, f"{PREFIX}{n}_count"} & set(exposed.labels)]
    assert not missing


def test_alerts_have_what_alertmanager_and_people_need() -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs/operations.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
    rules = [r for g in document(DEPLOY / "prometheus/alerts.yaml")["groups"] for r in g["rules"]]
    assert len({r["alert"] for r in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert Path(ROOT / path).is_file() and anchor in anchors, f"{rule['alert']}: no entry {anchor}"
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


def test_panels_have_a_place_and_a_data_source() -> None:
    panels = dashboard()
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]  # type: ignore[index]
    assert len(set(places)) == len(places)
    for found in walk(json.loads((DEPLOY / "grafana/sglang-pd.json").read_text())):
        if "datasource" in found:
            assert found["datasource"] == {"type": "prometheus", "uid": "$datasource"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rate(sglang_pd_room_total[5m])", "no such metric"),
        ("sum by (stge) (rate(sglang_pd_failed_total[5m]))", "no label stge"),
        ('rate(sglang_pd_rooms_total{result="don"}[5m])', "never don"),
        ("sglang_pd_rooms_total", "for counters"),
        ("histogram_quantile(0.5, sum by (role) (rate(sglang_pd_room_bytes_bucket[5m])))", "needs le"),
    ],
)
def test_wrong_queries_are_noticed(exposed: Exposed, text: str, problem: str) -> None:
    assert any(problem in found for found in wrong(taken_apart(text), exposed))
