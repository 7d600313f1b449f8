"""The conversation that the library backends share, over a library that a test commands."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.library.link import Ends, LibraryLink, Work
from sglang_pd.backends.library.process import ProcessIdentity, Watch, own_identity
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.protocol.errors import PdError, TransferError

PENDING, DONE, FAILED, UNKNOWN = (getattr(TransferState, n) for n in ("PENDING", "DONE", "FAILED", "UNKNOWN"))


class Call:
    """A call that ends when a test says so."""

    def __init__(self) -> None:
        self.finished = False
        self.failed: TransferError | None = None

    def end(self, failed: TransferError | None = None) -> None:
        self.finished, self.failed = True, failed


class CommandedLink(LibraryLink[int, Call]):
    """Keeps every call until it is ended; refuses once `lost`."""

    def __init__(self, process: ProcessIdentity, most: int = 2) -> None:
        self.news = 0
        self.calls: list[Call] = []
        self.lost: PdError | None = None
        super().__init__(Ends("fake", "peer", Watch(process), most, self._tell), set())

    def _tell(self) -> None:
        self.news += 1

    def _refusal(self) -> PdError | None:
        return self.lost

    def _post(self, work: Work[int, Call], piece: int) -> Call | None:
        self.calls.append(Call())
        return self.calls[-1]

    def _ask(self, call: Call) -> None:
        pass

    def _outcome(self, call: Call) -> PdError | None:
        return call.failed

    def _fault(self, error: PdError) -> None:
        self.lost = error

    def add(self, pieces: int, deadline_s: float = 30.0, host_only: bool = True) -> LibraryTransfer:
        transfer = LibraryTransfer("fake", "peer", pieces, deadline_s)
        self._queue.append(Work(transfer, iter(range(pieces)), host_only))
        self.open.add(transfer)
        return transfer

    def turn(self) -> None:
        while self.post_one():
            pass
        self.check()
        self.prove()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def link_to(child: subprocess.Popen[bytes], **facts: int) -> CommandedLink:
    own = own_identity()
    with open(f"/proc/{child.pid}/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    return CommandedLink(ProcessIdentity(own.boot_id, own.pid_namespace, child.pid, ticks), **facts)


def becomes(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end and not condition():
        time.sleep(0.01)
    return condition()


BROKEN = TransferError("the library's words", code="transfer_unknown")


def test_done_is_every_piece_handed_over_and_ended_well() -> None:
    link = CommandedLink(own_identity())
    transfer = link.add(3)
    link.turn()
    assert len(link.calls) == 2, "no more calls in flight than the bound"
    link.calls[0].end()
    link.turn()
    link.turn()
    assert len(link.calls) == 3 and transfer.poll() is PENDING
    for call in link.calls[1:]:
        call.end()
    link.turn()
    assert transfer.poll() is DONE and not link.open and link.news == 1


def test_a_piece_that_cannot_be_prepared_fails_its_transfer_alone() -> None:
    link = CommandedLink(own_identity())

    def broken() -> Iterator[int]:
        yield 0
        raise ValueError("on purpose")

    bad = LibraryTransfer("fake", "peer", 1, 30.0)
    link._queue.append(Work(bad, broken(), True))
    good = link.add(1)
    link.turn()
    for call in link.calls:
        call.finished = True
    link.turn()
    assert bad.poll() is TransferState.FAILED and "on purpose" in str(bad.error)
    assert good.poll() is TransferState.DONE and link.lost is None


def test_what_was_handed_over_and_ended_well_needs_no_other_proof() -> None:
    link = CommandedLink(own_identity(), most=1)
    transfer = link.add(2)
    link.turn()
    link.lost = BROKEN
    link.turn()
    assert transfer.poll() is PENDING
    link.calls[0].end()
    link.turn()
    assert transfer.poll() is FAILED and transfer.error is BROKEN and len(link.calls) == 1


@pytest.mark.parametrize("host_only", [True, False])
def test_a_broken_call_is_proven_by_the_peers_death_and_only_on_the_host(
    child: subprocess.Popen[bytes], host_only: bool
) -> None:
    link = link_to(child)
    transfer = link.add(1, host_only=host_only)
    link.turn()
    link.calls[0].end(BROKEN)
    link.turn()
    assert transfer.poll() is UNKNOWN and transfer in link.open and not link.prove()
    child.kill()
    assert becomes(link.watch.gone)
    assert link.prove() is host_only
    assert transfer.poll() is (FAILED if host_only else UNKNOWN) and (transfer in link.open) is not host_only
    assert transfer.error is BROKEN


def test_the_source_is_free_once_the_connection_is_closed_and_that_proves_nothing(
    child: subprocess.Popen[bytes],
) -> None:
    link = link_to(child)
    transfer, later = link.add(1), link.add(1)
    link.turn()
    link.calls[0].end(BROKEN)
    link.turn()
    assert transfer.poll() is UNKNOWN and not transfer.source_free
    link.closed()
    assert transfer.source_free and not later.source_free
    assert transfer.poll() is UNKNOWN and not transfer.quiesced and transfer in link.open


def test_a_call_in_flight_is_never_proven_by_a_death(child: subprocess.Popen[bytes]) -> None:
    link = link_to(child)
    transfer = link.add(2)
    link.turn()
    link.calls[0].end(BROKEN)
    child.kill()
    assert becomes(link.watch.gone)
    link.turn()
    assert transfer.poll() is UNKNOWN
    link.calls[1].end()
    link.turn()
    assert transfer.poll() is FAILED


def test_giving_up_leaves_unknown_what_is_held_and_failed_what_never_was() -> None:
    link = CommandedLink(own_identity())
    held, never = link.add(5), link.add(1)
    link.turn()
    assert link.give_up(BROKEN) == link.calls
    assert held.poll() is UNKNOWN and never.poll() is FAILED and link.open == {held}


class Never:
    def query(self) -> bool:
        return False


def test_cancelled_before_its_first_piece_it_is_never_handed_over_and_later_nothing_changes() -> None:
    link = CommandedLink(own_identity(), most=1)
    held = link.add(1)
    link._queue[0].after = Never()
    held.cancel()
    link.turn()
    assert held.poll() is FAILED and not link.calls
    busy, behind = link.add(2), link.add(1)
    link.turn()
    busy.cancel()
    behind.cancel()
    link.turn()
    assert behind.poll() is FAILED and behind.error is not None and behind.error.code == "transfer_failed"
    assert busy.poll() is PENDING and link.open == {busy}, "what has begun goes on"
    link.calls[0].end()
    link.turn()
    link.turn()
    link.calls[1].end()
    link.turn()
    busy.cancel()
    assert busy.poll() is DONE and len(link.calls) == 2
