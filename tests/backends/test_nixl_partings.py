"""The word of a writer over CMA that it has left: when it is given, what it is worth, and what it never covers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sglang_pd.backends.library.link import Work
from sglang_pd.backends.library.process import ProcessIdentity, own_identity
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.nixl.blob import AgentBlob, agent_name
from sglang_pd.backends.nixl.library import Handle
from sglang_pd.backends.nixl.link import Link
from sglang_pd.backends.nixl.partings import Partings
from sglang_pd.backends.nixl.pieces import Piece
from sglang_pd.backends.nixl.writers import BYE, HELLO, MAX_PROCESSES, Note, Writers, greeting, parting
from sglang_pd.protocol.errors import TransferError
from sglang_pd.testing import BackendSpec
from sglang_pd.testing.cases_bytes import exact, one_item
from sglang_pd.testing.cases_fence import stays_clean
from sglang_pd.testing.lab import MIB, ChildProcess, Lab, RemoteRefusal

ME = own_identity()


def anywhere(process: ProcessIdentity) -> bool:
    return True


def hello(number: int, process: ProcessIdentity = ME) -> bytes:
    return greeting(Note(5, process, number))


def bye(number: int, process: ProcessIdentity = ME) -> bytes:
    return parting(Note(5, process, number))


def left(writers: Writers) -> bool:
    assert writers.gone(5, anywhere) is not writers.live(5, anywhere)
    return writers.gone(5, anywhere)


# What the notes are worth


def test_a_living_writer_has_left_once_its_word_covers_its_newest_connection() -> None:
    writers = Writers()
    writers.admit(5, ME)
    assert not left(writers), "it was admitted and never connected"
    for notes, has_left in (
        ([hello(3)], False), ([bye(3)], True), ([hello(7)], False), ([bye(3)], False), ([bye(7)], True),
        ([bye(9)], True), ([hello(9)], True), ([hello(8), bye(8)], True), ([hello(11), hello(10), bye(10)], False),
    ):  # fmt: skip
        for note in notes:
            writers.heard(note)
        assert left(writers) is has_left, notes


def test_who_is_admitted_again_is_expected_to_connect_again() -> None:
    """Else a word of before would be taken for one about the connection to come."""
    writers = Writers()
    writers.admit(5, ME)
    writers.heard(hello(3))
    writers.admit(5, ME)
    writers.heard(bye(3))
    assert not left(writers), "that was about the connection of before"
    writers.admit(5, ME)
    writers.heard(hello(4))
    writers.heard(bye(4))
    assert left(writers)
    writers.admit(5, ME)
    assert not left(writers)


def test_each_process_of_an_epoch_speaks_for_itself() -> None:
    writers, other = Writers(), msgspec.structs.replace(ME, pid=1, start_ticks=0, boot_id="another")
    for note in (hello(1), hello(1, other), bye(1)):
        writers.heard(note)
    assert not left(writers)
    writers.heard(bye(1, other))
    assert left(writers)


def test_more_processes_than_are_kept_prove_nothing() -> None:
    writers = Writers()
    for pid in range(2 * MAX_PROCESSES):
        one = msgspec.structs.replace(ME, pid=pid + 1, start_ticks=0)
        writers.heard(hello(1, one))
        writers.heard(bye(1, one))
    assert not left(writers) and len(writers._known[5]) <= MAX_PROCESSES + 1


@pytest.mark.parametrize("prefix", [HELLO, BYE])
@pytest.mark.parametrize("body", [(5, ME), (5, ME, 1, 0), (5, ME, 0), (5, ME, -1), (5, ME, "1"), (5, None, 1)])
def test_what_is_no_note_says_nothing(prefix: bytes, body: tuple[Any, ...]) -> None:
    writers = Writers()
    assert writers.heard(prefix + msgspec.msgpack.encode(body)) is None
    assert writers.heard((prefix + msgspec.msgpack.encode((5, ME, 1)))[:-1]) is None
    assert not writers._known
    assert (writers.heard(prefix + msgspec.msgpack.encode((5, ME, 1))) == 5) is (prefix == HELLO)


# When it is given


class Recorder:
    """In place of the library's agent: pieces end when told; what was sent to the peer."""

    def __init__(self) -> None:
        self.posted, self.sent = list[Handle](), list[bytes]()

    def prepare(self, rows: Any, kinds: Any, name: str) -> Handle:
        return Handle(None)

    def post(self, handle: Handle, name: str) -> None:
        self.posted.append(handle)

    def check(self, handle: Handle, name: str) -> None: ...

    def release(self, handle: Handle) -> None: ...

    def notify(self, name: str, message: bytes) -> None:
        self.sent.append(message)

    def byes(self) -> list[int]:
        notes = [one[len(BYE) :] for one in self.sent if one.startswith(BYE)]
        return [msgspec.msgpack.decode(one, type=Note).number for one in notes]


