"""The reference engine on a CUDA device: the same bits as on the CPU, over pools in device memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from support.reference_run import SOFT, SPARSE, Host, Running, Size, prompt_ids, same_logits
from support.stub_backend import StubBackend

from sglang_pd.backends.base import Segment
from sglang_pd.engines.reference import ReferenceConfig, ReferenceEngine
from sglang_pd.memory.layout import layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.protocol.manifest import RankId, Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 12
OFFLOAD = ReferenceConfig(ple_offload=True)


class DeviceMemory(StubBackend):
    """A stub that has device memory too."""

    def allocate(self, nbytes: int, device: str = "cpu") -> Segment:
        if device == "cpu":
            return super().allocate(nbytes)
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return Segment(memory.data_ptr(), nbytes, device, memory)


class DeviceHost(Host):
    """A host whose pools and weights lie on a device."""

    def __init__(self, config: ReferenceConfig, size: Size) -> None:
        super().__init__(config, size)
        self.engine = ReferenceEngine(config, device="cuda:0")
        layout = layout_rank(self.engine.state, size.capacity(), Topology(), RankId(0, 0), "cuda:0")
        self.pools = RankPools(layout, Scope(DeviceMemory()).allocate_layout(layout))
        for key in self.pools.keys:
            tensor = self.pools.tensor(*key)
            assert tensor.is_cuda != (key[0] == "PLE" and config.ple_offload)
            tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
        self.engine.attach(self.pools)


def answers(host: Host, lengths: Iterable[int]) -> list[Running]:
    runs = [host.prefill(f"r{n}", prompt_ids(n, seed=n), (6, 11, 400)) for n in lengths]
    host.decode(runs, STEPS)
    return runs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("config", [SPARSE, SOFT, OFFLOAD], ids=["sparse", "soft", "ple in host memory"])
def test_the_device_gives_the_bits_of_the_cpu(config: ReferenceConfig) -> None:
    lengths = (1, 5, 38, 300)
    size = Size(64, 5, 5, 120, "random", 9)
    cpu, cuda = Host(config, size), DeviceHost(config, size)
    for a, b in zip(answers(cpu, lengths), answers(cuda, lengths), strict=True):
        assert a.tokens == b.tokens
        assert same_logits(a, b)
    differ = []
    for key in cpu.pools.keys:
        ours, theirs = cpu.pools.tensor(*key), cuda.pools.tensor(*key).cpu()
        written = ours != (3.7e5 if ours.is_floating_point() else -77)
        if not np.array_equal(ours[written].numpy(), theirs[written].numpy()):
            differ.append(key)
    assert not differ
