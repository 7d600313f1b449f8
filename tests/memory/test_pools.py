"""Views lie where the manifest says; reset knows initial values and armed slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.hybrid_state import EOS, PAGE, capacity, fill, hybrid_state
from support.stub_backend import StubBackend

from sglang_pd.memory.allocator import Allocator
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.memory.layout import Capacity, layout_rank
from sglang_pd.memory.lease import Lease
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.scope import Scope
from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.memory.views import host_bytes
from sglang_pd.protocol.errors import BackendError, ManifestError
from sglang_pd.protocol.kinds import PLE_NGRAM_STATE_LAYER_ID
from sglang_pd.protocol.manifest import RankId, Topology


def pools_of(state: StateSpec, size: Capacity) -> RankPools:
    layout = layout_rank(state, size, Topology(), RankId(0, 0))
    return RankPools(layout, Scope(StubBackend()).allocate_layout(layout))


def test_every_region_is_written_through_its_view_and_nowhere_else() -> None:
    pools = pools_of(hybrid_state(), capacity(3))
    for number, key in enumerate(pools.keys):
        pools.array(*key)[...] = number + 1
    for number, key in enumerate(pools.keys):
        assert (pools.tensor(*key) == number + 1).all(), key
        region, space = pools.region(*key)
        raw = host_bytes(pools.segments[region.segment])
        payload = raw[region.offset : region.offset + region.span_bytes(space)]
        assert payload.view(np.asarray(pools.array(*key)).dtype).flat[0] == number + 1


def test_a_slot_view_is_addressed_by_the_regions_own_slots() -> None:
    pools = pools_of(hybrid_state(), capacity(3))
    pools.slots("KV", 4, "v")[PAGE * 2 + 5, 3, 1] = 7.0
    assert pools.array("KV", 4, "v")[2, 5, 0, 3, 1] == 7.0
    assert pools.slots("QSA_PENDING", 2, "key").shape == (4 * 5, 1, 5)
    assert pools.slots("QSA_COMPRESSED", 2, "key").shape == (4 * 2, 1, 5)


def test_outer_count_and_bfloat16_and_padding() -> None:
    spec = RegionSpec("k", (0,), "bfloat16", 4, (3,), outer_count=2)
    padded = StateSpec((ComponentSpec("KV", "tokens", (spec,), item_align_bytes=512),), 1)
    pools = pools_of(padded, Capacity(2 * PAGE, PAGE))
    view = pools.tensor("KV", 0, "k")
    assert view.shape == (3, PAGE, 2, 4, 3)
    assert view.dtype is torch.bfloat16
    fill(pools, 0xA5)
    view[...] = 1.0
    region, _ = pools.region("KV", 0, "k")
    raw = host_bytes(pools.segments[0]).reshape(3, region.stride_bytes)
    assert region.item_bytes < region.stride_bytes
    assert (raw[:, region.item_bytes :] == 0xA5).all(), "bytes between items are never written"
    with pytest.raises(ManifestError, match="padded"):
        pools.slots("KV", 0, "k")
    with pytest.raises(BackendError, match="numpy"):
        pools.array("KV", 0, "k")
    dense = pools_of(StateSpec((ComponentSpec("KV", "tokens", (spec,)),), 1), Capacity(2 * PAGE, PAGE))
    assert dense.slots("KV", 0, "k").shape == (3 * PAGE, 2, 4, 3)


def test_a_fresh_request_starts_from_zero_and_eos() -> None:
    pools = pools_of(hybrid_state(), capacity(3))
    fill(pools, 0x7F)
    lease = Allocator(pools.layout.roots).lease(5)
    pools.reset(lease.tables())
    slot = int(lease.tables().slot.lower()[0])  # type: ignore[union-attr]
    assert (pools.array("PLE", PLE_NGRAM_STATE_LAYER_ID, "ngram")[slot] == EOS).all()
    for part in ("conv", "temporal"):
        assert not pools.array("MAMBA", 1, part)[slot].any()
        others = np.delete(pools.row_bytes("MAMBA", 1, part), slot, axis=0)
        assert (others == 0x7F).all(), "another request's slot"


def test_an_armed_slot_cannot_be_cleared() -> None:
    pools = pools_of(hybrid_state(), capacity(3))
    lease = Allocator(pools.layout.roots).lease(5)
    pools.arm(lease.tables())
    pools.array("MAMBA", 1, "temporal")[:] = 4.0
    with pytest.raises(LeaseError, match="armed for receive"):
        pools.reset(lease.tables())
    assert (pools.array("MAMBA", 1, "temporal") == 4.0).all()
    with pytest.raises(LeaseError, match="armed twice"):
        pools.arm(lease.tables())
    pools.disarm(lease.generation)
    pools.reset(lease.tables())


def row_and_slot(lease: Lease) -> tuple[int, int]:
    tables = lease.tables()
    assert tables.row is not None and tables.slot is not None
    return int(tables.row.lower()[0]), int(tables.slot.lower()[0])


def test_a_slot_that_another_lease_has_taken_is_not_cleared_by_old_tables() -> None:
    pools = pools_of(hybrid_state(), capacity(3))
    allocator = Allocator(pools.layout.roots)
    first = allocator.lease(5)
    old, place = first.tables(), row_and_slot(first)
    pools.reset(old)
    pools.reset(old)
    first.release()
    second = allocator.lease(5)
    assert row_and_slot(second) == place, "the place is used again"
    pools.reset(second.tables())
    pools.array("MAMBA", 1, "temporal")[:] = 4.0
    for forbidden in (pools.reset, pools.arm, pools.take):
        with pytest.raises(LeaseError, match="lease that is over"):
            forbidden(old)
    assert (pools.array("MAMBA", 1, "temporal") == 4.0).all()
    pools.arm(second.tables())
    pools.disarm(second.generation)


def test_a_slot_that_receives_belongs_to_whom_it_was_armed_for() -> None:
    """After the state arrived nothing marks it but the generation: an old request must not clear it."""
    pools = pools_of(hybrid_state(), capacity(3))
    allocator = Allocator(pools.layout.roots)
    first = allocator.lease(5)
    old = first.tables()
    first.release()
    second = allocator.lease(5)
    pools.arm(second.tables())
    with pytest.raises(LeaseError, match="armed"):
        pools.reset(old)
    pools.disarm(second.generation)
    with pytest.raises(LeaseError, match="lease that is over"):
        pools.reset(old)


def test_a_row_alone_tells_an_old_lease() -> None:
    spec = RegionSpec("key", (0,), "float32", 1, (5,), replicated=True)
    ring = ComponentSpec("QSA_PENDING", "rows", (spec,), ring_width=5, group_tokens=4)
    pools = pools_of(StateSpec((ring,), 1), Capacity(2 * PAGE, PAGE, rows=1))
    allocator = Allocator(pools.layout.roots)
    first = allocator.lease(5)
    old = first.tables()
    first.release()
    pools.take(allocator.lease(5).tables())
    with pytest.raises(LeaseError, match="row 1"):
        pools.take(old)


def test_a_region_that_is_not_there_and_one_that_does_not_fit() -> None:
    layout = layout_rank(hybrid_state(), capacity(3), Topology(), RankId(0, 0))
    scope = Scope(StubBackend())
    segments = scope.allocate_layout(layout)
    with pytest.raises(ManifestError, match="KV/0/k"):
        RankPools(layout, segments).array("KV", 0, "k")
    with pytest.raises(BackendError, match="runs past"):
        RankPools(layout, segments[:1])
