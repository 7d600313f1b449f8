"""kill -9 of writers with copies in flight: is the destination's memory left alone once `revoke` says True?

Each lane has one destination process that lives on, and kills one writer after another. A writer keeps eight batches in
its queue, of many pages (kernels) or of a few long ranges (copies by the driver); the destination sees its canaries
overwritten, so they are running, and then the writer is killed.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any

from sglang_pd.testing.lab import MIB, BackendSpec, ChildProcess, ConformanceFailure, Lab, RemoteRefusal, canaries
from sglang_pd.testing.pattern import CANARY, batch_to_wire, pages

SIZE = 128 * MIB
DEPTH = 8
WATCH_S = 0.3
RANGES = (SIZE // 16384, 8)
"""Ranges of a batch, by turns."""


def one_kill(lab: Lab, target: ChildProcess, src_device: str, ranges: int) -> dict[str, Any]:
    """Start a writer, kill it while it writes, ask for the proof, re-own the memory and watch it."""
    writer = lab.spawn((SIZE,), device=src_device)
    try:
        link = lab.connect(writer, target)
        writer.call("fill", segment=0, offset=0, nbytes=SIZE, value=CANARY ^ 0xFF)
        batch = pages(1, ranges, SIZE // ranges, (SIZE,), (SIZE,))
        link.move(batch)
        canaries(target)
        arguments = {"peer": link.peer, "batch": batch_to_wire(batch), "for_s": 30.0, "depth": DEPTH}
        writer.start("stream", arguments)
        writing = target.call("watch", segment=0, nbytes=SIZE, value=CANARY, for_s=5.0) >= 0
        time.sleep(0.05)
        writer.kill()
        asked = target.call("revoke", epoch=writer.epoch, within_s=10.0)
        late = -1
        if asked["proven"]:
            canaries(target)
            late = target.call("watch", segment=0, nbytes=SIZE, value=CANARY, for_s=WATCH_S)
        return {"writing": writing, "proven": asked["proven"], "took_s": asked["took_s"], "late_offset": late}
    finally:
        lab.end(writer)


def run_lane(spec: BackendSpec, kills: int, ranges: int, results: list[dict[str, Any]]) -> None:
    """`kills` writers, one after another, against one destination."""
    lab = Lab(spec)
    try:
        target = lab.spawn((SIZE,), device=spec.dst_device)
        for _ in range(kills):
            try:
                found = one_kill(lab, target, spec.src_device, ranges)
            except (ConformanceFailure, RemoteRefusal) as error:
                found = {"error": str(error)[:2000]}
            results.append({"devices": f"{spec.src_device} -> {spec.dst_device}", "ranges": ranges, **found})
    finally:
        lab.close()


def run_kills(backend: str, options: Mapping[str, Any], kills: int, lanes: int, gpus: int) -> dict[str, Any]:
    """`kills` kills in all, over `lanes` lanes at once, which take turns with the kinds of destination.

    These are another GPU where there is one, the same GPU, and (for `local`) host memory that the GPU writes to.
    """
    targets = (["cuda:1"] if gpus > 1 else []) + ["cuda:0"] + (["cpu"] if backend == "local" else [])
    results: list[dict[str, Any]] = []
    threads = []
    for lane in range(lanes):
        dst = targets[lane % len(targets)]
        spec = BackendSpec(name=backend, options=dict(options), src_device="cuda:0", dst_device=dst)
        share = kills // lanes + (lane < kills % lanes)
        ranges = RANGES[lane // len(targets) % len(RANGES)]
        threads.append(threading.Thread(target=run_lane, args=(spec, share, ranges, results)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    good = [one for one in results if one.get("proven") and one["writing"] and one["late_offset"] < 0]
    return {"asked": kills, "intact": len(good), "runs": results}


def print_kills(found: dict[str, Any]) -> None:
    """A line for the sum and one for each run that was not good."""
    took = [one["took_s"] for one in found["runs"] if one.get("proven")]
    median = f"{statistics.median(took) * 1e3:.2f} ms, slowest {max(took) * 1e3:.1f} ms" if took else "never"
    print(
        f"kill -9 in flight: {found['intact']} of {found['asked']} intact after revoke; proof after {median} (median)"
    )
    for one in found["runs"]:
        if "error" in one or not one["proven"] or not one["writing"] or one["late_offset"] >= 0:
            print(f"    NOT GOOD {one}")
