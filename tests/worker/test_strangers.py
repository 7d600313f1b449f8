"""Whoever reaches a port without being a peer: dropped, counted, and nothing grows (SE-02, SE-04, SE-06)."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import xxhash
import zmq
from support.hybrid_state import capacity, hybrid_state, instance, layouts
from support.worker_pair import finished, hand_over, oracles, start_pair, start_room, wait_until
from support.worker_process import WorkerProcess, free_address

from sglang_pd.protocol import messages as m
from sglang_pd.protocol.codec import encode
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import RankId, Term, Topology
from sglang_pd.worker.control import PEERS
from sglang_pd.worker.peers.link import MAX_BATCH, MAX_FRAMES_A_TURN, Link
from sglang_pd.worker.ranks.orders import Alive, Joined
from sglang_pd.worker.ranks.orders import encode as encode_report

# A class whose unpickling would end the process, by hand: nothing here may need the library that reads such bytes.
PICKLE = b"cos\n_exit\n(I3\ntR."
NESTED = b"\x82\xa4type\xa5Alive\xa1x" + b"\x91" * 3_900 + b"\xc0"
"""A map whose unknown field is nested deeper than the decoder goes."""
MIB = 2**20


@contextlib.contextmanager
def dealer(address: str, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    """A client of our own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.sndtimeo = 2_000
        for name, value in options.items():
            setattr(client, name, value)
        client.connect(address)
        yield client


def counts(worker: WorkerProcess) -> dict[str, float]:
    return {key: value for key, value in worker.ask("stats")["stats"].items() if key.startswith("count_")}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    prefill, decode = start_pair(
        {"ranks_bind": free_address(), "pages": 60}, {"ranks_bind": free_address(), "pages": 60}
    )
    with prefill, decode:
        hand_over(prefill, decode, 1, 20)
        yield prefill, decode
        for room in range(100_000, 100_100, 5):
            five = [start_room(prefill, decode, room + number, 9) for number in range(5)]
            for p, d in five:
                finished(prefill, decode, p, d)
        for worker in (prefill, decode):
            assert worker.ask("stats")["stats"]["loop_faults"] == 0, worker.ask("stats")["last_fault"]
        oracles(prefill, decode)


def garbage(seed: int) -> Iterator[bytes]:
    """Random bytes, a pickle, and our own frames bent."""
    draw = random.Random(seed)
    good = encode(m.Heartbeat(peer_epoch=1, seq=1, state="ready", rooms=0), epoch=7)
    for _ in range(300):
        yield draw.randbytes(draw.choice([0, 1, 3, 40, 64, 300, 5_000]))
        yield PICKLE
        bent = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bent[draw.randrange(len(bent))] = draw.randrange(256)
        yield bytes(bent)
        yield good[: draw.randrange(len(good))]
        yield b"\x81" * draw.randrange(2_000)  # nesting as deep as it goes
        yield NESTED


@pytest.mark.parametrize("port", ["address", "ranks_address"])
def test_frames_of_a_stranger(pair: tuple[WorkerProcess, WorkerProcess], port: str) -> None:
    for worker in pair:
        with dealer(getattr(worker, port)) as client:
            for number, frame in enumerate(garbage(1)):
                client.send(frame)
                if not number % 10:
                    client.send_multipart([frame, frame, b""])
        hand_over(*pair, 1_000 + os.getpid() + (worker is pair[0]) + 2 * (port == "address"), 20)


