"""How fast plans are: compile, prove and bind, against a plain numpy outer sum of the same size in the same run.

    python benchmarks/plan.py [--out DIR] [--rounds N]

Rounds are interleaved (case, ceiling, case, ceiling, ...); figures are medians, ratios are medians of per-round ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from stamp import write_result

from sglang_pd.protocol.bind import Chunk, bind
from sglang_pd.protocol.codec import decode, encode
from sglang_pd.protocol.indices import pack_indices
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import (
    Component,
    InstanceManifest,
    RankId,
    RankManifest,
    Region,
    SegmentInfo,
    Topology,
    Transport,
)
from sglang_pd.protocol.messages import RoomOpen
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.spaces import VirtualTok

PAGE_TOKENS = 64
HEADS = 8
HEAD_BYTES = 128
POOL_PAGES = 8192


def instance(name: str, tp: int, layers: int, pool_pages: int = POOL_PAGES) -> InstanceManifest:
    """An instance with K and V of `layers` layers, 8 heads of 64 bf16 elements, pages of 64 tokens."""
    space = VirtualTok(capacity_tokens=pool_pages * PAGE_TOKENS, page_tokens=PAGE_TOKENS)
    heads = max(1, HEADS // tp)
    row = heads * HEAD_BYTES
    regions = tuple(
        Region(
            layer_id=layer,
            part=part,
            dtype="bfloat16",
            item_bytes=PAGE_TOKENS * row,
            stride_bytes=PAGE_TOKENS * row,
            row_bytes=row,
            unit_bytes=HEAD_BYTES,
            units_total=HEADS,
            dim=heads,
            segment=2 * layer + (part == "v"),
            offset=0,
        )
        for layer in range(layers)
        for part in ("k", "v")
    )
    segments = tuple(SegmentInfo(nbytes=region.span_bytes(space)) for region in regions)
    ranks = tuple(
        RankManifest(
            rank=RankId(0, t),
            epoch=t + 1,
            segments=segments,
            components=(Component(kind="KV", space=space, regions=regions),),
            transport=Transport(backend="local"),
        )
        for t in range(tp)
    )
    return InstanceManifest(instance_id=name, topology=Topology(tp=tp), model="bench", ranks=ranks)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def outer_sum(entries: int, blocks: int) -> Callable[[], Any]:
    """The ceiling: addresses and lengths of entries x blocks descriptors by plain broadcasting, nothing checked."""
    base = np.arange(entries, dtype=np.uint64) * np.uint64(1 << 30)
    offset = np.random.default_rng(0).permutation(blocks).astype(np.uint64) * np.uint64(8192)

    def run() -> object:
        src = (base[:, None] + offset).ravel()
        dst = (base[:, None] + offset).ravel()
        return src, dst, np.full(src.shape, 8192, dtype=np.uint64)

    return run


def bind_case(entries: int, pages: int, contiguous: bool, rounds: int) -> dict[str, Any]:
    """Room checks and bind of entries x pages, against the outer sum."""
    pair = Pairing(instance("prefill", 1, entries // 2), instance("decode", 1, entries // 2, POOL_PAGES - 64))
    plan = pair.plan(RankId(0, 0), RankId(0, 0))
    (src_space,), (dst_space,) = pair.needed.src, pair.needed.dst
    rng = np.random.default_rng(7)
    src_pages = np.arange(1, pages + 1) if contiguous else rng.permutation(POOL_PAGES - 1)[:pages] + 1
    dst_pages = np.arange(9, pages + 9) if contiguous else rng.permutation(POOL_PAGES - 65)[:pages] + 1
    src, dst = {src_space: src_space.ingest(src_pages)}, {dst_space: dst_space.ingest(dst_pages)}
    prompt, chunk = Prompt(pages * PAGE_TOKENS), Chunk(0, pages * PAGE_TOKENS, last=True)

    def grids() -> Any:
        return bind(plan, pair.room(prompt, src, dst), chunk)

    def bound() -> Any:
        return grids().arrays  # one by one, as libraries want them

    lazy = statistics.median(timed(grids) for _ in range(rounds))
    facts = {"descriptors": len(grids()), "as_grids_milliseconds": round(lazy * 1e3, 3)}
    return _compare(bound, outer_sum(entries, pages), rounds, **facts)


def slice_case(rounds: int) -> dict[str, Any]:
    """TP 4 -> 1: the head slices of 64 layers and 4,096 tokens from one source rank."""
    pair = Pairing(instance("prefill", 4, 64), instance("decode", 1, 64))
    plan = pair.plan(RankId(0, 1), RankId(0, 0))
    (src_space,), (dst_space,) = pair.needed.src, pair.needed.dst
    pages = 4096 // PAGE_TOKENS
    rng = np.random.default_rng(7)
    src = {src_space: src_space.ingest(rng.permutation(POOL_PAGES - 1)[:pages] + 1)}
    dst = {dst_space: dst_space.ingest(rng.permutation(POOL_PAGES - 1)[:pages] + 1)}

    def bound() -> Any:
        return bind(plan, pair.room(Prompt(4096), src, dst), Chunk(0, 4096, last=True)).arrays

    return _compare(bound, outer_sum(128, 4096), rounds, descriptors=len(bound().length))


def _compare(case: Callable[[], Any], ceiling: Callable[[], Any], rounds: int, **facts: Any) -> dict[str, Any]:
    times, ratios = [], []
    for _ in range(rounds):
        spent, best = timed(case), timed(ceiling)
        times.append(spent)
        ratios.append(spent / best)
    return {
        **facts,
        "milliseconds": round(statistics.median(times) * 1e3, 3),
        "milliseconds_min": round(min(times) * 1e3, 3),
        "times_outer_sum": round(statistics.median(ratios), 2),
    }


def pair_case(rounds: int) -> dict[str, Any]:
    """Two instances of 8 ranks and 128 layers: verdict, compile for one destination rank, and its proof."""
    src, dst = instance("prefill", 8, 128), instance("decode", 8, 128, POOL_PAGES - 64)
    encoded = msgspec.msgpack.encode(src)

    def whole() -> None:
        Pairing(src, dst).plan(RankId(0, 0), RankId(0, 0))

    decode = [timed(lambda: msgspec.msgpack.decode(encoded, type=InstanceManifest)) for _ in range(rounds)]
    return {
        "milliseconds": round(statistics.median(timed(whole) for _ in range(rounds)) * 1e3, 2),
        "manifest_bytes": len(encoded),
        "manifest_decode_milliseconds": round(statistics.median(decode) * 1e3, 2),
    }


def codec_case(rounds: int) -> dict[str, Any]:
    """A RoomOpen with 65,536 random page indices: bytes on the wire, encode and decode."""
    space = VirtualTok(capacity_tokens=2**20, page_tokens=1).list_space
    pages = space.ingest(np.random.default_rng(3).permutation(2**20)[:65_536] + 1)
    frame = b""

    def send() -> bytes:
        nonlocal frame
        message = RoomOpen(
            room=1,
            generation=1,
            to_epoch=1,
            request_id="r",
            prompt_tokens=65_536,
            prompt_digest=1,
            index_lists=(pack_indices(space.digest, pages.lower()),),
        )
        frame = encode(message, epoch=1)
        return frame

    def receive() -> Any:
        return decode(frame).message.index_lists[0].indices()

    spent = [timed(send) for _ in range(rounds)]
    read = [timed(receive) for _ in range(rounds)]
    return {
        "bytes": len(frame),
        "encode_milliseconds": round(statistics.median(spent) * 1e3, 3),
        "decode_milliseconds": round(statistics.median(read) * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=None, help="folder for plan.json (default: benchmarks/results)")
    options = parser.parse_args()
    rounds = options.rounds
    figures = {
        "bind": {
            "32 x 512 random": bind_case(32, 512, False, rounds),
            "32 x 2048 random": bind_case(32, 2048, False, rounds),
            "128 x 2048 random": bind_case(128, 2048, False, rounds),
            "32 x 2048 contiguous": bind_case(32, 2048, True, rounds),
            "TP 4 -> 1, 64 layers x 4096 tokens": slice_case(rounds),
        },
        "verdict, compile and proof, 2 x 8 ranks x 128 layers": pair_case(rounds),
        "RoomOpen with 65,536 random indices": codec_case(rounds),
    }
    print(json.dumps(figures, indent=2))
    print(f"written to {write_result('plan', figures, options.out)}")


if __name__ == "__main__":
    main()
