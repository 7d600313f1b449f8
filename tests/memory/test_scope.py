"""The scope: one way to transferable memory, and its end."""

from __future__ import annotations

import numpy as np
import pytest
from support.hybrid_state import capacity, hybrid_state
from support.stub_backend import StubBackend

from sglang_pd.backends.base import Segment
from sglang_pd.backends.registry import create_backend
from sglang_pd.memory.holding import held, hold, let_go, register
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.memory.layout import layout_rank
from sglang_pd.memory.scope import Scope
from sglang_pd.protocol.errors import BackendError
from sglang_pd.protocol.manifest import RankId, Topology


def host(nbytes: int) -> Segment:
    memory = np.zeros(nbytes, np.uint8)
    return Segment(int(memory.ctypes.data), nbytes, "cpu", memory)


def test_a_layout_gets_its_segments_in_order() -> None:
    layout = layout_rank(hybrid_state(), capacity(4), Topology(), RankId(0, 0))
    scope = Scope(StubBackend())
    segments = scope.allocate_layout(layout)
    assert [s.number for s in segments] == list(range(len(layout.segments)))
    assert [s.nbytes for s in segments] == [p.nbytes for p in layout.segments]
    scope.check_layout(layout)


def test_a_layout_elsewhere_is_refused_by_segment() -> None:
    scope = Scope(StubBackend())
    scope.allocate(64)
    scope.register()
    with pytest.raises(BackendError, match="segment KV"):
        scope.check_layout(layout_rank(hybrid_state(), capacity(4), Topology(), RankId(0, 0)))


def test_a_region_outside_the_scope_is_named() -> None:
    scope = Scope(StubBackend())
    own = scope.allocate(256)
    assert scope.locate(own.address + 16, 240, "KV/0/k") == (0, 16)
    for address, nbytes in ((own.address + 16, 241), (own.address - 1, 4), (host(8).address, 8)):
        with pytest.raises(BackendError) as caught:
            scope.locate(address, nbytes, "QSA_PENDING/24/key")
        assert caught.value.code == "memory_refused"
        assert caught.value.where == "QSA_PENDING/24/key"
    with pytest.raises(BackendError):
        scope.locate(own.address, 8, "KV/0/k", device="cuda:0")


def test_local_adopts_no_host_memory_and_says_so() -> None:
    with create_backend("local", epoch=7) as backend:
        scope = Scope(backend)
        with pytest.raises(BackendError) as caught:
            scope.adopt(host(4096), "KV/0/k")
        assert caught.value.code == "backend_unsupported"
        assert "local" in str(caught.value)
        assert caught.value.where == "KV/0/k"
        assert not scope.segments


def test_a_failed_probe_leaves_the_scope_as_it_was() -> None:
    scope = Scope(StubBackend(probe="expandable segments cannot be exported"))
    with pytest.raises(BackendError, match="expandable"):
        scope.adopt(host(64), "KV/0/k")
    assert not scope.segments


def test_the_same_memory_is_not_adopted_twice() -> None:
    scope = Scope(StubBackend())
    memory = host(128)
    scope.adopt(memory, "KV/0/k")
    with pytest.raises(BackendError, match="overlaps"):
        scope.adopt(Segment(memory.address + 64, 64, "cpu", memory), "KV/0/v")


def test_nothing_is_added_once_registered() -> None:
    scope = Scope(StubBackend())
    scope.allocate(64)
    scope.register()
    for late in (lambda: scope.allocate(64), lambda: scope.adopt(host(64)), scope.register):
        with pytest.raises(BackendError, match="registered"):
            late()


def test_memory_behind_a_backend_that_is_held_is_not_adopted_by_another() -> None:
    memory, holder = host(256), object()
    first = StubBackend(epoch=1)
    Scope(first).adopt(memory)
    Scope(StubBackend(epoch=2)).adopt(memory)
    hold(first, holder, "one")
    with pytest.raises(BackendError, match="behind another backend"):
        Scope(StubBackend(epoch=3)).adopt(memory)
    Scope(StubBackend(epoch=4)).adopt(host(256))
    let_go(first, holder)
    Scope(StubBackend(epoch=5)).adopt(memory)


def test_memory_that_two_backends_have_is_served_behind_one_of_them_alone() -> None:
    memory, holder, other = host(256), object(), object()
    first, second, third = (StubBackend(epoch=n) for n in (1, 2, 3))
    scopes = [Scope(one) for one in (first, second, third)]
    own = scopes[0].allocate(64)
    scopes[0].adopt(memory)
    scopes[1].adopt(Segment(memory.address + 128, 128, "cpu", memory))
    scopes[2].adopt(Segment(own.address, 32, "cpu", own.keep_alive))
    for scope in scopes:
        scope.register()
    hold(first, holder, "one")
    hold(first, holder, "one")
    for backend in (second, third):
        with pytest.raises(BackendError, match="behind another backend"):
            hold(backend, other, "two")
        assert not held(backend)
    with pytest.raises(BackendError, match="behind another backend"):
        Scope(StubBackend(epoch=4)).adopt(Segment(own.address, 32, "cpu", own.keep_alive))
    let_go(first, holder)
    hold(second, other, "two")
    with pytest.raises(BackendError, match="behind another backend"):
        hold(first, holder, "one")
    hold(third, other, "three")


def test_memory_that_was_freed_is_nobodys() -> None:
    class Owner:
        pass

    first, second, owner = StubBackend(epoch=1), StubBackend(epoch=2), Owner()
    register(first, [Segment(4096, 64, "cpu", owner)])
    register(second, [Segment(4096, 64, "cpu", Owner())])
    hold(first, first, "one")
    hold(second, second, "two")
    late = StubBackend(epoch=3)
    register(late, [Segment(4096, 64, "cpu", owner)])
    with pytest.raises(BackendError, match="behind another backend"):
        hold(late, late, "three")
    del owner
    hold(late, late, "three")


def test_suspend_waits_for_rooms_and_resume_wants_a_new_epoch() -> None:
    first = StubBackend(epoch=1)
    scope = Scope(first)
    scope.allocate(64)
    scope.register()
    one, other = object(), object()
    hold(first, one, "one")
    hold(first, one, "one")
    with pytest.raises(BackendError, match="another endpoint"):
        hold(first, other, "other")
    let_go(first, other)
    with pytest.raises(LeaseError, match="an endpoint serves"):
        scope.suspend()
    assert not first.closed
    let_go(first, one)
    scope.suspend()
    assert first.closed
    assert not scope.segments
    with pytest.raises(BackendError, match="suspended"):
        scope.allocate(64)
    with pytest.raises(BackendError, match="epoch"):
        scope.resume(StubBackend(epoch=1))
    scope.resume(StubBackend(epoch=2))
    assert scope.epoch == 2
    scope.allocate(64)
    scope.register()
    with pytest.raises(LeaseError, match="only a suspended"):
        scope.resume(StubBackend(epoch=3))
