"""The pump and the links over a library that a test commands: bounds, deadlines, events, failures, replaced engines."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.library.blob import SegmentEntry
from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.library.segments import Scope
from sglang_pd.backends.library.sockets import reserve
from sglang_pd.backends.mooncake import inbound as mooncake_inbound
from sglang_pd.backends.mooncake import links as mooncake_links
from sglang_pd.backends.mooncake import pump as mooncake_pump
from sglang_pd.backends.mooncake.blob import Blob, identity_bytes
from sglang_pd.backends.mooncake.inbound import Inbound
from sglang_pd.backends.mooncake.library import Library
from sglang_pd.backends.mooncake.links import Links
from sglang_pd.backends.mooncake.options import MooncakeOptions
from sglang_pd.backends.mooncake.ports import former
from sglang_pd.backends.mooncake.pump import Pump
from sglang_pd.backends.mooncake.transfer import MooncakePeer, MooncakeTransfer, Outbound
from sglang_pd.protocol.errors import BackendError, TransferError

LIBRARY = Library(module=None, version="0.3.13", flags={}, has_tickets=False, has_arrays=False)
DONE, FAILED, UNKNOWN, PENDING = (getattr(TransferState, n) for n in ("DONE", "FAILED", "UNKNOWN", "PENDING"))


class CommandedRaw:
    """Keeps every submission running until `verdict` is set; counts what is outstanding."""

    def __init__(self) -> None:
        self.verdict = 0
        self.fails: set[int] = set()
        self.next_id = 0
        self.sizes: dict[int, tuple[int, int]] = {}
        self.most_pieces = self.most_bytes = self.total_bytes = 0

    def _take(self, lengths: list[int]) -> int:
        self.next_id += 1
        self.sizes[self.next_id] = len(lengths), sum(lengths)
        self.total_bytes += sum(lengths)
        self.most_pieces = max(self.most_pieces, sum(n for n, _ in self.sizes.values()))
        self.most_bytes = max(self.most_bytes, sum(n for _, n in self.sizes.values()))
        return self.next_id

    def transfer_submit_write(self, session: str, src: int, dst: int, length: int) -> int:
        return self._take([length])

    def batch_transfer_async_write(self, session: str, src: list[int], dst: list[int], length: list[int]) -> int:
        return self._take(length)

    def transfer_check_status(self, one: int) -> int:
        if one in self.fails:
            del self.sizes[one]
            return -1
        if self.verdict:
            del self.sizes[one]
        return self.verdict

    def get_batch_transfer_status(self, ids: list[int]) -> int:
        del self.sizes[ids[0]]
        return 0


class CommandedEngine:
    """An engine of `Links` and of the pump."""

    made: list[CommandedEngine] = []

    def __init__(self, library: Library, options: MooncakeOptions) -> None:
        self.raw: Any = CommandedRaw()
        self.answers: Callable[[], bool] = lambda: True
        self.stopped = False
        CommandedEngine.made.append(self)

    def probe(self, session: str) -> int:
        return 0

    def read(self, session: str, local: int, remote: int, nbytes: int) -> bool:
        import ctypes

        ctypes.memmove(local, identity_bytes(5, 1), nbytes)
        return True

    def stop(self, within_s: float) -> bool:
        self.stopped = True
        return True


def blob(epoch: int = 5, session: str = "127.0.0.1:9") -> Blob:
    return Blob(
        mooncake_version="0.3.13",
        transport="tcp",
        epoch=epoch,
        generation=1,
        session=session,
        identity_address=4096,
        segments=[SegmentEntry(0, 0, "cpu")],
    )


class Bench:
    """A pump with one peer."""

    def __init__(self, options: MooncakeOptions) -> None:
        self.engine = CommandedEngine(LIBRARY, options)
        self.raw = self.engine.raw
        self.asked: list[MooncakePeer] = []
        self.pump = Pump(LIBRARY, options, self.asked.append, lambda: None)
        self.peer = MooncakePeer(1, blob(), Outbound(self.engine))  # type: ignore[arg-type]

    def post(self, lengths: list[int], deadline_s: float = 30.0, after: Any = None) -> MooncakeTransfer:
        length = np.array(lengths, np.uint64)
        at = np.cumsum(length * np.uint64(2)) + np.uint64(1 << 20)
        segment = np.zeros(len(lengths), np.uint32)
        pieces = Rows(at, at + np.uint64(1 << 40), length, segment, segment)
        transfer = MooncakeTransfer(self.peer, pieces, sum(lengths), deadline_s, after)
        self.pump.post(self.peer, transfer)
        return transfer


def becomes(transfer: MooncakeTransfer, state: TransferState, within_s: float = 10.0) -> bool:
    ends = time.monotonic() + within_s
    while transfer.poll() is not state and time.monotonic() < ends:
        time.sleep(0.001)
    return transfer.poll() is state


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(MooncakeOptions(max_descriptors_per_peer=100, max_bytes_per_peer=1 << 20))
    yield made
    made.pump.stop()


def test_what_is_outstanding_is_bounded_and_all_of_it_moves(bench: Bench) -> None:
    transfers = [bench.post([1000] * 333) for _ in range(4)] + [bench.post([40 << 20]), bench.post([64])]
    time.sleep(0.05)
    assert 0 < bench.raw.most_pieces <= 100
    bench.raw.verdict = 1
    assert all(becomes(one, DONE) for one in transfers)
    assert bench.raw.most_pieces <= 100 and bench.raw.total_bytes == 4 * 333_000 + (40 << 20) + 64
    assert bench.raw.most_bytes <= 16 << 20  # one piece may exceed the bound, alone
    assert bench.peer.posted == bench.peer.resolved == 6 and bench.pump.queued == 0
    assert bench.peer.outstanding_pieces == bench.peer.outstanding_bytes == bench.peer.outbound.flights == 0


def test_past_its_deadline_it_is_unknown_then_what_it_proves_to_be(bench: Bench) -> None:
    whole, part = bench.post([64], 0.5), bench.post([1000] * 300, 0.5)
    waiting = bench.post([1000] * 300, 0.5)
    assert becomes(whole, UNKNOWN) and becomes(part, UNKNOWN)
    assert becomes(waiting, FAILED)  # nothing of it was ever submitted
    assert {one.error.code for one in (whole, part, waiting) if one.error} == {"transfer_timeout"}
    assert not whole.quiesced and bench.peer.resolved == 1
    bench.raw.verdict = 1
    assert becomes(whole, DONE) and whole.error is None
    assert becomes(part, FAILED)  # what was submitted was acknowledged, the rest never will be
    assert bench.peer.posted == bench.peer.resolved


def test_a_failure_is_unknown_for_good_and_stops_the_peer_until_verified(bench: Bench) -> None:
    first = bench.post([64])
    bench.raw.verdict = -1
    assert becomes(first, UNKNOWN)
    assert first.error is not None and first.error.code == "transfer_unknown" and "-1" in str(first.error)
    bench.raw.verdict = 1
    second = bench.post([64])
    time.sleep(0.05)
    assert bench.asked == [bench.peer] and second.poll() is PENDING and bench.raw.next_id == 1
    bench.pump.call(lambda: bench.pump.settle_peer(bench.peer))
    assert becomes(second, DONE) and first.poll() is UNKNOWN
    assert bench.peer.posted - bench.peer.resolved == 1


def test_a_lost_peer_ends_what_waits(bench: Bench) -> None:
    bench.raw.verdict = -1
    assert becomes(bench.post([64]), UNKNOWN)
    waiting = bench.post([64])
    bench.peer.lose(TransferError("gone", code="peer_lost"))
    bench.pump.call(lambda: bench.pump.settle_peer(bench.peer))
    assert becomes(waiting, FAILED) and waiting.error is not None and waiting.error.code == "peer_lost"


def test_what_a_verification_found_stops_a_small_write(bench: Bench) -> None:
    """The owner looked before it; the write that it then posts itself must not go to somebody else."""
    bench.peer.lose(TransferError("somebody else is there", code="epoch_stale"))
    transfer = bench.post([64])
    assert becomes(transfer, TransferState.FAILED) and not bench.raw.total_bytes


class Event:
    """As torch.cuda.Event; it comes when told, on a thread that must not be the owner's."""

    def __init__(self) -> None:
        self.come = False
        self.error: Exception | None = None
        self.asked_by: set[int] = set()

    def query(self) -> bool:
        self.asked_by.add(threading.get_ident())
        if self.error:
            raise self.error
        return self.come

    def synchronize(self) -> None:
        raise AssertionError("synchronize would block")


