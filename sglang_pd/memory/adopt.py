"""Adoption: regions on tensors that an engine allocated itself, with the engine's own strides.

The scope takes each underlying allocation once (K and V may be views of one); a region then gets its place from where
its tensor lies. A tensor that the planner could not address is refused by name: it must hold its items in order, each
item's rows contiguous, items at one stride.

Strides cannot tell [page, head, token, dim] from [page, token, head, dim]: both are dense. Its axes can, so each must
end where one of the region's view does. Where sizes are equal by chance (as many heads as tokens in a page) or axes
come joined, nothing can tell, and the engine's word counts: the `layout` that it declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import Segment
from sglang_pd.memory.layout import (
    Capacity,
    Place,
    RankLayout,
    RegionKey,
    SegmentPlan,
    Shape,
    components_of,
    rank_shapes,
    roots_of,
)
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import DTYPE_BYTES, StateSpec
from sglang_pd.protocol.errors import ManifestError
from sglang_pd.protocol.manifest import RankId, Topology

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Buffer:
    """An engine's tensor as memory.

    address: of its first element. shape, strides_bytes: of the tensor. base_address, base_nbytes: the allocation it is
    a view of. keep_alive: what keeps that allocation.
    """

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    device: str
    base_address: int
    base_nbytes: int
    keep_alive: object = field(repr=False, compare=False, default=None)


def tensor_buffer(tensor: torch.Tensor) -> Buffer:
    """A torch tensor as a `Buffer`; its storage is what gets adopted.

    Raises `ManifestError` for one whose values are not what lies in its memory: sparse, quantized, nested, on the meta
    device, lazily negated or conjugated, without memory, or of a class that wraps others. torch does not know memory
    that is read only (`from_numpy` of such an array): adopt the array instead.
    """
    unfit = _unfit(tensor)
    if unfit:
        raise _not_plain(unfit, "a plain strided tensor", f"{tensor.dtype} {tuple(tensor.shape)}")
    address = tensor.data_ptr()  # asked first: a lazy clone gets memory of its own here
    storage = tensor.untyped_storage()
    if not address or not storage.nbytes():
        raise _not_plain("a tensor without memory", "a plain strided tensor", f"{tensor.dtype} {tuple(tensor.shape)}")
    size = tensor.element_size()
    return Buffer(
        address,
        tuple(tensor.shape),
        tuple(s * size for s in tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        storage.data_ptr(),
        storage.nbytes(),
        storage,
    )


def array_buffer(array: NDArray[Any]) -> Buffer:
    """A numpy array as a `Buffer`; the array at the bottom of its chain of views is what gets adopted.

    Raises `ManifestError` for one that may not be written (bytes, a file mapped to be read) or that has a mask, which
    does not travel.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise _not_plain("a masked array", "a plain array", f"{array.dtype} {array.shape}")
    if not array.flags.writeable:
        raise _not_plain("memory that may only be read", "a writeable array", f"{array.dtype} {array.shape}")
    base: Any = array
    while getattr(base, "base", None) is not None and hasattr(base.base, "__array_interface__"):
        base = base.base
    address = int(array.__array_interface__["data"][0])
    return Buffer(
        address, array.shape, array.strides, str(array.dtype), "cpu",
        int(base.__array_interface__["data"][0]), int(base.nbytes), base,
    )  # fmt: skip


