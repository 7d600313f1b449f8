"""Cases on refusal: what must not move does not, and says so before anything moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.protocol.batch import RegionTable, WriteBatch
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.testing.case import Figures, case
from sglang_pd.testing.cases_bytes import exact, one_item
from sglang_pd.testing.lab import (
    MIB,
    CaseSkipped,
    ConformanceFailure,
    Lab,
    Link,
    RemoteRefusal,
    canaries,
    compare,
    require,
)
from sglang_pd.testing.pattern import batch_to_wire, canary_images, pages


def _must_refuse(link: Link, batch: WriteBatch, what: str) -> None:
    wire = batch_to_wire(batch)
    error = link.writer.refused("write", peer=link.peer, batch=wire, deadline_s=10.0)
    require(error.code == "segment_invalid", f"{what}: refused as {error.code}, not as segment_invalid")


def _bad_column(batch: WriteBatch, name: str, row: int, value: int) -> WriteBatch:
    column: NDArray[Any] = getattr(batch, name).copy()
    column[row] = value
    changed: dict[str, Any] = {name: column}
    return replace(batch, **changed)


def _bad_table(table: RegionTable, segment: int) -> RegionTable:
    number = table.segment.copy()
    number[:] = segment
    return replace(table, segment=number)


@case
def out_of_bounds(lab: Lab) -> None:
    """A descriptor past its region or segment, on either side, is refused whole: its neighbours do not move either."""
    link = lab.shared()
    canaries(link.target)
    good = pages(100, 8, 4096, link.writer.sizes, link.target.sizes)
    wraps = 2**64 - 2048
    for side in ("src", "dst"):
        table: RegionTable = getattr(good, side)
        size = int(table.size_bytes[getattr(good, f"{side}_region")[5]])
        for offset in (size, size - 4095, size + (1 << 40), wraps):
            _must_refuse(link, _bad_column(good, f"{side}_offset", 5, offset), f"{side} offset {offset}")
        _must_refuse(link, _bad_column(good, f"{side}_region", 5, 10_000), f"{side} region out of its table")
    for length in (0, 1 << 40, 2**64 - 1):
        _must_refuse(link, _bad_column(good, "length", 5, length), f"length {length}")
    compare(link.target, canary_images(link.target.sizes), "refused batches")
    exact(link, good, 100, "a good batch after refused ones")


@case
def unregistered(lab: Lab) -> None:
    """A region on a segment that is not registered, on either side, is refused."""
    link = lab.shared()
    canaries(link.target)
    good = pages(110, 8, 4096, link.writer.sizes, link.target.sizes)
    for number in (len(link.writer.sizes), 2**31):
        _must_refuse(link, replace(good, src=_bad_table(good.src, number)), f"source segment {number}")
        _must_refuse(link, replace(good, dst=_bad_table(good.dst, number)), f"destination segment {number}")
    grown = replace(good.dst, size_bytes=good.dst.size_bytes + np.uint64(1 << 30))
    _must_refuse(link, replace(good, dst=grown), "a destination region larger than its segment")
    compare(link.target, canary_images(link.target.sizes), "refused batches")


@case
def foreign_memory(lab: Lab) -> None:
    """Memory from outside the scope is refused by `register`, and by `adopt` unless that is a declared capability."""
    child = lab.spawn((4096,), device=lab.spec.src_device)
    error = child.refused("register_foreign", nbytes=1 << 16)
    require(error.code == "memory_refused", f"register refused foreign memory as {error.code}")
    if child.capabilities["adopts_host"]:
        child.call("adopt_foreign", nbytes=1 << 16)
    else:
        error = child.refused("adopt_foreign", nbytes=1 << 16)
        require(error.code == "backend_unsupported", f"adopt refused foreign memory as {error.code}")
    error = child.refused("register_again")
    require(error.code == "memory_refused", f"overlapping registration was refused as {error.code}")


@case
def adopted_tensor(lab: Lab) -> Figures:
    """A tensor of torch's allocator is adopted and its bytes move; one that cannot be exported is refused by name."""
    sides = [((MIB,), lab.spec.src_device), ((MIB,), lab.spec.src_device), ((4 * MIB,), lab.spec.dst_device)]
    writer, expandable, target = lab.spawn_many(sides)
    if lab.spec.src_device == "cpu" or not writer.capabilities["adopts_device"]:
        raise CaseSkipped("no device memory, or adoption is not a declared capability")
    # Not a multiple of 2 MiB: several tensors share a block of the allocator, and this one starts inside.
    writer.sizes += (writer.call("adopt_tensor", nbytes=768 * 1024, expandable=False),)
    link = lab.connect(writer, target)
    exact(link, pages(140, 40, 16384, writer.sizes, target.sizes), 140, "an adopted tensor")
    try:
        expandable.sizes += (expandable.call("adopt_tensor", nbytes=24 * MIB, expandable=True),)
    except RemoteRefusal as refusal:
        require("expandable" in str(msg_fields(refusal.info)), f"refused without naming it: {refusal.info}")
        return {"expandable_segments": "refused"}
    again = lab.connect(expandable, target)
    exact(again, pages(141, 200, 16384, expandable.sizes, target.sizes), 141, "a tensor in expandable segments")
    return {"expandable_segments": "moved"}


