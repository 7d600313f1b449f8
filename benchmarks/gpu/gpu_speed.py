"""Speed between GPUs, beside a raw `copy_` of the same bytes in the same run: interleaved rounds, medians.

The writer is this process, the destination a process of its own. `one` is a single write from the call to DONE;
`queued` is the time of a write when several are posted before the first is awaited, as a server does. Every case is
checked byte for byte once.
"""

from __future__ import annotations

import secrets
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_pd.backends.base import Backend, Peer, Segment, TransferState
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.batch import Grid, GridBatch, RegionTable, WriteBatch
from sglang_pd.testing import memory
from sglang_pd.testing.lab import MIB, BackendSpec, ChildProcess, Lab
from sglang_pd.testing.pattern import apply_batch, canary_images, pages

POOL = 512 * MIB
ROUNDS = 9
QUEUED = 8
SLOW_S = 0.15
READ_BYTES = 64 * MIB

GRIDS = {
    "32 layers x 1024 pages of 16 KiB": (32, 1024, 16384),
    "32 layers x 64 pages of 16 KiB": (32, 64, 16384),
    "32 layers x 14336 rows of 1152 B": (32, 14336, 1152),
    "32 layers x 1024 rows of 1152 B": (32, 1024, 1152),
}
"""As a plan gives them: random pages, the same in every layer (a region each), bound to one grid."""

CASES = {
    "512 MiB in one block": (1, POOL),
    "32 x 1024 pages of 16 KiB": (32 * 1024, 16384),
    "32 x 64 pages of 16 KiB": (32 * 64, 16384),
    "32 x 14336 rows of 1152 B": (32 * 14336, 1152),
    "32 x 1024 rows of 1152 B": (32 * 1024, 1152),
    "one item of 64 B": (1, 64),
}