LEFT = TransferError("disconnected here", code="peer_lost")


class Talk:
    """This process as a writer to one incarnation of a peer."""

    def __init__(self) -> None:
        self.partings, self.agent = Partings(5, ME), Recorder()

    def connect(self, process: ProcessIdentity = ME, build: int = 0) -> Link:
        blob = AgentBlob(
            epoch=6, agent=agent_name(6, build), nixl_version="1.5.1", plugin="UCX", settings=0, process=process,
            host_paths=["cma"], listens=[], segments=[], metadata=b"",
        )  # fmt: skip
        link = Link(blob, lambda: None)
        link.users, link.added = 1, True
        self.partings.greet(self.agent, link, 0.0)  # type: ignore[arg-type]
        return link

    def write(self, link: Link) -> LibraryTransfer:
        transfer = LibraryTransfer("nixl", "peer", 1, 30.0)
        link.open.add(transfer)
        link.submit(Work(transfer, iter([Piece(([], []), ("cpu", "cpu"), "cpu")]), True))
        self.turn(link)
        return transfer

    def turn(self, link: Link) -> None:
        for _ in range(3):
            link.step(self.agent, time.monotonic())  # type: ignore[arg-type]

    def leave(self, link: Link) -> None:
        link.users = 0
        link.lose(LEFT)
        self.partings.leave(self.agent, link)  # type: ignore[arg-type]


def test_it_is_given_once_everything_has_ended() -> None:
    talk = Talk()
    link = talk.connect()
    talk.write(link)
    talk.leave(link)
    assert not talk.agent.byes(), "a piece is under way"
    talk.agent.posted[0].finished = True
    talk.turn(link)
    talk.leave(link)
    assert talk.agent.byes() == [link.number]


def test_it_is_not_given_while_anything_is_unknown_of_this_connection_or_of_one_before() -> None:
    talk = Talk()
    link = talk.connect()
    talk.write(link)
    talk.agent.posted[0].failed = TransferError("ERR", code="transfer_unknown")
    talk.agent.posted[0].finished = True
    talk.turn(link)
    assert link.open and not link.waiting()
    talk.leave(link)
    again = talk.connect(build=1)
    talk.leave(again)
    assert not talk.agent.byes()


def test_it_is_not_given_while_another_connection_stands_or_somebody_uses_this_one() -> None:
    talk = Talk()
    one, other = talk.connect(), talk.connect(build=1)
    talk.leave(one)
    assert not talk.agent.byes()
    talk.leave(other)
    assert talk.agent.byes() == [other.number] and other.number > one.number
    used = talk.connect(build=2)
    used.lose(LEFT)
    talk.partings.leave(talk.agent, used)  # type: ignore[arg-type]
    used.users, used.added = 0, False  # our own agent was closed
    talk.partings.leave(talk.agent, used)  # type: ignore[arg-type]
    assert len(talk.agent.byes()) == 1


