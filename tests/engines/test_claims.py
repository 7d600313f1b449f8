"""Engines refuse memory that a call may not name: one request twice in a batch, another lease's tables, old ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.reference_run import DECODE, PREFILL, SPARSE, Host, Running, hand_over, prompt_ids
from support.transformers_run import engine, host, prompt

from sglang_pd.engines.base import DecodeItem, PrefillChunk, Request
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.protocol.errors import RoomError

torch.set_num_threads(1)

ENGINES = ("reference", "transformers")


def side(name: str, size: Any = PREFILL, number: int = 0) -> tuple[Host, Any]:
    """An instance, and how its prompts are made."""
    if name == "reference":
        return Host(SPARSE, size), prompt_ids
    return host(engine("Qwen4ExpForCausalLM", number=number), size), prompt


def step(run: Running) -> DecodeItem:
    run.lease.advance(run.stop + 1)
    return DecodeItem(run.name, run.tokens[-1], run.lease.tables())


def after(at: Host, runs: list[Running]) -> list[tuple[list[int], list[bytes]]]:
    """Two steps more: tokens and logits."""
    at.decode(runs, 2)
    return [(run.tokens, [row.tobytes() for row in run.logits]) for run in runs]


@pytest.mark.parametrize("name", ENGINES)
def test_a_batch_names_each_request_and_each_lease_once(name: str) -> None:
    """A refused batch leaves no trace: the requests go on as if it had not been."""
    want = []
    for refused in (False, True):
        at, ids = side(name)
        runs = [at.prefill("a", ids(13)), at.prefill("b", ids(9, 8))]
        if refused:
            a, b = (step(run) for run in runs)
            with pytest.raises(RoomError, match="batch twice") as twice:
                at.engine.decode([a, b, a])
            assert (twice.value.code, twice.value.where) == ("request_rejected", "a")
            with pytest.raises(LeaseError, match="name one lease"):
                at.engine.decode([a, DecodeItem("b", b.token, a.tables)])
        want.append(after(at, runs))
    assert want[0] == want[1]


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_stays_on_its_lease(name: str) -> None:
    at, ids = side(name)
    lease, other = (at.allocator.lease(9, window_stop=0) for _ in range(2))
    at.engine.start(Request("a", ids(9)), lease.tables())
    for each in (lease, other):
        each.advance(9)
    with pytest.raises(LeaseError, match="another lease"):
        at.engine.prefill(PrefillChunk("a", 0, 9, other.tables()))
    output = at.engine.prefill(PrefillChunk("a", 0, 9, lease.tables()))
    assert output is not None
    for each in (lease, other):
        each.advance(10)
    with pytest.raises(LeaseError, match="another lease"):
        at.engine.decode([DecodeItem("a", output.token, other.tables())])
    assert at.engine.decode([DecodeItem("a", output.token, lease.tables())])


@pytest.mark.parametrize("name", ENGINES)
def test_tables_of_a_lease_that_is_over_are_refused_once_its_place_is_taken(name: str) -> None:
    """Started with old tables, a request cleared its neighbour's slot."""
    want = []
    for intruded in (False, True):
        at, ids = side(name)
        gone = at.prefill("gone", ids(13))
        gone.lease.advance(14)
        old = gone.lease.tables()
        gone.lease.release()  # but the engine was not told
        run = at.prefill("b", ids(9, 8))
        assert run.lease.tables().slot is not None and old.slot is not None
        assert run.lease.tables().slot.lower() == old.slot.lower(), "the slot is used again"
        if intruded:
            with pytest.raises(LeaseError, match="lease that is over"):
                at.engine.start(Request("c", ids(5)), old)
            with pytest.raises(LeaseError, match="lease that is over"):
                at.engine.decode([DecodeItem("gone", gone.tokens[-1], old)])
        want.append(after(at, [run]))
    assert want[0] == want[1]


@pytest.mark.parametrize("name", ENGINES)
def test_a_record_is_not_admitted_on_a_lease_that_is_over(name: str) -> None:
    source, ids = side(name)
    destination, _ = side(name, DECODE, 1)
    early = hand_over(source, source.prefill("early", ids(13)), destination)
    old = early.lease.tables()
    early.lease.release()
    run = source.prefill("r", ids(9, 8))
    record = source.engine.handoff("r")
    arrived = hand_over(source, run, destination)
    assert arrived.lease.tables().slot.lower() == old.slot.lower()  # type: ignore[union-attr]
    with pytest.raises(LeaseError, match="lease that is over"):
        destination.engine.admit("other", record, old)
