"""The Hugging Face engine: bit-equal to the library's own loop after a hand-over by plans alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.reference_run import DECODE, PREFILL, Host, How, Running, differences, hand_over, same_logits
from support.transformers_run import NAMED, OTHERS, engine, host, library_loop, prompt

from sglang_pd.engines.base import DecodeItem, PrefillChunk, PromptScorer, Request, Sampling
from sglang_pd.engines.transformers import run_whole
from sglang_pd.engines.transformers.walk import tensors
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.memory.live import live_rows
from sglang_pd.protocol.errors import RoomError
from sglang_pd.protocol.kinds import Prompt, kind_of

QWEN4 = "Qwen4ExpForCausalLM"
STEPS = 10
DTYPES = ("float32", "bfloat16")
CASES: list[tuple[int, tuple[int, ...]]] = [
    (1, ()), (2, ()), (5, ()), (37, ()), (64, ()), (65, ()), (37, (16, 21)), (67, (64, 3)),
]  # fmt: skip
LEAN = [case for case in CASES if case[0] not in (2, 64)]


def whole_state(host_: Host, run: Running, own: Any) -> None:
    """Every live row of the pools is what the library's own cache holds, to the byte."""
    engine_: Any = host_.engine
    found = tensors(own, engine_.walk.carried)
    prompt_ = Prompt(run.stop)
    for item in engine_.walk.carried:
        layer = kind_of(item.kind).request_wide.get(item.part, item.layer)
        _, raw = live_rows(host_.pools, (item.kind, layer, item.part), run.lease.lists(prompt_), prompt_)
        want = item.rows(found[item.layer, item.path], 0).contiguous()
        units = raw.reshape(len(raw), -1)
        size = want[None].view(torch.uint8).numel() if item.role == "slot" else want[0].view(torch.uint8).numel()
        begin = item.first * (size // item.shape[0])
        part = np.ascontiguousarray(units[:, begin : begin + size])
        assert part.tobytes() == want.view(torch.uint8).numpy().tobytes(), item.name


def check(name: str, dtype: str, length: int, chunks: Sequence[int]) -> None:
    prefill, decode = engine(name, dtype), engine(name, dtype, 1)
    source, destination = host(prefill, PREFILL), host(decode, DECODE)
    source.prefill("other", prompt(11, seed=3))  # so that the request's row and slot are not the first
    run = source.prefill("r", prompt(length), chunks)
    arrived = hand_over(source, run, destination, How(chunks=chunks))
    _, before = library_loop(prefill.model, prompt(length), chunks, 0)
    whole_state(destination, arrived, before)
    destination.decode([arrived], STEPS)
    want, after = library_loop(prefill.model, prompt(length), chunks, STEPS)
    assert arrived.tokens == want.tokens
    assert same_logits(arrived, want)
    whole_state(destination, arrived, after)
    for one, held in ((source, run), (destination, arrived)):
        one.end(held)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "chunks"), LEAN, ids=str)
def test_qwen4_hands_over_bit_equal(dtype: str, length: int, chunks: tuple[int, ...]) -> None:
    check(QWEN4, dtype, length, chunks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMED)
