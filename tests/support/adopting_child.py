"""A child process: two engines with tensors of their own, adopted by a transport, and a hand-over between them.

Run as `python -m support.adopting_child BACKEND OPTIONS_AS_JSON`. Prints one line of JSON. A process that loaded a
transport library may crash when the interpreter ends, so it ends itself.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from sglang_pd.backends.base import Backend, TransferState
from sglang_pd.backends.registry import create_backend
from sglang_pd.engines.reference.config import ReferenceConfig, state_spec
from sglang_pd.memory.adopt import adopt_rank, tensor_buffer
from sglang_pd.memory.allocator import Allocator, Policy
from sglang_pd.memory.layout import Capacity, RankLayout, rank_shapes
from sglang_pd.memory.live import live_rows
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.protocol.bind import Chunk, bind
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import InstanceManifest, RankId, Topology, Transport
from sglang_pd.protocol.pairing import Pairing

ALONE = (Topology(), RankId(0, 0))
STATE = state_spec(ReferenceConfig())
WAIT_S = 30.0


def adopted(backend: Backend, size: Capacity, value: float) -> RankPools:
    """An engine's own tensors, K and V of all layers in one allocation, the others apart."""
    shapes = {s.key: s for s in rank_shapes(STATE, size, *ALONE)}
    paged = [key for key in shapes if key[0] == "KV"]
    whole = torch.full((len(paged), *shapes[paged[0]].view.shape), value, dtype=torch.float64)
    tensors = dict(zip(paged, whole, strict=True))
    for key, shape in shapes.items():
        if key not in tensors:
            tensors[key] = torch.full(shape.view.shape, int(value), dtype=getattr(torch, shape.region.dtype))
    scope = Scope(backend)
    layout = adopt_rank(scope, STATE, size, ALONE, {key: tensor_buffer(t) for key, t in tensors.items()})
    return RankPools(layout, scope.segments)


def instance(name: str, layout: RankLayout, epoch: int) -> InstanceManifest:
    rank = layout.manifest(epoch, Transport(backend="same"))
    return InstanceManifest(instance_id=name, topology=Topology(), model="m", ranks=(rank,))


def main(name: str, options: dict[str, object]) -> dict[str, object]:
    """Move one prompt; count regions whose live rows differ, and bytes of the destination that were touched."""
    backends = [create_backend(name, epoch=epoch, options=options) for epoch in (11, 12)]
    source = adopted(backends[0], Capacity(96, 8, 3, 3, 64), 0.0)
    destination = adopted(backends[1], Capacity(72, 8, 4, 5, 48), 5.0)
    for number, key in enumerate(source.keys):
        tensor = source.tensor(*key)
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 97 + number % 23)
    a, b = (
        Allocator(pools.layout.roots, Policy("random", seed)).lease(45)
        for seed, pools in ((1, source), (2, destination))
    )
    prompt = Prompt(45)
    pairing = Pairing(instance("p", source.layout, 11), instance("d", destination.layout, 12))
    room = pairing.room(prompt, a.lists(prompt), b.lists(prompt))
    backends[1].admit(11, backends[0].describe())
    peer = backends[0].connect(backends[1].describe(), 12)
    batch = bind(pairing.plan(ALONE[1], ALONE[1]), room, Chunk(0, 45, last=True))
    transfer = backends[0].write(peer, batch)
    end = time.monotonic() + WAIT_S
    while transfer.poll() is TransferState.PENDING and time.monotonic() < end:
        for backend in backends:
            backend.progress()
        time.sleep(0.001)
    differ = []
    for key in source.keys:
        sent = live_rows(source, key, a.lists(prompt), prompt)[1]
        got = live_rows(destination, key, b.lists(prompt), prompt)[1]
        if sent.tobytes() != got.tobytes() or not sent.any():
            differ.append(key)
    return {
        "state": transfer.poll().value,
        "differ": differ,
        "segments": len(source.segments),
        "bytes": transfer.nbytes,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
    sys.stdout.flush()
    os._exit(0)
