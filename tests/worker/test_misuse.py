"""What an engine's author gets wrong is refused at the call, by name; no room, no memory and no port is lost by it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.local_pair import CONFIG, IDS, PAGE, LocalPair, Side
from support.worker_pair import wait_until
from support.worker_process import free_address

from sglang_pd import Network, PrefillEndpoint
from sglang_pd.protocol import messages as m
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.errors import (
    BackendUnavailable,
    ConfigError,
    ManifestError,
    PdError,
    RoomError,
    SpaceMismatch,
)
from sglang_pd.protocol.manifest import RankId
from sglang_pd.worker.ranks import source
from sglang_pd.worker.setup import Trace


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    both.start(1)
    both.complete(1)
    yield both
    both.start(2)
    both.complete(2)
    for side in (both.prefill, both.decode):
        wait_until(lambda side=side: side.at.stats()["rooms"] == 0)  # type: ignore[misc]
        assert side.at.stats()["loop_faults"] == 0, side.at.stats()
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


@pytest.mark.parametrize("bad", [None, 5, "tcp://\ud800:1", "nothing", "tcp://host", "tcp://host:", "ipc:///tmp/x:1"])
def test_an_address_to_connect_to_is_judged_at_the_call(pair: LocalPair, bad: Any) -> None:
    with pytest.raises(ConfigError, match="tcp://host:port"):
        pair.decode.at.connect(bad)


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


@pytest.mark.parametrize("stop", [41, 50_000_000, 2**32 - 1])
def test_a_record_of_more_than_the_room_is_refused_before_it_is_read(pair: LocalPair, stop: int) -> None:
    """The check of a peer's claim took memory by what it claimed, held the control thread, and might never answer."""
    room = 60 + stop % 7
    pair.start(room)
    table = pair.decode.at.control.desk.decode
    wait_until(lambda: room in table.rooms)
    record = m.Wrote(
        room=room, generation=table.rooms[room].generation, writer=m.Writer(0, 0), component="KV", layer_start=0,
        layer_stop=2, token_start=0, token_stop=stop, last=True, nbytes=1, digests=b"\0" * 16,
    )  # fmt: skip
    peering = pair.prefill.at.control.peering
    pair.prefill.at._loop.submit(lambda: [peering.send(talk.epoch, record) for talk in peering.all()])
    assert pair.decode.released(room, 5.0) == ["failed:range_conflict", "releasable"]
    pair.prefill.released(room)


@pytest.mark.parametrize("room", [-1, 2**63, 2**64, "7", 7.0, None])
def test_what_is_no_room_id_gets_no_further(pair: LocalPair, room: Any) -> None:
    """Decode's memory was withheld for ever: neither the open nor the abort of such a room could be written."""
    with pytest.raises((RoomError, TypeError)):
        pair.decode.at.open(room, pair.address, IDS, pair.decode.lists())
    with pytest.raises((RoomError, TypeError)):
        pair.prefill.at.request(room, IDS, pair.prefill.lists())


def test_numbers_of_numpy_are_numbers(pair: LocalPair) -> None:
    room = np.int64(10)
    handle = np.int64(pair.prefill.at.request(room, np.array(IDS), pair.prefill.lists()))
    pair.decode.at.open(room, pair.address, np.array(IDS), pair.decode.lists(), prefix_tokens=np.int64(0))
    pair.prefill.at.send(handle, np.int64(0), np.int64(40), last=np.bool_(True))
    pair.prefill.at.finish(handle, np.int64(40), memoryview(np.arange(4)))
    assert pair.decode.released(10) == ["admitted", "done", "releasable"]
    assert [event.record for event in pair.decode.events if event.room == 10][0] == np.arange(4).tobytes()


def test_a_record_is_bytes(pair: LocalPair) -> None:
    pair.start(11)
    for record in ("text", None, 5):
        with pytest.raises(TypeError):
            pair.prefill.at.finish(pair.handles[11], 40, record)  # type: ignore[arg-type]
    pair.complete(11)


def test_calls_for_a_room_that_was_never_requested_are_refused_and_for_an_ended_one_ignored(pair: LocalPair) -> None:
    """A wrong id showed only when a lease ran out; an engine that has not heard of an end yet does no wrong."""
    for call in (lambda: pair.prefill.at.send(13, 0, 16, last=False), lambda: pair.prefill.at.finish(13, 40, b"")):
        with pytest.raises(RoomError, match="no such handle") as caught:
            call()
        assert caught.value.code == "room_unknown" and "handle 13" in caught.value.where
    pair.start(12)
    pair.complete(12)
    pair.prefill.at.send(pair.handles[12], 0, 16, last=False)
    pair.prefill.at.finish(pair.handles[12], 40, b"late")


def test_a_room_whose_call_was_refused_was_never_in_use(pair: LocalPair) -> None:
    for call in (
        lambda: pair.prefill.at.request(20, [-1], pair.prefill.lists()),
        lambda: pair.decode.at.open(20, pair.address, [-1], pair.decode.lists()),
        lambda: pair.decode.at.open(20, pair.address, IDS, None),  # type: ignore[arg-type]
    ):
        with pytest.raises((PdError, AttributeError)):
            call()
    pair.start(20)
    pair.complete(20)


def test_texts_that_utf8_cannot_say_do_not_pin_memory(pair: LocalPair) -> None:
    half = "\ud800"
    pair.prefill.at.request(30, IDS, pair.prefill.lists(), trace=Trace(half, half))
    handle = pair.decode.at.open(30, pair.address, IDS, pair.decode.lists(), trace=Trace(half, half))
    wait_until(lambda: pair.decode.at.stats()["rooms"] == 1)
    pair.decode.at.abort(handle, half)
    assert pair.decode.released(30) == ["aborted:room_aborted", "releasable"]
    assert sorted(pair.prefill.released(30)) == ["aborted:room_aborted", "releasable"]