def test_an_event_is_awaited_off_the_owners_thread_and_lets_others_pass(bench: Bench) -> None:
    bench.raw.verdict = 1
    event, broken = Event(), Event()
    broken.error = RuntimeError("device lost")
    held, free, failed = bench.post([64], after=event), bench.post([64]), bench.post([64], after=broken)
    assert becomes(free, DONE) and becomes(failed, FAILED)
    assert failed.error is not None and "device lost" in str(failed.error)
    assert held.poll() is PENDING and threading.get_ident() not in event.asked_by
    event.come = True
    assert becomes(held, DONE)


def test_what_is_cancelled_before_it_was_submitted_never_is(bench: Bench) -> None:
    event = Event()
    held, busy, behind = bench.post([64], after=event), bench.post([1000] * 300), bench.post([64])
    time.sleep(0.05)
    for one in (held, busy, behind):
        one.cancel()
        one.cancel()
    assert becomes(held, FAILED) and becomes(behind, FAILED), "also what waits behind others"
    assert held.error is not None and held.error.code == "transfer_failed"
    assert busy.poll() is PENDING, "what has begun goes on"
    event.come = True
    bench.raw.verdict = 1
    assert becomes(busy, DONE) and bench.raw.total_bytes == 300_000
    busy.cancel()
    assert busy.poll() is DONE and bench.pump.queued == 0 and bench.peer.posted == bench.peer.resolved


