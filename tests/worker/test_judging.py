"""Manifests of strangers: judged beside the control thread, bounded before they are built, and forgotten."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import xxhash
import zmq
from support.local_pair import LocalPair
from support.worker_pair import wait_until

from sglang_pd.protocol import messages as m
from sglang_pd.protocol.codec import decode, encode
from sglang_pd.protocol.errors import ManifestError, RemoteProtocolError
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.manifest_size import MAX_RANKS, MAX_REGIONS, MAX_SEGMENTS, check_size
from sglang_pd.worker.peers import judge as judging
from sglang_pd.worker.peers import pairings
from sglang_pd.worker.peers.judge import Case, Judge, Judged
from sglang_pd.worker.peers.link import Called


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair(liveness_s=60.0)
    both.start(1)
    both.complete(1)
    yield both
    both.close()


class Gate:
    """Whoever is judged in one of the names waits until it opens."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._open = threading.Event()

    def pass_through(self, case: Case) -> None:
        if any(name.encode() in case.stated for name in self.names):
            self._open.wait(60)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found, real = Gate(), judging.judge

    def judge(case: Case) -> Judged:
        found.pass_through(case)
        return real(case)

    monkeypatch.setattr(judging, "judge", judge)
    yield found
    found.open()


def manifest_of(pair: LocalPair, name: str, number: int = 0) -> InstanceManifest:
    """What a decode like the pair's own states, under its own name and epoch."""
    own = pair.decode.at.control.peering.own.manifest
    ranks = tuple(msgspec.structs.replace(rank, epoch=1_000 + number) for rank in own.ranks)
    return msgspec.structs.replace(own, instance_id=name, ranks=ranks)  # type: ignore[no-any-return]


def hello(manifest: InstanceManifest | dict[str, Any], epoch: int = 7) -> bytes:
    body = msgspec.msgpack.encode(manifest)
    return encode(
        m.Hello(
            instance="stranger", manifest=body, manifest_digest=xxhash.xxh3_64_intdigest(body), packing_rules=(1,),
            heartbeat_ms=500, liveness_ms=3_000,
        ),
        epoch=epoch,
    )  # fmt: skip


@contextlib.contextmanager
def stranger(pair: LocalPair, address: str = "") -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger, client.rcvtimeo = 0, 20_000
        client.connect(address or pair.address)
        yield client


def count(pair: LocalPair, name: str) -> float:
    return pair.prefill.at.stats().get(f"count_{name}", 0.0)  # type: ignore[no-any-return]


def test_a_decode_tells_nobody_who_calls_it_of_its_memory(pair: LocalPair) -> None:
    """Who got its manifest there could state it at a prefill, and have that one write over its rooms."""
    with stranger(pair, pair.decode.at.address) as client:
        client.send(hello(manifest_of(pair, "another decode")))
        answer = decode(client.recv()).message
    assert isinstance(answer, m.Refusal) and answer.error.code == "feature_unsupported"


def test_rooms_go_on_while_a_stranger_is_judged(pair: LocalPair, gate: Gate) -> None:
    gate.names.append("endless")
    with stranger(pair) as client:
        for _ in range(3):
            client.send(hello(manifest_of(pair, "endless")))
        wait_until(lambda: count(pair, "repeated_while_judged") == 2)  # it is judged once, however often it asks
        pair.start(2)
        pair.complete(2)
        client.rcvtimeo = 10
        with pytest.raises(zmq.Again):
            client.recv()


def test_a_stranger_who_says_something_else_meanwhile_is_answered_for_that(pair: LocalPair, gate: Gate) -> None:
    gate.names.append("first")
    first, second = hello(manifest_of(pair, "first")), hello(manifest_of(pair, "second"), epoch=8)
    with stranger(pair) as client:
        client.send(first)
        client.send(first)
        wait_until(lambda: count(pair, "repeated_while_judged") == 1)
        client.send(second)
        client.send(second)
        wait_until(lambda: count(pair, "repeated_while_judged") == 2)
        gate.open()
        answer, want = decode(client.recv()).message, decode(second).message
        assert isinstance(answer, m.HelloReply) and isinstance(want, m.Hello)
        assert answer.peer_manifest_digest == want.manifest_digest
        client.rcvtimeo = 300
        with pytest.raises(zmq.Again):
            client.recv()


def a_case(stated: bytes) -> Case:
    return Case(1, 2, None, b"own", 3, True, stated, xxhash.xxh3_64_intdigest(stated))  # type: ignore[arg-type]