def _unfit(tensor: torch.Tensor) -> str:
    """What keeps a tensor from being its own memory, or nothing."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor of the class {type(tensor).__name__}"
    found = {
        "a nested tensor": tensor.is_nested,
        "a tensor that is not strided": tensor.layout is not torch.strided,
        "a quantized tensor": tensor.is_quantized,
        "a tensor on the meta device": tensor.is_meta,
        "a tensor that is negated when it is read": tensor.is_neg(),
        "a tensor that is conjugated when it is read": tensor.is_conj(),
    }
    return next((what for what, holds in found.items() if holds), "")


def _not_plain(what: str, expected: str, actual: str) -> ManifestError:
    return ManifestError(
        f"{what} cannot be adopted", where="adopt", expected=expected, actual=actual,
        hint="Adopt the writeable memory itself that the engine's kernels read and write.",
    )  # fmt: skip


def adopt_rank(
    scope: Scope, state: StateSpec, capacity: Capacity, at: tuple[Topology, RankId], buffers: Mapping[RegionKey, Buffer]
) -> RankLayout:
    """Adopt and register the tensors of one rank, and lay its regions out on them.

    buffers: one for each region that the state has on this rank, no more and no less.
    Raises `ManifestError` naming the region whose tensor does not fit, before anything is adopted; `BackendError` as
    `Scope.adopt`.
    """
    topology, rank = at
    shapes = list(rank_shapes(state, capacity, topology, rank))
    wanted = {shape.key for shape in shapes}
    if wanted != set(buffers):
        raise ManifestError(
            "tensors and regions do not match", where=f"rank {rank}",
            expected=f"one tensor for each of its {len(wanted)} regions, and no other",
            actual=f"{len(buffers)} tensors; missing: {_named(wanted - set(buffers))}; "
            f"too many: {_named(set(buffers) - wanted)}",
            hint="Regions are named kind/layer/part.",
        )  # fmt: skip
    strides = {shape.key: item_stride(shape, buffers[shape.key]) for shape in shapes}
    bases: dict[tuple[int, int, str], str] = {}
    for shape in shapes:
        buffer = buffers[shape.key]
        base = (buffer.base_address, buffer.base_nbytes, buffer.device)
        if base not in bases:
            bases[base] = "/".join(map(str, shape.key))
            scope.adopt(Segment(base[0], base[1], base[2], buffer.keep_alive), bases[base])
    scope.register()
    places: dict[RegionKey, Place] = {}
    for shape in shapes:
        buffer = buffers[shape.key]
        span = (shape.items - 1) * strides[shape.key] + shape.item_bytes
        number, offset = scope.locate(buffer.address, span, "/".join(map(str, shape.key)), buffer.device)
        places[shape.key] = Place(number, offset, strides[shape.key])
    segments = tuple(SegmentPlan(s.nbytes, s.device, f"adopted-{n}") for n, s in enumerate(scope.segments))
    return RankLayout(
        topology,
        rank,
        roots_of(state, capacity, topology),
        components_of(shapes, places),
        segments,
        {shape.key: shape.view for shape in shapes},
    )


def _named(keys: Set[RegionKey]) -> str:
    """Some keys as errors name regions."""
    shown = ["/".join(map(str, key)) for key in sorted(keys, key=str)]
    return " ".join(shown[:8]) + " ..." * (len(shown) > 8) or "none"


def item_stride(shape: Shape, buffer: Buffer) -> int:
    """Bytes from item to item of a tensor that holds the region. Raises `ManifestError` where items do not lie so."""
    where = "/".join(map(str, shape.key))

    def refuse(message: str, expected: object, actual: object) -> ManifestError:
        return ManifestError(message, where=where, expected=expected, actual=actual)

    if buffer.dtype != shape.region.dtype:
        raise refuse("the tensor has another dtype", shape.region.dtype, buffer.dtype)
    merged = _merged(buffer)
    item = shape.item_bytes
    if merged is None or len(merged) > 2:
        raise refuse("the tensor is not items of contiguous rows", "at most one stride", buffer.strides_bytes)
    run = merged[-1][0]
    items, stride = (run // item, item) if len(merged) == 1 else merged[0]
    if len(merged) == 2 and run != item:
        raise refuse("the tensor's contiguous runs are not items", f"{item} bytes", f"{run} bytes")
    if items < shape.items:
        raise refuse(
            "the tensor is smaller than its index space", f"{shape.items} items of {item} bytes for {shape.space}",
            f"{items} items",
        )  # fmt: skip
    view = shape.view.shape
    ends = {1, *accumulate(reversed(view[1:]), mul)}
    # The outermost axis counts items, or rows of all of them: a pool may have more than its space needs.
    mine = list(accumulate((n for n in reversed(buffer.shape) if n != 1), mul))[:-1]
    if not ends.issuperset(mine):
        raise ManifestError(
            "the tensor's axes are not the region's", where=where, expected=f"{view}, neighbouring axes joined or not",
            actual=buffer.shape,
            hint="A token's row is contiguous: pools of [page, head, token, dim] (HND) or with other axes swapped "
            "cannot be adopted.",
        )  # fmt: skip
    return stride


def _merged(buffer: Buffer) -> list[tuple[int, int]] | None:
    """Axes joined where they touch: [(items, stride_bytes)?, (run_bytes, 1)]; None where the last axis is not dense."""
    size = DTYPE_BYTES[buffer.dtype]
    axes = [(n, s) for n, s in zip(buffer.shape, buffer.strides_bytes, strict=True) if n != 1]
    run, rest = size, list(axes)
    while rest and rest[-1][1] == run:
        run *= rest.pop()[0]
    if not rest:
        return [(run, 1)]
    items, stride = rest.pop()
    while rest and rest[-1][1] == stride * items:
        items *= rest.pop()[0]
    return None if rest or stride < run else [(items, stride), (run, 1)]
