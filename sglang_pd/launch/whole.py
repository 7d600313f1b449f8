"""The same models run whole, in one process and without any transfer: what a hand-over is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.registry import create_backend
from sglang_pd.config import WorkerConfig
from sglang_pd.engines.base import DecodeItem, Engine, Output, PrefillChunk, Request, Sampling
from sglang_pd.engines.registry import create_engine
from sglang_pd.memory.allocator import Policy
from sglang_pd.worker.serving.instances import plan_instance
from sglang_pd.worker.serving.parts import Memory, Parts, assemble
from sglang_pd.worker.setup import new_epoch


class Whole:
    """A model that prefills and decodes in this process. config: a worker's; its chunk schedule is kept, since a
    model's last bits may depend on it, and its pools, where the engine has no way without them."""

    def __init__(self, config: WorkerConfig) -> None:
        self._chunk_tokens = config.engine.chunk_tokens
        device = "cuda:0" if config.pools.device == "cuda" else config.pools.device
        pools = msgspec.structs.replace(config.pools, device=device, poison=None)
        config = msgspec.structs.replace(config, pools=pools)
        self._engine: Engine = create_engine(config.engine.name, config.engine.options, device)
        self._own_loop = config.engine.name == "transformers"
        self._parts: Parts | None = None
        if not self._own_loop:
            planned = plan_instance(config, self._engine.describe())
            backend = create_backend("local", epoch=new_epoch())
            memory = Memory(capacity=planned.budget.capacity, policy=Policy(), device=device)
            self._parts = assemble(self._engine, backend, memory)
        self.vocab_size = self._engine.describe().vocab_size

    def run(self, token_ids: list[int], count: int, sampling: Sampling) -> list[tuple[int, float]]:
        """`count` tokens after the prompt, each with its log-probability; past the end token, too."""
        ids = np.asarray(token_ids, dtype=np.int64)
        outputs = self._library_loop(ids, sampling) if self._own_loop else self._engine_loop(ids, count, sampling)
        return [(output.token, output.logprob) for output in islice(outputs, count)]

    def _library_loop(self, ids: NDArray[np.int64], sampling: Sampling) -> Iterator[Output]:
        from sglang_pd.engines.transformers import run_whole

        engine: Any = self._engine
        return run_whole(engine, ids, self._chunk_tokens, sampling)

    def _engine_loop(self, ids: NDArray[np.int64], count: int, sampling: Sampling) -> Iterator[Output]:
        if self._parts is None:
            return
        lease = self._parts.allocator.lease(len(ids) + count, window_stop=0)
        try:
            self._engine.start(Request("whole", ids, sampling), lease.tables())
            output = None
            for start in range(0, len(ids), self._chunk_tokens):
                stop = min(start + self._chunk_tokens, len(ids))
                lease.advance(stop)
                output = self._engine.prefill(PrefillChunk("whole", start, stop, lease.tables()))
                lease.settle(stop)
            position = len(ids)
            while output is not None:
                yield output
                position += 1
                lease.advance(position)
                outputs = self._engine.decode([DecodeItem("whole", output.token, lease.tables())])
                output = outputs[0] if outputs else None
                lease.settle(position)
        finally:
            self._engine.release("whole")
            lease.release()
