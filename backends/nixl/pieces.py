"""A write of the `nixl` backend as the library gets it: addresses and device numbers, one pair of memory kinds each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.nixl.library import Rows as LibraryRows
from sglang_pd.backends.nixl.options import NixlOptions
from sglang_pd.backends.sides import Side, one_range, ordinal
from sglang_pd.protocol.batch import U64, WriteBatch


@dataclass(slots=True)
class Piece:
    """What one call hands to the library, all of one pair of memory kinds.

    rows: local and remote descriptors: address, length in bytes, device number; arrays of shape [rows, 3], uint64, or
        lists of tuples.
    kinds: `cpu` or `cuda`, each side. source_device: of the first row.
    """

    rows: tuple[LibraryRows, LibraryRows]
    kinds: tuple[str, str]
    source_device: str


def pieces(rows: Rows, own: Side, peer: Side, options: NixlOptions) -> Iterator[Piece]:
    """What is handed to the library call by call: at most so many descriptors and, but for the last, bytes."""
    whole = rows.merged().cut(options.max_bytes_per_post)
    for kinds, part in _by_kinds(whole, own, peer):
        for some in part.slices(options.max_descriptors_per_post, options.max_bytes_per_post):
            local = _table(some.src, some.length, own.index[some.src_segment])
            remote = _table(some.dst, some.length, peer.index[some.dst_segment])
            yield Piece((local, remote), kinds, own.devices[int(some.src_segment[0])])


def _by_kinds(rows: Rows, own: Side, peer: Side) -> Iterator[tuple[tuple[str, str], Rows]]:
    """The rows by kind of memory: source `cpu` or `cuda`, destination likewise."""
    if own.host_only and peer.host_only:
        yield ("cpu", "cpu"), rows
        return
    src = np.array([device != "cpu" for device in own.devices])
    dst = np.array([device != "cpu" for device in peer.devices])
    both = src[rows.src_segment] * 2 + dst[rows.dst_segment]
    for code in np.unique(both):
        kinds = ("cuda" if code & 2 else "cpu", "cuda" if code & 1 else "cpu")
        yield kinds, rows.take(np.flatnonzero(both == code))


def _table(address: U64, length: U64, index: U64) -> LibraryRows:
    table = np.empty((address.shape[0], 3), np.uint64)
    table[:, 0] = address
    table[:, 1] = length
    table[:, 2] = index
    return table


def single_piece(batch: WriteBatch, own: Side, peer: Side) -> Piece | None:
    """The piece of a batch of one descriptor; None as for `one_range`."""
    found = one_range(batch, own, peer)
    if found is None:
        return None
    (src, src_segment), (dst, dst_segment), nbytes = found
    here, there = own.devices[src_segment], peer.devices[dst_segment]
    rows: tuple[LibraryRows, LibraryRows] = ([(src, nbytes, ordinal(here))], [(dst, nbytes, ordinal(there))])
    return Piece(rows, (here.partition(":")[0], there.partition(":")[0]), here)
