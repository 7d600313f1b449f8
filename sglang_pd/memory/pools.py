"""One rank's pools: typed views on its segments, and what may be done to a request's state as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.base import Segment
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.memory.layout import RankLayout, RegionKey, ViewShape
from sglang_pd.memory.lease import Tables
from sglang_pd.memory.views import NUMPY_DTYPES, host_bytes, segment_tensor, strided_array, strided_tensor
from sglang_pd.protocol.errors import BackendError, ManifestError
from sglang_pd.protocol.manifest import Region
from sglang_pd.protocol.spaces import AnySpace, RecurrentSlot

if TYPE_CHECKING:
    import torch


class RankPools:
    """Views of every region of one rank. The engine's rank owns it; views stay valid while the scope is not suspended.

    Holds the rank's own list of rows and slots that are armed for receive, so that no engine can clear arriving state,
    whatever its scheduler believes; and the generation that took each row and slot last, so that tables of a lease that
    is over are refused once another has its place. One allocator serves the pools: generations of two do not compare.
    """

    def __init__(self, layout: RankLayout, segments: Sequence[Segment]) -> None:
        self.layout = layout
        self.segments = tuple(segments)
        self._regions: dict[RegionKey, tuple[Region, AnySpace]] = {
            (component.kind, *region.key): (region, component.space)
            for component in layout.components
            for region in component.regions
        }
        for key, (region, space) in self._regions.items():
            self._check(key, region, space)
        self._armed: dict[int, tuple[int | None, int | None]] = {}
        self._taken: dict[tuple[str, int], int] = {}
        """Generation that took a row or slot last; as many entries as there are rows and slots."""
        self._tensors: dict[int, torch.Tensor] = {}

    def _check(self, key: RegionKey, region: Region, space: AnySpace) -> None:
        have = self.segments[region.segment].nbytes if region.segment < len(self.segments) else 0
        need = region.offset + region.span_bytes(space)
        if need > have:
            raise BackendError(
                "a region runs past its segment", code="memory_refused", where="/".join(map(str, key)),
                expected=f"{need} bytes in segment {region.segment}", actual=f"{have} bytes",
            )  # fmt: skip

    @property
    def keys(self) -> tuple[RegionKey, ...]:
        """Every region there is, in the manifest's order."""
        return tuple(self._regions)

    def _find(self, key: RegionKey) -> tuple[Region, AnySpace, ViewShape]:
        if key not in self._regions:
            raise ManifestError(
                "this rank has no such region", where="/".join(map(str, key)), expected=f"one of {len(self.keys)}"
            )
        region, space = self._regions[key]
        return region, space, self.layout.views[key]

    def region(self, kind: str, layer_id: int, part: str) -> tuple[Region, AnySpace]:
        """A region and its index space. Raises `ManifestError` where this rank has none."""
        region, space, _ = self._find((kind, layer_id, part))
        return region, space

    def array(self, kind: str, layer_id: int, part: str) -> NDArray[Any]:
        """Host view [items, rows_per_item, outer_count, units, *unit_shape]."""
        region, _, view = self._find((kind, layer_id, part))
        raw = host_bytes(self.segments[region.segment])
        return strided_array(raw, view.dtype, region.offset, view.shape, region.stride_bytes)

    def tensor(self, kind: str, layer_id: int, part: str) -> torch.Tensor:
        """The same view as a tensor, on the segment's device."""
        region, _, view = self._find((kind, layer_id, part))
        if region.segment not in self._tensors:
            self._tensors[region.segment] = segment_tensor(self.segments[region.segment])
        return strided_tensor(
            self._tensors[region.segment], view.dtype, region.offset, view.shape, region.stride_bytes
        )  # fmt: skip

    def row_bytes(self, kind: str, layer_id: int, part: str) -> NDArray[np.uint8]:
        """Host view by row: uint8 [items, rows_per_item, row_bytes]."""
        region, space, view = self._find((kind, layer_id, part))
        shape = (region.items(space), region.rows_per_item, region.row_bytes)
        return strided_array(
            host_bytes(self.segments[region.segment]), "uint8", region.offset, shape, region.stride_bytes
        )  # fmt: skip

    def slots(self, kind: str, layer_id: int, part: str) -> torch.Tensor:
        """Tensor [rows, units, *unit_shape] (with outer_count after rows where it is not 1), addressed by a slot of the
        region's own space. Raises `ManifestError` where items are padded, since no such view exists then.
        """
        region, _, view = self._find((kind, layer_id, part))
        if region.stride_bytes != region.item_bytes:
            raise ManifestError(
                "padded items have no flat view", where=f"{kind}/{layer_id}/{part}", expected=region.item_bytes,
                actual=region.stride_bytes, hint="Address items and rows through `tensor`.",
            )  # fmt: skip
        outer = (view.outer_count,) if view.outer_count > 1 else ()
        rows = view.items * view.rows_per_item
        return self.tensor(kind, layer_id, part).view(rows, *outer, view.units, *view.unit_shape)

    # --- a request's state ---

    def take(self, tables: Tables) -> None:
        """Row and slot are this generation's from now on; again and again, as often as it names them.

        Raises `LeaseError` where a younger generation took either: the tables are of a lease that is over.
        """
        row, slot = _row_slot(tables)
        mine = [(what, index) for what, index in (("row", row), ("slot", slot)) if index is not None]
        for what, index in mine:
            last = self._taken.get((what, index), 0)
            if last > tables.generation:
                raise LeaseError(
                    "tables of a lease that is over", where=f"{what} {index}", expected=f"generation {last}",
                    actual=f"generation {tables.generation}", hint="Ask the lease for its tables at each step.",
                )  # fmt: skip
        self._taken.update(dict.fromkeys(mine, tables.generation))

    def arm(self, tables: Tables) -> None:
        """A peer may write this request's row, slot and pages: `reset` is refused until `disarm`.

        Raises `LeaseError` for a row or slot that is armed already, and as `take`.
        """
        row, slot = _row_slot(tables)
        for generation, (other_row, other_slot) in self._armed.items():
            if (row is not None and row == other_row) or (slot is not None and slot == other_slot):
                raise LeaseError("a row or slot is armed twice", where=f"generation {generation}", actual=(row, slot))
        self.take(tables)
        self._armed[tables.generation] = (row, slot)

    def disarm(self, generation: int) -> None:
        """Every byte is in, or every writer is fenced. Harmless for one that was not armed."""
        self._armed.pop(generation, None)

    def reset(self, tables: Tables) -> None:
        """Give a fresh request's recurrent slot its initial values (zero; an n-gram history: EOS).

        Raises `LeaseError` for a slot that is armed for receive, and as `take`.
        """
        _, slot = _row_slot(tables)
        for generation, (_, armed) in self._armed.items():
            if slot is not None and slot == armed:
                raise LeaseError(
                    "a slot armed for receive cannot be cleared", where=f"slot {slot}",
                    actual=f"armed by generation {generation}, cleared by generation {tables.generation}",
                )  # fmt: skip
        self.take(tables)
        for key, (_, space) in self._regions.items():
            if isinstance(space, RecurrentSlot) and slot is not None:
                initial = self.layout.views[key].initial
                if self._on_host(key):
                    self.array(*key)[slot] = initial
                else:
                    self.tensor(*key)[slot] = initial

    def _on_host(self, key: RegionKey) -> bool:
        segment = self.segments[self._regions[key][0].segment]
        return segment.device == "cpu" and self.layout.views[key].dtype in NUMPY_DTYPES


def _row_slot(tables: Tables) -> tuple[int | None, int | None]:
    row = int(tables.row.lower()[0]) if tables.row is not None and len(tables.row) else None
    slot = int(tables.slot.lower()[0]) if tables.slot is not None and len(tables.slot) else None
    return row, slot
