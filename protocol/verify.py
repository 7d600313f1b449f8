"""Digests of a record's bytes, taken alike at the source and at the destination.

For each layer of a record: the sum, mod 2**64, over the intervals of that layer, of mix64(d + salt), where d is the
state digest of the interval's rows (`digest.py`) and salt tells intervals apart: mix64 of destination rank, region part
and interval start. A swap of K and V, of two ranks or of two rows changes it. It catches transport faults; a source
that named the wrong row is caught by tests, never on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from sglang_pd.protocol.batch import U64
from sglang_pd.protocol.bind import RoomIndices, rows_of
from sglang_pd.protocol.digest import MASK, digest_rows, mix64
from sglang_pd.protocol.kinds import Elements
from sglang_pd.protocol.manifest import RankManifest
from sglang_pd.protocol.plan import Plan

RowReader = Callable[[int, U64, int], NDArray[np.uint8]]
"""(region number, byte offsets [n] in the region, row length in bytes) -> rows uint8 [n, length]."""
RowDigest = Callable[[int, U64, int, NDArray[np.int64]], int]
"""(region number, byte offsets [n], row length, element numbers [n]) -> `digest_rows` of those rows."""


def digest_with(read: RowReader) -> RowDigest:
    """The numpy digest over a reader of host memory."""
    return lambda region, offsets, length, elements: digest_rows(read(region, offsets, length), elements)


def layer_digests(
    plan: Plan,
    ranks: tuple[RankManifest, Literal["source", "destination"]],
    room: RoomIndices,
    record: tuple[str, Elements],
    digest: RowDigest,
) -> dict[int, int]:
    """Digest contribution of one rank pair to a record, by layer id.

    ranks: the manifest of the rank that reads its own memory, and which side it is. record: kind and elements.
    Contributions of a writer's destination ranks add up (mod 2**64).
    """
    (manifest, side), (kind, elements) = ranks, record
    parts = [region.part for component in manifest.components for region in component.regions]
    totals: dict[int, int] = {}
    for move in plan.moves:
        if move.kind != kind:
            continue
        rows = rows_of(move, room, elements)
        offsets = rows.src_offset if side == "source" else rows.dst_offset
        regions = move.src_region if side == "source" else move.dst_region
        inner = move.src_inner if side == "source" else move.dst_inner
        for entry in range(len(move)):
            region = int(regions[entry])
            d = digest(region, offsets + inner[entry], int(move.length[entry]), rows.element)
            salt = xxhash.xxh3_64_intdigest(f"{plan.dst_rank}/{parts[region]}/{int(move.dst_inner[entry])}".encode())
            mixed = int(mix64(np.array([(d + salt) & MASK], dtype=np.uint64))[0])
            layer = int(move.layer_id[entry])
            totals[layer] = (totals.get(layer, 0) + mixed) & MASK
    return totals
