"""What an engine's author gets wrong is refused at the call, by name; no room, no memory and no port is lost by it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest
from support.local_pair import IDS, LocalPair


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    both.start(1)
    both.complete(1)
    yield both
    both.start(2)
    both.complete(2)
    for side in (both.prefill, both.decode):
        stats = side.at.stats()
        assert (stats["rooms"], stats["loop_faults"]) == (0, 0), stats
    both.close()


@pytest.mark.parametrize("bad", [None, 5, "tcp://\ud800:1", "nothing"])
def test_an_address_that_is_none_costs_only_its_own_room(pair: LocalPair, bad: Any) -> None:
    pair.decode.at.open(40, "tcp://127.0.0.1:1", IDS, pair.decode.lists())
    pair.decode.at.open(41, bad, IDS, pair.decode.lists(4))
    pair.decode.at.open(42, "tcp://127.0.0.1:1", IDS, pair.decode.lists(7))
    assert pair.decode.released(41) == ["failed:config_invalid", "releasable"]
    for room in (40, 42):
        assert pair.decode.released(room) == ["failed:peer_unknown", "releasable"]
    pair.decode.events.clear()


def test_without_descriptors_rooms_are_refused_not_lost(pair: LocalPair) -> None:
    (soft, hard), taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for number in range(3):
            pair.decode.at.open(50 + number, f"tcp://127.0.0.1:{10 + number}", IDS, pair.decode.lists(1 + 3 * number))
        for number in range(3):
            assert pair.decode.released(50 + number) == ["failed:queue_full", "releasable"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