def test_connections_that_carry_nothing_any_more_are_not_kept() -> None:
    talk = Talk()
    for build in range(20):
        talk.leave(talk.connect(build=build))
    assert len(talk.agent.byes()) == 20 and sum(map(len, talk.partings._links.values())) == 1
    link = talk.connect(msgspec.structs.replace(ME, boot_id="of another host"))
    talk.leave(link)
    assert len(talk.agent.byes()) == 20, "who cannot be reached by CMA needs no such word"


# Between processes, over the library


@pytest.fixture
def cma() -> Iterator[Lab]:
    made = Lab(BackendSpec(name="nixl"))
    try:
        yield made
    finally:
        made.close()


def revoke(child: ChildProcess, epoch: int, within_s: float) -> bool:
    return bool(child.call("revoke", epoch=epoch, within_s=within_s)["proven"])


def test_a_living_writer_that_has_left_is_proven_and_its_way_back_is_closed(cma: Lab) -> None:
    link = cma.fresh((MIB,), (MIB,))
    writer, target = link.writer, link.target
    for _ in range(3):
        before = target.call("describe")
        exact(link, one_item(link, 65536), 1, "while connected")
        assert not revoke(target, writer.epoch, 1.0) and target.call("describe") == before
        writer.call("disconnect", peer=link.peer)
        assert revoke(target, writer.epoch, 20.0), "it lives and has left"
        assert target.call("describe") != before
        with pytest.raises(RemoteRefusal) as caught:
            writer.call("connect", blob=before, epoch=target.epoch)
        assert caught.value.info.code == "peer_lost"
        stays_clean(link, 0.2, "after the proof")
        assert revoke(target, writer.epoch, 5.0), "nothing has happened since"
        cma.admit(writer, target)
        assert not revoke(target, writer.epoch, 0.5), "it may connect again"
        link = cma.connect(writer, target)


def test_a_writer_that_connected_again_or_has_more_to_write_is_not_proven(cma: Lab) -> None:
    link = cma.fresh((MIB,), (MIB,))
    writer, target = link.writer, link.target
    exact(link, one_item(link, 4096), 1, "the first time")
    writer.call("disconnect", peer=link.peer)
    time.sleep(0.5)
    facts = writer.call("connect", blob=target.call("describe"), epoch=target.epoch)  # nobody agreed to that
    time.sleep(0.5)
    assert not revoke(target, writer.epoch, 1.5)
    cma.admit(writer, target)
    second = writer.call("connect", blob=target.call("describe"), epoch=target.epoch)
    writer.call("disconnect", peer=facts["peer"])
    assert not revoke(target, writer.epoch, 1.5), "two use one connection, and one has left"
    writer.call("disconnect", peer=second["peer"])
    assert revoke(target, writer.epoch, 20.0)


def test_an_agent_closed_before_a_writer_came_is_closed_again_once_that_one_has_left(cma: Lab) -> None:
    writer, target = cma.spawn((MIB,)), cma.spawn((MIB,))
    assert not revoke(target, writer.epoch, 1.5), "nobody said who that is"
    before = target.call("describe")
    facts = writer.call("connect", blob=before, epoch=target.epoch)
    time.sleep(0.5)
    writer.call("disconnect", peer=facts["peer"])
    time.sleep(0.5)
    assert revoke(target, writer.epoch, 20.0) and target.call("describe") != before


def test_the_word_of_one_that_lives_is_waited_for_before_the_agent_is_closed_for_one_that_died(cma: Lab) -> None:
    """Two ranks of one instance: the close would cut that word off, and it comes once."""
    link = cma.fresh((MIB,), (MIB,))
    dead, alive, target = cma.spawn((MIB,)), link.writer, link.target
    cma.connect(dead, target)
    dead.kill()
    for _ in range(30):
        assert not revoke(target, alive.epoch, 0.0) and not revoke(target, dead.epoch, 0.0)
        time.sleep(0.05)
    alive.call("disconnect", peer=link.peer)
    assert revoke(target, alive.epoch, 20.0) and revoke(target, dead.epoch, 20.0)