def grid_pages(layers: int, pages_of_layer: int, page_bytes: int) -> GridBatch:
    """Every layer's pool is its share of the segment; pages are drawn from all of it, permuted on both sides."""
    pool = POOL // layers // page_bytes
    rng = np.random.default_rng(11)
    number = np.arange(layers, dtype=np.uint32)
    size = np.full(layers, pool * page_bytes, np.uint64)
    table = RegionTable(np.zeros(layers, np.uint32), number.astype(np.uint64) * np.uint64(POOL // layers), size)
    blocks = (rng.permutation(pool)[:pages_of_layer].astype(np.uint64) * np.uint64(page_bytes) for _ in range(2))
    zero, length = np.zeros(layers, np.uint64), np.full(pages_of_layer, page_bytes, np.uint64)
    return GridBatch(table, table, (Grid(number, number, zero, zero, *blocks, length),))


def odd_grids() -> dict[str, WriteBatch]:
    """Grids that no fast path likes: slices of rows by entry, odd addresses, blocks longer than one program's share."""
    one = RegionTable(np.zeros(1, np.uint32), np.zeros(1, np.uint64), np.full(1, POOL, np.uint64))

    def u64(*values: int) -> NDArray[np.uint64]:
        return np.array(values, np.uint64)

    zero = np.zeros(3, np.uint32)
    rows = np.arange(1000, dtype=np.uint64)
    slices = Grid(
        zero, zero, u64(3, 40, 90), u64(1, 77, 200), rows * np.uint64(101), rows * np.uint64(293),
        np.ones(1000, np.uint64), entry_length=u64(7, 30, 11),
    )  # fmt: skip
    long = Grid(zero[:2], zero[:2], u64(0, 64 * MIB), u64(96 * MIB, 16), u64(0, 20 * MIB), u64(8, 32 * MIB),
                u64(5 * MIB + 8, 300_000))  # fmt: skip
    return {"grid of odd slices": GridBatch(one, one, (slices,)), "grid of long blocks": GridBatch(one, one, (long,))}


def finish(backend: Backend, transfers: list[Any]) -> None:
    """Wait for all, as an owner that has nothing else to do."""
    for transfer in transfers:
        while transfer.poll() is TransferState.PENDING:
            backend.progress()
        if transfer.poll() is not TransferState.DONE:
            raise RuntimeError(f"{transfer.poll()}: {transfer.error}")


def timed(action: Callable[[], None]) -> float:
    """Seconds it takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def raw_copy(nbytes: int, src: int, dst: int) -> Callable[[], None]:
    """One contiguous `copy_` of as many bytes between the two GPUs, awaited."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=f"cuda:{src}")
    target = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{dst}")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(src)
        torch.cuda.synchronize(dst)

    return copy


def verify(target: ChildProcess, own: Segment, batch: WriteBatch) -> None:
    """Compare every byte of the destination with what the batch should have made of it. Raises `RuntimeError`."""
    source = memory.read_bytes(own, 0, own.nbytes)
    expected = canary_images((POOL,))
    apply_batch(batch, [source], expected)
    for start in range(0, POOL, READ_BYTES):
        found = np.frombuffer(target.call("read", segment=0, offset=start, nbytes=READ_BYTES), np.uint8)
        if not np.array_equal(found, expected[0][start : start + READ_BYTES]):
            raise RuntimeError(f"wrong bytes in [{start}, {start + READ_BYTES})")


def run_case(backend: Backend, peer: Peer, batch: WriteBatch, copy: Callable[[], None]) -> dict[str, float]:
    """Interleaved rounds of the raw copy, single writes and queued writes."""
    times: dict[str, list[float]] = {"raw": [], "one": [], "submit": [], "queued": []}
    copy()
    cold = timed(lambda: finish(backend, [backend.write(peer, batch)]))
    # A library that takes a second for a batch is not asked for a hundred of them.
    rounds, at_once = (ROUNDS, QUEUED) if cold < SLOW_S else (3, 2)
    for _ in range(rounds):
        times["raw"].append(timed(copy))
        began = time.perf_counter()
        transfer = backend.write(peer, batch)
        times["submit"].append(time.perf_counter() - began)
        finish(backend, [transfer])
        times["one"].append(time.perf_counter() - began)
        queued = timed(lambda: finish(backend, [backend.write(peer, batch) for _ in range(at_once)]))
        times["queued"].append(queued / at_once)
    medians = {name: statistics.median(values) for name, values in times.items()}
    gigabytes = batch.total_bytes / 1e9
    return {
        "rounds": rounds,
        **{f"{name}_ms": medians[name] * 1e3 for name in times},
        **{f"{name}_GB_per_s": gigabytes / medians[name] for name in ("raw", "one", "queued")},
        "one_of_raw": statistics.median(r / o for r, o in zip(times["raw"], times["one"], strict=True)),
        "queued_of_raw": statistics.median(r / q for r, q in zip(times["raw"], times["queued"], strict=True)),
    }


def run_pair(name: str, options: Mapping[str, Any], dst: int) -> dict[str, Any]:
    """Every case from GPU 0 to GPU `dst`."""
    lab = Lab(BackendSpec(name=name, options=dict(options)))
    found: dict[str, Any] = {}
    try:
        target = lab.spawn((POOL,), device=f"cuda:{dst}")
        backend = create_backend(name, epoch=secrets.randbits(63) | 1, options=options)
        (own,) = backend.register([backend.allocate(POOL, "cuda:0")])
        content = np.random.default_rng(5).integers(0, 256, POOL, dtype=np.uint8)
        memory.write_bytes(own, 0, content)
        target.call("admit", epoch=backend.epoch, blob=backend.describe())
        peer = backend.connect(target.call("describe"), target.epoch)
        found["transport"] = peer.transport
        batches: dict[str, WriteBatch] = {case: grid_pages(*shape) for case, shape in GRIDS.items()}
        batches |= odd_grids()
        batches |= {case: pages(7, *shape, (POOL,), (POOL,)) for case, shape in CASES.items()}
        for case, batch in batches.items():
            target.call("fill", segment=0, offset=0, nbytes=POOL, value=0xC5)
            try:
                found[case] = run_case(backend, peer, batch, raw_copy(batch.total_bytes, 0, dst))
                verify(target, own, batch)
            except RuntimeError as error:
                found[case] = {"error": str(error)[:500]}
            print(f"{case}: {found[case]}", file=sys.stderr, flush=True)
        backend.close()
    finally:
        lab.close()
    return found


def run_speed(name: str, options: Mapping[str, Any], gpus: int, *, first_pair: bool = False) -> dict[str, Any]:
    """GPU 0 to GPU 1 where there are two, and within GPU 0 unless only the first pair is wanted."""
    pairs = [1, 0] if gpus > 1 else [0]
    return {f"cuda:0 -> cuda:{dst}": run_pair(name, options, dst) for dst in pairs[: 1 if first_pair else None]}


def print_speed(found: dict[str, Any]) -> None:
    """The table."""
    for pair, cases in found.items():
        print(f"speed {pair} over {cases['transport']}")
        print(
            f"    {'case':28}{'raw GB/s':>10}{'one':>8}{'queued':>8}{'one/raw':>9}{'queued/raw':>11}{'submit ms':>11}"
        )
        for case, row in cases.items():
            if case == "transport":
                continue
            if "error" in row:
                print(f"    {case:28}ERROR {row['error']}")
                continue
            print(
                f"    {case:28}{row['raw_GB_per_s']:10.1f}{row['one_GB_per_s']:8.1f}{row['queued_GB_per_s']:8.1f}"
                f"{row['one_of_raw']:9.3f}{row['queued_of_raw']:11.3f}{row['submit_ms']:11.3f}"
                + (f"   one p50 {row['one_ms'] * 1e3:.1f} us" if "64 B" in case else "")
            )
