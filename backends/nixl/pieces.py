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

DIRECT_BYTES, DIRECT_DESCRIPTORS = 16 << 20, 1024
"""The largest piece that is copied by system calls to a process number: before each piece the link looks whether that
process lives, and what is copied of a piece after its death may reach another process that was given the number.
Smaller ones cost more (64 MiB, two-core AMD EPYC machine, against 64 MiB and 4,096 descriptors a call): 16 MiB 1.8 %
contiguous, 2.6 % as pages of 64 KiB, 1.5 % as pages of 16 KiB; 8 MiB 8 %, 6 % and 4 %; 4 MiB 15 %, 17 % and 9 %.
"""


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


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest piece: descriptors and bytes."""

    descriptors: int
    nbytes: int


def bounds(options: NixlOptions, *, direct: bool) -> Bounds:
    """The largest piece to a peer; `direct`: as of `Link`."""
    own = Bounds(options.max_descriptors_per_post, options.max_bytes_per_post)
    if not direct:
        return own
    return Bounds(min(own.descriptors, DIRECT_DESCRIPTORS), min(own.nbytes, DIRECT_BYTES))


def pieces(rows: Rows, own: Side, peer: Side, most: Bounds) -> Iterator[Piece]:
    """What is handed to the library call by call: at most so many descriptors and bytes."""
    whole = rows.merged().cut(most.nbytes)
    for kinds, part in _by_kinds(whole, own, peer):
        for some in part.slices(most.descriptors, most.nbytes):
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


def cut(piece: Piece, nbytes: int) -> Iterator[Piece]:
    """A piece of one descriptor in parts of at most `nbytes`, without arrays."""
    ((src, total, here),), ((dst, _, there),) = piece.rows
    for at in range(0, int(total), nbytes):
        length = min(nbytes, int(total) - at)
        rows: tuple[LibraryRows, LibraryRows] = ([(src + at, length, here)], [(dst + at, length, there)])
        yield Piece(rows, piece.kinds, piece.source_device)