def test_news_makes_the_descriptor_readable_once(bench: Bench) -> None:
    transfer = bench.post([1000] * 50)
    assert select.select([bench.pump.wakeup_fd()], [], [], 0.02)[0] == []
    bench.raw.verdict = 1
    assert select.select([bench.pump.wakeup_fd()], [], [], 10.0)[0]
    assert transfer.poll() is DONE
    time.sleep(0.01)
    bench.pump.drain_wakeup()
    assert select.select([bench.pump.wakeup_fd()], [], [], 0.02)[0] == []


def test_after_stop_nobody_reads_what_has_the_descriptors_number_now(bench: Bench) -> None:
    transfer = bench.post([1000] * 50)
    bench.raw.verdict = 1
    assert becomes(transfer, DONE) and select.select([bench.pump.wakeup_fd()], [], [], 10.0)[0]
    bench.pump.stop()
    fd = os.eventfd(5, os.EFD_NONBLOCK)
    try:
        os.dup2(fd, bench.pump.wakeup_fd())
        bench.pump.drain_wakeup()
        assert os.eventfd_read(fd) == 5
    finally:
        os.close(bench.pump.wakeup_fd())
        if fd != bench.pump.wakeup_fd():
            os.close(fd)


def test_stop_leaves_no_transfer_pending(bench: Bench) -> None:
    flying, waiting = bench.post([1000] * 300), bench.post([64] * 300)
    time.sleep(0.05)
    bench.pump.stop()
    assert flying.poll() is UNKNOWN and waiting.poll() is FAILED


# links


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Links]:
    CommandedEngine.made = []
    monkeypatch.setattr(mooncake_links, "Engine", CommandedEngine)
    monkeypatch.setattr(mooncake_links.socket, "create_connection", lambda *a: type("S", (), {"close": lambda s: 0})())
    made = Links(LIBRARY, MooncakeOptions(), lambda: ([], []))
    yield made
    made.close(1.0)


