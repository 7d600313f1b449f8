"""Host names are resolved beside the control thread: a name server that does not answer costs its own rooms alone."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from support.local_pair import IDS, LocalPair
from support.worker_pair import wait_until

from sglang_pd.protocol.errors import ConfigError
from sglang_pd.worker.peers import resolve
from sglang_pd.worker.peers.link import Link
from sglang_pd.worker.peers.resolve import Outcome, Resolver


class Names:
    """What the system's resolver answers. A name in `slow` waits until the test is over."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self.slow: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.over = threading.Event()

    def getaddrinfo(self, host: str, port: object, **_: Any) -> list[Any]:
        self.asked[host] += 1
        if host in self.slow:
            self.over.wait(60)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.known[host]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    found = Names()
    monkeypatch.setattr(socket, "getaddrinfo", found.getaddrinfo)
    yield found
    found.over.set()


@pytest.fixture
def pair(names: Names) -> Iterator[LocalPair]:
    both = LocalPair(liveness_s=60.0)
    yield both
    both.close()


def error_of(pair: LocalPair, room: int) -> str:
    assert pair.decode.released(room) == ["failed:peer_unknown", "releasable"]
    (error,) = [event.error for event in pair.decode.events if event.room == room and event.error]
    return str(error)


@pytest.mark.parametrize("slow", [False, True])
def test_a_name_that_does_not_resolve_fails_its_own_rooms(
    pair: LocalPair, names: Names, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "LOOKUP_S", 0.3)
    names.slow |= {"slow.test"} if slow else set()
    pair.start(1)
    pair.decode.at.open(2, "tcp://slow.test:8998", IDS, pair.decode.lists(8))
    pair.complete(1)
    said = error_of(pair, 2)
    assert "tcp://slow.test:8998" in said and "has no address" in said
    assert ("no name server answered" if slow else "no such name") in said
    pair.start(3)
    pair.complete(3)
    assert names.asked["slow.test"] == 1


def test_a_prefill_is_reached_by_its_name_and_followed_where_it_moves(pair: LocalPair, names: Names) -> None:
    names.known["prefill.test"] = ["127.0.0.2", "127.0.0.1"]  # nobody listens at the first
    address = pair.address.replace("127.0.0.1", "prefill.test")
    pair.handles[1] = pair.prefill.at.request(1, IDS, pair.prefill.lists())
    pair.decode.at.open(1, address, IDS, pair.decode.lists())
    pair.complete(1)


def test_what_libzmq_is_given_are_numbers(names: Names) -> None:
    names.known["a.test"] = ["::1"]
    link = Link()
    try:
        link.call("tcp://a.test:8998")
        (dealer,) = link._dealers.values()
        wait_until(lambda: not list(link.receive()) and dealer.getsockopt(zmq.LAST_ENDPOINT))
        assert dealer.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0") == b"tcp://[::1]:8998"
        link.call("tcp://[::1]:8998")
        link.call("tcp://127.0.0.1:8998")
        assert names.asked == {"a.test": 1}
        with pytest.raises(ConfigError):
            link.call("tcp://a.test:70000")
    finally:
        link.close()


def test_threads_and_names_are_bounded_and_what_is_known_serves_on(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.known["good.test"] = ["192.0.2.1"]
    resolver = Resolver(lambda: None)
    wait_until(lambda: resolver.ask("good.test"))
    names.slow |= {f"slow-{number}.test" for number in range(300)} | {"good.test"}
    before = threading.active_count()
    for number in range(300):
        resolver.ask(f"slow-{number}.test")
    assert threading.active_count() <= before + resolve.MAX_THREADS
    assert len(resolver._names) <= resolve.MAX_NAMES
    outcome = resolver.ask("one-more.test")
    assert outcome is not None and "too many" in outcome.error
    monkeypatch.setattr(resolve, "FRESH_S", -1.0)
    known = Resolver(lambda: None)
    names.slow.discard("good.test")
    wait_until(lambda: known.ask("good.test"))
    names.slow.add("good.test")
    assert known.ask("good.test") == known.ask("good.test") == Outcome(("192.0.2.1",))
