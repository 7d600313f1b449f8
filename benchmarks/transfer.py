"""How fast a transport moves scattered pages on CPU, and how long one small item takes.

    python benchmarks/transfer.py [--backend local nixl mooncake] [--pages 32768] [--rounds 7] [--out DIR]

Each backend runs in a writer process of its own. Rounds are interleaved: a contiguous memcpy of as many bytes by one
thread, the backend's write, the raw library driven by hand on the same descriptors. Figures are medians; ratios are
medians of the ratios within a round. Small items alternate between the backend and the raw library.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from stamp import write_result

from sglang_pd.backends.base import Backend, Peer, TransferState
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.testing import memory
from sglang_pd.testing.lab import MIB, BackendSpec, Lab
from sglang_pd.testing.pattern import apply_batch, canary_images, pages

PAGE_BYTES = 16384
SMALL_BYTES = 64
SMALL_ROUNDS = 2000
LIBRARIES = ("nixl", "mooncake")
OPTIONS: dict[str, dict[str, Any]] = {"mooncake": {"insecure_data_plane": True}}


def environment(name: str) -> dict[str, str]:
    """What the backend's library must find in its environment."""
    if name != "mooncake":
        return {}
    from sglang_pd.backends.mooncake.backend import environment as mooncake_environment

    return dict(mooncake_environment(OPTIONS[name]))


def finish(backend: Backend, peer: Peer, batch: WriteBatch) -> None:
    """One write to its end, as an owner waits who has nothing else to do: on the wake-up, or by the interval."""
    transfer = backend.write(peer, batch)
    began = time.perf_counter()
    while transfer.poll() is TransferState.PENDING:
        backend.progress()
        if time.perf_counter() - began > 0.002:
            time.sleep(0.0002)
    if transfer.poll() is not TransferState.DONE:
        raise RuntimeError(f"{transfer.poll()}: {transfer.error}")


def timed(action: Callable[[], None]) -> float:
    """Seconds it takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def ratio(above: list[float], below: list[float]) -> float:
    """Median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def measure(actions: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each action in each round, interleaved, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            took = timed(action)
            if number:
                times[name].append(took)
    return times


def writer(name: str, count: int, rounds: int) -> dict[str, Any]:
    """All figures of one backend; runs in a process of its own."""
    size = count * PAGE_BYTES
    options = OPTIONS.get(name, {})
    lab = Lab(BackendSpec(name=name, options=options))
    target = lab.spawn((size,))
    backend = create_backend(name, epoch=secrets.randbits(63) | 1, options=options)
    (own,) = backend.register([backend.allocate(size)])
    content = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
    memory.write_bytes(own, 0, content)
    target.call("fill", segment=0, offset=0, nbytes=size, value=0xC5)
    target.call("admit", epoch=backend.epoch, blob=backend.describe())
    peer = backend.connect(target.call("describe"), target.epoch)
    batch = pages(1, count, PAGE_BYTES, (size,), (size,))
    small = pages(2, 1, SMALL_BYTES, (size,), (size,))
    plain = np.full(size, 1, np.uint8)
    actions: dict[str, Callable[[], None]] = {
        "memcpy": lambda: np.copyto(plain, content),
        "ours": lambda: finish(backend, peer, batch),
    }
    small_actions: dict[str, Callable[[], None]] = {"ours": lambda: finish(backend, peer, small)}
    raw = None
    if name in LIBRARIES:
        from transfer_raw import RawPair

        raw = RawPair(name, size)
        arrays, few = ((b.src_addresses()[1], b.dst_addresses()[1], b.length) for b in (batch, small))
        side = raw.side
        actions["raw"] = lambda: side.write(*arrays)
        small_actions["raw"] = lambda: side.write(*few)
    times = measure(actions, rounds)
    small_times = measure(small_actions, SMALL_ROUNDS)
    verify(target.call, content, batch, small, size)
    found = figures(times, small_times, size)
    found["transport"] = peer.transport
    if raw is not None:
        raw.close()
    backend.close()
    lab.close()
    return found


def verify(call: Callable[..., Any], content: Any, batch: WriteBatch, small: WriteBatch, size: int) -> None:
    """Every byte of the destination is what the batches make of it. Raises `RuntimeError`."""
    expected = canary_images((size,))
    for one in (batch, small):
        apply_batch(one, [content], expected)
    for start in range(0, size, 32 * MIB):
        nbytes = min(32 * MIB, size - start)
        found = np.frombuffer(call("read", segment=0, offset=start, nbytes=nbytes), np.uint8)
        if not np.array_equal(found, expected[0][start : start + nbytes]):
            raise RuntimeError(f"wrong bytes in [{start}, {start + nbytes})")


def figures(times: dict[str, list[float]], small: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Medians and ratios."""
    found: dict[str, Any] = {f"{name}_GB_per_s": size / statistics.median(t) / 1e9 for name, t in times.items()}
    found["ours_of_memcpy"] = ratio(times["memcpy"], times["ours"])
    found |= {f"small_{name}_p50_us": statistics.median(t) * 1e6 for name, t in small.items()}
    if "raw" in times:
        found["ours_of_raw"] = ratio(times["raw"], times["ours"])
        found["small_above_raw_us"] = found["small_ours_p50_us"] - found["small_raw_p50_us"]
    found["seconds"] = times
    return found


def run(name: str, count: int, rounds: int) -> dict[str, Any]:
    """Run a writer process and read its figures."""
    command = [sys.executable, str(Path(__file__)), "--writer", name, "--pages", str(count), "--rounds", str(rounds)]
    env = {**os.environ, **environment(name)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"figures"')]
    if not lines:
        return {"error": f"the writer ended with status {done.returncode} and no figures"}
    found: dict[str, Any] = json.loads(lines[-1])["figures"]
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    """The table."""
    print(
        f"{'backend':10}{'over':10}{'GB/s':>7}{'memcpy':>8}{'ratio':>7}{'raw':>7}{'ratio':>7}"
        f"{'64 B us':>9}{'raw us':>8}"
    )
    for name, row in results.items():
        if "error" in row:
            print(f"{name:10}{row['error']}")
            continue
        raw = (row.get("raw_GB_per_s"), row.get("ours_of_raw"), row.get("small_raw_p50_us"))
        rate, share, small = ("-" if value is None else f"{value:.2f}" for value in raw)
        print(
            f"{name:10}{row['transport'][:9]:10}{row['ours_GB_per_s']:7.2f}{row['memcpy_GB_per_s']:8.2f}"
            f"{row['ours_of_memcpy']:7.2f}{rate:>7}{share:>7}{row['small_ours_p50_us']:9.1f}{small:>8}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["local", *LIBRARIES], choices=["local", *LIBRARIES])
    parser.add_argument("--pages", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--writer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.writer:
        print(json.dumps({"figures": writer(given.writer, given.pages, given.rounds)}), flush=True)
        os._exit(0)  # a process that created UCX dies in its exit handlers
    results = {name: run(name, given.pages, given.rounds) for name in given.backend}
    show(results)
    write_result("transfer_cpu", {"pages": given.pages, "page_bytes": PAGE_BYTES, "backends": results}, given.out)


if __name__ == "__main__":
    main()
