"""Cutting ranges into kernel launches: every byte once, words that divide everything, pieces of bounded length."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pd.backends.local.launch import BLOCKS, PIECE_BYTES, plan_launches

LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([1152, 4096, 16384, PIECE_BYTES, PIECE_BYTES + 16, 700_000]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64), LENGTHS), min_size=1, max_size=40))
def test_every_byte_once_in_words_that_fit(ranges: list[tuple[int, int, int]]) -> None:
    src = np.array([(1 << 40) + i * (1 << 24) + a for i, (a, _, _) in enumerate(ranges)], np.uint64)
    dst = np.array([(1 << 41) + i * (1 << 24) + b for i, (_, b, _) in enumerate(ranges)], np.uint64)
    length = np.array([n for _, _, n in ranges], np.uint64)
    pieces = []
    for plan in plan_launches(src, dst, length):
        launch = plan.launch
        assert launch.ranges == plan.src.shape[0] == plan.dst.shape[0] == plan.length.shape[0] > 0
        assert launch.block in BLOCKS[launch.word_bytes]
        for values in (plan.src, plan.dst, plan.length):
            assert not (values % np.uint64(launch.word_bytes)).any()
        assert int(plan.length.max()) <= PIECE_BYTES and int(plan.length.min()) > 0
        assert launch.same_bytes == 0 or (plan.length == launch.same_bytes).all()
        pieces += list(zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True))
    pieces.sort()
    for s, d, n in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
        done = 0
        while done < n:
            piece = pieces.pop(0)
            assert piece[0] == s + done and piece[1] == d + done
            done += piece[2]
        assert done == n
    assert not pieces


def test_aligned_pages_are_one_launch_of_the_largest_word() -> None:
    rng = np.random.default_rng(0)
    pages = rng.permutation(1000).astype(np.uint64) * np.uint64(16384)
    (plan,) = plan_launches(pages, pages[::-1].copy(), np.full(1000, 16384, np.uint64))
    assert (plan.launch.word_bytes, plan.launch.block, plan.launch.same_bytes) == (16, 2048, 16384)


def test_one_odd_range_does_not_slow_the_others() -> None:
    src = np.arange(100, dtype=np.uint64) * np.uint64(4096)
    length = np.full(100, 4096, np.uint64)
    length[7] = 33
    by_word = {plan.launch.word_bytes: plan.launch.ranges for plan in plan_launches(src, src.copy(), length)}
    assert by_word == {16: 99, 1: 1}
