"""Connecting over the local backend: neither end waits for the other, and what is given up leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator

import pytest
from support.forks import in_fork
from support.local_backends import SIZE, door, eventually, hello, make

from sglang_pd.backends.local import connect as local_connect
from sglang_pd.backends.local import link as local_link
from sglang_pd.backends.local import listener as local_listener
from sglang_pd.backends.local.backend import LocalBackend
from sglang_pd.backends.local.link import SegmentFacts, host_identity, pack_address
from sglang_pd.backends.local.listener import Exports
from sglang_pd.protocol.errors import BackendError, TransferError


@pytest.fixture
def pair() -> Iterator[tuple[LocalBackend, LocalBackend]]:
    writer, target = make(11), make(22)
    yield writer, target
    writer.close()
    target.close()


@contextlib.contextmanager
def silent_door(backlog: int = 8) -> Iterator[tuple[socket.socket, bytes]]:
    """A listener that never answers, as a stopped destination, and the blob that leads to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(b"\0sglang-pd-test/" + os.urandom(8).hex().encode())
        sock.listen(backlog)
        yield sock, pack_address(local_link.Address(33, sock.getsockname(), host_identity()))


def test_a_destination_that_does_not_answer_holds_up_no_other(pair: tuple[LocalBackend, LocalBackend]) -> None:
    """Its owner's thread waited a second for each, and others' rooms failed meanwhile."""
    writer, target = pair
    with silent_door() as (_, blob):
        waiting = [writer.start_connect(blob, 33) for _ in range(4)]
        assert [one.poll() for one in waiting] == [None] * 4
        assert writer.connect(target.describe(), 22).lost is None
        assert [one.poll() for one in waiting] == [None] * 4
        for one in waiting:
            one.cancel()
            one.cancel()


def test_a_full_queue_of_callers_is_asked_again(pair: tuple[LocalBackend, LocalBackend]) -> None:
    with silent_door(0) as (sock, blob):
        waiting = [pair[0].start_connect(blob, 33) for _ in range(4)]
        assert [one.poll() for one in waiting] == [None] * 4
        taken = []

        def all_came() -> bool:
            assert [one.poll() for one in waiting] == [None] * 4
            with contextlib.suppress(BlockingIOError):
                sock.setblocking(False)
                taken.append(sock.accept()[0])
            return len(taken) == 4

        assert eventually(all_came)
        assert all(one.recv(4) for one in taken)
        for left in taken:
            left.close()


