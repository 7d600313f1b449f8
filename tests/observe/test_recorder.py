"""Records, metrics, health and dumps of one worker that is told by hand, on a clock that is turned by hand."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from sglang_pd.observe import (
    Condition,
    Count,
    Identity,
    Observer,
    PeerState,
    Pool,
    Quarantine,
    Recorder,
    Result,
    RoomFacts,
    RoomKey,
    Settings,
    Stage,
)
from sglang_pd.observe.metrics import MAX_SERIES, METRICS, PREFIX, Metrics
from sglang_pd.observe.stages import ROLE_STAGES
from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, TransferError
from sglang_pd.protocol.room import Role

SECOND = 10**9


@dataclass
class Told:
    """A recorder with its clock and the lines it wrote."""

    role: Role
    now_ns: int = 5 * SECOND
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = Settings(
            stall_s=10,
            clock=lambda: self.now_ns,
            wall=lambda: 1e9,
            sink=lambda line: self.lines.append(json.loads(line)),
        )
        self.recorder = Recorder(Identity(self.role, "me", 7, "local"), settings)

    def room(self, room: int, result: Result = Result.DONE, cause: ErrorInfo | None = None, nbytes: int = 4096) -> None:
        key = RoomKey(room, 1)
        facts = RoomFacts("req-1", "00-ab", "peer", 9, ("pp0/tp0",), ("pp0/tp0",), 37, 16, {"Page": 3})
        stages = ROLE_STAGES[self.role]
        self.recorder.room_opened(key, RoomFacts(request_id="req-1"), stages[0])
        self.recorder.room_facts(key, facts)
        for stage in stages[1:]:
            self.now_ns += SECOND // 8
            self.recorder.stage(key, stage)
            if stage is Stage.WIRE:
                self.recorder.bytes_moved(key, "KV", nbytes, 4)
                self.recorder.bytes_moved(key, "KV", nbytes, 4)
                self.recorder.bytes_moved(key, "MAMBA", 64, 1)
            if stage is Stage.VERIFY:
                self.recorder.verified(key, "KV", 3, 1)
        self.now_ns += SECOND // 8
        self.recorder.room_ended(key, result, cause)

    def samples(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for family in text_string_to_metric_families(self.recorder.metrics.text().decode()):
            for sample in family.samples:
                found.setdefault(sample.name.removeprefix(PREFIX), []).append(sample)
        return found

    def value(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self.samples()[name] if labels.items() <= s.labels.items())


@pytest.fixture(params=list(Role), ids=lambda role: role.value)
def told(request: pytest.FixtureRequest) -> Iterator[Told]:
    yield Told(request.param)


# Records


def test_one_line_a_room_with_everything(told: Told) -> None:
    told.room(2**62)
    (line,) = told.lines
    assert line["event"] == "room" and line["room"] == 2**62 and line["generation"] == 1
    assert (line["role"], line["instance"], line["epoch"], line["backend"]) == (
        told.role.value,
        "me",
        f"{7:016x}",
        "local",
    )
    assert (line["peer"], line["peer_epoch"], line["request_id"]) == ("peer", f"{9:016x}", "req-1")
    assert (line["prompt_tokens"], line["prefix_tokens"], line["pages"]) == (37, 16, {"Page": 3})
    assert line["bytes"] == {"KV": 8192, "MAMBA": 64} and line["descriptors"] == 9 and line["result"] == "done"
    assert sum(line["stage_s"].values()) == pytest.approx(line["total_s"], abs=1e-9)
    assert set(line["stage_s"]) == {stage.value for stage in ROLE_STAGES[told.role]}
    assert "cause" not in line
    assert line.get("verified_layers", 0) == (3 if told.role is Role.DECODE else 0)


def test_the_first_cause_is_in_the_record_with_its_stage(told: Told) -> None:
    cause = TransferError("the peer's kernel reset it", where="rank pp0/tp1", actual="ECONNRESET").info()
    told.room(1, Result.FAILED, cause)
    (line,) = told.lines
    assert line["cause"]["code"] == "transfer_failed" and line["cause"]["where"] == "rank pp0/tp1"
    last = ROLE_STAGES[told.role][-1].value
    assert line["last_stage"] == last
    assert told.value("failed_total", stage=last, reason="transfer_failed") == 1
    assert told.value("rooms_total", result="failed") == 1 and told.value("rooms_total", result="done") == 0


def test_a_second_end_changes_nothing(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.room(1)
    with caplog.at_level(logging.WARNING):
        told.recorder.room_ended(RoomKey(1, 1), Result.FAILED, None)
    assert len(told.lines) == 1 and told.value("rooms_total") == 1 and "not open" in caplog.text


def test_a_broken_sink_stops_nobody() -> None:
    def broken(line: str) -> None:
        raise OSError("disk full")

    recorder = Recorder(Identity(Role.PREFILL, "me", 1, "local"), Settings(sink=broken))
    recorder.room_opened(RoomKey(1, 1), RoomFacts(), Stage.QUEUE)
    recorder.room_ended(RoomKey(1, 1), Result.DONE, None)
    assert recorder.metrics.value("observer_dropped_total") == 1


def test_what_is_told_of_no_room_and_of_no_stage_is_counted(told: Told) -> None:
    told.recorder.stage(RoomKey(5, 5), Stage.WIRE)
    told.recorder.bytes_moved(RoomKey(5, 5), "KV", 1)
    wrong = Stage.ADMIT if told.role is Role.PREFILL else Stage.POST
    told.recorder.room_opened(RoomKey(6, 1), RoomFacts(), Stage.QUEUE)
    told.recorder.stage(RoomKey(6, 1), wrong)
    told.recorder.room_ended(RoomKey(6, 1), Result.DONE, None)
    assert told.recorder.metrics.value("observer_dropped_total") == 2
    assert told.lines[-1]["last_stage"] == "queue"


# Metrics


def test_after_one_room_every_metric_of_the_role_has_a_sample_and_no_other(told: Told) -> None:
    told.recorder.pool(Pool("Page", 1, 2, 3))
    told.room(1)
    have = {family.name for family in text_string_to_metric_families(told.recorder.metrics.text().decode())
            if family.samples}  # fmt: skip
    want = {PREFIX + m.name.removesuffix("_total") for m in METRICS.values() if told.role in m.roles}
    assert have == want
    other = next(role for role in Role if role is not told.role)
    assert any(m.roles == frozenset({other}) for m in METRICS.values())


def test_stage_histograms_have_one_sample_a_room(told: Told) -> None:
    for room in range(3):
        told.room(room)
    counts = [s for s in told.samples()["stage_seconds_count"] if s.labels["peer_pool"] == "peer"]
    assert {s.labels["stage"]: s.value for s in counts} == {s.value: 3.0 for s in ROLE_STAGES[told.role]}
    assert told.value("stage_seconds_sum") == pytest.approx(told.value("room_seconds_sum"), abs=1e-3)


def test_two_sizes_are_in_two_buckets(told: Told) -> None:
    """OB-02."""
    told.room(1, nbytes=1000)
    told.room(2, nbytes=10_000_000)
    counts = sorted({s.value for s in told.samples()["room_bytes_bucket"]})
    assert counts == [0.0, 1.0, 2.0]


def test_bytes_by_component_peer_and_direction(told: Told) -> None:
    """OB-08."""
    told.room(1)
    direction = "sent" if told.role is Role.PREFILL else "received"
    assert told.value("bytes_total", component="KV", peer_pool="peer", direction=direction) == 8192


ROOMS = range(10**15 + 7, 10**15 + 57)


def test_no_label_names_a_room(told: Told) -> None:
    for room in ROOMS:
        told.room(room)
    text = told.recorder.metrics.text().decode()
    assert "req-1" not in text and not any(f'"{room}"' in text for room in ROOMS)
    assert not {"room", "request", "request_id", "generation"} & {x for m in METRICS.values() for x in m.labels}


def test_strangers_cannot_grow_the_store() -> None:
    metrics = Metrics(Role.DECODE, "local")
    for i in range(20 * MAX_SERIES):
        metrics.observe("stage_seconds", 1.0, "wire", f"peer-{i}")
        metrics.add("message_refused_total", 1, f"code-{i}")
    text = metrics.text().decode()
    assert metrics.value("message_refused_total", "other") > 0
    assert text.count(PREFIX + "message_refused_total{") <= MAX_SERIES + 1
    assert text.count(PREFIX + "stage_seconds_count{") <= MAX_SERIES + 1
    assert 'peer_pool="other",role="decode",stage="wire"' in text


def test_the_global_registry_is_untouched(told: Told) -> None:
    before = set(REGISTRY._names_to_collectors)
    told.room(1)
    told.recorder.metrics.text()
    twin = Told(told.role)
    twin.room(1)
    assert twin.value("rooms_total") == 1
    assert set(REGISTRY._names_to_collectors) == before and not any(PREFIX in name for name in before)


def test_every_count_has_its_metric() -> None:
    for role in Role:
        recorder = Recorder(Identity(role, "me", 1, "local"), Settings())
        for what in Count:
            recorder.count(what, "x", 2)
            labels = ("x",) * len(METRICS[what.value].labels)
            expected = 2 if role in METRICS[what.value].roles else 0
            assert recorder.metrics.value(what.value, *labels) == expected


def test_a_metric_that_is_not_declared_is_a_defect() -> None:
    metrics = Metrics(Role.DECODE, "local")
    for call in (
        lambda: metrics.add("nope"),
        lambda: metrics.set("rooms_total", 1),
        lambda: metrics.add("retry_total"),
    ):
        with pytest.raises(LocalProtocolError):
            call()


def test_gauges(told: Told) -> None:
    told.recorder.pool(Pool("Page", 10, 5, 2))
    told.recorder.queue(3, 8)
    told.recorder.quarantine(Quarantine(4096, 8192, told.now_ns))
    told.recorder.peer("a", 1, PeerState.READY)
    told.recorder.peer("b", 1, PeerState.LOST, "killed")
    told.recorder.room_opened(RoomKey(1, 1), RoomFacts(), Stage.QUEUE)
    told.now_ns += 2 * SECOND
    assert told.value("pool_units", state="quarantined", space="Page") == 2
    assert (told.value("queue_depth"), told.value("queue_limit")) == (3, 8)
    assert (told.value("quarantined_bytes"), told.value("quarantine_oldest_seconds")) == (4096, 2)
    assert told.value("peers", state="lost") == 1 and told.value("peers", state="refused") == 0
    assert told.value("rooms", stage="queue") == 1 and told.value("oldest_room_seconds", stage="queue") == 2
    assert told.value("open_fds") > 0 and told.value("threads") > 0
    told.recorder.room_ended(RoomKey(1, 1), Result.ABORTED, None)
    assert told.value("rooms") == 0 and told.value("oldest_room_seconds") == 0


# Health and dump


def test_not_ready_when_work_waits_and_nothing_moves(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    recorder = told.recorder
    assert recorder.health().condition is Condition.STARTING
    recorder.ready()
    told.now_ns += 100 * SECOND
    assert recorder.health().is_ready, "idle is not stalled"
    recorder.queue(1, 8)
    recorder.decision("pp0/tp1", "idle")
    recorder.decision("pp0/tp0", "await_open", RoomKey(4, 2), "x" * 1000)
    told.now_ns += 9 * SECOND
    recorder.queue(2, 8)
    assert recorder.health().is_ready, "a longer queue is not progress, and not yet a stall"
    told.now_ns += SECOND
    with caplog.at_level(logging.ERROR):
        state = recorder.health()
        recorder.health()
    assert state.condition is Condition.STALLED and "10.0 s" in state.reason
    assert caplog.text.count("stalled:") == 1, "the dump is logged once"
    assert "pp0/tp1" in caplog.text and "await_open room 4/2" in caplog.text, "every rank is in the dump, idle ones too"
    assert told.value("ready") == 0 and told.value("stalled_seconds") == 10
    told.room(1)
    assert recorder.health().is_ready, "one room ended: it moves"
    recorder.queue(0, 8)
    told.now_ns += 100 * SECOND
    assert recorder.health().is_ready
    recorder.draining("SIGTERM")
    assert recorder.health().condition is Condition.DRAINING and recorder.health().reason == "SIGTERM"


def test_an_open_room_that_does_not_move_stalls_too(told: Told) -> None:
    told.recorder.ready()
    told.recorder.room_opened(RoomKey(1, 1), RoomFacts(), Stage.QUEUE)
    told.now_ns += 10 * SECOND
    assert told.recorder.health().condition is Condition.STALLED
    told.recorder.bytes_moved(RoomKey(1, 1), "KV", 1)
    assert told.recorder.health().is_ready, "slow is not stalled"


def test_dump(told: Told) -> None:
    recorder = told.recorder
    recorder.peer("p", 9, PeerState.READY)
    told.room(3)
    recorder.room_opened(RoomKey(1, 1), RoomFacts(peer="p", prompt_tokens=5), Stage.QUEUE)
    told.now_ns += SECOND
    recorder.bytes_moved(RoomKey(1, 1), "KV", 77)
    for i in range(1000):
        recorder.decision("pp0/tp0", f"step-{i}")
    dump = json.loads(recorder.answer("dump"))
    (room,) = dump["rooms"]
    assert (room["room"], room["stage"], room["age_s"], room["moved_bytes"]) == (1, "queue", 1.0, 77)
    assert dump["peers"][0]["state"] == "ready" and dump["ended"][0]["room"] == 3
    ring = dump["decisions"]["pp0/tp0"]
    assert len(ring) == 256 and ring[-1][1] == "step-999"
    assert "step-999" in recorder.dump().text() and "queue" in recorder.dump().text()
    assert "error" in json.loads(recorder.answer("quit")) and json.loads(recorder.answer("health"))


def test_tables_are_bounded() -> None:
    told = Told(Role.DECODE)
    for i in range(10_000):
        told.recorder.peer(f"p{i}", 1, PeerState.LOST if i % 2 else PeerState.READY)
    assert len(told.recorder.dump().peers) <= 4096
    for i in range(70_000):
        told.recorder.room_opened(RoomKey(i, 1), RoomFacts(), Stage.QUEUE)
    assert len(told.recorder.dump().rooms) == 65_536


def test_the_null_observer_takes_everything() -> None:
    """Whoever overrides an `Observer` overrides all of it: `Recorder` does, with the same parameters."""
    for name, method in inspect.getmembers(Observer, inspect.isfunction):
        assert (
            inspect.signature(getattr(Recorder, name)).parameters.keys() == inspect.signature(method).parameters.keys()
        )
        assert name in vars(Recorder)
    Observer().room_opened(RoomKey(1, 1), RoomFacts(), Stage.QUEUE)
