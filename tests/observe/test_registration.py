"""One table a registration: what each side registers, or every differing field."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from support.hybrid_state import PAGE, hybrid_state

from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.observe import Identity, Recorder, Settings
from sglang_pd.observe.records import component_lines
from sglang_pd.protocol.handshake import compare
from sglang_pd.protocol.manifest import InstanceManifest, RankId, Topology, Transport
from sglang_pd.protocol.room import Role

CAPACITY = Capacity(tokens=8 * PAGE, page_tokens=PAGE, rows=2, slots=2, swa_tokens=4 * PAGE)
LOCAL = Transport(backend="local")
STATE = hybrid_state()


def manifest(name: str, tp: int, capacity: Capacity = CAPACITY) -> InstanceManifest:
    topology = Topology(tp=tp)
    transport = Transport(backend="local")
    ranks = [layout_rank(STATE, capacity, topology, RankId(0, t)).manifest(t + 1, transport) for t in range(tp)]
    return InstanceManifest(instance_id=name, topology=topology, model="m", ranks=tuple(ranks))


def told(peer: InstanceManifest, caplog: pytest.LogCaptureFixture) -> tuple[dict[str, object], Recorder]:
    own, lines = manifest("own", 1), []
    recorder = Recorder(Identity(Role.PREFILL, "own", 1, "local"), Settings(sink=lines.append))
    with caplog.at_level(logging.INFO):
        recorder.registration(own, peer, compare(own, peer), "memfd")
    (line,) = lines
    return json.loads(line), recorder


def test_an_accepted_pair(caplog: pytest.LogCaptureFixture) -> None:
    line, recorder = told(manifest("peer", 2), caplog)
    assert line["accepted"] and line["peer_epochs"] == [f"{1:016x}", f"{2:016x}"] and line["transport"] == "memfd"
    assert (line["topology"], line["peer_topology"]) == ("pp1 tp1 dcp1", "pp1 tp2 dcp1")
    kinds = {c.kind for c in STATE.components}
    for side in ("own_components", "peer_components"):
        assert {row["kind"] for row in line[side]} == kinds
    assert "accepted" in caplog.text and "QSA_COMPRESSED" in caplog.text
    assert recorder.metrics.value("registration_total", "accepted") == 1
    assert json.loads(recorder.answer("registrations"))[0]["peer"] == "peer"


def test_a_refused_pair_names_every_field(caplog: pytest.LogCaptureFixture) -> None:
    other = replace(CAPACITY, page_tokens=2 * PAGE)
    line, recorder = told(manifest("peer", 1, other), caplog)
    fields = {m["field"] for m in line["mismatches"]}
    assert not line.get("accepted") and "page_tokens" in fields
    assert "REFUSED" in caplog.text and "page_tokens" in caplog.text
    assert all(recorder.metrics.value("registration_rejected_total", name) == 1 for name in fields)


def test_lines_gather_layers_over_all_ranks_of_an_instance() -> None:
    topology = Topology(pp=2)
    ranks = [
        layout_rank(STATE, CAPACITY, topology, RankId(p, 0)).manifest(1, Transport(backend="local")) for p in (0, 1)
    ]
    lines = component_lines(InstanceManifest(instance_id="i", topology=topology, model="m", ranks=tuple(ranks)))
    by_part = {(line.kind, line.part): line for line in lines}
    assert by_part["KV", "k"].layers == "2 4 5"
    assert by_part["QSA_PENDING", "rope"].layers == "request-wide"
    assert by_part["MLA", "latent"].units == "1 replicated" and by_part["KV", "k"].units == "4 of 4"
