"""Runners of both roles: a record is its request's own, and what befalls one job harms no other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.reference_run import prompt_ids
from support.runner_pair import Owner, RunnerPair, whole

from sglang_pd.engines.base import HandoffRecord, Request, Sampling
from sglang_pd.memory.lease import Lease
from sglang_pd.protocol.errors import ErrorInfo, RoomError
from sglang_pd.protocol.indices import prompt_digest
from sglang_pd.worker.jobs import Job, Token

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def runners() -> Iterator[RunnerPair]:
    made = RunnerPair()
    yield made
    made.close()


@pytest.fixture
def pair(runners: RunnerPair) -> Iterator[RunnerPair]:
    yield runners
    runners.idle()


def code_of(end: ErrorInfo | str) -> str:
    return end if isinstance(end, str) else end.code


# --- whose record it is ---


def test_a_record_of_another_prompt_of_that_length_is_refused(
    pair: RunnerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, model and digests of the state that was sent all agree: only the prompt does not."""
    engine = pair.prefill.parts.engine
    real, kept = engine.handoff, list[HandoffRecord]()

    def first_of_all(request_id: str) -> HandoffRecord:
        kept.append(real(request_id))
        return kept[0]

    monkeypatch.setattr(engine, "handoff", first_of_all)
    ids, other = prompt_ids(19, 3), prompt_ids(19, 4)
    _, owner = pair.hand_over(100, "a", ids)
    assert owner.end() == "length" and owner.tokens == whole(ids, 5)
    _, owner = pair.hand_over(101, "b", other)
    error = owner.end()
    assert isinstance(error, ErrorInfo) and error.code == "prompt_mismatch" and not owner.tokens
    assert f"{prompt_digest(other):016x}" in error.expected and f"{prompt_digest(ids):016x}" in error.actual


def test_ids_that_their_owner_overwrites_are_not_the_jobs(pair: RunnerPair) -> None:
    ids = prompt_ids(40, 5)
    want, lent = whole(ids, 5), ids.copy()
    prefill, _ = pair.job(110, "mine", lent)
    decode, owner = pair.job(110, "mine", lent)
    lent[:] = 7
    pair.prefill.submit(prefill)
    pair.decode.submit(decode)
    assert owner.end() == "length" and owner.tokens == want
    with pytest.raises(ValueError, match="read-only"):
        prefill.token_ids[0] = 7


@pytest.mark.parametrize("bad", [[[1, 2]], [1.5], ["1"], [True], [2**70], 5], ids=str)
def test_what_is_no_flat_list_of_ids_makes_no_job(bad: object) -> None:
    with pytest.raises(RoomError, match="flat array of integers"):
        Job(room=1, request_id="x", token_ids=bad, sink=print)  # type: ignore[arg-type]


# --- one request id, one request ---


def test_an_id_that_is_held_is_refused_and_its_holder_unharmed(pair: RunnerPair) -> None:
    """Decode replaced the one that ran and went on with tokens of neither; prefill let the engine forget it."""
    ids, other = prompt_ids(19, 3), prompt_ids(30, 4)
    gates = [pair.closed(runner) for runner in (pair.prefill, pair.decode)]
    _, owner = pair.hand_over(120, "same", ids, max_new_tokens=40)
    for runner, gate in zip((pair.prefill, pair.decode), gates, strict=True):
        for job in (pair.job(121, "same", other)[0], runner._held["same"]):  # another job, and the very same again
            with pytest.raises(RoomError) as queued:
                runner.submit(job)
            assert queued.value.code == "request_duplicate" and "room 120" in str(queued.value)
        gate.set()
    owner.until(lambda: len(owner.tokens) > 3)
    with pytest.raises(RoomError, match="request_duplicate"):
        pair.decode.submit(pair.job(121, "same", other)[0])
    assert owner.end() == "length" and owner.tokens == whole(ids, 39)
    pair.idle()
    _, owner = pair.hand_over(122, "same", other)
    assert owner.end() == "length" and owner.tokens == whole(other, 5), "the id is free again"


