"""The state digest: golden vectors that torch and Triton implementations must meet too, and the faults it must see."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol.digest import MASK, combine, digest_rows, mix64, words_per_row
from sglang_pd.protocol.errors import PlanError

VECTORS = Path(__file__).parent.parent / "vectors" / "digest.json"


def slow_mix64(word: int) -> int:
    """SplitMix64's finaliser in Python integers: independent of numpy's wrap-around."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def slow_digest(rows: list[bytes], elements: list[int]) -> int:
    total = 0
    for row, element in zip(rows, elements, strict=True):
        count = -(-len(row) // 8)
        row = row.ljust(count * 8, b"\0")
        for word in range(count):
            value = int.from_bytes(row[word * 8 : word * 8 + 8], "little")
            total += slow_mix64(value ^ slow_mix64(element * count + word))
    return total & MASK


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text()), ids=lambda v: v["name"])
def test_golden_vectors(vector: dict[str, object]) -> None:
    rows = [bytes.fromhex(row) for row in vector["rows"]]  # type: ignore[attr-defined]
    elements: list[int] = vector["elements"]  # type: ignore[assignment]
    array = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), -1)
    assert digest_rows(array, np.array(elements, dtype=np.int64)) == int(str(vector["digest"]), 16)


@given(st.integers(1, 40), st.integers(0, 12), st.data())
def test_agrees_with_python_integers_in_any_split(row_bytes: int, count: int, data: st.DataObject) -> None:
    rows = [data.draw(st.binary(min_size=row_bytes, max_size=row_bytes)) for _ in range(count)]
    elements = data.draw(st.permutations(range(count)))
    array = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(count, row_bytes)
    numbers = np.array(elements, dtype=np.int64)
    whole = digest_rows(array, numbers)
    assert whole == slow_digest(rows, list(elements))
    cut = data.draw(st.integers(0, count))
    assert combine(digest_rows(array[:cut], numbers[:cut]), digest_rows(array[cut:], numbers[cut:])) == whole


def test_lost_moved_swapped_and_flipped_rows_change_it() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (6, 24), dtype=np.uint8)
    elements = np.arange(6, dtype=np.int64)
    whole = digest_rows(rows, elements)
    flipped = rows.copy()
    flipped[3, 7] ^= 1
    swapped = rows[[0, 1, 3, 2, 4, 5]]
    assert whole not in {
        digest_rows(rows[:5], elements[:5]),
        digest_rows(rows, elements + 1),
        digest_rows(swapped, elements),
        digest_rows(flipped, elements),
    }
    # A zero row is no nothing: losing it shows.
    assert digest_rows(np.zeros((1, 8), np.uint8), elements[:1]) != 0 or digest_rows(rows[:0], elements[:0]) == 0


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(PlanError):
        digest_rows(np.zeros((2, 4), np.uint8), np.zeros(3, np.int64))


def test_mix64_and_padding() -> None:
    assert int(mix64(np.array([1], np.uint64))[0]) == slow_mix64(1)
    assert [words_per_row(n) for n in (1, 8, 9)] == [1, 1, 2]