def test_raw_bytes_on_every_tcp_port(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    draw = random.Random(2)
    for worker in pair:
        for address in (worker.address, worker.ranks_address):
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            for payload in (
                b"GET / HTTP/1.1\r\n\r\n",
                PICKLE,
                draw.randbytes(4_096),
                b"\xff" * 64 + draw.randbytes(99),
            ):
                with socket.create_connection((host, int(port)), timeout=5) as raw, contextlib.suppress(OSError):
                    raw.sendall(payload)


def test_raw_bytes_on_the_local_backends_socket(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    """The abstract Unix sockets of both processes, by their names in the kernel's list."""
    with open("/proc/net/unix") as table:
        names = {line.split()[-1] for line in table if line.split()[-1].startswith("@sglang-pd/")}
    own: set[str] = set()
    for worker in pair:
        inodes = {os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.pid}/fd")}
        with open("/proc/net/unix") as table:
            own |= {
                line.split()[-1]
                for line in table
                if f"socket:[{line.split()[6] if len(line.split()) > 6 else ''}]" in inodes
            } & names
    assert len(own) >= 2
    draw = random.Random(3)
    for name in own:
        for payload in (b"", PICKLE, b"\x10\0\0\0" + draw.randbytes(16), draw.randbytes(9_000), b"\xff\xff\xff\xff"):
            with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
                raw.connect("\0" + name[1:])
                raw.sendall(payload)


def test_a_stranger_is_told_to_introduce_itself_and_no_faster_than_the_limit(
    pair: tuple[WorkerProcess, WorkerProcess],
) -> None:
    before = counts(pair[0]).get("count_refused_peer_unknown", 0)
    answers = 0
    with dealer(pair[0].address) as client:
        for number in range(3_000):
            client.send(encode(m.StatusQuery(room=number, generation=1, nonce=1, have=0, after=0), epoch=9))
        wait_until(lambda: counts(pair[0])["count_refused_peer_unknown"] >= before + 3_000)
        client.rcvtimeo = 500
        with contextlib.suppress(zmq.Again):
            while True:
                client.recv()
                answers += 1
    assert 0 < answers < 2_000


def rank_lies() -> Iterator[bytes]:
    """Reports of ranks that are none."""
    for number in range(50):
        yield encode_report(Joined(rank=RankId(number, 3), epoch=number, term=Term(), manifest=b"\x80"))
        yield encode_report(Joined(rank=RankId(0, 0), epoch=number, term=Term(), manifest=os.urandom(40)))
        yield encode_report(Alive(counters={"x": 1.0}))


def test_ranks_that_are_none_do_not_join(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    for worker in pair:
        with dealer(worker.ranks_address) as client:
            for frame in rank_lies():
                client.send(frame)
            client.rcvtimeo = 3_000
            assert client.recv(), "it is told that it is not known"
        assert worker.ask("stats")["ready"]


@pytest.mark.parametrize(
    "messages", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("who", ["stranger", "agreed"])
def test_bogus_rooms_cost_no_memory(pair: tuple[WorkerProcess, WorkerProcess], who: str, messages: int) -> None:
    """SE-02, from somebody unknown and from a peer with a verdict: under 50 MiB, and rooms go on beside it."""
    prefill, decode = pair
    before = prefill.ask("check")["rss"]
    if who == "agreed":
        # Statuses, renewals and aborts of rooms that nobody opened; in the decode's own name.
        decode.ask("flood", times=messages, timeout_s=850)
    else:
        with dealer(prefill.address, sndhwm=1_000, sndtimeo=60_000) as client:
            error = ErrorInfo(code="x" * 60, message="y" * 300)
            for number in range(messages // 2):
                client.send(encode(m.Abort(room=number, generation=number + 1, error=error), epoch=number))
                client.send(encode(m.Refusal(error=error, refused_type=1, room=number, generation=1), epoch=9))
    hand_over(prefill, decode, 50_000 + messages + (who == "agreed"), 20)
    grown = prefill.ask("check")["rss"] - before
    assert grown < 50 * MIB, f"{grown / MIB:.1f} MiB"


def test_a_flood_leaves_room_for_timers_and_answers() -> None:
    """Of what has come, one turn takes a bounded part."""
    link = Link(None)
    try:
        address = link.listen(PEERS, "tcp://127.0.0.1:*")
        with dealer(address, sndhwm=100) as client:
            for _ in range(60):
                client.send_multipart([b"frame"] * MAX_BATCH)
            wait_until(lambda: link.sockets()[0].poll(50))
            taken = []
            while sum(taken) < 60 * MAX_BATCH:
                taken.append(sum(1 for _ in link.receive()))
                assert taken[-1] <= MAX_FRAMES_A_TURN + MAX_BATCH
            assert len(taken) >= 60 * MAX_BATCH // (MAX_FRAMES_A_TURN + MAX_BATCH)
            with pytest.raises(zmq.Again):  # what nobody takes is held back at its sender
                for _ in range(5_000):
                    client.send_multipart([b"x" * 1024] * MAX_BATCH, zmq.DONTWAIT)
                    time.sleep(0.0002)
    finally:
        link.close()


def test_many_hellos_of_strangers_are_bounded(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    """Each with a manifest of its own, half of them acceptable, none ever confirmed."""
    prefill, _ = pair
    before = prefill.ask("check")["rss"]
    all_ranks = layouts(hybrid_state(), capacity(30, 8, 8), Topology())
    for turn in range(150):
        with dealer(prefill.address) as client:
            manifest = instance(f"stranger-{turn}", all_ranks, epoch=turn + 1)
            if turn % 2:
                manifest = msgspec.structs.replace(manifest, model="another")
            body = msgspec.msgpack.encode(manifest)
            hello = m.Hello(
                instance=manifest.instance_id, manifest=body, manifest_digest=xxhash.xxh3_64_intdigest(body),
                packing_rules=(1,), heartbeat_ms=100, liveness_ms=1_000,
            )  # fmt: skip
            client.send(encode(hello, epoch=turn + 1))
            client.rcvtimeo = 10_000
            assert client.recv()
    assert prefill.ask("check")["rss"] - before < 50 * MIB
    assert sum(peer["stage"] != "agreed" for peer in prefill.ask("stats")["peers"]) <= 64


# --- CURVE ------------------------------------------------------------------------------------------------------------


def keys() -> dict[str, Any]:
    public, secret = zmq.curve_keypair()
    return {"public": public.decode(), "secret": secret.decode()}


def test_with_keys_only_those_who_are_listed_get_through() -> None:
    ours, theirs = keys(), keys()
    shared = {**ours, "authorized": []}
    prefill, decode = start_pair({"curve": shared}, {"curve": shared})
    with prefill, decode:
        hand_over(prefill, decode, 1, 20)
        quiet = {key: value for key, value in counts(prefill).items() if "clients" not in key}
        unknown = {"curve_publickey": theirs["public"].encode(), "curve_secretkey": theirs["secret"].encode()}
        server = {"curve_serverkey": ours["public"].encode()}
        wrong = {"curve_serverkey": theirs["public"].encode()}
        for options in (unknown | server, unknown | wrong, {}):
            with dealer(prefill.address, **options) as client:
                client.sndtimeo = 300
                for frame in garbage(4):
                    with contextlib.suppress(zmq.Again):
                        client.send(frame, zmq.DONTWAIT)
                client.rcvtimeo = 300
                with pytest.raises(zmq.Again):
                    client.recv()
        now = {key: value for key, value in counts(prefill).items() if "clients" not in key}
        assert now == quiet, "a body of an unknown client was read"
        assert counts(prefill)["count_clients_refused"] >= 1
        with WorkerProcess("decode", id="decode-1", pages=30, curve=theirs, peer_wait_s=1.0) as other:
            d = other.ask("open", room=2, tokens=9, seed=2, address=prefill.address)
            assert other.end_of(d["handle"])["code"] == "peer_unknown"
        hand_over(prefill, decode, 3, 20)
        oracles(prefill, decode)
