"""A prefill and a decode worker in this process, each behind its ASGI application; and the same prompts run whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import torch

from sglang_pd.config import load_worker
from sglang_pd.engines.base import Sampling
from sglang_pd.launch.whole import Whole
from sglang_pd.server.app import build_app
from sglang_pd.worker.serving.service import WorkerService

torch.set_num_threads(1)

BASE: dict[str, Any] = {
    "engine": {"name": "reference", "chunk_tokens": 64},
    "pools": {"tokens": 1024, "rows": 4, "page_tokens": 16},
    "network": {"bootstrap_port": 0, "http_port": 0},
    "liveness": {"heartbeat_s": 0.2, "liveness_s": 3, "status_max_s": 2, "transfer_s": 10, "drain_s": 20},
    "verify": "full",
}
_rooms = count(1)


def document(role: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's configuration, sections merged over `BASE`."""
    pools = {"order": "high"} if role == "prefill" else {"order": "random", "seed": 3, "poison": 0x7B}
    made: dict[str, Any] = {"role": role, **BASE, "pools": {**BASE["pools"], **pools}}
    for name, values in sections.items():
        made[name] = {**made.get(name, {}), **values} if isinstance(values, Mapping) else values
    return made


@dataclass
class Pair:
    """Two workers and what posts to both."""

    prefill: WorkerService
    decode: WorkerService
    apps: dict[str, Any]

    def ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine."""
        return asyncio.run(asyncio.wait_for(call, 50))

    def client(self, leg: str, **headers: str) -> httpx.AsyncClient:
        """A client of one worker."""
        transport = httpx.ASGITransport(app=self.apps[leg])
        return httpx.AsyncClient(transport=transport, base_url=f"http://{leg}", timeout=50, headers=headers)

    def place(self, number: int = 1) -> dict[str, Any]:
        """A room for a request of `number` sequences, as a router would inject it."""
        first = next(_rooms)
        for _ in range(number - 1):
            next(_rooms)
        host, _, port = self.prefill.endpoint.address.removeprefix("tcp://").rpartition(":")
        return {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": first}

    def post(self, path: str, body: dict[str, Any], sequences: int = 1) -> tuple[httpx.Response, httpx.Response]:
        """Post the same body to both legs; prefill's answer, decode's answer."""
        body = {**self.place(sequences), **body}

        async def both() -> Any:
            async with self.client("prefill") as one, self.client("decode") as other:
                return await asyncio.gather(one.post(path, json=body), other.post(path, json=body))

        return self.ask(both())

    def get(self, leg: str, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        """One request to one worker."""

        async def one() -> Any:
            async with self.client(leg, **headers) as client:
                return await client.request(method, path)

        return self.ask(one())

    def settled(self) -> bool:
        """Nothing is leased, queued, open or withheld on either side: polled for a while."""
        return self.ask(self._settled())

    async def _settled(self) -> bool:
        for _ in range(200):
            leases = [service.parts.allocator.leases for service in (self.prefill, self.decode)]
            rooms = [service.endpoint.stats()["rooms"] for service in (self.prefill, self.decode)]
            idle = self.prefill.runner.idle and self.decode.runner.idle
            if idle and not any(leases) and not any(rooms):
                return True
            await asyncio.sleep(0.05)
        return False


@contextmanager
def pair_of(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Iterator[Pair]:
    """Both workers, closed in the end."""
    one = WorkerService(load_worker(prefill or document("prefill")))
    try:
        other = WorkerService(load_worker(decode or document("decode")))
        try:
            yield Pair(one, other, {"prefill": build_app(one), "decode": build_app(other)})
        finally:
            other.close()
    finally:
        one.close()


class Oracle:
    """The reference model run whole."""

    def __init__(self) -> None:
        self._whole = Whole(load_worker(document("prefill")))

    def tokens(self, prompt: list[int], number: int, sampling: Sampling | None = None) -> list[int]:
        """`number` tokens after the prompt."""
        return [token for token, _ in self._whole.run(prompt, number, sampling or Sampling())]

    def scored(self, prompt: list[int], number: int) -> list[tuple[int, float]]:
        """The same with log-probabilities, greedy."""
        return self._whole.run(prompt, number, Sampling())
