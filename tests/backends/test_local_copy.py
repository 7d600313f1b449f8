"""The copier of the local backend: exact for any mix of ranges, honest about what it did not copy."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.local import copy as local_copy
from sglang_pd.backends.local.copy import Copier, CopyJob, Ranges, copy_now
from sglang_pd.backends.local.transfer import HeldPart, LocalTransfer
from sglang_pd.protocol.errors import BackendUnavailable, PdError, TransferError

SIZE = 1 << 20


class Memories:
    """Two memories, and what the destination should hold."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.src = rng.integers(0, 256, SIZE, dtype=np.uint8)
        self.dst = np.full(SIZE, 0xC5, np.uint8)
        self.expected = self.dst.copy()

    def ranges(self, pieces: list[tuple[int, int, int]]) -> Ranges:
        """(source offset, destination offset, length) of each."""
        for src, dst, length in pieces:
            self.expected[dst : dst + length] = self.src[src : src + length]
        columns = np.array(pieces, np.int64).reshape(-1, 3)
        src, dst = self.src.ctypes.data, self.dst.ctypes.data
        spans = (src, src + SIZE), (dst, dst + SIZE)
        return Ranges(columns[:, 0] + src, columns[:, 1] + dst, columns[:, 2].copy(), *spans)


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Ranges that do not overlap in the destination: cut it at random points, keep some of the pieces."""
    kinds = st.sampled_from([1, 2, 3, 7, 63, 64, 576, 1151, 1152, 2047, 2048, 2049, 8191, 8192, 16384, 40_001, 262_144])
    few = draw(st.lists(kinds, min_size=1, max_size=3))
    lengths = draw(st.lists(st.one_of(st.sampled_from(few), st.integers(1, 5000)), min_size=1, max_size=60))
    found, at = [], 0
    for length in lengths:
        at += draw(st.integers(0, 9))
        if at + length > SIZE:
            break
        found.append((draw(st.integers(0, SIZE - length)), at, length))
        at += length
    return draw(st.permutations(found))


@settings(max_examples=60, deadline=None)
@given(pieces(), st.integers(0, 2**32 - 1))
def test_any_mix_is_exact(chosen: list[tuple[int, int, int]], seed: int) -> None:
    memories = Memories(seed)
    copy_now([memories.ranges(chosen)])
    np.testing.assert_array_equal(memories.dst, memories.expected)


def test_the_last_byte_of_the_memory_is_reached() -> None:
    memories = Memories(1)
    ends = [(SIZE - n, SIZE - 300_000 + sum(range(n)), n) for n in (1, 2, 3)]
    copy_now([memories.ranges([*ends, (0, SIZE - 2049, 2049), (SIZE - 270_000, 0, 270_000)])])
    np.testing.assert_array_equal(memories.dst, memories.expected)


@pytest.mark.parametrize("size", [64, 4096, local_copy.ITEM_BYTES - 1])
def test_many_lengths_in_a_memory_smaller_than_an_item(size: int) -> None:
    lengths = range(1, local_copy.LANES_BY_LENGTH + 2)
    src, dst = np.arange(size, dtype=np.int64).astype(np.uint8), np.zeros(size, np.uint8)
    at = np.cumsum([0, *lengths])[:-1]
    spans = [(one.ctypes.data, one.ctypes.data + size) for one in (src, dst)]
    copy_now([Ranges(at + spans[0][0], at + spans[1][0], np.array(lengths), *spans)])
    np.testing.assert_array_equal(dst[: sum(lengths)], src[: sum(lengths)])
    assert not dst[sum(lengths) :].any()


@pytest.fixture
def copier() -> Iterator[tuple[Copier, threading.Semaphore]]:
    told = threading.Semaphore(0)
    made = Copier(2, told.release)
    yield made, told
    made.close(TransferError("closed", code="transfer_failed"))


class Event:
    """A device event that happens when it is told to."""

    def __init__(self, outcome: Callable[[], bool]) -> None:
        self.query = outcome


def many(memories: Memories) -> Ranges:
    rng = np.random.default_rng(8)
    src, dst = rng.permutation(64) * 16384, rng.permutation(64) * 16384
    return memories.ranges([(int(s), int(d), 16384) for s, d in zip(src, dst, strict=True)])


def test_threads_copy_everything(copier: tuple[Copier, threading.Semaphore]) -> None:
    jobs = []
    for seed in range(20):
        memories = Memories(seed)
        ranges = many(memories)
        job = CopyJob(lambda ranges=ranges: [ranges])  # type: ignore[misc]
        copier[0].submit(job)
        jobs.append((job, memories))
    for job, memories in jobs:
        assert copier[1].acquire(timeout=20)
        del job, memories
    for job, memories in jobs:
        assert job.settled and job.error is None
        np.testing.assert_array_equal(memories.dst, memories.expected)


def test_a_job_waits_for_its_event_and_lets_others_pass(copier: tuple[Copier, threading.Semaphore]) -> None:
    happened = threading.Event()
    waiting, free = Memories(1), Memories(2)
    held, passing = many(waiting), many(free)
    first, second = CopyJob(lambda: [held], Event(happened.is_set)), CopyJob(lambda: [passing])
    copier[0].submit(first)
    copier[0].submit(second)
    assert copier[1].acquire(timeout=20)
    assert second.settled and not first.settled
    assert (waiting.dst == 0xC5).all()
    happened.set()
    assert copier[1].acquire(timeout=20)
    assert first.settled and first.error is None
    np.testing.assert_array_equal(waiting.dst, waiting.expected)


class Started:
    """Another engine's part: it ends when told."""

    def __init__(self) -> None:
        self.settled, self.cancelled = False, False
        self.error: PdError | None = None
        self.doubt: PdError | None = None

    def cancel(self, cause: PdError) -> None:
        self.cancelled = True

    def withdraw(self, cause: PdError) -> bool:
        return False


