"""The reference model agrees with itself, however its work is cut, batched and laid out."""

from __future__ import annotations

import numpy as np
import pytest
from support.reference_run import (
    DECODE,
    PREFILL,
    SOFT,
    SPARSE,
    Host,
    Running,
    Size,
    differences,
    prompt_ids,
    same_logits,
)

from sglang_pd.engines.base import Sampling
from sglang_pd.engines.reference import ReferenceConfig

STEPS = 9


def whole(config: ReferenceConfig, length: int, steps: int = STEPS, seed: int = 7) -> tuple[Host, Running]:
    host = Host(config, Size(pages=20))
    run = host.prefill("whole", prompt_ids(length, seed))
    host.decode([run], steps)
    return host, run


@pytest.mark.parametrize("config", [SPARSE, SOFT], ids=["sparse", "soft"])
@pytest.mark.parametrize("chunks", [(16, 21), (5, 7, 25), (6, 11, 20), (1,) * 37, (36, 1)], ids=str)
def test_chunked_prefill_is_bit_equal(config: ReferenceConfig, chunks: tuple[int, ...]) -> None:
    host, want = whole(config, 37)
    other = Host(config, PREFILL)
    run = other.prefill("chunked", prompt_ids(37), chunks)
    other.decode([run], STEPS)
    assert run.tokens == want.tokens
    assert same_logits(run, want)
    assert not differences(other.live(run), host.live(want))


@pytest.mark.parametrize("config", [SPARSE, SOFT], ids=["sparse", "soft"])
def test_batched_decode_is_bit_equal(config: ReferenceConfig) -> None:
    lengths = (1, 3, 8, 13, 22)
    host = Host(config, Size(40, 6, 6, 24, "random", 9), filler=float("nan"))  # padding of short ones is never read
    runs = [host.prefill(f"r{n}", prompt_ids(n, seed=n), (3,) * 8) for n in lengths]
    host.decode(runs, STEPS)
    for length, run in zip(lengths, runs, strict=True):
        alone, want = whole(config, length, seed=length)
        assert run.tokens == want.tokens
        assert same_logits(run, want)
        assert not differences(host.live(run), alone.live(want))


def test_the_model_says_something() -> None:
    """A model whose answers do not depend on its input would prove nothing."""
    answers = [tuple(whole(SPARSE, 20, seed=seed)[1].tokens) for seed in range(4)]
    assert len(set(answers)) == 4
    assert min(len(set(answer)) for answer in answers) > 4


def test_requests_do_not_disturb_each_other() -> None:
    host = Host(SPARSE, DECODE)
    _, want = whole(SPARSE, 21)
    run = host.prefill("a", prompt_ids(21))
    for other in range(3):
        stranger = host.prefill(f"s{other}", prompt_ids(30, seed=50 + other))
        host.decode([run, stranger], 3)
        host.end(stranger)
    assert run.tokens == want.tokens[: len(run.tokens)]
    assert all(np.array_equal(a, b) for a, b in zip(run.logits, want.logits, strict=False))


def test_seeded_sampling_repeats() -> None:
    sampling = Sampling(temperature=0.9, seed=5)
    runs = []
    for seed in (5, 5, 6):
        host = Host(SPARSE, PREFILL)
        run = host.prefill("a", prompt_ids(9), sampling=Sampling(temperature=0.9, seed=seed))
        host.decode([run], 12)
        runs.append(run.tokens)
    assert runs[0] == runs[1] != runs[2]
    assert sampling.seed == 5
