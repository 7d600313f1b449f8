"""The state digest: a 64-bit sum that catches a lost, stale, moved or swapped row. The numpy reference.

digest = sum over i of mix64(word_i xor mix64(i)) mod 2**64, over little-endian 64-bit words; i counts words, and each
row is padded with zero bytes to whole words. mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood 2014). A sum can
be taken in any order and in parts: chunk by chunk, rank by rank, on any device. It finds transport faults; it is no
cryptographic hash, and it cannot know that a correct-looking source row was the wrong one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.errors import PlanError

WORD_BYTES: Final = 8
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
MASK: Final = 2**64 - 1


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, elementwise: a bijection of 64-bit words."""
    mixed = (words ^ (words >> _SHIFTS[0])) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _FACTORS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


def words_per_row(row_bytes: int) -> int:
    """64-bit words of a row, the zero padding included."""
    return -(-row_bytes // WORD_BYTES)


def digest_rows(rows: NDArray[np.uint8], elements: NDArray[np.int64]) -> int:
    """Digest of some rows of a region, to be added (mod 2**64) to that of the others.

    rows: uint8 [n, row_bytes]. elements: int64 [n], the element number of each row within the request (token position,
    group, 0 for a whole state), which decides the word numbers: row e covers words [e * w, (e + 1) * w).
    Raises `PlanError` for shapes that do not fit.
    """
    if rows.ndim != 2 or rows.dtype != np.uint8 or elements.shape != rows.shape[:1]:
        raise PlanError(
            "rows are uint8 [n, row_bytes] with one element number each",
            code="internal",
            where="digest_rows",
            actual=f"{rows.dtype} {rows.shape}, elements {elements.shape}",
        )
    count = words_per_row(rows.shape[1])
    padded = np.zeros((rows.shape[0], count * WORD_BYTES), dtype=np.uint8)
    padded[:, : rows.shape[1]] = rows
    words: NDArray[np.uint64] = padded.view(np.dtype("<u8")).astype(np.uint64)
    numbers = (elements[:, None] * count + np.arange(count, dtype=np.int64)).astype(np.uint64)
    mixed: NDArray[np.uint64] = mix64(words ^ mix64(numbers))
    return int(mixed.sum(dtype=np.uint64))


def combine(*digests: int) -> int:
    """Sum of digests of disjoint rows."""
    return sum(digests) & MASK
