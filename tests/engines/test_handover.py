"""Hand-over by plans alone, inside one process: tokens, logits and live state as if the model had run whole."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.reference_run import (
    DECODE,
    PAGE,
    PREFILL,
    SOFT,
    SPARSE,
    Host,
    How,
    Live,
    Running,
    Size,
    differences,
    hand_over,
    prompt_ids,
    same_logits,
)

from sglang_pd.engines.base import Sampling
from sglang_pd.engines.reference import ReferenceConfig
from sglang_pd.protocol.errors import PlanError

K, R = SPARSE.gdn_kernel, SPARSE.qsa_ratio
LENGTHS = sorted({1, 2, K - 1, R - 1, R, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 4 * PAGE + 5})
LEAN = (1, R - 1, PAGE, 4 * PAGE + 5)
CHUNKS: dict[str, tuple[int, ...]] = {"whole": (), "chunked": (6, 11, 7) * 4}
CONFIGS = {"sparse": SPARSE, "soft": SOFT}
STEPS = 2 * R + 1


@cache
def whole(mode: str, length: int, steps: int = STEPS) -> tuple[Running, Live, Live]:
    """The model run whole: the request, its live state after prefill, and after the last step."""
    host = Host(CONFIGS[mode], Size(pages=20))
    run = host.prefill("r", prompt_ids(length))
    before = host.live(run)
    host.decode([run], steps)
    return run, before, host.live(run)


def check(mode: str, length: int, chunks: str, sizes: tuple[Size, Size] = (PREFILL, DECODE)) -> None:
    want, before, after = whole(mode, length)
    source, destination = (Host(CONFIGS[mode], size) for size in sizes)
    source.prefill("other", prompt_ids(11, seed=3))  # so that the request's row and slot are not the first
    run = source.prefill("r", prompt_ids(length), CHUNKS[chunks])
    arrived = hand_over(source, run, destination, How(CHUNKS[chunks]))
    assert not differences(destination.live(arrived), before)
    destination.decode([arrived], STEPS)
    assert arrived.tokens == want.tokens
    assert same_logits(arrived, want)
    assert not differences(destination.live(arrived), after)
    for host, held in ((source, run), (destination, arrived)):
        host.end(held)


@pytest.mark.parametrize("mode", CONFIGS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("length", LEAN)
def test_hand_over_is_bit_equal(mode: str, chunks: str, length: int) -> None:
    check(mode, length, chunks)


@pytest.mark.slow
@pytest.mark.parametrize("mode", CONFIGS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("length", [n for n in LENGTHS if n not in LEAN])
def test_hand_over_is_bit_equal_at_every_boundary(mode: str, chunks: str, length: int) -> None:
    check(mode, length, chunks)


@pytest.mark.parametrize("orders", [("low", "high"), ("high", "low")], ids=str)
def test_allocation_order_does_not_matter(orders: tuple[str, str]) -> None:
    sizes = (Size(24, 4, 4, 16, orders[0]), Size(31, 6, 7, 13, orders[1]))  # type: ignore[arg-type]
    check("sparse", 19, "chunked", sizes)


def test_a_batch_of_handed_over_requests_decodes_together() -> None:
    lengths = (2, R, 19)
    source, destination = Host(SPARSE, PREFILL), Host(SPARSE, DECODE)
    arrived = []
    for length in lengths:
        run = source.prefill(f"r{length}", prompt_ids(length), (4,) * 9)
        arrived.append(hand_over(source, run, destination))
        source.end(run)
    destination.decode(arrived, STEPS)
    for length, run in zip(lengths, arrived, strict=True):
        want, _, after = whole("sparse", length)
        assert run.tokens == want.tokens
        assert same_logits(run, want)
        assert not differences(destination.live(run), after)


def test_speculative_rings_of_unequal_width_hand_over() -> None:
    """Prefill without speculation (ring of r) to decode that verifies two tokens at once (ring of r + 1)."""
    want = whole("sparse", 4 * PAGE + 3)[0]
    source, destination = Host(SPARSE, PREFILL), Host(ReferenceConfig(verify_window=2), DECODE)
    arrived = hand_over(source, source.prefill("r", prompt_ids(4 * PAGE + 3)), destination)
    destination.decode([arrived], STEPS)
    assert same_logits(arrived, want)


def test_sampler_state_travels() -> None:
    sampling = Sampling(temperature=1.0, seed=21)
    alone = Host(SPARSE, Size(pages=20))
    want = alone.prefill("r", prompt_ids(10), sampling=sampling)
    alone.decode([want], STEPS)
    source, destination = Host(SPARSE, PREFILL), Host(SPARSE, DECODE)
    arrived = hand_over(source, source.prefill("r", prompt_ids(10), sampling=sampling), destination)
    destination.decode([arrived], STEPS)
    assert arrived.tokens == want.tokens
    greedy, _, _ = whole("sparse", 10)
    assert arrived.tokens != greedy.tokens


def test_a_prefix_on_decode_is_not_written_and_the_state_moves_whole() -> None:
    """Decode holds the first two pages from an earlier request with the same beginning: only the rest moves."""
    want, _, after = whole("sparse", 4 * PAGE + 5)
    ids = prompt_ids(4 * PAGE + 5)
    source, destination = Host(SPARSE, PREFILL), Host(SPARSE, DECODE)
    early = hand_over(source, source.prefill("early", ids[: 3 * PAGE + 2].copy()), destination)
    destination.decode([early], 2)
    assert not np.array_equal(ids, prompt_ids(3 * PAGE + 2))
    run = source.prefill("r", ids, (9,) * 9)
    arrived = hand_over(source, run, destination, How(prefix=(early, 2 * PAGE)))
    destination.decode([arrived, early], STEPS)
    assert arrived.tokens == want.tokens
    assert same_logits(arrived, want)
    assert not differences(destination.live(arrived), after)


@pytest.mark.parametrize(("earlier", "length", "shared"), [(13, 9, 8), (14, 13, 8), (15, 11, 8), (22, 20, 16)])
def test_a_prefix_that_arrived_itself_lacks_what_its_own_window_did_not_reach(
    earlier: int, length: int, shared: int
) -> None:
    """The pages are held, but rows before the window of the earlier prompt were never written: wrong logits."""
    source, destination = Host(SPARSE, PREFILL), Host(SPARSE, DECODE)
    ids = prompt_ids(40)
    early = hand_over(source, source.prefill("early", ids[:earlier].copy()), destination)
    run = source.prefill("r", ids[:length].copy())
    assert SPARSE.window > length - shared and earlier > SPARSE.window
    with pytest.raises(PlanError, match="from position") as raised:
        hand_over(source, run, destination, How(prefix=(early, shared)))
    assert raised.value.code == "prefix_unaligned"