def test_an_abort_names_a_code_that_exists(pair: LocalPair) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        pair.decode.at.abort(31, code="nonsense")


def test_an_endpoint_that_cannot_be_made_leaves_nothing() -> None:
    side = Side(PrefillEndpoint, "again")
    side.at.close()
    setup, network = side.setup, Network(bind=free_address())
    config, before = replace(CONFIG, instance_id="again"), len(os.listdir("/proc/self/fd"))
    segments = tuple(replace(segment, number=segment.number + 1) for segment in setup.segments)
    for bad in (replace(setup, rank=RankId(3, 0)), replace(setup, segments=segments)):
        with pytest.raises((ManifestError, ConfigError)) as raised:
            PrefillEndpoint(config, bad, network)
        assert isinstance(raised.value, ManifestError)
    assert len(os.listdir("/proc/self/fd")) == before
    PrefillEndpoint(config, setup, network).close()
    side.close()


def test_after_close_nobody_elses_descriptor_is_read() -> None:
    both = LocalPair()
    both.close()
    later = [os.eventfd(3, os.EFD_NONBLOCK) for _ in range(40)]
    try:
        assert both.prefill.at.poll() == both.decode.at.poll() == []
        assert [os.eventfd_read(fd) for fd in later] == [3] * 40
        assert both.decode.at.wakeup_fd() == -1
    finally:
        for fd in later:
            os.close(fd)
    with pytest.raises(RoomError, match="closed"):
        both.decode.at.open(1, both.address, IDS, both.decode.lists())


@pytest.mark.parametrize("bound", ["MAX_WAITING_CHUNKS", "MAX_WAITING_ROOMS"])
def test_chunks_that_nobody_asked_for_do_not_use_up_the_place(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Of ranks in other processes, say. They waited for ever, and at the bound every room to come was refused."""
    monkeypatch.setattr(source, bound, 8)
    for number in range(20):
        pair.prefill.at.agent.send(1_000 + number, Chunk(0, 16, False))
        pair.prefill.at.agent.handoff(2_000 + number, 40, b"record")
    room = 70 + (bound == "MAX_WAITING_ROOMS")  # of its own: what was said of the other's would be taken for its end
    pair.start(room)
    pair.complete(room)


@pytest.mark.parametrize(
    "wrong",
    [
        {"heartbeat_s": 2.0, "liveness_s": 3.0},
        {"heartbeat_s": 0.0},
        {"liveness_s": float("inf")},
        {"peer_wait_s": float("nan")},
        {"verify": "Full"},
        {"instance_id": "\ud800"},
    ],
)
def test_a_configuration_that_cannot_work_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    """Their handshakes could never be written, and an unknown `verify` verified nothing."""
    with pytest.raises(ConfigError, match=min(wrong, key=lambda name: name == "heartbeat_s" and len(wrong) > 1)):
        replace(CONFIG, **wrong)


@pytest.mark.parametrize("deadline_s", [1e9, float("inf")])
def test_a_drain_without_end_is_told_to_peers(deadline_s: float) -> None:
    both = LocalPair()
    try:
        both.start(1)
        both.complete(1)
        both.prefill.at.drain(deadline_s)
        peers = both.decode.at.control.desk.decode.peers
        wait_until(lambda: all(peer.drain_until_s is not None for peer in peers.values()))
        assert both.prefill.at.stats()["loop_faults"] == 0
        with pytest.raises(RoomError, match="deadline_s"):
            both.decode.at.drain(float("nan"))
    finally:
        both.close()


def test_lists_of_another_space_or_of_none_are_refused_at_the_call(pair: LocalPair) -> None:
    """Packed, they name the space that they were given for: nobody could tell later."""
    space = pair.prefill.space
    other = replace_extent(space)
    for lists, said in (
        ({space: other.ingest([1, 2, 3])}, "reached a consumer of"),
        ({space: [1, 2, 3]}, r"space\.ingest"),
        ({"KV": [1, 2, 3]}, r"space\.ingest"),
    ):
        with pytest.raises(SpaceMismatch, match=said):
            pair.prefill.at.request(70, IDS, lists)  # type: ignore[arg-type]
        with pytest.raises(SpaceMismatch, match=said):
            pair.decode.at.open(70, pair.address, IDS, lists)  # type: ignore[arg-type]


def replace_extent(space: Any) -> Any:
    """The same kind of space, of another allocator: a page more."""
    return type(space)(of=msgspec.structs.replace(space.of, capacity_tokens=space.of.capacity_tokens + PAGE))


def test_a_peer_that_a_rank_cannot_meet_is_called_again_after_a_while_and_rooms_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was met again at once, hundreds of times, and rooms were told of bootstrap ports and keys."""
    both, tries = LocalPair(), list[int]()

    def admit(epoch: int, blob: bytes) -> None:
        tries.append(epoch)
        raise BackendUnavailable("nothing can be kept", where="/nowhere", hint="Make that folder")

    monkeypatch.setattr(both.decode.backend, "admit", admit)
    try:
        both.prefill.at.request(1, IDS, both.prefill.lists())
        both.decode.at.open(1, both.address, IDS, both.decode.lists())
        assert both.decode.released(1)[0] == "failed:peer_unknown"
        (error,) = [event.error for event in both.decode.events if event.error is not None]
        assert "/nowhere" in error.message and "Make that folder" in error.message and not error.hint
        assert 1 <= len(tries) <= 3, "peer_wait_s is 2"
    finally:
        both.close()
