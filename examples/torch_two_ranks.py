"""An engine with its own allocator and tensors hands a prompt over, two tensor-parallel ranks on each side.

Four processes: on either side rank 0 holds the endpoint, rank 1 joins it. The tensors are the engine's; the backend
adopts them, which `local` does not do for host memory, so this needs nixl. Run: python examples/torch_two_ranks.py
"""

import importlib.util
import multiprocessing
import os
import select
import sys
import time

import torch

from sglang_pd import (
    ControlConfig,
    DecodeEndpoint,
    EventKind,
    PrefillEndpoint,
    RankEndpoint,
    RankSetup,
    create_backend,
    handle_of,
    new_epoch,
)
from sglang_pd.memory.adopt import adopt_rank, tensor_buffer
from sglang_pd.memory.layout import Capacity
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.worker.setup import Network

TP, LAYERS, HEADS, DIM, PAGE = 2, 3, 4, 16, 8
PARTS = ("k", "v")
REGIONS = tuple(RegionSpec(part, tuple(range(LAYERS)), "float32", HEADS, (DIM,)) for part in PARTS)
STATE = StateSpec((ComponentSpec("KV", "tokens", REGIONS),), LAYERS)
PROMPT = list(range(1000, 1045))  # 45 tokens: 6 pages, the last one partial


class Engine:
    """One rank. Page 0 is its padding page; every rank runs the same allocator, so all hold the same pages."""

    def __init__(self, pages, rank):
        self.heads = slice(rank * HEADS // TP, (rank + 1) * HEADS // TP)
        self.kv = torch.zeros(LAYERS, len(PARTS), pages, PAGE, HEADS // TP, DIM)
        self.free = list(range(1, pages))
        self.backend = create_backend("nixl", epoch=new_epoch())
        scope = Scope(self.backend)
        tensors = {("KV", n, p): tensor_buffer(self.kv[n, i]) for n in range(LAYERS) for i, p in enumerate(PARTS)}
        capacity = Capacity(tokens=(pages - 1) * PAGE, page_tokens=PAGE)
        layout = adopt_rank(scope, STATE, capacity, (Topology(tp=TP), RankId(0, rank)), tensors)
        self.space = layout.roots.tokens.list_space
        self.setup = RankSetup(
            backend=self.backend, components=layout.components, segments=scope.segments, rank=RankId(0, rank)
        )

    def allocate(self, tokens):
        return [self.free.pop() for _ in range(-(-tokens // PAGE))]

    def state_of(self, prompt):
        """What computing the prompt leaves, this rank's heads: [layers, parts, tokens, heads, dim]."""
        size = (LAYERS, len(PARTS), len(prompt), HEADS, DIM)
        return torch.randn(size, generator=torch.Generator().manual_seed(sum(prompt)))[..., self.heads, :]

    def rows(self, pages, tokens):
        """The tokens' rows in the pool, in order."""
        return self.kv[:, :, pages].flatten(2, 3)[:, :, :tokens]

    def prefill(self, pages, prompt):
        rows = torch.zeros(LAYERS, len(PARTS), len(pages) * PAGE, HEADS // TP, DIM)
        rows[:, :, : len(prompt)] = self.state_of(prompt)
        self.kv[:, :, pages] = rows.unflatten(2, (len(pages), PAGE))


def process(role, rank, pipe):
    torch.set_num_threads(1)
    engine = Engine(40 if role == "prefill" else 25, rank)
    if rank == 0:
        kind = PrefillEndpoint if role == "prefill" else DecodeEndpoint
        config = ControlConfig(instance_id=role, model="toy", topology=Topology(tp=TP))
        endpoint = kind(config, engine.setup, Network(ranks_bind="tcp://127.0.0.1:0"))
        pipe.send((endpoint.address, endpoint.ranks_address))
        while not endpoint.ready:
            time.sleep(0.01)
    else:
        endpoint = RankEndpoint(engine.setup, pipe.recv())
    pages = engine.allocate(len(PROMPT))
    if role == "prefill":
        handle = handle_of("request-1")  # every rank runs the same schedule, and names the room alike
        if rank == 0:
            endpoint.request(7, PROMPT, {engine.space: engine.space.ingest(pages)}, handle=handle)
        engine.prefill(pages, PROMPT)
        endpoint.send(handle, 0, len(PROMPT), last=True)
        if rank == 0:
            endpoint.finish(handle, len(PROMPT), b"first token: 42")
    elif rank == 0:
        endpoint.open(7, pipe.recv(), PROMPT, {engine.space: engine.space.ingest(pages)})
        admitted = None
        while admitted is None:
            select.select([endpoint.wakeup_fd()], [], [], 30)
            for event in endpoint.poll():
                print(event.kind.value, event.error or event.record.decode(), flush=True)
                admitted = event if event.kind is EventKind.ADMITTED else admitted
        pipe.send("admitted")
    pipe.recv()  # decode: every byte is here, on every rank; prefill: nobody needs it any more
    if role == "decode":
        equal = torch.equal(engine.rows(pages, len(PROMPT)), engine.state_of(PROMPT))
        print(f"decode rank {rank}: {'equal' if equal else 'DIFFERENT'}", flush=True)
    pipe.send("over")
    os._exit(0)  # a process that used UCX is not to run its exit handlers


def main():
    if importlib.util.find_spec("nixl") is None:
        sys.exit("this example adopts host memory, which needs nixl: pip install 'sglang-pd[nixl]'")
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for role in ("prefill", "decode"):
        for rank in range(TP):
            pipes[role, rank], theirs = context.Pipe()
            processes.append(context.Process(target=process, args=(role, rank, theirs), daemon=True))
            processes[-1].start()
    addresses = {role: pipes[role, 0].recv() for role in ("prefill", "decode")}
    for role, (_, ranks_address) in addresses.items():
        pipes[role, 1].send(ranks_address)
    pipes["decode", 0].send(addresses["prefill"][0])
    pipes["decode", 0].recv()
    for key in [("decode", 0), ("decode", 1), ("prefill", 0), ("prefill", 1)]:
        pipes[key].send("go on")
        pipes[key].recv()
    for one in processes:
        one.join(10)


if __name__ == "__main__":
    main()