def test_a_session_that_another_incarnation_had_gets_a_fresh_engine(links: Links) -> None:
    first = links.reach(blob(5))
    assert links.reach(blob(5)) is first and len(CommandedEngine.made) == 1
    with pytest.raises(TransferError) as caught:  # the identity page still says 5
        links.reach(blob(6))
    assert caught.value.code == "epoch_stale" and len(CommandedEngine.made) == 2
    assert links.reach(blob(5, "127.0.0.1:8")) is not first


def test_after_a_failure_the_engine_is_replaced_counted_and_ended(links: Links) -> None:
    peer = MooncakePeer(1, blob(5), links.reach(blob(5)))
    links.join(peer.outbound, peer)
    before, settled = peer.outbound, threading.Event()
    links.verify(peer, settled.set)
    assert settled.wait(10) and peer.lost is None
    assert peer.outbound is not before and links.rebuilds == 1
    ends = time.monotonic() + 5
    while not before.engine.stopped and time.monotonic() < ends:  # type: ignore[attr-defined]
        time.sleep(0.005)
    assert before.engine.stopped and not peer.outbound.engine.stopped  # type: ignore[attr-defined]


def test_another_identity_loses_the_peer(links: Links) -> None:
    peer = MooncakePeer(1, blob(7), Outbound(CommandedEngine(LIBRARY, MooncakeOptions())))  # type: ignore[arg-type]
    settled = threading.Event()
    links.verify(peer, settled.set)
    assert settled.wait(10) and peer.lost is not None and peer.lost.code == "epoch_stale"


