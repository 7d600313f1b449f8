"""From checked ranges to kernel launches: word sizes, pieces, and the order of addresses. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.batch import U64

WORD_BYTES = (16, 8, 4, 1)
"""Words the kernel moves, in bytes; a range takes the largest that divides its source, destination and length."""

BLOCKS = {16: (128, 256, 512, 1024, 2048), 8: (256, 2048), 4: (256, 2048), 1: (256, 2048)}
"""Word -> words one step of a program may move (of 8 bytes where the word is 16): the smallest that holds the longest
range is taken, else the last, in a loop. Every entry is one compiled kernel."""

ALIGN_SLOTS = 16
"""Launches start at multiples of this in a staging buffer: Triton compiles anew for addresses not divisible by 16."""

FEW_RANGES = 16
"""Up to so many ranges are copied by a call of the driver each: that takes a few microseconds, and ten times as long it
takes to write addresses down, send them up and launch a kernel."""

PIECE_BYTES = 256 << 10
"""Longest range one program copies; longer ones are split among programs."""


@dataclass(frozen=True)
class Launch:
    """Shape of one launch. `same_bytes`: the length of every range, 0 if they differ."""

    ranges: int
    word_bytes: int
    block: int
    same_bytes: int

    @property
    def warps(self) -> int:
        """Warps a program: 16 words a thread, at most 4 warps."""
        return max(1, min(4, self.block // 512))


@dataclass(frozen=True)
class LaunchRanges:
    """A launch and its ranges, uint64 of shape [ranges]: source and destination addresses, lengths in bytes."""

    launch: Launch
    src: U64
    dst: U64
    length: U64


@dataclass(frozen=True)
class GridLaunch:
    """Shape of a launch over a grid of `entries` x `blocks` descriptors, each in `pieces` of `piece_bytes`.

    by_entry: lengths belong to entries, else to blocks. first_block: slot of the first block in the address rows.
    """

    entries: int
    blocks: int
    pieces: int
    piece_bytes: int
    first_block: int
    by_entry: bool
    word_bytes: int
    block: int

    @property
    def warps(self) -> int:
        """Warps a program, as for `Launch`."""
        return max(1, min(4, self.block // 512))


@dataclass(frozen=True)
class GridAddresses:
    """A grid by addresses, uint64: of each entry's first byte on both sides, and of each block from there."""

    src_entry: U64
    dst_entry: U64
    src_block: U64
    dst_block: U64
    length: U64
    by_entry: bool


def plan_grid(grid: GridAddresses) -> GridLaunch:
    """The launch for a grid. One word size for all of it: the largest that divides every address and length."""
    parts = (grid.src_entry, grid.dst_entry, grid.src_block, grid.dst_block, grid.length)
    bits = 0
    for part in parts:
        bits |= int(np.bitwise_or.reduce(part))
    word = _word(bits)
    longest = int(grid.length.max())
    piece = min(longest, PIECE_BYTES)
    words = -(-piece // min(word, 8))
    block = next((block for block in BLOCKS[word] if block >= words), BLOCKS[word][-1])
    return GridLaunch(
        entries=grid.src_entry.shape[0],
        blocks=grid.src_block.shape[0],
        pieces=-(-longest // piece),
        piece_bytes=piece,
        first_block=-(-grid.src_entry.shape[0] // ALIGN_SLOTS) * ALIGN_SLOTS,
        by_entry=grid.by_entry,
        word_bytes=word,
        block=block,
    )


def plan_launches(src: U64, dst: U64, length: U64) -> list[LaunchRanges]:
    """One launch for each word size that occurs. All arrays have shape [ranges]; no length is 0."""
    if int(length.max()) > PIECE_BYTES:
        src, dst, length = _pieces(src, dst, length)
    together = int(np.bitwise_or.reduce(src) | np.bitwise_or.reduce(dst) | np.bitwise_or.reduce(length))
    if _word(together) == WORD_BYTES[0]:
        return [_launch(WORD_BYTES[0], src, dst, length)]
    bits = src | dst | length
    plans = []
    left = np.ones(bits.shape[0], np.bool_)
    for word in WORD_BYTES:
        rows = left & (bits & np.uint64(word - 1) == 0)
        left &= ~rows
        if rows.all():
            return [_launch(word, src, dst, length)]
        if rows.any():
            plans.append(_launch(word, src[rows], dst[rows], length[rows]))
    return plans


def _word(bits: int) -> int:
    return next(word for word in WORD_BYTES if bits % word == 0)


def _launch(word: int, src: U64, dst: U64, length: U64) -> LaunchRanges:
    longest = int(length.max())
    same = longest if int(length.min()) == longest else 0
    words = -(-longest // min(word, 8))
    block = next((block for block in BLOCKS[word] if block >= words), BLOCKS[word][-1])
    return LaunchRanges(Launch(src.shape[0], word, block, same), src, dst, length)


def _pieces(src: U64, dst: U64, length: U64) -> tuple[U64, U64, U64]:
    count: NDArray[np.int64] = (-(-length.astype(np.int64) // PIECE_BYTES)).astype(np.int64)
    first = np.cumsum(count) - count
    step = ((np.arange(int(count.sum()), dtype=np.int64) - np.repeat(first, count)) * PIECE_BYTES).astype(np.uint64)
    piece = np.minimum(np.repeat(length, count) - step, np.uint64(PIECE_BYTES))
    return np.repeat(src, count) + step, np.repeat(dst, count) + step, piece
