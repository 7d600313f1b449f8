"""Several requests in one forward: within rounding of each alone, and never closer than that to another choice.

The rule: a comparison counts where the best logit leads the second by ten times the largest difference seen; one that
does not is void, and too many void ones are a failure of the test itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.reference_run import DECODE, PREFILL, Host, Running, hand_over
from support.transformers_run import ALL_SELECTED, NAMED, OTHERS, engine, host, library_loop, options, prompt

from sglang_pd.engines.base import DecodeItem
from sglang_pd.engines.transformers import TransformersEngine
from sglang_pd.engines.transformers import engine as engine_module
from sglang_pd.engines.transformers.selfcheck import Manners
from sglang_pd.protocol.errors import ConfigError

QWEN4 = "Qwen4ExpForCausalLM"
SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
BATCHED = [name for name in (*NAMED, *OTHERS, *ALL_SELECTED) if name not in (QWEN4, *SPARSE)]
"""Sparse attention over index scores is compared where it selects all: at a tie a batch may select another token."""
STEPS = 8
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.35}
"""Largest difference of a logit (they have standard deviation near one) that rounding explains in these models."""


def forced(host_: Host, runs: Sequence[Running], tokens: Sequence[Sequence[int]]) -> None:
    """Decode given tokens, so that a near tie does not lead two runs apart."""
    for step in range(len(tokens[0])):
        for run in runs:
            run.stop += 1
            run.lease.advance(run.stop)
        batch = [DecodeItem(r.name, t[step], r.lease.tables()) for r, t in zip(runs, tokens, strict=True)]
        for run, output in zip(runs, host_.engine.decode(batch) or [], strict=True):
            run.take(output)
            run.lease.settle(run.stop)


def arrive(one: TransformersEngine, other: TransformersEngine, lengths: Sequence[int]) -> tuple[Host, list[Running]]:
    source, destination = host(one, PREFILL), host(other, DECODE)
    found = []
    for length in lengths:
        run = source.prefill(f"r{length}", prompt(length))
        found.append(hand_over(source, run, destination))
        source.end(run)
    return destination, found


def judge(want: Running, got: Running, dtype: str) -> tuple[int, int]:
    """(comparisons that count, all). Raises where a difference is more than rounding or a clear choice differs."""
    counted = 0
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        worst = float(np.abs(ours - theirs).max())
        assert worst <= TOLERANCE[dtype]
        second, first = np.sort(theirs)[-2:]
        if first - second > 10 * worst:
            counted += 1
            assert int(np.argmax(ours)) == int(np.argmax(theirs))
    return counted, len(want.logits)


def check(name: str, dtype: str, lengths: Sequence[int]) -> None:
    destination, runs = arrive(engine(name, dtype), engine(name, dtype, 2, decode_batch=4), lengths)
    alone = [library_loop(engine(name, dtype).model, prompt(length), (), STEPS)[0] for length in lengths]
    forced(destination, runs, [want.tokens[:STEPS] for want in alone])
    judged = [judge(want, got, dtype) for want, got in zip(alone, runs, strict=True)]
    if dtype == "float32":
        assert sum(count for count, _ in judged) > sum(count for _, count in judged) // 2, "most comparisons are void"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_unequal_requests_decode_in_one_forward(dtype: str) -> None:
    check(QWEN4, dtype, (2, 11, 37))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", BATCHED)
def test_every_model_decodes_in_batches(name: str, dtype: str) -> None:
    check(name, dtype, (2, 11, 37))


def test_one_forward_takes_as_many_requests_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[int]]] = []
    real = engine_module.forward

    def counting(model: Any, ids: Any, cache: Any, lengths: Sequence[int], **more: Any) -> Any:
        seen.append((ids.shape[0], list(lengths)))
        return real(model, ids, cache, lengths, **more)

    one, other = engine(QWEN4), engine(QWEN4, "float32", 2, decode_batch=4)
    destination, runs = arrive(one, other, (2, 3, 5, 8, 11))
    monkeypatch.setattr(engine_module, "forward", counting)
    destination.decode(runs, 2)
    assert [size for size, _ in seen] == [4, 1, 4, 1]
    seen.clear()
    monkeypatch.setattr(other, "manners", Manners(continues=True, pads=False, batches=True))
    destination.decode(runs, 1)
    assert seen == [(1, [length]) for length in (4, 5, 7, 10, 13)]


def test_requests_join_and_leave_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that changes is built anew from pools, so that the requests go on as if they had been alone."""
    destination, runs = arrive(engine(QWEN4), engine(QWEN4, "float32", 2, decode_batch=4), (5, 9, 16))
    alone = [library_loop(engine(QWEN4).model, prompt(length), (), 6)[0] for length in (5, 9, 16)]
    feed = [want.tokens for want in alone]
    forced(destination, runs[:2], [feed[0][:2], feed[1][:2]])
    forced(destination, [runs[2], *runs[:2]], [feed[2][:2], feed[0][2:4], feed[1][2:4]])
    destination.end(runs[0])
    forced(destination, [runs[1], runs[2]], [feed[1][4:6], feed[2][2:4]])
    for want, run in zip(alone, runs, strict=True):
        want.logits = want.logits[: len(run.logits)]
        judge(want, run, "float32")


def test_a_model_that_takes_no_batch_is_refused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_pd.engines.transformers.selfcheck._close", lambda got, want: False)
    with pytest.raises(ConfigError, match="other logits in a batch"):
        TransformersEngine(options("LlamaForCausalLM", decode_batch=2))
    assert not TransformersEngine(options("LlamaForCausalLM")).manners.batches