def test_a_closed_port_loses_the_peer_and_a_silent_one_is_asked_again(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = MooncakePeer(1, blob(5), links.reach(blob(5)))
    outcome: list[Exception] = [TimeoutError("slow"), ConnectionRefusedError("closed")]

    def fail(*arguments: Any) -> Any:
        raise outcome[0]

    monkeypatch.setattr(mooncake_links.socket, "create_connection", fail)
    settled = threading.Event()
    peer.verify_at = float("inf")
    links.verify(peer, settled.set)
    ends = time.monotonic() + 5
    while peer.verify_at == float("inf") and time.monotonic() < ends:
        time.sleep(0.005)
    assert peer.lost is None and not settled.is_set() and peer.verify_at < time.monotonic() + 2
    outcome.pop(0)
    links.verify(peer, settled.set)
    assert settled.wait(10) and peer.lost is not None and peer.lost.code == "peer_lost"


def test_a_closed_engine_is_not_called() -> None:
    from sglang_pd.backends.mooncake.engine import Engine

    engine = object.__new__(Engine)
    engine._raw = None
    with pytest.raises(BackendError, match="closed"):
        engine.probe("x")


def soon(condition: Callable[[], object]) -> bool:
    ends = time.monotonic() + 10
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    return bool(condition())


class Ward:
    """A pump and links, as the backend has them."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.pump = Pump(LIBRARY, MooncakeOptions(), self.verify, links.reap)
        links.at_pump, links.ended = self.pump.call, self.pump.engine_ended

    def verify(self, peer: MooncakePeer) -> None:
        self.links.verify(peer, lambda: self.pump.call(lambda: self.pump.settle_peer(peer)))

    def meet(self, number: int, epoch: int = 5) -> MooncakePeer:
        peer = MooncakePeer(number, blob(epoch), self.links.reach(blob()))
        self.links.join(peer.outbound, peer)
        return peer

    def post(self, peer: MooncakePeer, deadline_s: float = 30.0) -> MooncakeTransfer:
        one, segment = np.array([1 << 20], np.uint64), np.zeros(1, np.uint32)
        transfer = MooncakeTransfer(peer, Rows(one, one, one, segment, segment), 1 << 20, deadline_s, None)
        self.pump.post(peer, transfer)
        return transfer


@pytest.fixture
def ward(links: Links) -> Iterator[Ward]:
    made = Ward(links)
    yield made
    made.pump.stop()


def test_the_source_is_free_once_the_engine_that_may_read_it_has_ended(ward: Ward) -> None:
    """It was pinned for ever: the lost peer, and a healthy one beside it, kept the engine."""
    gone, healthy = ward.meet(1, epoch=7), ward.meet(2)
    before: Any = gone.outbound.engine
    assert healthy.outbound is gone.outbound
    under_way, failing = ward.post(healthy), ward.post(gone)
    gone.lose(TransferError("somebody else is there", code="epoch_stale"))
    before.raw.fails = {2}
    assert soon(lambda: failing.poll() is UNKNOWN)
    assert soon(lambda: healthy.outbound.engine is not before), "it writes through another engine"
    later = ward.post(healthy)
    assert not before.stopped and not failing.source_free, "something of the healthy one is still under way there"
    before.raw.verdict = healthy.outbound.engine.raw.verdict = 1
    assert becomes(under_way, DONE) and becomes(later, DONE)
    assert soon(lambda: failing.source_free) and before.stopped
    assert failing.poll() is UNKNOWN and not failing.quiesced and healthy.lost is None


def test_who_hangs_after_it_is_gone_is_no_longer_waited_for(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_pump, "_ABANDON_S", 0.3)
    peer = ward.meet(1)
    engine: Any = peer.outbound.engine
    transfer = ward.post(peer, deadline_s=0.2)
    assert becomes(transfer, UNKNOWN)
    time.sleep(0.5)
    assert not transfer.source_free, "its peer may only be slow"
    peer.connected = False
    ward.pump.call(lambda: ward.links.leave(peer))
    assert soon(lambda: transfer.source_free) and engine.stopped and transfer.poll() is UNKNOWN


def test_an_engine_whose_end_is_not_proven_keeps_the_source(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_links, "_END_AGAIN_S", 0.01)
    peer, proven = ward.meet(1), threading.Event()
    engine: Any = peer.outbound.engine
    monkeypatch.setattr(engine, "stop", lambda within_s: proven.is_set())
    transfer = ward.post(peer)
    peer.lose(TransferError("gone", code="peer_lost"))
    engine.raw.verdict = -1
    assert becomes(transfer, UNKNOWN)
    time.sleep(0.2)
    assert not transfer.source_free
    proven.set()
    assert soon(lambda: transfer.source_free)


# the engine that peers write through


class PortEngine:
    """It listens on one port."""

    port = 0

    def __init__(self, library: Library, options: MooncakeOptions) -> None:
        self.ports = frozenset({self.port})

    def register(self, addresses: list[int], sizes: list[int]) -> None:
        pass

    def stop(self, within_s: float) -> bool:
        return True


@pytest.mark.parametrize("admitted", [True, False])
def test_a_port_that_peers_know_is_nobodys_after_the_backend(monkeypatch: pytest.MonkeyPatch, admitted: bool) -> None:
    """A stopped writer connects to it again, and writes where another backend of the process may have its memory."""
    monkeypatch.setattr(mooncake_inbound, "Engine", PortEngine)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = PortEngine.port = free.getsockname()[1]
    inbound = Inbound(LIBRARY, MooncakeOptions(), 1, Scope("mooncake", 8))
    if admitted:
        inbound.admit(7)
    inbound.close()
    again = reserve(port)
    assert (again is None) is admitted and (port in former()) is admitted
    if again is not None:
        again.close()


class SlowEngine:
    """It takes its time to end."""

    may_end = threading.Event()

    def __init__(self, library: Library, options: MooncakeOptions) -> None:
        self.ports: set[int] = set()

    def register(self, addresses: list[int], sizes: list[int]) -> None:
        pass

    def stop(self, within_s: float) -> bool:
        return self.may_end.wait(10)


def test_who_is_admitted_while_the_engine_is_replaced_is_not_covered_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_inbound, "Engine", SlowEngine)
    SlowEngine.may_end.clear()
    inbound = Inbound(LIBRARY, MooncakeOptions(), 1, Scope("mooncake", 8))
    ended = threading.Event()
    assert not inbound.revoke(7, ended.set) and not inbound.revoke(8, ended.set)
    inbound.admit(7)
    SlowEngine.may_end.set()
    assert ended.wait(10)
    assert inbound.revoke(8, ended.set), "that one was not admitted again"
    assert not inbound.revoke(7, ended.set), "it may have written through the new engine"
    inbound.close()
