"""The fault-injecting backend: each fault does what it says, and stays within the contract."""

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock, PropertyMock

import numpy as np
import pytest

from sglang_pd.backends.base import Backend, Connecting, Peer, Segment, Transfer, TransferState
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.errors import ConfigError, TransferError
from sglang_pd.testing.events import HostEvent
from sglang_pd.testing.faults import Fault, FaultyBackend, FaultyTransfer, SlowConnecting, WrappedBackend, install
from sglang_pd.testing.memory import fill, read_bytes
from sglang_pd.testing.pattern import Ranges, make_batch

SIZE = 1 << 16


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Pair:
    writer: FaultyBackend
    target: Backend
    peer: Peer
    source: Segment
    destination: Segment
    clock: Clock

    def batch(self, rows: int = 4) -> WriteBatch:
        at = Ranges(np.zeros(rows, np.int64), np.arange(rows, dtype=np.int64) * 4096)
        return make_batch(at, at, np.full(rows, 4096, np.int64), (SIZE,), (SIZE,))

    def write(self, rows: int = 4) -> Transfer:
        return self.writer.write(self.peer, self.batch(rows), deadline_s=10.0)

    def landed(self) -> int:
        return int((read_bytes(self.destination, 0, SIZE) == 7).sum())

    def step(self, seconds: float) -> None:
        self.clock.now += seconds
        self.writer.progress()


class Maker:
    def __init__(self) -> None:
        self.made: list[Backend] = []

    def __call__(self, *faults: Fault, seed: int = 0) -> Pair:
        clock = Clock()
        writer = FaultyBackend(create_backend("local", epoch=1), faults, seed=seed, clock=clock)
        target = create_backend("local", epoch=2)
        self.made += [writer, target]
        (source,) = writer.register([writer.allocate(SIZE)])
        (destination,) = target.register([target.allocate(SIZE)])
        fill(source, 0, SIZE, 7)
        target.admit(1, writer.describe())
        return Pair(writer, target, writer.connect(target.describe(), 2), source, destination, clock)


@pytest.fixture
def make() -> Iterator[Maker]:
    maker = Maker()
    yield maker
    for backend in maker.made:
        backend.close()


def test_no_fault_is_transparent(make: Maker) -> None:
    pair = make()
    assert pair.write().poll() is TransferState.DONE
    assert pair.landed() == 4 * 4096
    assert pair.writer.struck == []


def test_drop_is_unknown_after_its_deadline_and_nothing_lands(make: Maker) -> None:
    pair = make(Fault(kind="drop"))
    transfer = pair.write()
    assert transfer.poll() is TransferState.PENDING
    pair.step(10.5)
    assert transfer.poll() is TransferState.UNKNOWN
    assert transfer.error is not None and transfer.error.code == "transfer_timeout"
    assert not transfer.quiesced and pair.landed() == 0
    assert pair.writer.fence(pair.peer), "a dropped batch can never land"


def test_delay_posts_later(make: Maker) -> None:
    pair = make(Fault(kind="delay", seconds=2.0))
    transfer = pair.write()
    pair.step(1.9)
    assert transfer.poll() is TransferState.PENDING and pair.landed() == 0
    assert not pair.writer.fence(pair.peer)
    assert pair.writer.progress_interval_s is not None
    pair.step(0.2)
    assert transfer.poll() is TransferState.DONE and pair.landed() == 4 * 4096
    assert pair.writer.fence(pair.peer) and pair.writer.progress_interval_s is None


@pytest.mark.parametrize(("kind", "after"), [("delay", "FAILED"), ("late", "UNKNOWN"), ("drop", "PENDING")])
def test_cancel_gives_up_what_waits_to_be_posted_and_nothing_else(make: Maker, kind: Any, after: str) -> None:
    pair = make(Fault(kind=kind, seconds=2.0))
    transfer = pair.write()
    transfer.cancel()
    assert transfer.poll() is TransferState[after]
    pair.step(2.5)
    assert pair.landed() == (4 * 4096 if kind == "late" else 0)


def test_cancel_reaches_what_was_posted(make: Maker) -> None:
    pair = make(Fault(kind="delay"))
    event = HostEvent()
    transfer = pair.writer.write(pair.peer, pair.batch(), after=event, deadline_s=10.0)
    pair.step(0.0)
    transfer.cancel()
    end = time.monotonic() + 10
    while transfer.poll() is TransferState.PENDING and time.monotonic() < end:
        time.sleep(0.001)
    assert transfer.poll() is TransferState.FAILED and pair.landed() == 0


def test_delay_past_the_deadline_is_unknown_then_done(make: Maker) -> None:
    pair = make(Fault(kind="delay", seconds=20.0))
    transfer = pair.write()
    pair.step(15.0)
    assert transfer.poll() is TransferState.UNKNOWN and not pair.writer.fence(pair.peer)
    pair.step(6.0)
    assert transfer.poll() is TransferState.DONE and transfer.error is None


def test_partial_lands_a_part_and_fails(make: Maker) -> None:
    pair = make(Fault(kind="partial", fraction=0.5))
    transfer = pair.write()
    pair.step(0.0)
    assert transfer.poll() is TransferState.FAILED
    assert transfer.error is not None and "partial" in transfer.error.message
    assert pair.landed() == 2 * 4096


def test_late_bytes_land_after_unknown(make: Maker) -> None:
    pair = make(Fault(kind="late", seconds=3.0))
    transfer = pair.write()
    assert transfer.poll() is TransferState.UNKNOWN and not transfer.quiesced
    assert not pair.writer.fence(pair.peer) and pair.landed() == 0
    pair.step(3.1)
    assert pair.landed() == 4 * 4096
    assert transfer.poll() is TransferState.DONE and pair.writer.fence(pair.peer)