def held_part(copier: Copier, happened: Callable[[], bool], started: list[Started]) -> HeldPart:
    gate = CopyJob(lambda: (), Event(happened))
    copier.submit(gate)

    def start() -> Started:
        started.append(Started())
        return started[-1]

    return HeldPart(gate, start)


def test_a_held_part_starts_after_its_event_and_wakes_its_owner(copier: tuple[Copier, threading.Semaphore]) -> None:
    happened, started = threading.Event(), list[Started]()
    part = held_part(copier[0], happened.is_set, started)
    time.sleep(0.02)
    assert not part.settled and not started
    happened.set()
    assert copier[1].acquire(timeout=20), "nobody was told that it can start"
    assert not part.settled and len(started) == 1
    part.cancel(TransferError("too late", where="test"))
    assert started[0].cancelled and not part.settled, "what runs is waited for"
    started[0].settled = True
    assert part.settled and part.error is None and len(started) == 1


def test_a_held_part_whose_event_fails_or_that_is_cancelled_never_starts(
    copier: tuple[Copier, threading.Semaphore],
) -> None:
    def fail() -> bool:
        raise RuntimeError("device lost")

    started = list[Started]()
    failed = held_part(copier[0], fail, started)
    assert copier[1].acquire(timeout=20)
    assert failed.settled and "device lost" in str(failed.error)
    waiting = held_part(copier[0], lambda: False, started)
    cause = TransferError("the peer went", where="test")
    waiting.cancel(cause)
    assert copier[1].acquire(timeout=20)
    assert waiting.settled and waiting.error is cause and not started


def test_a_held_part_that_cannot_start_fails(copier: tuple[Copier, threading.Semaphore]) -> None:
    gate = CopyJob(lambda: (), Event(lambda: True))
    copier[0].submit(gate)
    assert copier[1].acquire(timeout=20)

    def start() -> Started:
        raise TransferError("no such device", where="test")

    part = HeldPart(gate, start)
    assert part.settled and "no such device" in str(part.error)


def test_a_held_part_whose_start_breaks_is_in_doubt_and_not_started_again(
    copier: tuple[Copier, threading.Semaphore],
) -> None:
    gate, starts = CopyJob(lambda: (), Event(lambda: True)), list[int]()
    copier[0].submit(gate)
    assert copier[1].acquire(timeout=20)

    def start() -> Started:
        starts.append(1)
        raise RuntimeError("CUDA error: launch failed")

    transfer = LocalTransfer(64, time.monotonic() + 30, [HeldPart(gate, start)])
    assert [transfer.poll() for _ in range(3)] == [TransferState.UNKNOWN] * 3
    assert len(starts) == 1 and "launch failed" in str(transfer.error)


def test_a_held_part_whose_event_comes_after_the_deadline_is_dropped(
    copier: tuple[Copier, threading.Semaphore],
) -> None:
    started = list[Started]()
    transfer = LocalTransfer(64, time.monotonic() - 1, [held_part(copier[0], lambda: True, started)])
    assert copier[1].acquire(timeout=20)
    assert transfer.poll() is TransferState.FAILED and not started
    assert transfer.error is not None and transfer.error.code == "transfer_timeout"


