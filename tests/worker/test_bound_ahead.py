"""Descriptors that are bound while the engine computes: used where the guess was right, and never where it was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.local_pair import IDS, PAGE, LocalPair, Side
from support.worker_pair import wait_until

from sglang_pd.worker.ranks import source as source_module

TOKENS = len(IDS)


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    pair = LocalPair()
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every chunk that was bound."""
    chunks: list[tuple[int, int]] = []
    bind = source_module.bind

    def counted(plan, indices, chunk):  # type: ignore[no-untyped-def]
        chunks.append((chunk.start, chunk.stop))
        return bind(plan, indices, chunk)

    monkeypatch.setattr(source_module, "bind", counted)
    return chunks


def pages(side: Side, layer: int) -> np.ndarray:
    """One layer's K as raw bytes, [pages, page bytes]."""
    array = side.pools.array("KV", layer, "k")
    return array.reshape(array.shape[0], -1).view(np.uint8)


def hand_over(pair: LocalPair, room: int, cuts: list[int], ready: Callable[[], bool] = lambda: True) -> None:
    """A room in chunks that end at `cuts` and with the prompt, from when it has begun and `ready` holds; every byte of
    decode's memory is checked.
    """
    rng = np.random.default_rng(room)
    for side in (pair.prefill, pair.decode):
        for layer in (0, 1):
            pages(side, layer)[:] = rng.integers(0, 256, pages(side, layer).shape, dtype=np.uint8)
    src, dst = 1 + room % 5, 4 + room % 7
    wanted = [pages(pair.decode, layer).copy() for layer in (0, 1)]
    for layer, page in np.ndindex(2, 3):
        nbytes = wanted[layer].shape[1] // PAGE * min(PAGE, TOKENS - page * PAGE)
        wanted[layer][dst + page, :nbytes] = pages(pair.prefill, layer)[src + page, :nbytes]
    source = pair.prefill.at.agent.source
    handle = pair.prefill.at.request(room, IDS, pair.prefill.lists(src))
    pair.decode.at.open(room, pair.address, IDS, pair.decode.lists(dst))
    wait_until(lambda: handle in source._rooms and source._rooms[handle].begun is not None and ready())
    for start, stop in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        pair.prefill.at.send(handle, start, stop, last=stop == TOKENS)
    pair.prefill.at.finish(handle, TOKENS, b"")
    assert pair.decode.released(room) == ["admitted", "done", "releasable"]
    pair.prefill.released(room)
    for layer in (0, 1):
        assert np.array_equal(pages(pair.decode, layer), wanted[layer])


def test_a_rest_that_was_guessed_is_bound_once(pair: LocalPair, bound: list[tuple[int, int]]) -> None:
    hand_over(pair, 1, [])
    assert bound == [(0, TOKENS)], "nothing is guessed before the engine has sent a chunk as long"
    bound.clear()
    hand_over(pair, 2, [], ready=lambda: bound == [(0, TOKENS)])
    assert bound == [(0, TOKENS)]


def test_a_guess_that_was_wrong_moves_nothing(pair: LocalPair, bound: list[tuple[int, int]]) -> None:
    hand_over(pair, 1, [])
    for room, cuts in enumerate([[16], [5], [5, 20], [39], [1, 2, 3, 38], [0, 16]], start=2):
        bound.clear()
        hand_over(pair, room, cuts)
        ends = [0, *cuts, TOKENS]
        assert set(zip(ends[:-1], ends[1:], strict=True)) <= set(bound), "what was sent was bound as it was sent"


def test_long_rests_are_not_guessed(
    pair: LocalPair, bound: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MAX_AHEAD_TOKENS", 24)
    hand_over(pair, 1, [])
    bound.clear()
    hand_over(pair, 2, [20])
    assert bound == [(0, 20), (20, TOKENS)]
