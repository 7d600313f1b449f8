"""One-rank instances of the reference engine in this process, and hand-overs between them by protocol plans alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from support.hybrid_state import copy_chunk, instance
from support.stub_backend import StubBackend

from sglang_pd.engines.base import DecodeItem, HandoffRecord, Output, PrefillChunk, Request, Sampling
from sglang_pd.engines.reference import ReferenceConfig, ReferenceEngine
from sglang_pd.memory.allocator import Allocator, Policy
from sglang_pd.memory.index_pool import Order
from sglang_pd.memory.layout import Capacity, RegionKey, layout_rank
from sglang_pd.memory.lease import Lease
from sglang_pd.memory.live import live_rows
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.pairing import Pairing

torch.set_num_threads(1)

PAGE = 8
SPARSE = ReferenceConfig()
SOFT = ReferenceConfig(coupling="soft")
POISON = 3.7e5

Live = dict[RegionKey, tuple[NDArray[np.int64], NDArray[np.uint8]]]
"""Live rows by region: element numbers and bytes."""


def prompt_ids(count: int, seed: int = 7, vocab: int = 251, eos: int = 2) -> NDArray[np.int64]:
    """A prompt with an end-of-sequence inside the n-gram history, where it is long enough."""
    ids = np.random.default_rng(seed).integers(3, vocab, count)
    if count > 4:
        ids[count - 2] = eos
    return ids


@dataclass
class Size:
    """Pool sizes of one instance, and how it allocates."""

    pages: int = 24
    rows: int = 4
    slots: int = 4
    window_pages: int = 16
    order: Order = "high"
    seed: int = 1

    def capacity(self) -> Capacity:
        return Capacity(self.pages * PAGE, PAGE, self.rows, self.slots, self.window_pages * PAGE)


PREFILL = Size(24, 4, 4, 16, "random", 3)
DECODE = Size(31, 6, 7, 13, "random", 5)


@dataclass
class Running:
    """A request at one instance."""

    name: str
    lease: Lease
    tokens: list[int] = field(default_factory=list)
    logits: list[NDArray[np.float64]] = field(default_factory=list)
    stop: int = 0

    def take(self, output: Output) -> None:
        self.tokens.append(output.token)
        self.logits.append(output.logits)


class Host:
    """An instance of one rank: engine, pools, allocator. Pools start full of poison."""

    def __init__(
        self, config: ReferenceConfig, size: Size, engine: ReferenceEngine | None = None, filler: float = POISON
    ) -> None:
        self.config = config
        self.engine = engine or ReferenceEngine(config)
        layout = layout_rank(self.engine.state, size.capacity(), Topology(), RankId(0, 0))
        self.pools = RankPools(layout, Scope(StubBackend()).allocate_layout(layout))
        self.allocator = Allocator(layout.roots, Policy(size.order, size.seed))
        self.manifest = instance(f"{size.order}-{size.pages}", [layout])
        poison(self.pools, filler)
        self.engine.attach(self.pools)

    def prefill(
        self, name: str, ids: NDArray[np.int64], chunks: Sequence[int] = (), sampling: Sampling | None = None
    ) -> Running:
        """Prefill a prompt, whole or in chunks of these lengths, and keep the first token."""
        run = Running(name, self.allocator.lease(len(ids), window_stop=0))
        self.engine.start(Request(name, ids, sampling or Sampling()), run.lease.tables())
        for length in chunks or (len(ids),):
            start, run.stop = run.stop, min(len(ids), run.stop + length)
            if start == run.stop:
                break
            run.lease.advance(run.stop)
            output = self.engine.prefill(PrefillChunk(name, start, run.stop, run.lease.tables()))
            run.lease.settle(run.stop)
            if output is not None:
                run.take(output)
        return run

    def decode(self, runs: Sequence[Running], steps: int) -> None:
        """Decode these requests together."""
        for _ in range(steps):
            for run in runs:
                run.stop += 1
                run.lease.advance(run.stop)
            batch = [DecodeItem(run.name, run.tokens[-1], run.lease.tables()) for run in runs]
            for run, output in zip(runs, self.engine.decode(batch) or [], strict=True):
                run.take(output)
                run.lease.settle(run.stop)

    def end(self, run: Running) -> None:
        self.engine.release(run.name)
        run.lease.release()
        self.allocator.check_integrity()

    def live(self, run: Running) -> Live:
        """Live rows of every region, as a hand-over of what was computed so far would need them."""
        prompt = Prompt(run.stop)  # a shared prefix counts: it is read like the rest
        lists = run.lease.lists(prompt)
        return {key: live_rows(self.pools, key, lists, prompt) for key in self.pools.keys}


def poison(pools: RankPools, value: float = POISON) -> None:
    """Fill every region with something no state ever holds."""
    for key in pools.keys:
        whole = pools.layout.views[key].dtype.startswith("int")
        absurd = value == POISON or np.isnan(value)
        pools.tensor(*key).fill_((-77 if absurd else int(value)) if whole else value)


Mutate = Callable[[RankPools, RankPools, Lease, Lease, Prompt], None]
"""(source, destination, source lease, destination lease, prompt), after the copies: spoil something."""


@dataclass(frozen=True)
class How:
    """How a hand-over is made.

    chunks: lengths in which the transfer is made (streaming kinds move with each, the others with the last). mutate:
    called between the copies and the admission. prefix: a request at the destination, and how many leading tokens of it
    are shared and do not move. name: of the request at the destination, where it is another.
    """

    chunks: Sequence[int] = ()
    mutate: Mutate | None = None
    prefix: tuple[Running, int] | None = None
    name: str = ""


PLAIN = How()


def hand_over(source: Host, run: Running, destination: Host, how: How = PLAIN) -> Running:
    """Move a prefilled request by plans and plain copies, and admit it at the destination."""
    held = None if how.prefix is None else (how.prefix[0].lease, how.prefix[1])
    lease = destination.allocator.lease(run.stop, prefix=held)
    prompt = Prompt(run.stop, lease.prefix_tokens)
    pairing = Pairing(source.manifest, destination.manifest)
    arrived = Running(how.name or run.name, lease, run.tokens[:1], run.logits[:1], run.stop)
    lease.arm()
    destination.pools.arm(lease.tables())
    room = pairing.room(prompt, run.lease.lists(Prompt(run.stop)), lease.lists(prompt))
    start = 0
    for length in (*how.chunks, run.stop):
        stop = min(run.stop, start + length)
        if start < stop:
            copy_chunk(pairing, room, Chunk(start, stop, stop == run.stop), [source.pools], [destination.pools])
        start = stop
    if how.mutate is not None:
        how.mutate(source.pools, destination.pools, run.lease, lease, prompt)
    lease.disarm()
    destination.pools.disarm(lease.generation)
    record = HandoffRecord.decode(source.engine.handoff(run.name).encode())
    destination.engine.admit(arrived.name, record, lease.tables())
    return arrived


def differences(a: Live, b: Live) -> list[RegionKey]:
    """Regions whose live rows differ."""
    assert set(a) == set(b)
    return [key for key in a if not all(np.array_equal(x, y) for x, y in zip(a[key], b[key], strict=True))]


def same_logits(a: Running, b: Running) -> bool:
    return len(a.logits) == len(b.logits) and all(np.array_equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))
