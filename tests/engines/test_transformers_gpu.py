"""The Hugging Face engine on a CUDA device: over pools in host memory, and over pools on the device. Run by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.reference_run import DECODE, PREFILL, Running, hand_over
from support.transformers_run import NAMED, host, options, prompt

from sglang_pd.backends.base import Segment
from sglang_pd.engines.base import DecodeItem, PrefillChunk, Request
from sglang_pd.engines.transformers import TransformersEngine, describe_options, run_whole
from sglang_pd.memory.allocator import Allocator
from sglang_pd.memory.layout import layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.protocol.manifest import RankId, Topology

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda:0"
STEPS = 8


def whole(engine: TransformersEngine, length: int, chunk_tokens: int) -> tuple[list[int], list[bytes]]:
    outputs = run_whole(engine, prompt(length), chunk_tokens)
    taken = [next(outputs) for _ in range(STEPS + 1)]
    return [output.token for output in taken], [output.logits.tobytes() for output in taken]


def as_bytes(run: Running) -> list[bytes]:
    return [logits.tobytes() for logits in run.logits]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMED)
def test_a_device_model_over_host_pools_hands_over(name: str, dtype: str) -> None:
    given = options(name, dtype, device=DEVICE)
    one, two = TransformersEngine(given), TransformersEngine(given)
    assert one.describe() == describe_options(given)
    source, destination = host(one, PREFILL), host(two, DECODE)
    for length in (1, 5, 37, 65):
        run = source.prefill(f"r{length}", prompt(length), (64, 1))
        arrived = hand_over(source, run, destination)
        destination.decode([arrived], STEPS)
        assert (arrived.tokens, as_bytes(arrived)) == whole(one, length, 64)
        source.end(run)
        destination.end(arrived)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMED)
def test_a_device_model_goes_on_from_device_pools(name: str, dtype: str) -> None:
    engine = TransformersEngine(options(name, dtype), device=DEVICE)
    layout = layout_rank(engine.state, PREFILL.capacity(), Topology(), RankId(0, 0), DEVICE)
    memory: list[Any] = [torch.full((plan.nbytes,), 0x7B, dtype=torch.uint8, device=DEVICE) for plan in layout.segments]
    engine.attach(RankPools(layout, [Segment(m.data_ptr(), m.numel(), DEVICE, m) for m in memory]))
    lease = Allocator(layout.roots).lease(37 + STEPS, window_stop=0)
    engine.start(Request("r", prompt(37)), lease.tables())
    lease.advance(37)
    output = engine.prefill(PrefillChunk("r", 0, 37, lease.tables()))
    assert output is not None
    run = Running("r", lease)
    run.take(output)
    for step in range(STEPS):
        lease.advance(38 + step)
        (output,) = engine.decode([DecodeItem("r", run.tokens[-1], lease.tables())]) or []
        run.take(output)
    assert (run.tokens, as_bytes(run)) == whole(engine, 37, 64)
