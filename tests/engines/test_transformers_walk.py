"""The walk over cache layers, and the copies it leads to, on layers of the library that no model here combines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.hybrid_state import PAGE
from support.stub_backend import StubBackend
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from sglang_pd.engines.transformers.mover import Mover, Span
from sglang_pd.engines.transformers.state import state_of
from sglang_pd.engines.transformers.walk import Carried, Walk, leaves, tensors, walk
from sglang_pd.memory.allocator import Allocator, Policy
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.protocol.errors import LocalProtocolError, ManifestError
from sglang_pd.protocol.manifest import RankId, Topology

Feed = Callable[[Any, int, int], None]
"""What a model does to one layer: (layer, start, count)."""


def rows(start: int, count: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[count, *shape] whose values tell their token."""
    tokens = torch.arange(start, start + count).reshape(-1, *[1] * len(shape))
    width = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(1, *shape)
    return (tokens * 100 + width).to(dtype)


def attention(heads: int = 2, keys: int = 3, values: int = 3) -> Feed:
    def feed(layer: Any, start: int, count: int) -> None:
        k, v = (rows(start, count, heads, width).transpose(0, 1)[None] for width in (keys, values))
        layer.update(k, v)

    return feed


def linear(*kernels: int, recurrent: bool = True, history: int = 0) -> Feed:
    def feed(layer: Any, start: int, count: int) -> None:
        for index, kernel in enumerate(kernels):
            new = rows(start, count, 4).transpose(0, 1)[None] + 1000 * index
            layer.update_conv_state(new, state_idx=index, conv_kernel_size=kernel)
        if history:
            ids = torch.arange(start, start + count)[None]
            layer.update_conv_state(ids, state_idx=len(kernels), conv_kernel_size=history)
        if recurrent:
            layer.update_recurrent_state(torch.full((1, 2, 3, 5), float(start + count)))

    return feed


def indexed(positions: bool) -> Feed:
    def feed(layer: Any, start: int, count: int) -> None:
        attention(1, 4, 2)(layer, start, count)
        layer.update_indexer(rows(start, count, 6)[None])
        if positions:
            new = torch.arange(start, start + count).view(1, 1, -1).expand(3, 1, -1)
            old = layer.indexer_position_ids
            layer.indexer_position_ids = new if old is None else torch.cat([old, new], -1)

    return feed


class Fake:
    """A model that is nothing but what it leaves in its cache."""

    def __init__(self, *layers: tuple[Callable[[], Any], Feed]) -> None:
        self._layers = layers

    def new_cache(self) -> Any:
        return Cache(layers=[make() for make, _ in self._layers])

    def run(self, cache: Any, start: int, count: int) -> None:
        for layer, (_, feed) in zip(cache.layers, self._layers, strict=True):
            feed(layer, start, count)

    def walk(self, latent: int = 0) -> Walk:
        return walk(self.run, self.new_cache(), latent)


def window(size: int) -> Callable[[], Any]:
    return lambda: DynamicSlidingWindowLayer(sliding_window=size)


MODELS: dict[str, Fake] = {
    "keys and values": Fake((DynamicLayer, attention())),
    "heads and widths differ by layer": Fake((DynamicLayer, attention(2, 3, 5)), (DynamicLayer, attention(4, 6, 6))),
    "latent without rope": Fake((DynamicLayer, attention(1, 4, 0))),
    "latent with rope, index keys": Fake((DynamicIndexedLayer, indexed(False))),
    "raw keys and coordinates": Fake((DynamicIndexedLayer, indexed(True)), (DynamicIndexedLayer, indexed(False))),
    "windows of two sizes": Fake((window(5), attention()), (window(9), attention()), (DynamicLayer, attention())),
    "windows alone": Fake((window(4), attention())),
    "three windows of one state": Fake((lambda: LinearAttentionLayer(number_of_states=3), linear(4, 4, 4))),
    "window without recurrent state": Fake((LinearAttentionLayer, linear(3, recurrent=False))),
    "both in one layer": Fake(
        (LinearAttentionAndFullAttentionLayer, lambda layer, *at: (attention()(layer, *at), linear(4)(layer, *at))[0]),
    ),
    "n-gram histories": Fake(
        (lambda: LinearAttentionLayer(number_of_states=3), linear(4, 9, history=2)),
        (lambda: LinearAttentionLayer(number_of_states=3), linear(4, 9, history=2)),
    ),
}  # fmt: skip


class Place:
    """Pools, and a lease of several requests."""

    def __init__(self, fake: Fake, found: Walk, pages: int = 40) -> None:
        state = state_of(found, 2)
        size = Capacity(pages * PAGE, PAGE, 4, 4, pages * PAGE if state.window_tokens else 0)
        layout = layout_rank(state, size, Topology(), RankId(0, 0))
        self.pools = RankPools(layout, Scope(StubBackend()).allocate_layout(layout))
        for key in self.pools.keys:
            self.pools.tensor(*key).fill_(-77)
        self.mover = Mover(found, fake.new_cache, self.pools, "cpu")
        self.allocator = Allocator(layout.roots, Policy("random", 3))


