"""What state a model has, without a size, a rank or an address: the input of `layout.py`.

Pure: the standard library and `protocol` only. An engine states its components once; how they are cut over ranks, how
large they are and where they lie follows from topology and capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal, NoReturn, get_args

from sglang_pd.protocol.errors import ManifestError
from sglang_pd.protocol.kinds import kind_of
from sglang_pd.protocol.manifest import Topology

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by the name of the dtype as it stands in a manifest."""

HEAD_MAJOR: Final = "HND"
"""Layout tag, in any case, of pages whose heads lie one behind the other: a token's row is then in pieces."""

Root = Literal["tokens", "local_tokens", "swa", "rows", "slots"]
"""The allocator behind a component. `local_tokens` is cut over DCP ranks; `tokens` is whole on each of them."""


def refuse(where: str, expected: object, actual: object, message: str = "impossible state description") -> NoReturn:
    """Raise `ManifestError` for a field of a description."""
    raise ManifestError(message, where=where, expected=expected, actual=actual)


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """One part of a component, over all its layers.

    part: one of the kind's parts. layer_ids: layers that have it; for a request-wide part, layers that need it.
    dtype: a key of `DTYPE_BYTES`. units_total, unit_shape: a row is outer_count x units x unit_shape elements, where a
    unit (a head, a channel) is never cut. shard_groups: sub-blocks that are sharded each on its own (q | k | v).
    replicated: equal on all attention-TP ranks. initial: value of a fresh slot (an n-gram history starts as EOS).
    """

    part: str
    layer_ids: tuple[int, ...]
    dtype: str
    units_total: int
    unit_shape: tuple[int, ...] = ()
    outer_count: int = 1
    shard_groups: tuple[int, ...] = ()
    replicated: bool = False
    initial: int | float = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            refuse(f"{self.part}.dtype", " | ".join(DTYPE_BYTES), self.dtype)
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            refuse(f"{self.part}.layer_ids", "rising layer ids, at least one", self.layer_ids)
        if min((self.units_total, self.outer_count, *self.unit_shape)) < 1:
            refuse(self.part, "positive sizes", (self.units_total, self.outer_count, self.unit_shape))
        if self.shard_groups and sum(self.shard_groups) != self.units_total:
            refuse(f"{self.part}.shard_groups", f"sizes that sum to {self.units_total}", self.shard_groups)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit."""
        return prod(self.unit_shape) * DTYPE_BYTES[self.dtype]

    def units_on_rank(self, tp: int) -> int:
        """Units that each of `tp` ranks holds. Raises `ManifestError` where a group and tp do not divide."""
        if self.replicated:
            return self.units_total
        for group in self.shard_groups or (self.units_total,):
            if group % tp and tp % group:
                refuse(f"{self.part}.shard_groups", f"each size divides tp = {tp}, or tp divides it", group)
        return sum(max(1, group // tp) for group in self.shard_groups or (self.units_total,))


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """All of one kind that a model has.

    ratio: tokens of a compressed group (the space is then a scaled one); 0: none. ring_width, group_tokens: for rings;
    the width is r + window - 1 where r is group_tokens and window the tokens of one speculative verify step.
    layout: tag that peers compare as text; HND (`HEAD_MAJOR`) is refused where a page has several heads.
    device: where it lies, "" for the rank's own device, "cpu" for host memory beside it. segment: components that name
    the same one are views of one allocation; "" for one of its own.
    item_align_bytes: items start at multiples of it; the bytes between are never written.
    """

    kind: str
    root: Root
    regions: tuple[RegionSpec, ...]
    ratio: int = 0
    ring_width: int = 0
    group_tokens: int = 0
    layout: str = ""
    device: str = ""
    segment: str = ""
    optional: bool = False
    item_align_bytes: int = 1

    def __post_init__(self) -> None:
        kind = kind_of(self.kind)
        if self.root not in get_args(Root):
            refuse(f"{self.kind}.root", " | ".join(get_args(Root)), self.root)
        for region in self.regions:
            if region.part not in kind.parts:
                refuse(f"{self.kind}.{region.part}", " | ".join(kind.parts), region.part)
        if not self.regions:
            refuse(f"{self.kind}.regions", "at least one", 0)
        if bool(self.ring_width) != bool(self.group_tokens) or (self.ring_width and self.root != "rows"):
            refuse(f"{self.kind}.ring_width", "a ring has a width and a group, on rows", (self.root, self.ring_width))
        if self.ratio and self.root not in ("tokens", "swa"):
            refuse(f"{self.kind}.ratio", "a ratio on tokens or swa", self.root)
        if self.item_align_bytes < 1:
            refuse(f"{self.kind}.item_align_bytes", ">= 1", self.item_align_bytes)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """All state of a model.

    layers: number of layers; ids are 0 to layers - 1. window_tokens: of the sliding-window layers, 0 where there are
    none. stage_starts: first layer of each pipeline stage; () cuts evenly.
    """

    components: tuple[ComponentSpec, ...]
    layers: int
    window_tokens: int = 0
    stage_starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kinds = [component.kind for component in self.components]
        if len(set(kinds)) != len(kinds):
            refuse("components", "one component a kind", kinds)
        for component in self.components:
            highest = max(layer for region in component.regions for layer in region.layer_ids)
            if highest >= self.layers:
                refuse(f"{component.kind}.layer_ids", f"below {self.layers}", highest)
        if any(c.root == "swa" for c in self.components) != bool(self.window_tokens):
            refuse("window_tokens", "positive exactly where a component uses the swa root", self.window_tokens)
        if self.stage_starts and (self.stage_starts[0] != 0 or list(self.stage_starts) != sorted(self.stage_starts)):
            refuse("stage_starts", "rising layer ids from 0", self.stage_starts)

    def stage_layers(self, topology: Topology, pp_rank: int) -> range:
        """Layer ids of one pipeline stage."""
        starts = self.stage_starts or tuple(i * self.layers // topology.pp for i in range(topology.pp))
        if len(starts) != topology.pp:
            refuse("stage_starts", f"one for each of {topology.pp} stages", self.stage_starts)
        return range(starts[pp_rank], (*starts, self.layers)[pp_rank + 1])

    @property
    def roots(self) -> frozenset[str]:
        """Allocators that any component needs, `local_tokens` counted as `tokens`."""
        return frozenset("tokens" if c.root == "local_tokens" else c.root for c in self.components)
