"""Cases on the bytes themselves: every byte of the batch, no other byte, visible when DONE is said."""

from __future__ import annotations

import numpy as np

from sglang_pd.backends.base import batch_rows
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.testing.case import Figures, case
from sglang_pd.testing.lab import MIB, CaseSkipped, Lab, Link, RemoteRefusal, canaries, compare, load, require
from sglang_pd.testing.pattern import (
    CANARY,
    Ranges,
    apply_batch,
    batch_to_wire,
    canary_images,
    fragments,
    make_batch,
    pages,
    random_images,
)

GIB = 1 << 30
SUBMIT_BOUND_S = 0.025
"""`write` promises 5 ms for 65,536 descriptors; the best of five may take this long on a loaded machine."""


def exact(link: Link, batch: WriteBatch, seed: int, what: str) -> None:
    """Move a batch between freshly filled memories and compare every byte of the destination."""
    images = random_images(seed, link.writer.sizes)
    load(link.writer, images)
    canaries(link.target)
    link.move(batch)
    expected = canary_images(link.target.sizes)
    apply_batch(batch, images, expected)
    compare(link.target, expected, what)


def one_item(link: Link, nbytes: int, src_offset: int = 0, dst_offset: int = 0) -> WriteBatch:
    """A batch of one descriptor, segment 0 to segment 0."""

    def at(offset: int) -> Ranges:
        return Ranges(np.array([0], np.int64), np.array([offset], np.int64))

    length = np.array([nbytes], np.int64)
    return make_batch(at(src_offset), at(dst_offset), length, link.writer.sizes, link.target.sizes)


@case
def exact_single(lab: Lab) -> None:
    """One descriptor of 1 byte, 64 bytes, 4 KiB and 3 MiB arrives exactly."""
    link = lab.shared()
    for seed, (nbytes, src, dst) in enumerate([(1, 5, 9), (64, 128, 4096), (4096, 0, 8192), (3 * MIB, 4096, MIB)]):
        exact(link, one_item(link, nbytes, src, dst), seed, f"one item of {nbytes} bytes")


@case
def exact_batched(lab: Lab) -> None:
    """Sixteen neighbours in one batch arrive exactly, whether or not the transport merges them."""
    link = lab.shared()
    rows = np.arange(16, dtype=np.int64)
    ranges = Ranges(np.zeros(16, np.int64), rows * 8192)
    batch = make_batch(ranges, ranges, np.full(16, 8192, np.int64), link.writer.sizes, link.target.sizes)
    exact(link, batch, 10, "a batch of neighbours")


@case
def exact_permuted(lab: Lab) -> None:
    """Pages permuted on both sides over several segments arrive exactly, at 16 KiB and at 1,152 bytes."""
    link = lab.shared()
    for seed, (count, page_bytes) in enumerate([(300, 16384), (3000, 1152)]):
        batch = pages(20 + seed, count, page_bytes, link.writer.sizes, link.target.sizes)
        exact(link, batch, 20 + seed, f"permuted pages of {page_bytes} bytes")


@case
def exact_mixed_lengths(lab: Lab) -> None:
    """Pieces of many different lengths in one batch arrive exactly."""
    link = lab.shared()
    batch = fragments(30, 400, link.writer.sizes, link.target.sizes, align=64)
    exact(link, batch, 30, "mixed lengths")


@case
def exact_unaligned(lab: Lab) -> None:
    """Pieces that start and end at any byte arrive exactly."""
    link = lab.shared()
    exact(link, fragments(40, 2000, link.writer.sizes, link.target.sizes), 40, "unaligned pieces")
    exact(link, fragments(41, 5000, link.writer.sizes, link.target.sizes, limit=7), 41, "pieces under 8 bytes")


@case
def exact_zero_descriptors(lab: Lab) -> None:
    """A batch without descriptors is DONE at once and writes nothing."""
    link = lab.shared()
    canaries(link.target)
    none = np.zeros(0, np.int64)
    batch = make_batch(Ranges(none, none), Ranges(none, none), none, link.writer.sizes, link.target.sizes)
    ended = link.move(batch)
    require(ended["nbytes"] == 0, "an empty batch counts bytes")
    require(ended["took_s"] < 1.0, "an empty batch was not DONE at once")
    compare(link.target, canary_images(link.target.sizes), "an empty batch")


@case
def exact_65536_descriptors(lab: Lab) -> Figures:
    """65,536 descriptors in one write arrive exactly, and `write` does not block."""
    link = lab.shared()
    batch = pages(50, 65536, 64, link.writer.sizes, link.target.sizes)
    exact(link, batch, 50, "65,536 descriptors")
    best = min(link.move(batch)["write_s"] for _ in range(5))
    require(best < SUBMIT_BOUND_S, f"write took {best * 1e3:.1f} ms for 65,536 descriptors, best of five")
    return {"write_ms": round(best * 1e3, 2)}