def test_the_smallest_is_judged_first_and_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Event(), threading.Event()
    order: list[int] = []

    def judge(case: Case) -> Judged:
        began.set()
        go.wait(60)
        order.append(len(case.stated))
        raise RemoteProtocolError("seen")

    monkeypatch.setattr(judging, "judge", judge)
    monkeypatch.setattr(judging, "MAX_WAITING_BYTES", 100)
    judge_of_all = Judge(lambda: None)
    assert judge_of_all.ask(Called(0), a_case(b"x"), print)
    assert began.wait(20)
    assert judge_of_all.ask(Called(1), a_case(b"x" * 60), print)
    assert judge_of_all.ask(Called(2), a_case(b"x" * 30), print)
    assert judge_of_all.ask(Called(3), a_case(b"x" * 20), print)  # the largest goes
    assert not judge_of_all.ask(Called(4), a_case(b"x" * 99), print)
    assert judge_of_all.asked(Called(1)) is judge_of_all.asked(Called(4)) is None
    assert judge_of_all.ask(Called(2), a_case(b"x" * 10), print)  # it states something else now
    go.set()
    taken: list[Any] = []
    wait_until(lambda: taken.extend(judge_of_all.take()) or len(taken) == 3)
    assert order == [1, 10, 20]
    assert all(isinstance(result, RemoteProtocolError) for _, _, result in taken)


def test_strangers_are_bounded_in_bytes_and_forgotten(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of them is left, pairings included; the peer that is agreed keeps its own."""
    from sglang_pd.worker.peers import peering

    size = len(msgspec.msgpack.encode(manifest_of(pair, "stranger-00")))
    monkeypatch.setattr(peering, "MAX_STRANGER_BYTES", 4 * size + size // 2)
    monkeypatch.setattr(peering, "STRANGER_S", 3_600.0)
    before = set(pairings._used)  # some of them may be a former test's, and go meanwhile
    with contextlib.ExitStack() as stack:
        for number in range(10):
            client = stack.enter_context(stranger(pair))
            client.send(hello(manifest_of(pair, f"stranger-{number:02}", number), epoch=number + 1))
            assert isinstance(decode(client.recv()).message, m.HelloReply)
        gc.collect()
        assert len(set(pairings._used) - before) == 4
        monkeypatch.setattr(peering, "STRANGER_S", 0.0)
        wait_until(lambda: len(pair.prefill.at.peers()) == 1)
    gc.collect()
    assert not set(pairings._used) - before
    pair.start(2)
    pair.complete(2)


def many(ranks: int, segments: int, regions: int, components: int = 1) -> dict[str, Any]:
    """The form of a manifest, of nothing that makes sense."""
    rank = {"segments": [0] * segments, "components": [{"regions": [0] * regions}] * components}
    return {"ranks": [rank] * ranks}


@pytest.mark.parametrize(
    "form, where",
    [
        (many(MAX_RANKS + 1, 1, 1), "$.ranks"),
        (many(MAX_RANKS, MAX_SEGMENTS // MAX_RANKS + 1, 1), "instance.segments"),
        (many(MAX_RANKS, 1, MAX_REGIONS // MAX_RANKS + 1), "instance.regions"),
        (many(16, 1, MAX_REGIONS // 128, 9), "instance.regions"),
        (many(1, 65_537, 1), "$.segments"),
        (many(1, 1, 65_537), "$.regions"),
        (many(1, 1, 1, 257), "$.components"),
    ],
)
def test_a_manifest_that_is_too_large_is_refused_by_name_before_it_is_built(
    pair: LocalPair, form: dict[str, Any], where: str
) -> None:
    with pytest.raises((ManifestError, msgspec.ValidationError)) as refused:
        check_size(msgspec.msgpack.encode(form))
    assert where in str(refused.value)
    with stranger(pair) as client:
        client.send(hello(form))
        answer = decode(client.recv()).message
    assert isinstance(answer, m.Refusal) and where in answer.error.where + answer.error.message
    assert answer.refused_type == 1


def test_the_largest_that_is_allowed_is_counted_through() -> None:
    check_size(msgspec.msgpack.encode(many(MAX_RANKS, MAX_SEGMENTS // MAX_RANKS, MAX_REGIONS // MAX_RANKS)))
    with pytest.raises(ManifestError):
        check_size(msgspec.msgpack.encode(many(1, 1, 65_000, 256)))
