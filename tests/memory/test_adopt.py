"""Adoption: an engine's own tensors, with its own strides, hand over as well as ours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.hybrid_state import PAGE, capacity, copy_chunk, fill, hybrid_state, instance
from support.stub_backend import StubBackend

from sglang_pd.memory.adopt import Buffer, adopt_rank, array_buffer, tensor_buffer
from sglang_pd.memory.allocator import Allocator, Policy
from sglang_pd.memory.layout import Capacity, RegionKey, layout_rank, rank_shapes
from sglang_pd.memory.live import live_rows
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.errors import BackendError, ManifestError
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.manifest import RankId, Topology
from sglang_pd.protocol.pairing import Pairing

ALONE = (Topology(), RankId(0, 0))
KEYS: list[RegionKey] = [("KV", 0, "k"), ("KV", 0, "v"), ("KV", 1, "k"), ("KV", 1, "v")]
TWO_LAYERS = StateSpec(
    (ComponentSpec("KV", "tokens", tuple(RegionSpec(part, (0, 1), "float32", 2, (3,)) for part in ("k", "v"))),), 2
)
SIZE = Capacity(3 * PAGE, PAGE)


def separate() -> dict[RegionKey, torch.Tensor]:
    return {key: torch.zeros(4 * PAGE, 2, 3) for key in KEYS}


def one_allocation() -> dict[RegionKey, torch.Tensor]:
    whole = torch.zeros(2, 2, 4, PAGE, 2, 3)
    return {key: whole[key[1], int(key[2] == "v")] for key in KEYS}


def interleaved_by_page() -> dict[RegionKey, torch.Tensor]:
    whole = torch.zeros(4, 2, 2, PAGE, 2, 3)
    return {key: whole[:, key[1], int(key[2] == "v")] for key in KEYS}


def larger_than_needed() -> dict[RegionKey, torch.Tensor]:
    return {key: torch.zeros(9, PAGE, 2, 3) for key in KEYS}


def of_numpy() -> dict[RegionKey, np.ndarray]:
    whole = np.zeros((4, 2, 2, PAGE, 6), np.float32)
    return {key: whole[:, key[1], int(key[2] == "v")] for key in KEYS}


@pytest.mark.parametrize("make", [separate, one_allocation, interleaved_by_page, larger_than_needed, of_numpy])
def test_adopted_tensors_hand_over_and_are_handed_over_to(make: object) -> None:
    """Own pools -> adopted tensors -> own pools: the bytes that come back are those that left."""
    tensors = make()  # type: ignore[operator]
    backend = StubBackend()
    scope = Scope(backend)
    wrap = array_buffer if make is of_numpy else tensor_buffer
    layout = adopt_rank(scope, TWO_LAYERS, SIZE, ALONE, {k: wrap(t) for k, t in tensors.items()})
    assert len(backend.adopted) == (4 if make in (separate, larger_than_needed) else 1)
    adopted = RankPools(layout, scope.segments)
    adopted.tensor("KV", 1, "v")[2, 3, 0, 1, 2] = 5.0
    assert torch.as_tensor(tensors["KV", 1, "v"]).reshape(-1, PAGE, 2, 3)[2, 3, 1, 2] == 5.0

    own_layout = layout_rank(TWO_LAYERS, Capacity(5 * PAGE, PAGE), *ALONE)
    own = [RankPools(own_layout, Scope(StubBackend()).allocate_layout(own_layout)) for _ in range(2)]
    for key in KEYS:
        own[0].tensor(*key).copy_(torch.randn(own[0].tensor(*key).shape))
    fill(own[1], 0xEE)
    leases = [
        Allocator(layout.roots, Policy("random", seed)).lease(19)
        for seed, layout in ((1, own_layout), (2, layout), (3, own_layout))
    ]
    prompt = Prompt(19)
    for src, dst, a, b in ((own[0], adopted, *leases[:2]), (adopted, own[1], *leases[1:])):
        pairing = Pairing(instance("p", [src.layout]), instance("d", [dst.layout]))
        room = pairing.room(prompt, a.lists(prompt), b.lists(prompt))
        copy_chunk(pairing, room, Chunk(0, 19, last=True), [src], [dst])
    for key in KEYS:
        first = live_rows(own[0], key, leases[0].lists(prompt), prompt)[1]
        last = live_rows(own[1], key, leases[2].lists(prompt), prompt)[1]
        assert first.any()
        np.testing.assert_array_equal(first, last)


def test_every_kind_can_be_adopted() -> None:
    state, size = hybrid_state(), capacity(4)
    tensors = {
        s.key: torch.zeros(s.view.shape, dtype=getattr(torch, s.region.dtype)) for s in rank_shapes(state, size, *ALONE)
    }
    scope = Scope(StubBackend())
    layout = adopt_rank(scope, state, size, ALONE, {k: tensor_buffer(t) for k, t in tensors.items()})
    pools = RankPools(layout, scope.segments)
    for number, key in enumerate(pools.keys):
        pools.tensor(*key).fill_(number + 1)
        assert (tensors[key] == number + 1).all()
    assert set(pools.keys) == set(layout_rank(state, size, *ALONE).views)


def test_local_refuses_an_engines_host_tensors_by_name() -> None:
    scope = Scope(StubBackend(adopts=False))
    with pytest.raises(BackendError) as caught:
        adopt_rank(scope, TWO_LAYERS, SIZE, ALONE, {k: tensor_buffer(t) for k, t in separate().items()})
    assert (caught.value.code, caught.value.where) == ("backend_unsupported", "KV/0/k")


def transposed() -> torch.Tensor:
    return torch.zeros(2, 4 * PAGE, 3).transpose(0, 1)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(4 * PAGE, 2, 3, dtype=torch.float64), "another dtype"),
        (torch.zeros(3 * PAGE, 2, 3), "smaller than its index space"),  # the reserve was forgotten
        (transposed(), "not items of contiguous rows"),
        (torch.zeros(4 * PAGE, 2, 6)[..., ::2], "contiguous runs are not items"),
        (torch.zeros(4, 2, PAGE, 4, 3)[:, 0, :, :2], "not items of contiguous rows"),
        (torch.zeros(4, PAGE, 2, 3).flip(0).as_strided((4, PAGE, 2, 3), (0, 6, 3, 1)), "not items of contiguous rows"),
    ],
)
def test_a_tensor_that_cannot_be_addressed_is_refused_before_anything_is_adopted(
    tensor: torch.Tensor, why: str
) -> None:
    tensors = separate()
    tensors["KV", 1, "k"] = tensor
    scope = Scope(StubBackend())
    with pytest.raises(ManifestError, match=why) as caught:
        adopt_rank(scope, TWO_LAYERS, SIZE, ALONE, {k: tensor_buffer(t) for k, t in tensors.items()})
    assert caught.value.where == "KV/1/k"
    assert not scope.segments


def fits(tensor: torch.Tensor | np.ndarray, layout: str = "", **spec: object) -> None:
    """Adopt a tensor for the one region [4 pages, PAGE tokens, 1, 2 heads, 3] of float32, or as `spec` changes it."""
    fields = {"part": "k", "layer_ids": (0,), "dtype": "float32", "units_total": 2, "unit_shape": (3,), **spec}
    state = StateSpec((ComponentSpec("KV", "tokens", (RegionSpec(**fields),), layout=layout),), 1)  # type: ignore[arg-type]
    buffer = tensor_buffer(tensor) if isinstance(tensor, torch.Tensor) else array_buffer(tensor)
    adopt_rank(Scope(StubBackend()), state, SIZE, ALONE, {("KV", 0, "k"): buffer})


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, 2, PAGE, 3), {}),  # [page, head, token, dim]
        ((4, 1, 2, PAGE, 3), {}),
        ((9, 2, PAGE, 3), {}),
        ((4 * 2, PAGE, 3), {}),
        ((4 * 2, PAGE * 3), {}),
        ((4 * PAGE, 3, 2), {}),  # dim and head swapped
        ((PAGE, 4, 2, 3), {}),  # token slots of all pages side by side
        ((4, 3, PAGE, 2), {}),
        ((4, 2, PAGE), {"unit_shape": ()}),
        ((4 * PAGE, 2, 5, 3), {"outer_count": 5}),  # outer and head swapped
        ((4, 5, PAGE, 2, 3), {"outer_count": 5}),
        ((2, 4, PAGE, 2, 3), {}),  # page axis in two: which of them counts pages, nobody knows
    ],
    ids=str,
)
def test_a_dense_tensor_with_other_axes_is_refused_with_both_shapes(
    shape: tuple[int, ...], spec: dict[str, object]
) -> None:
    """Its bytes fit exactly: heads of a partial page went missing, and `verify` saw nothing."""
    with pytest.raises(ManifestError, match="axes are not the region's") as caught:
        fits(torch.zeros(shape), **spec)
    assert caught.value.where == "KV/0/k"
    assert caught.value.actual == shape
    assert f"(4, {PAGE}, " in str(caught.value.expected)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, PAGE, 2, 3), {}),
        ((4, PAGE, 1, 2, 1, 3), {}),
        ((4 * PAGE, 2, 3), {}),
        ((4 * PAGE + 5, 2, 3), {}),  # slots behind the last page
        ((4 * PAGE, 6), {}),
        ((4 * PAGE * 2, 3), {}),
        ((4, PAGE * 2 * 3), {}),
        ((4 * PAGE * 6,), {}),
        ((1, 9, PAGE, 6), {}),
        ((4, 1, PAGE, 3), {"units_total": 1}),  # one head: both orders are one
        ((4 * PAGE, 5, 2, 3), {"outer_count": 5}),
        ((4 * PAGE, 10, 3), {"outer_count": 5}),
        ((4, PAGE, 2, 6), {"unit_shape": (2, 3)}),
    ],
    ids=str,
)
def test_a_tensor_with_the_regions_axes_or_joined_ones_is_adopted(
    shape: tuple[int, ...], spec: dict[str, object]
) -> None:
    fits(torch.zeros(shape), **spec)
    fits(np.zeros(shape, np.float32), **spec)


@pytest.mark.parametrize("layout", ["HND", "hnd"])
def test_declared_head_major_pages_are_refused_whatever_their_sizes_say(layout: str) -> None:
    """As many heads as tokens in a page: the shape is right by chance, and only the declaration tells."""
    square = torch.zeros(4, PAGE, PAGE, 3)
    fits(square, "NHD", units_total=PAGE)
    with pytest.raises(ManifestError, match="heads apart") as caught:
        fits(square, layout, units_total=PAGE)
    assert (caught.value.where, caught.value.actual) == ("KV.layout", layout)
    fits(torch.zeros(4, 1, PAGE, 3), layout, units_total=1)
    with pytest.raises(ManifestError, match="heads apart"):  # our own pools lie row by row as well
        layout_rank(StateSpec((replace(TWO_LAYERS.components[0], layout=layout),), 2), SIZE, *ALONE)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


class Wrapped(torch.Tensor):
    """A subclass may hold its values anywhere."""


UNFIT: dict[str, tuple[object, str]] = {
    "bytes": (lambda: np.frombuffer(bytes(4 * PAGE * 24), np.float32).reshape(-1, 2, 3), "only be read"),
    "not writeable": (lambda: read_only(np.zeros((4 * PAGE, 2, 3), np.float32)), "only be read"),
    "broadcast": (lambda: np.broadcast_to(np.zeros((1, 2, 3), np.float32), (4 * PAGE, 2, 3)), "only be read"),
    "masked": (lambda: np.ma.masked_array(np.zeros((4 * PAGE, 2, 3), np.float32)), "masked"),
    "negated": (lambda: torch._neg_view(torch.zeros(4 * PAGE, 2, 3)), "negated"),
    "conjugated": (lambda: torch.zeros(4 * PAGE, 2, 3, dtype=torch.complex64).conj(), "conjugated"),
    "subclass": (lambda: torch.zeros(4 * PAGE, 2, 3).as_subclass(Wrapped), "class Wrapped"),
    "sparse": (lambda: torch.zeros(4 * PAGE, 2, 3).to_sparse(), "not strided"),
    "meta": (lambda: torch.zeros(4 * PAGE, 2, 3, device="meta"), "meta"),
    "freed": (lambda: freed(torch.zeros(4 * PAGE, 2, 3)), "without memory"),
    "zeros without memory": (lambda: torch._efficientzerotensor((4 * PAGE, 2, 3)), "without memory"),
}


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("what", UNFIT)
def test_values_that_are_not_the_memory_or_may_not_be_written_are_refused(what: str) -> None:
    make, why = UNFIT[what]
    with pytest.raises(ManifestError, match=why):
        fits(make())  # type: ignore[operator]


def test_parameters_and_lazy_clones_are_their_memory() -> None:
    fits(torch.nn.Parameter(torch.zeros(4 * PAGE, 2, 3)))
    fits(torch.zeros(4 * PAGE, 2, 3, requires_grad=True)[:])
    source = torch.zeros(4 * PAGE, 2, 3)
    clone = torch._lazy_clone(source)
    buffer = tensor_buffer(clone)
    assert buffer.address == clone.data_ptr() == buffer.base_address != source.data_ptr()


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_tensors_and_regions_must_match(change: str) -> None:
    buffers: dict[RegionKey, Buffer] = {k: tensor_buffer(t) for k, t in separate().items()}
    if change == "missing":
        del buffers["KV", 1, "v"]
    else:
        buffers["KV", 2, "k"] = buffers["KV", 1, "k"]
    with pytest.raises(ManifestError) as caught:
        adopt_rank(Scope(StubBackend()), TWO_LAYERS, SIZE, ALONE, buffers)
    assert str(caught.value.expected).startswith("one tensor for each of its 4 regions")
    wrong = "missing: KV/1/v; too many: none" if change == "missing" else "missing: none; too many: KV/2/k"
    assert caught.value.actual == f"{len(buffers)} tensors; {wrong}"