def test_who_never_answers_is_lost(pair: tuple[LocalBackend, LocalBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_connect, "CONNECT_WITHIN_S", 0.1)
    with silent_door() as (_, blob):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(TransferError, match="does not answer") as caught:
                pair[0].connect(blob, 33)
            assert caught.value.code == "peer_lost"
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_owner_is_woken_by_an_answer_and_by_nothing_else(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    wakeup = writer.wakeup_fd()
    assert wakeup is not None
    with silent_door() as (_, blob):
        silent = writer.start_connect(blob, 33)
        assert silent.poll() is None
        writer.progress()
        assert not local_link.is_dead(wakeup), "nothing has come yet"
        with target._listener._lock:
            answered = writer.start_connect(target.describe(), 22)
            assert answered.poll() is None
        assert eventually(lambda: local_link.is_dead(wakeup)), "an answer wakes the owner"
        assert eventually(lambda: writer.progress() is None and not local_link.is_dead(wakeup)), (
            "once, not until it asks"
        )
        assert eventually(lambda: answered.poll() is not None)
        writer.progress()
        assert not local_link.is_dead(wakeup), "who waits for another must sleep"
        silent.cancel()


def test_a_connection_that_was_given_up_leaves_no_writer_behind(pair: tuple[LocalBackend, LocalBackend]) -> None:
    """Memory that it could never write to would wait for its death."""
    writer, target = pair
    with target._listener._lock:
        connecting = writer.start_connect(target.describe(), 22)
        assert connecting.poll() is None
    assert eventually(lambda: target._listener._holders), "it was given memory"
    connecting.cancel()
    assert eventually(lambda: target.revoke(11))
    with pytest.raises(TransferError, match="given up"):
        given_up = writer.start_connect(target.describe(), 22)
        given_up.cancel()
        given_up.poll()


def test_a_hello_and_a_goodbye_in_one_are_both_heard(pair: tuple[LocalBackend, LocalBackend]) -> None:
    with door(pair[1]) as sock:
        sock.sendall(hello() + local_link.GOODBYE)
        assert eventually(lambda: 77 in pair[1]._listener._holders)
        assert eventually(lambda: pair[1].revoke(77))


def test_a_writer_that_takes_nothing_holds_up_no_other(
    pair: tuple[LocalBackend, LocalBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_listener, "SEND_WITHIN_S", 60.0)
    listener = pair[1]._listener
    exports, listener.exports = listener.exports, Exports((SegmentFacts(4096, "cpu"),) * 10_000, ())
    with door(pair[1]) as idle:
        idle.sendall(hello())
        assert eventually(lambda: any(one.out for one in listener._open.values())), "more than a socket takes"
        listener.exports = exports
        assert pair[0].connect(pair[1].describe(), 22).segment_bytes == (SIZE,)
        (slow,) = [one for one in listener._open.values() if one.out]
        slow.due = time.monotonic()
        with door(pair[1]):  # wakes the thread
            assert eventually(lambda: slow not in listener._open.values()), "it is left in the end"
    assert not pair[1].revoke(77), "and stays on record: it may have been given memory"


def test_a_fork_gives_up_nothing_of_its_parents(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    with silent_door() as (sock, blob):
        connecting = writer.start_connect(blob, 33)
        assert connecting.poll() is None
        assert "not to its fork" in in_fork(connecting.poll)
        in_fork(connecting.cancel)
        other, _ = sock.accept()
        assert select.select([other], [], [], 10.0)[0]
        assert local_link.GOODBYE != other.recv(4096)[-1:]
        assert connecting.poll() is None
        connecting.cancel()
        assert other.recv(10) == local_link.GOODBYE
        other.close()


@pytest.fixture
def stranger() -> Iterator[LocalBackend]:
    made = make(99)
    yield made
    made.close()


def test_a_writer_waits_until_it_is_admitted(pair: tuple[LocalBackend, LocalBackend], stranger: LocalBackend) -> None:
    target = pair[1]
    early = stranger.start_connect(target.describe(), 22)
    assert early.poll() is None
    assert eventually(lambda: any(one.hello for one in target._listener._open.values()))
    assert pair[0].connect(target.describe(), 22).lost is None, "it holds up nobody"
    assert early.poll() is None and 99 not in target._listener._holders
    target.admit(99, stranger.describe())
    assert eventually(lambda: early.poll() is not None)
    assert not target.revoke(99), "it has the memory, and lives"


def test_a_writer_that_nobody_admits_is_refused_by_name_and_given_nothing(
    pair: tuple[LocalBackend, LocalBackend], stranger: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_listener, "ADMIT_WITHIN_S", 0.1)
    target = pair[1]
    for again in (False, True):
        with pytest.raises(BackendError, match="0x63 was not admitted") as caught:
            stranger.connect(target.describe(), 22)
        assert caught.value.code == "peer_unknown" and not target._listener._holders
        if not again:  # a proof against it, and a later address, are no agreement either
            target.admit(99, stranger.describe())
            assert target.revoke(99)


def test_a_writer_that_leaves_before_it_is_admitted_leaves_nothing(
    pair: tuple[LocalBackend, LocalBackend], stranger: LocalBackend
) -> None:
    listener = pair[1]._listener
    early = stranger.start_connect(pair[1].describe(), 22)
    assert early.poll() is None and eventually(lambda: any(one.hello for one in listener._open.values()))
    early.cancel()
    assert eventually(lambda: not listener._open)
    pair[1].admit(99, stranger.describe())
    assert pair[1].revoke(99), "it was given nothing"
