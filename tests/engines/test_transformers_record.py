"""What travels beside the pools: every counter and flag of the caches, and nothing that contradicts them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from support.reference_run import DECODE, PREFILL, Host, Running, hand_over
from support.transformers_run import NAMED, engine, host, prompt

from sglang_pd.engines.base import HandoffRecord, PrefillChunk, Request
from sglang_pd.engines.transformers.engine import Extra
from sglang_pd.engines.transformers.walk import name_of
from sglang_pd.protocol.errors import RoomError
from sglang_pd.protocol.indices import prompt_digest

QWEN4 = "Qwen4ExpForCausalLM"


def handed(name: str) -> tuple[Host, Running, HandoffRecord]:
    source, destination = host(engine(name), PREFILL), host(engine(name, number=1), DECODE)
    arrived = hand_over(source, source.prefill("r", prompt(13)), destination)
    record = HandoffRecord.decode(source.engine.handoff("r").encode())
    destination.engine.release("r")
    return destination, arrived, record


def refused(name: str, **change: Any) -> str:
    destination, arrived, record = handed(name)
    with pytest.raises(RoomError) as error:
        destination.engine.admit("r", msgspec.structs.replace(record, **change), arrived.lease.tables())
    assert error.value.code == "request_rejected"
    return str(error.value)


def scalars(record: HandoffRecord) -> list[int | bool]:
    return msgspec.msgpack.decode(record.extra, type=Extra).scalars


EXPECTED = {
    QWEN4: {"is_initialized", "is_indexer_initialized", "has_previous_state", "is_conv_states_initialized",
            "is_recurrent_states_initialized", "conv_kernel_size"},
    "GptOssForCausalLM": {"is_initialized", "cumulative_length"},
    "DeepseekV32ForCausalLM": {"is_initialized", "is_indexer_initialized"},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_flags_and_counters_are_state(name: str) -> None:
    walk = engine(name).walk
    assert {scalar.path[0] for scalar in walk.scalars} == EXPECTED[name]
    _, _, record = handed(name)
    assert scalars(record) == [scalar.at(13) for scalar in walk.scalars]


@pytest.mark.parametrize("name", [QWEN4, "GptOssForCausalLM"])
def test_every_scalar_that_is_wrong_is_noticed(name: str) -> None:
    destination, arrived, record = handed(name)
    true = scalars(record)
    for number, scalar in enumerate(engine(name).walk.scalars):
        wrong = list(true)
        wrong[number] = not wrong[number] if isinstance(wrong[number], bool) else wrong[number] + 1
        forged = msgspec.structs.replace(record, extra=msgspec.msgpack.encode(Extra(wrong)))
        with pytest.raises(RoomError) as error:
            destination.engine.admit("r", forged, arrived.lease.tables())
        assert name_of(scalar.layer, scalar.path) in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_scalars_are_read_by_the_model(name: str) -> None:
    """What the record carries is not decoration: a cache without it fails, or says something else."""
    destination, arrived, record = handed(name)
    one: Any = destination.engine
    token = np.array([[record.first_token]])

    def logits(skip: int | None) -> bytes:
        one.admit("r", record, arrived.lease.tables())
        cache = one._caches["r",]
        if skip is not None:
            scalar = one.walk.scalars[skip]
            fresh = one.source.new_cache().layers[scalar.layer]
            blank = vars(fresh)[scalar.path[0]]
            put_value = blank if scalar.path[1] is None else blank[scalar.path[1]]
            target = vars(cache.layers[scalar.layer])
            if scalar.path[1] is None:
                target[scalar.path[0]] = put_value
            else:
                target[scalar.path[0]][scalar.path[1]] = put_value
        arrived.lease.advance(14)
        one._running["r"].tables = arrived.lease.tables()
        try:
            result: bytes = one._step([one._running["r"]], token).tobytes()
        finally:
            one.release("r")
        return result

    want = logits(None)
    for number, scalar in enumerate(one.walk.scalars):
        try:
            changed = logits(number) != want
        except Exception:  # the library, or our own check of the cache after the step
            changed = True
        assert changed, name_of(scalar.layer, scalar.path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "another"}, "another model"),
        ({"first_token": 97}, "not possible"),
        ({"prompt_tokens": 512}, "not possible"),
        ({"extra": b""}, "do not decode"),
        ({"extra": b"\x91\x92\x01\x02"}, "other counters"),
        ({"extra": b"\xc1" * 99}, "do not decode"),
    ],
    ids=str,
)
def test_foreign_records_are_refused(change: dict[str, Any], words: str) -> None:
    assert words in refused(QWEN4, **change)


def test_a_record_of_another_length_is_refused_where_a_cache_counts_tokens() -> None:
    assert "cumulative_length" in refused("GptOssForCausalLM", prompt_tokens=12)


def test_a_request_that_runs_is_not_replaced_by_one_of_its_name() -> None:
    destination, arrived, record = handed(QWEN4)
    destination.engine.admit("r", record, arrived.lease.tables())
    cache = destination.engine._caches["r",]
    with pytest.raises(RoomError, match="known already"):
        destination.engine.admit("r", record, destination.allocator.lease(13).tables())
    assert destination.engine._caches["r",] is cache
    destination.decode([arrived], 3)


def test_a_record_names_the_ids_that_were_computed() -> None:
    """Whoever lent the array may overwrite it; and a prompt that changes under the engine is told as it was read."""
    one, ids, other = engine(QWEN4), prompt(13), prompt(13, 3)
    source = host(one, PREFILL)
    for number, change in enumerate(("lent", "own")):
        lent, lease = ids.copy(), source.allocator.lease(13, window_stop=0)
        one.start(Request(change, lent), lease.tables())
        one.prefill(PrefillChunk(change, 0, 6, lease.tables()))
        lent[:] = other
        if number:
            one._running[change].prompt = other
        one.prefill(PrefillChunk(change, 6, 13, lease.tables()))
        read = np.concatenate([ids[:6], (other if number else ids)[6:]])
        assert one.handoff(change).prompt_digest == prompt_digest(read)


def test_a_record_fits_the_message_with_many_layers() -> None:
    record = handed(QWEN4)[2]
    assert len(record.extra) < 32_768 // 128  # 4 layers here; a record holds 32 times as many at the least
