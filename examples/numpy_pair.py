"""Hand a prompt's KV from one numpy "engine" to another, over shared memory. Run: python examples/numpy_pair.py"""

import select

import numpy as np

from sglang_pd import ControlConfig, DecodeEndpoint, EventKind, PrefillEndpoint, RankSetup, create_backend, new_epoch
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.protocol.manifest import RankId, Topology

LAYERS, HEADS, HEAD_DIM, PAGE = 4, 8, 16, 16
KV = ComponentSpec(
    kind="KV",
    root="tokens",
    regions=tuple(RegionSpec(part, tuple(range(LAYERS)), "float32", HEADS, (HEAD_DIM,)) for part in ("k", "v")),
)


def worker(pages):
    """Memory for `pages` pages of KV, and what an endpoint needs to know of it."""
    backend = create_backend("local", epoch=new_epoch())
    capacity = Capacity(tokens=pages * PAGE, page_tokens=PAGE)
    layout = layout_rank(StateSpec(components=(KV,), layers=LAYERS), capacity, Topology(), RankId(0, 0))
    segments = Scope(backend).allocate_layout(layout)
    setup = RankSetup(backend=backend, components=layout.components, segments=segments)
    return setup, RankPools(layout, segments), layout.roots.tokens.list_space


def main():
    (p_setup, p_pools, p_pages), (d_setup, d_pools, d_pages) = worker(64), worker(48)
    prefill = PrefillEndpoint(ControlConfig(instance_id="prefill-0", model="toy"), p_setup)
    decode = DecodeEndpoint(ControlConfig(instance_id="decode-0", model="toy"), d_setup)

    prompt = list(range(100, 150))  # 50 tokens: 4 pages, the last one partial
    src, dst = p_pages.ingest([60, 3, 17, 41]), d_pages.ingest([5, 47, 12, 30])
    handle = prefill.request(7, prompt, {p_pages: src})
    decode.open(7, prefill.address, prompt, {d_pages: dst})
    for layer in range(LAYERS):  # "compute": fill the prompt's pages
        for part in ("k", "v"):
            p_pools.array("KV", layer, part)[src.lower()] = np.random.rand(4, PAGE, 1, HEADS, HEAD_DIM)
    prefill.send(handle, 0, 32, last=False)  # chunks may go while the next one is computed
    prefill.send(handle, 32, 50, last=True)
    prefill.finish(handle, covered_tokens=50, record=b"first token: 42")

    admitted = None
    while admitted is None:
        select.select([decode.wakeup_fd()], [], [], 10)
        for event in decode.poll():
            print(event.kind.value, event.error or event.record.decode())
            admitted = event if event.kind is EventKind.ADMITTED else admitted
    for layer in range(LAYERS):
        got = d_pools.array("KV", layer, "k")[dst.lower()].reshape(-1, HEADS * HEAD_DIM)[:50]
        sent = p_pools.array("KV", layer, "k")[src.lower()].reshape(-1, HEADS * HEAD_DIM)[:50]
        print(f"layer {layer}: {'equal' if np.array_equal(got, sent) else 'DIFFERENT'}")
    prefill.close(), decode.close(), p_setup.backend.close(), d_setup.backend.close()


if __name__ == "__main__":
    main()