@case
def wrong_epoch(lab: Lab) -> None:
    """A blob whose incarnation is not the one asked for is refused."""
    link = lab.shared()
    blob = link.target.call("describe")
    for epoch in (link.target.epoch ^ 1, link.writer.epoch, 0):
        error = link.writer.refused("connect", blob=blob, epoch=epoch)
        require(error.code in ("epoch_stale", "backend_unsupported", "peer_lost"), f"refused as {error.code}")


@case
def damaged_blob(lab: Lab) -> None:
    """A connect blob that is empty, cut, foreign or has one bit flipped is refused and harms nobody."""
    link = lab.shared()
    blob = link.target.call("describe")
    require(0 < len(blob) <= 1 << 20, f"a connect blob of {len(blob)} bytes")
    flipped = [blob[:i] + bytes([blob[i] ^ 1]) + blob[i + 1 :] for i in {0, len(blob) // 3, len(blob) // 2}]
    for bad in (b"", b"\0", b"{}", blob[:-1], blob[: len(blob) // 2], b"\xff" * 64, *flipped):
        link.writer.refused("connect", blob=bad, epoch=link.target.epoch)
    exact(link, one_item(link, 4096), 120, "a good batch after damaged blobs")


@case
def unknown_option(lab: Lab) -> None:
    """An option that the backend does not know is an error that names it."""
    try:
        lab.spawn((4096,), options={"no_such_option_7": 1})
    except RemoteRefusal as refusal:
        info: ErrorInfo = refusal.info
        require("no_such_option_7" in str(msg_fields(info)), "the error does not name the unknown option")
        require(info.code == "config_invalid", f"an unknown option is refused as {info.code}")
        return
    raise ConformanceFailure("an unknown option was accepted")


def msg_fields(info: ErrorInfo) -> tuple[str, ...]:
    """Every text of an error."""
    return (info.message, info.where, info.expected, info.actual, info.hint, *info.details.values())


@case
def memory_refused(lab: Lab) -> None:
    """A device that is not there is refused by `allocate`, and so are zero bytes."""
    child = lab.spawn((4096,), device=lab.spec.src_device)
    for nbytes, device in ((4096, "cuda:4095"), (0, "cpu"), (4096, "tape:0")):
        error = child.refused("register", wanted=[(nbytes, device)])
        codes = ("memory_refused", "backend_unsupported", "backend_unavailable")
        require(error.code in codes, f"{nbytes} bytes on {device} refused as {error.code}")


@case
def closed_backend(lab: Lab) -> None:
    """`close` and `disconnect` may be called twice; afterwards a write is refused, and the peer lives on."""
    link = lab.fresh((65536,), (65536,))
    exact(link, one_item(link, 4096), 130, "before close")
    link.writer.call("disconnect", peer=link.peer)
    again = lab.connect(link.writer, link.target)
    exact(again, one_item(again, 4096), 131, "after disconnect and connect")
    link.writer.call("close")
    link.writer.refused("write", peer=again.peer, batch=batch_to_wire(one_item(again, 4096)), deadline_s=5.0)
    other = lab.spawn((65536,), device=lab.spec.src_device)
    third = lab.connect(other, link.target)
    exact(third, one_item(third, 4096), 132, "another writer after the first closed")
