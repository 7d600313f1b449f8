"""An engine's process may fork at any moment: the fork is refused by name, and its end costs its parent nothing."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.forks import in_fork
from support.local_pair import IDS, LocalPair
from support.worker_pair import wait_until

from sglang_pd import RankEndpoint
from sglang_pd.memory.scope import Scope
from sglang_pd.observe import AdminServer


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    yield both
    both.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_a_fork_that_closes_everything_costs_its_parent_nothing(pair: LocalPair, threaded: bool) -> None:
    pair.start(1)
    wait_until(lambda: pair.prefill.at.stats()["source_rooms"] == 1.0)

    def unwind() -> str:
        with pair.prefill.at, pair.prefill.backend, pair.decode.at, pair.decode.backend:
            pass
        pair.prefill.at = pair.decode.at = None
        gc.collect()
        return "ended"

    assert in_fork(unwind, threaded=threaded) == "ended"
    pair.complete(1)
    pair.start(2)
    pair.complete(2)


def test_an_endpoints_calls_are_refused_in_a_fork_by_name(pair: LocalPair) -> None:
    prefill, decode = pair.prefill, pair.decode
    pair.start(1)
    calls: list[Callable[[], object]] = [
        prefill.at.poll,
        prefill.at.wakeup_fd,
        prefill.at.drain,
        lambda: prefill.at.abort(1),
        lambda: prefill.at.request(2, IDS, prefill.lists()),
        lambda: prefill.at.send(1, 0, len(IDS), last=True),
        lambda: prefill.at.finish(1, len(IDS), b""),
        lambda: decode.at.open(2, pair.address, IDS, decode.lists()),
        lambda: decode.at.connect(pair.address),
        prefill.at.link.flush,
        lambda: list(prefill.at.link.receive()),
        Scope(prefill.backend).suspend,
    ]
    for call in calls:
        assert "BackendUnavailable" in (said := in_fork(call)) and "not to its fork" in said
    pair.complete(1)


def test_a_fork_takes_no_event_from_its_parent(pair: LocalPair) -> None:
    pair.start(1)
    pair.prefill.at.abort(pair.handles[1])
    wait_until(lambda: len(pair.prefill.at._events) >= 2)
    for _ in range(3):
        in_fork(pair.prefill.at.poll)
    assert "releasable" in pair.prefill.of(1)


def test_a_ranks_endpoint_ends_in_a_fork_without_its_parents(pair: LocalPair) -> None:
    pair.prefill.at.close()
    rank = RankEndpoint(pair.prefill.setup, "tcp://127.0.0.1:9")
    try:
        assert "not to its fork" in in_fork(lambda: rank.send(1, 0, 40, last=True))
        assert "not to its fork" in in_fork(lambda: rank.finish(1, 40, b""))
        turns = rank._loop.turns
        assert in_fork(rank.close) == "None"
        wait_until(lambda: rank._loop.turns > turns + 1)
    finally:
        rank.close()


def test_the_admin_socket_outlives_a_fork(tmp_path: Path) -> None:
    path = str(tmp_path / "admin")
    with AdminServer(path, lambda line: line.encode()) as server:
        assert in_fork(server.close) == "None"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10.0)
            client.connect(path)
            client.sendall(b"still there\n")
            assert b"still there" in client.recv(100)
