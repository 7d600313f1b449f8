"""Runners of both roles: a record is its request's own, and what befalls one job harms no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.reference_run import prompt_ids
from support.runner_pair import RunnerPair, whole

from sglang_pd.engines.base import HandoffRecord
from sglang_pd.protocol.errors import ErrorInfo, RoomError
from sglang_pd.protocol.indices import prompt_digest
from sglang_pd.worker.jobs import Job


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
