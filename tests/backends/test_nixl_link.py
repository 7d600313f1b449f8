"""One peer of the `nixl` backend over a stand-in for the library: what is handed over, and what never is."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.library.link import Work
from sglang_pd.backends.library.process import ProcessIdentity, own_identity
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.nixl.blob import AgentBlob, agent_name
from sglang_pd.backends.nixl.library import Handle
from sglang_pd.backends.nixl.link import DIRECT_POSTS, Link
from sglang_pd.backends.nixl.pieces import Piece


class FakeAgent:
    """Counts posts; `copies`: a posted piece has ended well when `post` returns, else when `arrive` is called."""

    def __init__(self, copies: bool) -> None:
        self.copies, self.posted = copies, list[Handle]()
        self.after_post: Callable[[], None] = lambda: None

    def prepare(self, rows: Any, kinds: Any, name: str) -> Handle:
        return Handle(None)

    def post(self, handle: Handle, name: str) -> None:
        self.posted.append(handle)
        handle.finished = self.copies
        self.after_post()

    def arrive(self) -> None:
        for handle in self.posted:
            handle.finished = True

    def check(self, handle: Handle, name: str) -> None: ...

    def release(self, handle: Handle) -> None: ...

    def notify(self, name: str, message: bytes) -> None: ...


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def link_to(child: subprocess.Popen[bytes], *, direct: bool) -> Link:
    own = own_identity()
    with open(f"/proc/{child.pid}/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    blob = AgentBlob(
        epoch=5, agent=agent_name(5, 0), nixl_version="1.5.1", plugin="UCX", settings=0,
        process=ProcessIdentity(own.boot_id, own.pid_namespace, child.pid, ticks),
        host_paths=["cma"], listens=[], segments=[], metadata=b"",
    )  # fmt: skip
    return Link(blob, lambda: None, direct=direct)


def submit(link: Link, pieces: int) -> LibraryTransfer:
    transfer = LibraryTransfer("nixl", "peer", pieces, 30.0)
    link.open.add(transfer)
    link.submit(Work(transfer, iter([Piece(([], []), ("cpu", "cpu"), "cpu")] * pieces), True))
    return transfer


def turns(link: Link, agent: Any, count: int = 20) -> None:
    for _ in range(count):
        link.step(agent, time.monotonic())


def end(child: subprocess.Popen[bytes], link: Link) -> None:
    child.kill()
    until = time.monotonic() + 20
    while not link.watch._readable():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("direct", [True, False])
def test_a_peer_whose_process_ended_is_handed_nothing_more(child: subprocess.Popen[bytes], direct: bool) -> None:
    """By its number another process could be meant."""
    link, agent = link_to(child, direct=direct), FakeAgent(copies=True)
    transfer, behind = submit(link, 100), submit(link, 1)
    link.step(agent, time.monotonic())  # type: ignore[arg-type]
    before = len(agent.posted)
    assert before == (DIRECT_POSTS if direct else 1) and transfer.poll() is TransferState.PENDING
    end(child, link)
    turns(link, agent)
    assert len(agent.posted) == before, "posted after the death"
    for one in (transfer, behind):
        assert one.poll() is TransferState.FAILED and one.error is not None and one.error.code == "peer_lost"
    assert link.lost is not None and not link.open


def test_it_is_looked_at_between_two_posts_of_one_turn(child: subprocess.Popen[bytes]) -> None:
    link, agent = link_to(child, direct=True), FakeAgent(copies=True)
    agent.after_post = lambda: end(child, link) if len(agent.posted) == 2 else None
    transfer = submit(link, 100)
    turns(link, agent)
    assert len(agent.posted) == 2 and transfer.poll() is TransferState.FAILED


def test_what_is_in_flight_at_the_death_is_unknown_until_its_calls_have_ended(child: subprocess.Popen[bytes]) -> None:
    link, agent = link_to(child, direct=False), FakeAgent(copies=False)
    transfer = submit(link, 100)
    turns(link, agent, 1)
    end(child, link)
    turns(link, agent)
    assert len(agent.posted) == 1 and transfer.poll() is TransferState.UNKNOWN and link.open == {transfer}
    agent.arrive()
    turns(link, agent)
    assert transfer.poll() is TransferState.FAILED and not link.open


def test_with_no_word_of_its_death_all_is_handed_over(child: subprocess.Popen[bytes]) -> None:
    link, agent = link_to(child, direct=True), FakeAgent(copies=True)
    transfer = submit(link, 10)
    turns(link, agent)
    assert len(agent.posted) == 10 and transfer.poll() is TransferState.DONE