def test_an_id_is_free_after_every_kind_of_end(pair: RunnerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ErrorInfo(code="room_aborted", message="on purpose")
    for runner in (pair.prefill, pair.decode):
        gate = pair.closed(runner)
        job, owner = pair.job(130, "again", prompt_ids(9))
        runner.submit(job)
        runner.cancel(job, gone)
        gate.set()
        assert code_of(owner.end()) == "room_aborted", "while it was queued"
        job, owner = pair.job(131, "again", prompt_ids(9))
        runner.submit(job)
        pair.on_engine(runner, lambda: None)
        runner.cancel(job, gone)
        assert code_of(owner.end()) == "room_aborted", "while it held memory"
        pair.idle()
        monkeypatch.setattr(runner, "_begin", lambda job: 1 // 0)
        job, owner = pair.job(132, "again", prompt_ids(9))
        runner.submit(job)
        assert code_of(owner.end()) == "internal", "when it began"
        monkeypatch.undo()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_what_an_engine_refuses_is_not_forgotten_by_it(pair: RunnerPair, side: str) -> None:
    """The engine knows the id for a request that is not the runner's; refusing the job must not end that one."""
    runner = getattr(pair, side)
    engine, held = runner.parts.engine, list[Lease]()

    def take() -> None:
        held.append(runner.parts.allocator.lease(9, window_stop=0))
        engine.start(Request("taken", prompt_ids(9)), held[0].tables())

    pair.on_engine(runner, take)
    owners = pair.hand_over(140 if side == "prefill" else 141, "taken", prompt_ids(19))
    error = owners[side == "decode"].end()
    assert isinstance(error, ErrorInfo) and error.code == "request_rejected" and "known already" in error.message
    assert "taken" in engine._sequences
    pair.on_engine(runner, lambda: (engine.release("taken"), held[0].release()))
    if side == "prefill":
        pair.decode.cancel_all(ErrorInfo(code="room_aborted", message="nobody will come"))


def test_a_probe_that_the_engine_refuses_ends_nobody_else(pair: RunnerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, failed = pair.prefill.parts.engine, list[str]()
    monkeypatch.setattr("sglang_pd.worker.serving.runner.time.monotonic_ns", lambda: 5)

    def collide() -> None:
        lease = pair.prefill.parts.allocator.lease(9, window_stop=0)
        engine.start(Request("probe-5", prompt_ids(9)), lease.tables())
        try:
            pair.prefill.probe()
        except RoomError as error:
            failed.append(error.code)
        failed.extend(engine._sequences)  # type: ignore[attr-defined]
        engine.release("probe-5")
        lease.release()
        assert pair.prefill.probe() >= 0

    pair.on_engine(pair.prefill, collide)
    assert failed == ["request_rejected", "probe-5"]


def test_a_job_that_is_refused_does_not_fail_the_room_of_one_that_waits(pair: RunnerPair) -> None:
    """Decode told prefill of the refusal, and prefill failed the room, which the other job had not opened yet."""
    ids = prompt_ids(19, 3)
    gate = pair.closed(pair.decode)
    waiting, owner = pair.job(150, "waits", ids)
    pair.decode.submit(waiting)
    refused, _ = pair.job(150, "refused", ids)
    pair.decode.decline(refused, ErrorInfo(code="prompt_too_long", message="on purpose"))
    pair.prefill.submit(pair.job(150, "waits", ids)[0])
    pair.settled(150)
    gate.set()
    assert owner.end() == "length" and owner.tokens == whole(ids, 5)


# --- what both sides were asked ---


WARM = Sampling(temperature=1.0, top_p=0.9, top_k=40, seed=21)


def asked(pair: RunnerPair, room: int, prefill: dict[str, Any], decode: dict[str, Any]) -> Owner:
    """Both legs of a room, each with its own wishes; decode's owner."""
    for runner, how in ((pair.prefill, prefill), (pair.decode, decode)):
        job, owner = pair.job(room, "r", prompt_ids(19), **how)
        runner.submit(job)
    return owner


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Sampling(), WARM),
        (WARM, Sampling()),
        *((WARM, msgspec.structs.replace(WARM, **{name: value})) for name, value in
          {"temperature": 0.5, "top_p": 0.8, "top_k": 41, "seed": 22}.items()),
    ],
)  # fmt: skip
def test_legs_that_would_choose_otherwise_are_refused(pair: RunnerPair, prefill: Sampling, decode: Sampling) -> None:
    room = 200 + next(NUMBERS)
    error = asked(pair, room, {"sampling": prefill}, {"sampling": decode}).end()
    assert isinstance(error, ErrorInfo) and error.code == "request_mismatch"
    assert str(decode) in error.expected and str(prefill) in error.actual


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"sampling": WARM}, {"sampling": WARM}),
        ({"sampling": WARM}, {"sampling": msgspec.structs.replace(WARM, seed=9), "any_seed": True}),
        ({"sampling": Sampling(seed=3, top_k=4)}, {}),
    ],
    ids=["equal", "any seed", "greedy whatever the seed"],
)
def test_legs_that_choose_alike_go_on_where_prefill_stopped(
    pair: RunnerPair, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    owner = asked(pair, 200 + next(NUMBERS), prefill, decode)
    assert owner.end() == "length" and owner.tokens == whole(prompt_ids(19), 5, prefill["sampling"])


def test_the_first_token_comes_with_as_many_likeliest_as_were_asked_for(pair: RunnerPair) -> None:
    owner = asked(pair, 200 + next(NUMBERS), {"top": 5}, {"top": 3})
    assert owner.end() == "length"
    assert [len(update.top) for update in owner.told if isinstance(update, Token)] == [3] * 6
    assert code_of(asked(pair, 200 + next(NUMBERS), {"top": 2}, {"top": 3}).end()) == "request_mismatch"


def test_a_record_of_later_draws_is_refused(pair: RunnerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded sampler would go on with other numbers."""
    engine = pair.prefill.parts.engine
    real = engine.handoff
    monkeypatch.setattr(engine, "handoff", lambda name: msgspec.structs.replace(real(name), sampled=2))
    assert code_of(asked(pair, 200 + next(NUMBERS), {}, {}).end()) == "request_rejected"


# --- what befalls one of a batch ---


@pytest.mark.parametrize("what", ["advance", "settle"])
def test_memory_that_fails_one_request_leaves_the_batch_exact(
    pair: RunnerPair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Those behind it were moved on by the engine, but computed their last token again at the next position."""
    gate = pair.closed(pair.decode)
    owners = [pair.hand_over(300 + 10 * len(what) + n, f"b{n}", prompt_ids(9 + n, n), max_new_tokens=40)[1]
              for n in range(3)]  # fmt: skip
    calls = itertools.count()
    real = getattr(Lease, what)

    def once(lease: Lease, stop: int) -> None:
        if lease.state.value == "held" and any(e.lease is lease and e.job.request_id == "b1" and e.produced == 5
                                               for e in pair.decode._jobs.values()) and not next(calls):  # fmt: skip
            raise ZeroDivisionError("on purpose")
        real(lease, stop)

    monkeypatch.setattr(Lease, what, once)
    gate.set()
    assert code_of(owners[1].end()) == "internal"
    for n in (0, 2):
        assert owners[n].end() == "length" and owners[n].tokens == whole(prompt_ids(9 + n, n), 39)


@pytest.mark.parametrize("change", [lambda out: [replace(out[0], request_id="other")], lambda out: []])
def test_tokens_of_another_batch_are_nobodys(pair: RunnerPair, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    engine = pair.decode.parts.engine
    real = engine.decode
    monkeypatch.setattr(engine, "decode", lambda items: change(real(items)))
    _, owner = pair.hand_over(400 + next(NUMBERS), "r", prompt_ids(9))
    error = owner.end()
    assert isinstance(error, ErrorInfo) and "not those of its batch" in error.message and len(owner.tokens) == 1


def test_all_are_given_up_though_one_cannot_be(pair: RunnerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = pair.closed(pair.decode)
    owners = []
    for n in range(3):
        job, owner = pair.job(500 + n, f"b{n}", prompt_ids(9))
        pair.decode.submit(job)
        owners.append(owner)
    real = pair.decode.decline
    monkeypatch.setattr(pair.decode, "decline", lambda job, error: real(job, error) if job.room != 500 else 1 // 0)
    pair.decode.cancel_all(ErrorInfo(code="draining", message="on purpose"))
    gate.set()
    assert [code_of(owner.end()) for owner in owners[1:]] == ["draining"] * 2


def test_memory_that_cannot_be_armed_comes_back(pair: RunnerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, owned in enumerate((pair.decode.parts.pools, Lease)):
        monkeypatch.setattr(owned, "arm", lambda *_: 1 // 0)
        job, owner = pair.job(600 + number, "r", prompt_ids(9))
        pair.decode.submit(job)
        assert code_of(owner.end()) == "internal"
        pair.idle()
        monkeypatch.undo()