@case
def exact_beyond_4_gib(lab: Lab) -> None:
    """Offsets over 4 GiB (and over 2 GiB) arrive exactly, on both sides."""
    size = 4 * GIB + 8 * MIB
    try:
        link = lab.fresh((size,), (size,))
    except RemoteRefusal as refusal:
        raise CaseSkipped(f"segments of {size} bytes are refused: {refusal.info}") from refusal
    src = [2 * GIB - 64, 4 * GIB - 64, 4 * GIB + 4096, 128]
    dst = [4 * GIB + 8192, 2 * GIB + 1, 64, 4 * GIB - 1000]
    length = [128, 4096, 70_000, 2048]
    zeros = np.zeros(len(src), np.int64)
    batch = make_batch(Ranges(zeros, np.array(src)), Ranges(zeros, np.array(dst)), np.array(length), (size,), (size,))
    image = random_images(60, length)
    for offset, data in zip(src, image, strict=True):
        link.writer.call("store", segment=0, offset=offset, data=data.tobytes())
    expected = []
    for offset, nbytes in zip(dst, length, strict=True):
        link.target.call("fill", segment=0, offset=offset - 32, nbytes=nbytes + 64, value=CANARY)
        expected.append(np.full(nbytes + 64, CANARY, np.uint8))
    link.move(batch)
    for offset, nbytes, data, frame in zip(dst, length, image, expected, strict=True):
        frame[32 : 32 + nbytes] = data
        found = link.target.call("read", segment=0, offset=offset - 32, nbytes=nbytes + 64)
        require(found == frame.tobytes(), f"{nbytes} bytes at offset {offset} (or beside them) are wrong")


@case
def source_reused_after_done(lab: Lab) -> None:
    """A source overwritten right after DONE does not change what arrived."""
    link = lab.shared()
    batch = pages(70, 128, 16384, link.writer.sizes, link.target.sizes)
    images = random_images(70, link.writer.sizes)
    for _ in range(3):
        load(link.writer, images)
        canaries(link.target)
        link.move(batch)
        for number, size in enumerate(link.writer.sizes):
            link.writer.call("fill", segment=number, offset=0, nbytes=size, value=0x3A)
        expected = canary_images(link.target.sizes)
        apply_batch(batch, images, expected)
        compare(link.target, expected, "a source reused after DONE")


@case
def waits_for_event(lab: Lab) -> Figures:
    """Bytes that depend on a device event are read after it, and `write` does not block until then."""
    link = lab.shared()
    batch = pages(75, 128, 16384, link.writer.sizes, link.target.sizes)
    for number, size in enumerate(link.writer.sizes):
        link.writer.call("fill", segment=number, offset=0, nbytes=size, value=0x11)
    canaries(link.target)
    late_s = 0.2
    ended = link.writer.call("write_after", peer=link.peer, batch=batch_to_wire(batch), value=0x22, late_s=late_s)
    require(ended["early"] == "pending", f"{ended['early']} before the event that the bytes depend on")
    require(ended["state"] == "done", f"behind an event the write ended {ended['state']}: {ended['error']}")
    require(ended["write_s"] < late_s / 2, f"write blocked for {ended['write_s'] * 1e3:.0f} ms")
    images = [np.full(size, 0x22 if number == 0 else 0x11, np.uint8) for number, size in enumerate(link.writer.sizes)]
    expected = canary_images(link.target.sizes)
    apply_batch(batch, images, expected)
    compare(link.target, expected, "bytes behind an event")
    return {"write_ms": round(ended["write_s"] * 1e3, 2)}


@case
def visible_after_done(lab: Lab) -> None:
    """After DONE every byte is visible at the peer: 1,000 rounds, told over a channel outside the transport."""
    link = lab.shared()
    rounds, nbytes = 1000, 32768
    batch = one_item(link, nbytes)
    link.target.start("rounds_check", {"nbytes": nbytes})
    confirmed = link.writer.call("rounds_send", peer=link.peer, batch=batch_to_wire(batch), rounds=rounds)
    seen = link.target.answer("rounds_check")
    require(confirmed == rounds, f"in {rounds} rounds {confirmed} were visible after DONE ({seen} were announced)")


@case
def many_writers_one_peer(lab: Lab) -> None:
    """Two processes write to one peer at the same time; every byte of both is right."""
    sizes = (4 * MIB,)
    spec = lab.spec
    wanted = [(sizes, spec.src_device), (sizes, spec.src_device), (sizes, spec.dst_device)]
    first, second, target = lab.spawn_many(wanted)
    whole = pages(80, 256, 16384, sizes, sizes)
    halves = [batch_rows(whole, slice(0, 128)), batch_rows(whole, slice(128, 256))]
    links = [lab.connect(writer, target) for writer in (first, second)]
    expected = canary_images(sizes)
    canaries(target)
    for seed, (link, half) in enumerate(zip(links, halves, strict=True)):
        images = random_images(80 + seed, sizes)
        load(link.writer, images)
        apply_batch(half, images, expected)
    for _ in range(5):
        posted = [link.post(half) for link, half in zip(links, halves, strict=True)]
        for link, one in zip(links, posted, strict=True):
            require(link.wait(one["transfer"])["state"] == "done", "a concurrent writer did not reach DONE")
    compare(target, expected, "two writers, one peer")


@case
def one_writer_many_peers(lab: Lab) -> None:
    """One process writes to three peers, all posted before any is awaited; every byte of all is right."""
    sizes = (2 * MIB,)
    spec = lab.spec
    writer, *targets = lab.spawn_many([(sizes, spec.src_device)] + [(sizes, spec.dst_device)] * 3)
    links = [lab.connect(writer, target) for target in targets]
    images = random_images(90, sizes)
    load(writer, images)
    batches = [pages(90 + i, 100, 16384, sizes, sizes) for i in range(len(links))]
    for target in targets:
        canaries(target)
    posted = [link.post(batch) for link, batch in zip(links, batches, strict=True)]
    for link, one, batch in zip(links, posted, batches, strict=True):
        require(link.wait(one["transfer"])["state"] == "done", "a write to one of three peers did not reach DONE")
        expected = canary_images(sizes)
        apply_batch(batch, images, expected)
        compare(link.target, expected, "one writer, three peers")
