"""The sequences of one request together: started all or none, gathered or streamed, and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from sglang_pd.http.bounds import Bodies
from sglang_pd.server.sequences import Ask, Progress, Sequence
from sglang_pd.server.tokenizer import Tokenizer
from sglang_pd.worker.serving.service import WorkerService


@dataclass(frozen=True)
class Worker:
    """What serves: the worker, its tokenizer, the model's name for clients, and what reads their requests."""

    service: WorkerService
    tokenizer: Tokenizer
    model: str
    bodies: Bodies

    @property
    def leg(self) -> str:
        """Which half of a hand-over this is."""
        return self.service.role.value

    @property
    def epoch(self) -> str:
        """This incarnation, 16 hexadecimal digits."""
        return f"{self.service.epoch:016x}"


@contextlib.contextmanager
def started(worker: Worker, asks: list[Ask]) -> Iterator[list[Sequence]]:
    """Sequences that run; all of them are given up when the block ends early. Raises `Failure`, none started then."""
    sequences = [Sequence(worker.service, worker.tokenizer, ask) for ask in asks]
    for sequence in sequences:
        sequence.check()
    running: list[Sequence] = []
    try:
        for sequence in sequences:
            sequence.start()
            running.append(sequence)
        yield sequences
    finally:
        for sequence in running:
            sequence.close()


async def gather(worker: Worker, asks: list[Ask]) -> list[Sequence]:
    """All answers, complete. The first failure ends the others. Raises `Failure`."""
    with started(worker, asks) as sequences:
        async for _ in merged(worker, sequences):
            pass
        return sequences


async def merged(worker: Worker, sequences: list[Sequence]) -> AsyncIterator[tuple[Sequence, Progress]]:
    """Every step of every sequence, as they come. Raises the first `Failure`, also when the deadline passes."""
    limit_s = worker.service.config.liveness.request_s
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    streams = {sequence: aiter(sequence) for sequence in sequences}
    waiting = {asyncio.ensure_future(_step(stream)): sequence for sequence, stream in streams.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=max(0.0, deadline_s - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise next(iter(waiting.values())).expire(limit_s)
            for task in done:
                sequence = waiting.pop(task)
                progress = task.result()
                if progress is None:
                    continue
                yield sequence, progress
                waiting[asyncio.ensure_future(_step(streams[sequence]))] = sequence
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _step(stream: AsyncIterator[Progress]) -> Progress | None:
    return await anext(stream, None)
