"""The page-copy kernel: one Triton program copies one range, from any address the GPU can read to any it can write.

A range is a few consecutive words of 16, 8, 4 or 1 bytes; the word is chosen by what divides source, destination and
length of all ranges of a launch. Peers' memory is reached over NVLink or PCIe by plain stores. Measured on two H200s
linked by NVLink before it was generalised: 0.93 of a contiguous copy at 16 KiB pages.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from sglang_pd.backends.local.launch import GridLaunch, Launch


@triton.jit(do_not_specialize=["same_bytes"])  # type: ignore[untyped-decorator]
def copy_ranges(src_addresses, dst_addresses, lengths, same_bytes, WORD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program i copies range i. `same_bytes`: the length of all ranges, or 0 where `lengths` has each one's."""
    item = tl.program_id(0)
    src_address = tl.load(src_addresses + item)
    dst_address = tl.load(dst_addresses + item)
    nbytes = same_bytes.to(tl.int64)
    if same_bytes == 0:
        nbytes = tl.load(lengths + item)
    copy_words(src_address, dst_address, nbytes, WORD, BLOCK)


@triton.jit(do_not_specialize=["blocks", "pieces", "piece_bytes"])  # type: ignore[untyped-decorator]
def copy_grid(  # type: ignore[no-untyped-def]
    addresses,
    row_slots,
    blocks,
    first_block,
    pieces,
    piece_bytes,
    BY_ENTRY: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i copies one piece of one descriptor of a grid: entry by entry, block by block, piece by piece.

    `addresses`: int64 rows of `row_slots` for source, destination and length; entries first, blocks from `first_block`.
    """
    item = tl.program_id(0).to(tl.int64)
    piece = item % pieces
    pair = item // pieces
    entry = pair // blocks
    block = first_block + pair % blocks
    src_address = tl.load(addresses + entry) + tl.load(addresses + block)
    dst_address = tl.load(addresses + row_slots + entry) + tl.load(addresses + row_slots + block)
    if BY_ENTRY:
        nbytes = tl.load(addresses + 2 * row_slots + entry)
    else:
        nbytes = tl.load(addresses + 2 * row_slots + block)
    start = piece * piece_bytes
    left = tl.maximum(tl.minimum(nbytes - start, piece_bytes.to(tl.int64)), 0)
    copy_words(src_address + start, dst_address + start, left, WORD, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def copy_words(src_address, dst_address, nbytes, WORD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one range by words of `WORD` bytes, `BLOCK` of them a step."""
    if WORD == 16:
        # Pairs of 8-byte words: what is promised here lets the compiler move 16 bytes at once.
        src = tl.multiple_of(src_address.to(tl.pointer_type(tl.int64)), 16)
        dst = tl.multiple_of(dst_address.to(tl.pointer_type(tl.int64)), 16)
        words = tl.multiple_of(nbytes // 8, 2)
    elif WORD == 8:
        src = src_address.to(tl.pointer_type(tl.int64))
        dst = dst_address.to(tl.pointer_type(tl.int64))
        words = nbytes // 8
    elif WORD == 4:
        src = src_address.to(tl.pointer_type(tl.int32))
        dst = dst_address.to(tl.pointer_type(tl.int32))
        words = nbytes // 4
    else:
        src = src_address.to(tl.pointer_type(tl.int8))
        dst = dst_address.to(tl.pointer_type(tl.int8))
        words = nbytes
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < words
        tl.store(dst + word, tl.load(src + word, mask=inside), mask=inside)


def launch_grid(addresses: Any, row_slots: int, launch: GridLaunch) -> None:
    """Start the kernel for a grid on the current stream. `addresses`: int64 device tensor, rows of `row_slots`."""
    copy_grid[(launch.entries * launch.blocks * launch.pieces,)](
        addresses, row_slots, launch.blocks, launch.first_block, launch.pieces, launch.piece_bytes,
        BY_ENTRY=launch.by_entry, WORD=launch.word_bytes, BLOCK=launch.block, num_warps=launch.warps,
    )  # fmt: skip


def launch_copy(src: Any, dst: Any, lengths: Any, launch: Launch) -> None:
    """Start the kernel on the current stream. `src`, `dst`, `lengths`: int64 device tensors of shape [ranges].

    The addresses must be readable and writable by the current device for the whole length of each range, and divisible
    by `launch.word_bytes` as the lengths are: whoever calls this has checked it.
    """
    copy_ranges[(launch.ranges,)](
        src, dst, lengths, launch.same_bytes, WORD=launch.word_bytes, BLOCK=launch.block, num_warps=launch.warps
    )
