"""Reference engines of several ranks in one process: a thread a rank, sums and maxima over barriers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from support.hybrid_state import copy_chunk, every_rank, instance
from support.reference_run import POISON, Running, Size, poison
from support.stub_backend import StubBackend

from sglang_pd.engines.base import DecodeItem, HandoffRecord, Output, PrefillChunk, Request, Sampling
from sglang_pd.engines.reference import Links, ReferenceConfig, ReferenceEngine
from sglang_pd.memory.allocator import Allocator, Policy
from sglang_pd.memory.layout import layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.pairing import Pairing

WAIT_S = 60.0
R = TypeVar("R")


class Group:
    """Reductions over some ranks, in rank order."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._parts: list[torch.Tensor] = [torch.zeros(())] * size

    def abort(self) -> None:
        self._barrier.abort()

    def reduce(self, rank: int, what: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = x
            self._barrier.wait()
            result = what(torch.stack(self._parts))
            self._barrier.wait()
            return result

        return call


class Fleet:
    """An instance of pp x tp ranks."""

    def __init__(
        self,
        config: ReferenceConfig,
        topology: Topology,
        size: Size,
        starts: tuple[int, ...] = (),
        filler: float = POISON,
    ) -> None:
        self.topology = topology
        self._groups: list[Group] = []
        links = self._links(topology)
        ranks = every_rank(topology)
        self.engines = [ReferenceEngine(config, topology, rank, links[rank], starts) for rank in ranks]
        layouts = [
            layout_rank(e.state, size.capacity(), topology, rank) for e, rank in zip(self.engines, ranks, strict=True)
        ]
        self.pools = [RankPools(layout, Scope(StubBackend()).allocate_layout(layout)) for layout in layouts]
        self.allocator = Allocator(layouts[0].roots, Policy(size.order, size.seed))
        self.manifest = instance(f"pp{topology.pp}-tp{topology.tp}-dcp{topology.dcp}-{size.pages}", layouts)
        for engine, pools in zip(self.engines, self.pools, strict=True):
            poison(pools, filler)
            engine.attach(pools)

    def _links(self, t: Topology) -> dict[RankId, Links]:
        links = {}
        pipes = {(p, r): queue.Queue[torch.Tensor]() for p in range(1, t.pp) for r in range(t.tp)}
        for p in range(t.pp):
            tp = Group(t.tp)
            dcp = [Group(t.dcp) for _ in range(t.tp // t.dcp)]
            self._groups += [tp, *dcp]
            for r in range(t.tp):
                near = dcp[r // t.dcp]
                links[RankId(p, r)] = Links(
                    tp.reduce(r, lambda x: x.sum(0)),
                    near.reduce(r % t.dcp, lambda x: x.sum(0)),
                    near.reduce(r % t.dcp, lambda x: x.amax(0)),
                    (lambda shape, q=pipes[p, r]: q.get(timeout=WAIT_S)) if p else Links().recv,
                    pipes[p + 1, r].put if p + 1 < t.pp else Links().send,
                )
        return links

    def each(self, call: Callable[[ReferenceEngine], R]) -> list[R]:
        """Run on every rank at once; results in rank order."""

        def guarded(engine: ReferenceEngine) -> R:
            try:
                return call(engine)
            except BaseException:
                for group in self._groups:
                    group.abort()
                raise

        with ThreadPoolExecutor(len(self.engines)) as pool:
            return list(pool.map(guarded, self.engines))

    @property
    def last(self) -> ReferenceEngine:
        """Rank 0 of the last stage, which speaks for the instance."""
        return self.engines[(self.topology.pp - 1) * self.topology.tp]

    def _spoken(self, outputs: list[Output | None]) -> Output | None:
        stage = outputs[(self.topology.pp - 1) * self.topology.tp :]
        first = stage[0]
        for other in stage[1:]:
            assert (first is None) == (other is None)
            assert first is None or other is None or np.array_equal(first.logits, other.logits), "ranks disagree"
        return first

    def prefill(self, name: str, ids: NDArray[np.int64], chunks: Sequence[int] = ()) -> Running:
        """As `Host.prefill`."""
        run = Running(name, self.allocator.lease(len(ids), window_stop=0))
        self.each(lambda e: e.start(Request(name, ids, Sampling()), run.lease.tables()))
        for length in chunks or (len(ids),):
            start, run.stop = run.stop, min(len(ids), run.stop + length)
            run.lease.advance(run.stop)
            chunk = PrefillChunk(name, start, run.stop, run.lease.tables())
            output = self._spoken(self.each(lambda e, chunk=chunk: e.prefill(chunk)))
            run.lease.settle(run.stop)
            if output is not None:
                run.take(output)
        return run

    def decode(self, runs: Sequence[Running], steps: int) -> None:
        """As `Host.decode`."""
        for _ in range(steps):
            for run in runs:
                run.stop += 1
                run.lease.advance(run.stop)
            batch = [DecodeItem(run.name, run.tokens[-1], run.lease.tables()) for run in runs]
            by_rank = self.each(lambda e, batch=batch: e.decode(batch))
            for number, run in enumerate(runs):
                output = self._spoken([outputs[number] if outputs else None for outputs in by_rank])
                assert output is not None
                run.take(output)
                run.lease.settle(run.stop)


def hand_over_fleet(source: Fleet, run: Running, destination: Fleet) -> Running:
    """Execute the plans of all rank pairs, and admit on every rank."""
    prompt = Prompt(run.stop)
    pairing = Pairing(source.manifest, destination.manifest)
    lease = destination.allocator.lease(run.stop)
    room = pairing.room(prompt, run.lease.lists(prompt), lease.lists(prompt))
    copy_chunk(pairing, room, Chunk(0, run.stop, last=True), source.pools, destination.pools)
    record = HandoffRecord.decode(source.last.handoff(run.name).encode())
    for engine in destination.engines:
        engine.admit(run.name, record, lease.tables())
    return Running(run.name, lease, run.tokens[:1], run.logits[:1], run.stop)
