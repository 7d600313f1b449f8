"""Writes of the local backend that wait behind an event: their deadline, their owner who gives them up, their peer."""

from collections.abc import Iterator

import pytest
from support.local_backends import SIZE, eventually, make

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.local.backend import LocalBackend
from sglang_pd.testing.pattern import pages


@pytest.fixture
def pair() -> Iterator[tuple[LocalBackend, LocalBackend]]:
    writer, target = make(11), make(22)
    yield writer, target
    writer.close()
    target.close()


class Never:
    def query(self) -> bool:
        return False


def test_a_batch_whose_event_never_happens_is_unknown_then_failed(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    transfer = writer.write(peer, pages(1, 64, 16384, (SIZE,), (SIZE,)), after=Never(), deadline_s=0.05)
    assert transfer.poll() is TransferState.PENDING and not writer.fence(peer)
    assert eventually(lambda: transfer.poll() is not TransferState.PENDING)
    assert transfer.error is not None and transfer.error.code == "transfer_timeout"
    assert eventually(lambda: transfer.poll() is TransferState.FAILED)
    assert writer.fence(peer)


def test_cancelled_behind_its_event_it_fails_and_copies_nothing(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    batch = pages(1, 64, 16384, (SIZE,), (SIZE,))
    held, free = writer.write(peer, batch, after=Never()), writer.write(peer, batch)
    held.cancel()
    assert eventually(lambda: held.poll() is TransferState.FAILED)
    assert held.error is not None and held.error.code == "transfer_failed" and held.source_free
    assert eventually(lambda: free.poll() is TransferState.DONE)
    free.cancel()
    assert free.poll() is TransferState.DONE and writer.fence(peer)


def test_disconnect_with_a_batch_in_the_queue_waits_for_quiet(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    transfer = writer.write(peer, pages(1, 64, 16384, (SIZE,), (SIZE,)), after=Never())
    writer.disconnect(peer)

    def failed() -> bool:
        writer.progress()
        return transfer.poll() is TransferState.FAILED

    assert eventually(failed)
    assert eventually(lambda: writer.progress() is None and target.revoke(11))