def test_named_models_hand_over_bit_equal(name: str, dtype: str) -> None:
    for length, chunks in CASES:
        check(name, dtype, length, chunks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_hand_over_bit_equal(name: str, dtype: str) -> None:
    for length, chunks in CASES:
        if not chunks or engine(name, dtype).manners.continues:
            check(name, dtype, length, chunks)


@pytest.mark.parametrize("length", [5, 37])
def test_tokens_are_those_of_generate(length: int) -> None:
    """The library's `generate` decides for itself what it passes to the model."""
    one = engine(QWEN4)
    want = one.model.generate(
        torch.from_numpy(prompt(length))[None], max_new_tokens=STEPS + 1, do_sample=False, eos_token_id=-1
    )[0, length:].tolist()
    source, destination = host(one, PREFILL), host(engine(QWEN4, number=1), DECODE)
    arrived = hand_over(source, source.prefill("r", prompt(length)), destination)
    destination.decode([arrived], STEPS)
    assert arrived.tokens == want
    outputs = run_whole(one, prompt(length), length)
    assert [next(outputs).token for _ in want] == want


def test_requests_of_one_decode_step_do_not_touch_each_other() -> None:
    """A loop of forwards, one for each request, is exact however many there are, in whatever order they come."""
    source, destination = host(engine(QWEN4), PREFILL), host(engine(QWEN4, number=1), DECODE)
    lengths = (2, 11, 37)
    arrived = []
    for length in lengths:
        run = source.prefill(f"r{length}", prompt(length))
        arrived.append(hand_over(source, run, destination))
        source.end(run)
    destination.decode(arrived[:2], 3)
    destination.decode(arrived[::-1], 3)
    destination.end(arrived[1])
    destination.decode([arrived[0], arrived[2]], 4)
    for run, length, steps in ((arrived[0], 2, 10), (arrived[2], 37, 7)):
        want, _ = library_loop(engine(QWEN4).model, prompt(length), (), steps)
        assert run.tokens == want.tokens
        assert same_logits(run, want)


@pytest.mark.parametrize("name", [QWEN4, pytest.param("GptOssForCausalLM", marks=pytest.mark.slow)])
def test_an_engine_decodes_what_it_prefilled_from_its_own_pools(name: str) -> None:
    alone = host(engine(name), PREFILL)
    run = alone.prefill("r", prompt(21), (16, 5))
    alone.decode([run], STEPS)
    want, own = library_loop(engine(name).model, prompt(21), (16, 5), STEPS)
    assert run.tokens == want.tokens
    assert same_logits(run, want)
    whole_state(alone, run, own)


def test_after_the_prompt_pools_alone_are_the_state() -> None:
    """What lies in the pools after the last chunk decides what comes next, in the engine that computed it too."""
    alone = host(engine(QWEN4), PREFILL)
    run = alone.prefill("r", prompt(21))
    alone.pools.slots("KV", 1, "v").zero_()
    alone.decode([run], 1)
    want, _ = library_loop(engine(QWEN4).model, prompt(21), (), 1)
    assert np.array_equal(run.logits[0], want.logits[0])
    assert not np.array_equal(run.logits[1], want.logits[1])


def test_a_slot_that_is_armed_for_receive_is_not_begun_in() -> None:
    alone = host(engine(QWEN4), PREFILL)
    lease = alone.allocator.lease(8, window_stop=0)
    alone.pools.arm(lease.tables())
    with pytest.raises(LeaseError, match="armed for receive"):
        alone.engine.start(Request("r", prompt(8)), lease.tables())
    alone.pools.disarm(lease.generation)
    alone.engine.start(Request("r", prompt(8)), lease.tables())


def test_nothing_but_the_live_rows_of_pools_is_read() -> None:
    """All bytes of decode's pools but the live rows become NaN or absurd: the answer stays, to the last bit."""
    source = host(engine(QWEN4), PREFILL)
    run = source.prefill("r", prompt(37))
    loud = host(engine(QWEN4, number=1), DECODE, filler=float("nan"))
    arrived = hand_over(source, run, loud)
    loud.decode([arrived], STEPS)
    want, _ = library_loop(engine(QWEN4).model, prompt(37), (), STEPS)
    assert same_logits(arrived, want)


def test_a_step_that_fails_leaves_the_pools_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside a forward costs the half-advanced cache, not the request."""
    one = engine(QWEN4)
    alone = host(one, PREFILL)
    run = alone.prefill("r", prompt(9))
    alone.decode([run], 2)
    run.lease.advance(run.stop + 1)
    item = DecodeItem("r", run.tokens[-1], run.lease.tables())
    layer = one.model.model.layers[-1]
    broken = layer.register_forward_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
    with pytest.raises(RoomError, match="no memory") as failed:
        one.decode([item])
    assert failed.value.code == "pool_exhausted"
    broken.remove()
    alone.decode([run], 4)
    want, own = library_loop(one.model, prompt(9), (), 6)
    assert same_logits(run, want)
    whole_state(alone, run, own)


def test_sampler_state_travels() -> None:
    sampling = Sampling(temperature=1.0, seed=21)
    alone = host(engine(QWEN4), PREFILL)
    want = alone.prefill("r", prompt(10), sampling=sampling)
    alone.decode([want], STEPS)
    source, destination = host(engine(QWEN4), PREFILL), host(engine(QWEN4, number=1), DECODE)
    arrived = hand_over(source, source.prefill("r", prompt(10), sampling=sampling), destination)
    destination.decode([arrived], STEPS)
    assert arrived.tokens == want.tokens
    assert arrived.tokens != library_loop(engine(QWEN4).model, prompt(10), (), STEPS)[0].tokens


def test_a_prompt_is_scored_by_the_model_that_reads_it() -> None:
    one = engine(QWEN4)
    assert isinstance(one, PromptScorer)
    alone, ids = host(one, PREFILL), prompt(21)
    lease = alone.allocator.lease(21, window_stop=0)
    one.start(Request("r", ids, score=True), lease.tables())
    assert one.prefill(PrefillChunk("r", 0, 16, lease.tables())) is None
    with pytest.raises(RoomError, match="not scored"):
        one.prompt_logprobs("r")
    output = one.prefill(PrefillChunk("r", 16, 21, lease.tables()))
    with torch.inference_mode():
        rows = torch.log_softmax(one.model(input_ids=torch.from_numpy(ids)[None]).logits[0].double(), -1)
    want = rows[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()
    assert np.allclose(one.prompt_logprobs("r"), want, rtol=0, atol=1e-4)
    assert output is not None and output.token == library_loop(one.model, ids, (16, 5), 0)[0].tokens[0]
    one.start(Request("quiet", ids), alone.allocator.lease(21, window_stop=0).tables())
    one.prefill(PrefillChunk("quiet", 0, 21, alone.allocator.leases[2].tables()))
    with pytest.raises(RoomError, match="not scored"):
        one.prompt_logprobs("quiet")


def test_a_prefix_on_decode_is_not_written() -> None:
    ids = prompt(37)
    source, destination = host(engine(QWEN4), PREFILL), host(engine(QWEN4, number=1), DECODE)
    early = hand_over(source, source.prefill("early", ids[:26].copy(), (16, 10)), destination)
    run = source.prefill("r", ids, (16, 21))
    arrived = hand_over(source, run, destination, How(chunks=(16, 21), prefix=(early, 16)))
    destination.decode([arrived], STEPS)
    want, _ = library_loop(engine(QWEN4).model, ids, (16, 21), STEPS)
    assert same_logits(arrived, want)


def test_live_state_of_two_runs_is_equal() -> None:
    hosts = [host(engine(QWEN4, number=number), size) for number, size in enumerate((PREFILL, DECODE))]
    runs = [one.prefill("r", prompt(23), (16, 7)) for one in hosts]
    assert not differences(hosts[0].live(runs[0]), hosts[1].live(runs[1]))


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": (np.empty(0, np.int64), "prompt_empty"),
    "too long": (np.full(512, 5), "prompt_too_long"),
    "foreign token": (np.array([5, 97]), "request_rejected"),
    "negative token": (np.array([5, -1]), "request_rejected"),
}


@pytest.mark.parametrize("what", BAD_PROMPTS)
def test_impossible_prompts_are_refused(what: str) -> None:
    ids, code = BAD_PROMPTS[what]
    one = engine(QWEN4)
    alone = host(one, PREFILL)
    lease = alone.allocator.lease(8, window_stop=0)
    with pytest.raises(RoomError) as refused:
        one.start(Request("r", ids), lease.tables())
    assert refused.value.code == code


def test_requests_are_known_once_and_chunks_follow_each_other() -> None:
    one = engine(QWEN4)
    alone = host(one, PREFILL)
    lease = alone.allocator.lease(8, window_stop=0)
    one.start(Request("r", prompt(8)), lease.tables())
    with pytest.raises(RoomError, match="known already"):
        one.start(Request("r", prompt(8)), lease.tables())
    for start, stop in ((1, 3), (0, 9), (0, 0)):
        with pytest.raises(RoomError, match="continues where"):
            one.prefill(PrefillChunk("r", start, stop, lease.tables()))
    assert one.prefill(PrefillChunk("r", 0, 3, lease.tables())) is None
    with pytest.raises(RoomError, match="not prefilled"):
        one.handoff("r")
    one.release("r")
    one.release("r")
    with pytest.raises(RoomError, match="no such request"):
        one.decode([DecodeItem("r", 5, lease.tables())])


def test_a_model_that_cannot_continue_a_prompt_takes_it_whole() -> None:
    """Jamba's multi-token forward starts from nothing in this library: a second chunk would be another model."""
    one = engine("JambaForCausalLM")
    assert not one.manners.continues
    alone = host(one, PREFILL)
    with pytest.raises(RoomError, match="chunk of several tokens"):
        alone.prefill("r", prompt(9), (5, 4))
    alone.prefill("whole", prompt(9))