def same(one: Any, other: Any) -> None:
    """Two caches hold the same: every attribute, every tensor to the byte."""
    for a, b in zip(one.layers, other.layers, strict=True):
        left, right = leaves(a), leaves(b)
        assert set(left) == set(right)
        for path, value in left.items():
            if isinstance(value, torch.Tensor):
                assert right[path].dtype == value.dtype and torch.equal(right[path], value), path
            else:
                assert right[path] == value, path


@pytest.mark.parametrize("chunks", [(1,), (3,), (23,), (2, 6, 1, 1), (20, 1, 1), (5, 13)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_comes_back_from_pools_as_it_was(name: str, chunks: Sequence[int]) -> None:
    fake = MODELS[name]
    place = Place(fake, fake.walk())
    lease, own, at = place.allocator.lease(sum(chunks), window_stop=0), fake.new_cache(), 0
    for count in chunks:
        lease.advance(at + count)
        fake.run(own, at, count)
        place.mover.store(own, [Span(lease.tables(), at, at + count)])
        at += count
        lease.settle(at)
    same(place.mover.load([Span(lease.tables(), at, at)]), own)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_every_request_padded_on_the_left(name: str) -> None:
    fake = MODELS[name]
    found = fake.walk()
    place = Place(fake, found)
    spans, alone = [], []
    for length in (3, 17, 8):
        lease, own = place.allocator.lease(length, window_stop=0), fake.new_cache()
        lease.advance(length)
        fake.run(own, 0, length)
        place.mover.store(own, [Span(lease.tables(), 0, length)])
        spans.append(Span(lease.tables(), length, length))
        alone.append(tensors(own, found.carried))
    batch = tensors(place.mover.load(spans), found.carried)
    for item in found.carried:
        for number, own in enumerate(alone):
            mine = item.rows(own[item.layer, item.path], 0)
            theirs = item.rows(batch[item.layer, item.path], number)
            if item.role != "slot":
                blank, theirs = theirs[: len(theirs) - len(mine)], theirs[len(theirs) - len(mine) :]
                assert len(blank) == item.held(17) - len(mine) and not blank.any()
            assert torch.equal(mine, theirs)


def kinds(found: Walk) -> set[tuple[str, str, int]]:
    return {(item.kind, item.part, item.layer) for item in found.carried}


def test_what_layers_hold_decides_the_kind() -> None:
    assert kinds(MODELS["latent without rope"].walk()) == {("MLA", "latent", 0)}
    assert kinds(MODELS["latent with rope, index keys"].walk()) == {
        ("MLA", "latent", 0), ("MLA", "rope", 0), ("INDEX_K", "key", 0),
    }  # fmt: skip
    raw = kinds(MODELS["raw keys and coordinates"].walk())
    assert {k for k in raw if k[0] != "MLA"} == {
        ("QSA_RAW_K", "key", 0), ("QSA_RAW_K", "key", 1), ("QSA_POSITIONS", "position", 0),
    }  # fmt: skip
    assert kinds(MODELS["n-gram histories"].walk()) == {
        (kind, part, layer)
        for layer in (0, 1)
        for kind, part in (("MAMBA", "conv"), ("MAMBA", "temporal"), ("PLE", "conv"), ("PLE", "ngram"))
    }
    square = Fake((DynamicLayer, attention(1, 4, 4)))
    assert kinds(square.walk()) == {("KV", "k", 0), ("KV", "v", 0)}
    assert kinds(square.walk(latent=4)) == {("MLA", "latent", 0), ("MLA", "rope", 0)}


def test_tensors_of_one_region_stand_one_behind_the_other() -> None:
    found = MODELS["three windows of one state"].walk()
    assert [item.first for item in found.carried if item.part == "conv"] == [0, 4, 8]
    (component,) = state_of(found, 2).components
    assert [(region.part, region.units_total) for region in component.regions] == [("conv", 12), ("temporal", 2)]


def test_a_history_is_kept_once_and_starts_as_end_of_sequence() -> None:
    found = MODELS["n-gram histories"].walk()
    ple = next(c for c in state_of(found, 2).components if c.kind == "PLE")
    history = next(region for region in ple.regions if region.part == "ngram")
    assert (history.units_total, history.initial, history.dtype) == (2, 2, "int64")


def test_histories_that_differ_between_layers_are_an_error() -> None:
    fake = MODELS["n-gram histories"]
    place = Place(fake, fake.walk())
    lease, own = place.allocator.lease(5), fake.new_cache()
    fake.run(own, 0, 5)
    own.layers[1].conv_states[2][0, 1] += 1
    with pytest.raises(LocalProtocolError, match="the same tokens in every layer"):
        place.mover.store(own, [Span(lease.tables(), 0, 5)])


SPOILT: dict[str, tuple[Callable[[Any], None], str]] = {
    "a row missing": (lambda own: setattr(own.layers[0], "keys", own.layers[0].keys[:, :, 1:]), "layer 0, keys"),
    "another precision": (lambda own: setattr(own.layers[0], "values", own.layers[0].values.half()), "layer 0, values"),
    "a counter": (lambda own: setattr(own.layers[0], "cumulative_length", 4), "layer 0, cumulative_length"),
    "a flag": (lambda own: setattr(own.layers[1], "is_initialized", False), "layer 1, is_initialized"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_cache_that_is_not_as_probed_is_an_error(what: str) -> None:
    spoil, where = SPOILT[what]
    fake = MODELS["windows of two sizes"]
    place = Place(fake, fake.walk())
    lease, own = place.allocator.lease(5), fake.new_cache()
    fake.run(own, 0, 5)
    spoil(own)
    with pytest.raises(LocalProtocolError, match="not what the probe") as error:
        place.mover.store(own, [Span(lease.tables(), 0, 5)])
    assert where in error.value.where


def extra(make: Callable[[int, int], Any]) -> Feed:
    """Keys and values, and one attribute more."""

    def feed(layer: Any, start: int, count: int) -> None:
        attention()(layer, start, count)
        layer.more = make(start, count)

    return feed


REFUSED: dict[str, tuple[Fake, str]] = {
    "an unknown tensor": (Fake((DynamicLayer, extra(lambda *_: torch.zeros(1, 2)))), "cache layer 0, more"),
    "a number that is no count": (Fake((DynamicLayer, extra(lambda start, _: start * 7))), "cache layer 0, more"),
    "a list": (Fake((DynamicLayer, extra(lambda *_: [1]))), "cache layer 0, more"),
    "a text that changes": (Fake((DynamicLayer, extra(lambda start, _: str(start)))), "cache layer 0, more"),
    "a dict of tensors": (
        Fake((DynamicLayer, extra(lambda *_: {"a": torch.zeros(1)}))), "cache layer 0, more"),
    "a state that comes late": (
        Fake((LinearAttentionLayer, lambda layer, start, count: linear(4, recurrent=start > 0)(layer, start, count))),
        "cache layer 0, recurrent_states[0]"),
    "a state that grows": (
        Fake((LinearAttentionLayer, lambda layer, start, count: layer.recurrent_states.update(
            {0: torch.zeros(1, start + count, 3)}))), "cache layer 0, recurrent_states[0]"),
    "keys that are dropped": (
        Fake((DynamicLayer, lambda layer, start, count: (attention()(layer, start, count),
              setattr(layer, "keys", layer.keys[:, :, -2:]))[0])), "cache layer 0, keys"),
    "windows of two widths": (
        Fake((lambda: LinearAttentionLayer(number_of_states=2), linear(4, 5))), "cache layer 0, conv_states[1]"),
    "histories of two widths": (
        Fake((lambda: LinearAttentionLayer(number_of_states=2), linear(4, history=2)),
             (lambda: LinearAttentionLayer(number_of_states=2), linear(4, history=3))),
        "cache layer 1, conv_states[1]"),
    "a window of one token": (Fake((window(1), attention())), "cache layer 0, sliding_window"),
    "a precision without a name": (
        Fake((LinearAttentionLayer, lambda layer, *_: layer.update_recurrent_state(
            torch.zeros((1, 2, 3), dtype=torch.complex64)))), "cache layer 0, recurrent_states[0]"),
    "nothing": (Fake((DynamicLayer, lambda *_: None)), "cache layer 0, layers"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_state_that_no_kind_carries_is_refused_by_name(what: str) -> None:
    fake, where = REFUSED[what]
    with pytest.raises(ManifestError) as error:
        state_of(fake.walk(), 2)
    assert error.value.where == where


def test_state_beside_the_layers_is_refused() -> None:
    fake = MODELS["keys and values"]

    def run(cache: Any, start: int, count: int) -> None:
        cache.counter = start + count
        fake.run(cache, start, count)

    with pytest.raises(ManifestError, match="no state outside the layers"):
        walk(run, fake.new_cache())


def test_what_a_shorter_window_forgot_is_zero() -> None:
    """Rows inside the longest window that a layer with a shorter one no longer has are the same on every run."""
    fake = MODELS["windows of two sizes"]
    place = Place(fake, fake.walk())
    lease, own = place.allocator.lease(20, window_stop=0), fake.new_cache()
    lease.advance(20)
    fake.run(own, 0, 20)
    place.mover.store(own, [Span(lease.tables(), 0, 20)])
    short = next(item for item in fake.walk().carried if item.layer == 0 and item.path[0] == "keys")
    assert isinstance(short, Carried) and short.window == 4
    slots = place.mover._slots(lease.tables(), 0, 20)["window"]
    held = place.pools.slots("SWA", 0, "k")[slots]
    assert len(held) == 8 and not held[:4].any() and (held[4:] != -77).all()