def test_fail_at_the_third(make: Maker) -> None:
    pair = make(Fault(kind="fail", at=3))
    states = [pair.write().poll() for _ in range(4)]
    assert states == [TransferState.DONE, TransferState.DONE, TransferState.FAILED, TransferState.DONE]
    assert pair.writer.struck == [(3, "fail")]


def test_hold_fence_until_released(make: Maker) -> None:
    pair = make(Fault(kind="hold_fence", at=1), Fault(kind="hold_fence", at=2, seconds=5.0))
    assert pair.write().poll() is TransferState.DONE
    assert not pair.writer.fence(pair.peer) and not pair.writer.revoke(99)
    pair.writer.release_fences()
    assert pair.writer.fence(pair.peer) and pair.writer.revoke(98)
    assert pair.write().poll() is TransferState.DONE
    assert not pair.writer.fence(pair.peer)
    pair.step(5.1)
    assert pair.writer.fence(pair.peer)


def test_disconnect_drops_what_waits(make: Maker) -> None:
    pair = make(Fault(kind="late", seconds=1.0))
    transfer = pair.write()
    pair.writer.disconnect(pair.peer)
    pair.step(2.0)
    assert transfer.poll() is TransferState.FAILED and pair.landed() == 0


def test_every_and_probability_are_reproducible(make: Maker) -> None:
    def struck(seed: int) -> list[tuple[int, str]]:
        pair = make(Fault(kind="fail", at=2, every=2, probability=0.5), seed=seed)
        for _ in range(40):
            pair.write()
        return pair.writer.struck

    assert struck(1) == struck(1) != struck(2)
    assert 0 < len(struck(1)) < 20 and all(number % 2 == 0 for number, _ in struck(1))


def test_by_name(make: Maker) -> None:
    install()
    options = {"inner": "local", "faults": [{"kind": "fail", "at": 1}]}
    with create_backend("faulty", epoch=5, options=options) as backend:
        assert backend.epoch == 5 and backend.capabilities.name == "local"
    with pytest.raises(ConfigError, match=r"faults\[0\]"):
        create_backend("faulty", epoch=5, options={"inner": "local", "faults": [{"kind": "explode"}]})


# A wrapper that leaves out a member answers with the contract's default where the transport says something else.


def members(contract: type) -> list[str]:
    return [name for name in vars(contract) if not name.startswith("_")]


@pytest.mark.parametrize("name", members(Backend))
def test_every_member_of_a_backend_is_passed_on(name: str) -> None:
    inner = MagicMock()
    wrapped = WrappedBackend(inner)
    member = inspect.getattr_static(Backend, name)
    if isinstance(member, property):
        said = PropertyMock(return_value=object())
        setattr(type(inner), name, said)
        assert getattr(wrapped, name) is said.return_value and said.call_count == 1
        return
    parameters = list(inspect.signature(member).parameters.values())[1:]
    given = {one.name: object() for one in parameters}
    plain = [given[one.name] for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    named = {one.name: given[one.name] for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    answer = getattr(wrapped, name)(*plain, **named)
    getattr(inner, name).assert_called_once_with(*plain, **named)
    nothing = inspect.signature(member).return_annotation == "None"
    assert answer is (None if nothing else getattr(inner, name).return_value)


@pytest.mark.parametrize(
    ("wrapper", "contract", "by_poll"),
    [(FaultyTransfer, Transfer, {"quiesced"}), (SlowConnecting, Connecting, {"wait"})],
)
def test_every_member_is_the_wrappers_own_but_for_what_follows_from_poll(
    wrapper: type, contract: type, by_poll: set[str]
) -> None:
    left_out = {name for name in members(contract) if inspect.getattr_static(wrapper, name) is vars(contract)[name]}
    assert left_out == by_poll


class Told(Transfer):
    """A transfer that is what it is told to be."""

    nbytes = 4

    def __init__(self, state: TransferState, free: bool) -> None:
        self.state, self.free = state, free

    def poll(self) -> TransferState:
        return self.state

    @property
    def error(self) -> TransferError | None:
        return None if self.state is TransferState.DONE else TransferError("told", code="transfer_unknown")

    @property
    def source_free(self) -> bool:
        return self.free or self.quiesced


@pytest.mark.parametrize("kind", ["delay", "late"])
def test_the_source_is_free_when_the_transport_says_so_and_never_before_it_was_posted(kind: Any) -> None:
    clock, real = Clock(), Told(TransferState.UNKNOWN, False)
    inner: Any = MagicMock()
    inner.write.return_value = real
    batch: Any = MagicMock(total_bytes=4, __len__=lambda self: 1)
    transfer = FaultyBackend(inner, [Fault(kind=kind, seconds=2.0)], clock=clock).write(
        MagicMock(), batch, deadline_s=1.0
    )
    assert not transfer.source_free
    clock.now += 1.5
    assert transfer.poll() is TransferState.UNKNOWN and not transfer.source_free, "it is still to be posted"
    clock.now += 1.0
    assert transfer.poll() is TransferState.UNKNOWN and not transfer.source_free, "it was posted, and is read"
    real.free = True
    assert transfer.source_free and not transfer.quiesced
    real.state = TransferState.DONE
    assert transfer.source_free and transfer.quiesced


def test_the_source_of_what_was_dropped_waits_for_the_fence(make: Maker) -> None:
    pair = make(Fault(kind="drop"))
    transfer = pair.write()
    pair.step(10.5)
    assert transfer.poll() is TransferState.UNKNOWN and not transfer.source_free
    assert pair.writer.fence(pair.peer)
