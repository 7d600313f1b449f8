"""A write of the `mori` backend as the library gets it: blocks between one local and one remote segment a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.mori.library import Blocks
from sglang_pd.backends.mori.options import MoriOptions

DOOR = -1
"""Segment number of the door in a `Piece`."""


@dataclass(slots=True)
class Piece:
    """Blocks between one local and one remote segment (or door), for one call."""

    src_segment: int
    dst_segment: int
    blocks: Blocks


GREETING = Piece(DOOR, DOOR, Blocks([2048], [0], [8]))
"""Eight bytes from our door to the peer's."""


def pieces(rows: Rows, options: MoriOptions) -> Iterator[Piece]:
    """What is handed to the library call by call: one pair of segments, at most so many blocks and bytes.

    `rows` has byte offsets in their segments for addresses.
    """
    whole = rows.grouped().merged().cut(min(options.max_block_bytes, options.max_bytes_per_call))
    for some in whole.slices(options.max_blocks_per_call, options.max_bytes_per_call, one_pair=True):
        blocks = Blocks(some.src.tolist(), some.dst.tolist(), some.length.tolist())
        yield Piece(int(some.src_segment[0]), int(some.dst_segment[0]), blocks)