def test_without_threads_a_job_is_refused_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier(2, lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(BackendUnavailable, match="thread"):
            copier.submit(CopyJob(lambda: ()))
    job = CopyJob(lambda: ())
    copier.submit(job)
    end = time.monotonic() + 10
    while not job.settled and time.monotonic() < end:
        time.sleep(0.001)
    assert job.settled and job.error is None
    copier.close(TransferError("over"))


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_failed_event_fails_the_job_and_copies_nothing(copier: tuple[Copier, threading.Semaphore]) -> None:
    def fail() -> bool:
        raise RuntimeError("device lost")

    memories = Memories(3)
    ranges = many(memories)
    job = CopyJob(lambda: [ranges], Event(fail))
    copier[0].submit(job)
    assert copier[1].acquire(timeout=20)
    assert job.settled and job.error is not None and "device lost" in str(job.error)
    assert (memories.dst == 0xC5).all()


def test_cancelled_before_its_event_copies_nothing(copier: tuple[Copier, threading.Semaphore]) -> None:
    memories = Memories(4)
    ranges = many(memories)
    job = CopyJob(lambda: [ranges], Event(lambda: False))
    copier[0].submit(job)
    time.sleep(0.01)
    job.cancel(TransferError("no longer wanted"))
    assert copier[1].acquire(timeout=20)
    assert job.settled and job.error is not None and job.error.message == "no longer wanted"
    assert (memories.dst == 0xC5).all()


def test_withdrawn_before_it_has_begun_or_not_at_all(copier: tuple[Copier, threading.Semaphore]) -> None:
    threads, settled = copier
    cause = TransferError("withdrawn")
    planning, go_on, memories = threading.Event(), threading.Event(), Memories(3)

    def grouped() -> list[Ranges]:
        planning.set()
        go_on.wait(10)
        return [many(memories)]

    held, begun = CopyJob(lambda: (), Event(lambda: False)), CopyJob(grouped)
    threads.submit(held)
    threads.submit(begun)
    assert planning.wait(10) and not begun.withdraw(cause)
    go_on.set()
    assert settled.acquire(timeout=10) and begun.settled and begun.error is None
    np.testing.assert_array_equal(memories.dst, memories.expected)
    assert held.withdraw(cause) and settled.acquire(timeout=10) and held.error is cause


def test_a_held_part_that_has_started_is_not_withdrawn(copier: tuple[Copier, threading.Semaphore]) -> None:
    started, cause = Started(), TransferError("withdrawn")
    gate, shut = CopyJob(lambda: ()), CopyJob(lambda: (), Event(lambda: False))
    running, waiting = (HeldPart(one, lambda: started) for one in (gate, shut))
    for one in (gate, shut):
        copier[0].submit(one)
    assert copier[1].acquire(timeout=10) and not running.settled
    assert not running.withdraw(cause) and not started.cancelled
    assert waiting.withdraw(cause) and waiting.settled and waiting.error is cause


def test_cancelled_in_the_middle_never_writes_after_it_settled(
    copier: tuple[Copier, threading.Semaphore], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = local_copy.Lane._copy
    started = threading.Event()

    def slow(self: local_copy.Lane, rows: slice) -> None:
        started.set()
        time.sleep(0.02)
        real(self, rows)

    monkeypatch.setattr(local_copy.Lane, "_copy", slow)
    monkeypatch.setattr(local_copy, "CHUNK_BYTES", 16384)
    memories = Memories(5)
    ranges = many(memories)
    job = CopyJob(lambda: [ranges])
    copier[0].submit(job)
    assert started.wait(20)
    job.cancel(TransferError("stop"))
    assert copier[1].acquire(timeout=20)
    frozen: NDArray[np.uint8] = memories.dst.copy()
    assert job.error is not None and not np.array_equal(frozen, memories.expected)
    time.sleep(0.1)
    np.testing.assert_array_equal(memories.dst, frozen)


def test_close_settles_what_waits() -> None:
    told = threading.Semaphore(0)
    copier = Copier(2, told.release)
    memories = Memories(6)
    ranges = many(memories)
    job = CopyJob(lambda: [ranges], Event(lambda: False))
    copier.submit(job)
    copier.close(TransferError("closed"))
    assert job.settled and job.error is not None and job.error.message == "closed"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pd-local-copy")]
