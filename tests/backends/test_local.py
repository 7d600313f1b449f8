"""The local backend beyond the conformance suite: its door, its proofs, its deadlines. Both ends in one process."""

import contextlib
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from support.forks import in_fork
from support.local_backends import SIZE, answer, door, eventually, hello, make

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.local import link as local_link
from sglang_pd.backends.local import listener as local_listener
from sglang_pd.backends.local.backend import LocalBackend
from sglang_pd.backends.local.link import Welcome, host_identity, pack_address, unpack_address
from sglang_pd.backends.local.memory import map_peer_memory
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, ConfigError, TransferError
from sglang_pd.testing.memory import fill, read_bytes, write_bytes
from sglang_pd.testing.pattern import Ranges, apply_batch, make_batch, pages

NESTED = struct.pack("<I", 4_004) + b"\x81\xa1x" + b"\x91" * 4_000 + b"\xc0"
"""A message with an unknown field that is nested deeper than the decoder goes."""


@pytest.fixture
def pair() -> Iterator[tuple[LocalBackend, LocalBackend]]:
    writer, target = make(11), make(22)
    yield writer, target
    writer.close()
    target.close()


def test_disconnect_says_goodbye_and_that_is_a_proof(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    before = target.describe()
    peer = writer.connect(before, 22)
    assert not target.revoke(11), "the writer's process (this one) lives"
    writer.disconnect(peer)
    assert eventually(lambda: target.revoke(11))
    with pytest.raises(BackendError, match="revoked"):
        writer.connect(before, 22)
    after = target.describe()
    assert target.revoke(11) and target.describe() == after, "asking again changes nothing"
    target.admit(11, writer.describe())  # both owners agreed anew
    again = writer.connect(after, 22)
    writer.disconnect(again)
    with pytest.raises(BackendError, match="revoked"):  # by what it knew before it stays out, also once it is back
        writer.connect(before, 22)
    again = writer.connect(after, 22)
    assert not target.revoke(11), "the earlier proof does not cover the later connection"
    writer.disconnect(again)
    assert eventually(lambda: target.revoke(11))


def test_a_closed_peer_is_lost_and_wakes_the_owner_once(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    assert peer.lost is None
    wakeup = writer.wakeup_fd()
    assert wakeup is not None
    target.close()
    assert eventually(lambda: local_link.is_dead(wakeup))
    writer.progress()
    assert not local_link.is_dead(wakeup), "a lost peer must not keep its owner awake"
    assert peer.lost is not None and peer.lost.code == "peer_lost"
    transfer = writer.write(peer, pages(1, 4, 4096, (SIZE,), (SIZE,)))
    assert transfer.poll() is TransferState.FAILED


def test_a_finished_copy_wakes_the_owner(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    wakeup = writer.wakeup_fd()
    assert wakeup is not None
    transfer = writer.write(peer, pages(1, 200, 16384, (SIZE,), (SIZE,)))
    assert eventually(lambda: local_link.is_dead(wakeup))
    assert eventually(lambda: transfer.poll() is TransferState.DONE)


@pytest.mark.parametrize(
    "said",
    [b"\xff" * 16, b"\x05\0\0\0hello", struct.pack("<I", 2**31), b"\0\0\0\0", b"G" * 8000, NESTED],
    ids=["noise", "no message", "huge", "empty", "long", "nested"],
)
def test_nonsense_is_hung_up_on_and_harms_nobody(pair: tuple[LocalBackend, LocalBackend], said: bytes) -> None:
    writer, target = pair
    with door(target) as sock:
        sock.sendall(said)
        if len(said) < 5000 and struct.unpack("<I", said[:4])[0] > len(said):
            sock.shutdown(socket.SHUT_WR)  # a message that will never be complete
        try:
            assert sock.recv(100) == b""
        except ConnectionResetError:
            pass
    assert writer.connect(target.describe(), 22).epoch == 22
    assert target.revoke(77), "nobody was given memory"


def test_silent_clients_do_not_hold_up_others(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    silent = [door(target) for _ in range(30)]
    began = time.monotonic()
    writer.connect(target.describe(), 22)
    assert time.monotonic() - began < 2.0
    for sock in silent:
        sock.close()


@pytest.mark.parametrize(("version", "wants", "code"), [(99, 22, "version_unsupported"), (1, 23, "epoch_stale")])
def test_a_wrong_hello_is_told_why(
    pair: tuple[LocalBackend, LocalBackend], version: int, wants: int, code: str
) -> None:
    with door(pair[1]) as sock:
        sock.sendall(hello(version, wants))
        assert answer(sock).code == code


def test_a_writer_whose_process_is_not_visible_is_never_proven_gone(
    pair: tuple[LocalBackend, LocalBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_listener, "open_pidfd", lambda sock: (None, os.geteuid()))
    with door(pair[1]) as sock:
        sock.sendall(hello())
        assert answer(sock).refusal == ""
    assert eventually(lambda: not pair[1]._listener._open)
    assert not pair[1].revoke(77), "it hung up without a goodbye, and may live in another PID namespace"


def test_another_user_is_not_served(pair: tuple[LocalBackend, LocalBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_listener, "open_pidfd", lambda sock: (None, os.geteuid() + 1))
    with pytest.raises(TransferError):
        pair[0].connect(pair[1].describe(), 22)
    assert pair[1].revoke(11), "it was given no memory"


def test_another_host_is_refused_by_name(pair: tuple[LocalBackend, LocalBackend]) -> None:
    address = unpack_address(pair[1].describe())
    elsewhere = pack_address(msgspec.structs.replace(address, host="another/1"))
    with pytest.raises(BackendError, match="not on this host"):
        pair[0].connect(elsewhere, 22)
    assert address.host == host_identity()


def test_nobody_at_the_address_is_peer_lost(pair: tuple[LocalBackend, LocalBackend]) -> None:
    blob = pair[1].describe()
    pair[1].close()
    with pytest.raises(TransferError) as caught:
        pair[0].connect(blob, 22)
    assert caught.value.code == "peer_lost"


def test_a_peer_that_announces_too_much_is_left() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door, make(11) as writer:
        door.bind(b"\0sglang-pd-test/" + os.urandom(8).hex().encode())
        door.listen(1)

        def serve() -> None:
            sock, _ = door.accept()
            sock.sendall(struct.pack("<I", 2**31))
            sock.recv(8192)
            sock.close()

        server = threading.Thread(target=serve)
        server.start()
        blob = pack_address(local_link.Address(22, door.getsockname(), host_identity()))
        with pytest.raises(TransferError, match="the limit is"):
            writer.connect(blob, 22)
        server.join()


@pytest.mark.parametrize("nbytes", [-5, 0, 2**63])
def test_a_peer_that_announces_an_impossible_segment_is_left(nbytes: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door, make(11) as writer:
        door.bind(b"\0sglang-pd-test/" + os.urandom(8).hex().encode())
        door.listen(1)

        def serve() -> None:
            sock, _ = door.accept()
            with sock, contextlib.suppress(OSError):  # it hangs up as soon as it has seen the table
                sock.recv(8192)
                body = msgspec.msgpack.encode(Welcome(segments=(local_link.SegmentFacts(nbytes, "cpu"),)))
                sock.sendall(struct.pack("<I", len(body)) + body)
                local_link.send_descriptors(sock, [door.fileno()])

        before = len(os.listdir("/proc/self/fd"))
        server = threading.Thread(target=serve)
        server.start()
        blob = pack_address(local_link.Address(22, door.getsockname(), host_identity()))
        with pytest.raises(TransferError):
            writer.connect(blob, 22)
        server.join()
        assert len(os.listdir("/proc/self/fd")) == before


@contextlib.contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """A process in which only so many descriptors are free."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 40, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        for _ in range(number):
            os.close(held.pop())
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_descriptors_errors_are_ours_and_name_the_limit(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    blob = target.describe()
    for left in range(4):
        with descriptors_left(left):
            with pytest.raises(BackendUnavailable, match="ulimit -n"):
                create_backend("local", epoch=33)
            try:
                writer.disconnect(writer.connect(blob, 22))
            except (BackendUnavailable, TransferError):
                pass
    writer.disconnect(writer.connect(blob, 22))
    assert target.revoke(11) or eventually(lambda: target.revoke(11)), "nobody was let in without a proof"


def test_the_door_rests_while_no_descriptor_is_free(pair: tuple[LocalBackend, LocalBackend]) -> None:
    target = pair[1]
    blob, knocks = target.describe(), []
    accept = target._listener._accept
    target._listener._accept = lambda: knocks.append(accept())  # type: ignore[method-assign,func-returns-value]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        with descriptors_left(0):
            sock.connect(unpack_address(blob).socket_name)
            time.sleep(0.5)
            assert 1 <= len(knocks) <= 5, "it spins"
        sock.settimeout(5.0)
        sock.sendall(hello())
        assert answer(sock).refusal == ""


def test_memory_that_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8192)
    with pytest.raises(BackendError, match="not the memory it announced"):
        map_peer_memory(fd, 8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_that_is_refused_leaves_no_descriptor(pair: tuple[LocalBackend, LocalBackend]) -> None:
    before, limits = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        for _ in range(5):
            with pytest.raises(BackendError, match="memory_refused"):
                pair[0].allocate(1 << 24)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == before


def test_connections_leave_nothing_behind(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair

    def churn(times: int) -> int:
        for _ in range(times):
            writer.disconnect(writer.connect(target.describe(), 22))
        assert eventually(lambda: not target._listener._open and not target._listener._holders)
        return len(os.listdir("/proc/self/fd"))

    before = churn(5)
    assert churn(100) <= before + 5, "one a connection would be a hundred"


def test_a_fork_may_not_use_it(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            writer.write(peer, pages(1, 4, 4096, (SIZE,), (SIZE,)))
            os.write(write, b"accepted")
        except BackendUnavailable as error:
            os.write(write, error.message.encode())
        finally:
            os._exit(0)
    os.close(write)
    assert b"not to its fork" in os.read(read, 1000)
    os.close(read)
    os.waitpid(child, 0)


def test_several_segments_and_a_peer_of_its_own_process(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    (extra,) = target.register([target.allocate(4096)])
    assert extra.number == 1
    peer = writer.connect(target.describe(), 22)
    assert peer.segment_bytes == (SIZE, 4096)
    own = writer._segments[0]
    fill(own, 0, SIZE, 9)
    zero, one = np.array([0]), np.array([1])
    batch = make_batch(Ranges(zero, zero), Ranges(one, zero), np.array([4096]), (SIZE,), (SIZE, 4096))
    assert writer.write(peer, batch).poll() is TransferState.DONE
    assert (read_bytes(extra, 0, 4096) == 9).all()
    assert not np.any(read_bytes(target._segments[0], 0, SIZE))


def test_options_are_checked() -> None:
    for options in ({"copy_threads": 0}, {"copy_threads": "two"}, {"threads": 2}):
        with pytest.raises(ConfigError) as caught:
            create_backend("local", epoch=1, options=options)
        assert caught.value.where == "$.backend.options"
        assert "copy_threads" in str(caught.value.expected) and str(options) == caught.value.actual


def test_what_the_system_refuses_any_backend_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(**_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("sglang_pd.backends.mori.backend.create", create)
    with pytest.raises(BackendUnavailable, match="mori.*Too many open files.*ulimit -n"):
        create_backend("mori", epoch=1)


def test_device_memory_without_a_device_names_what_is_missing(pair: tuple[LocalBackend, LocalBackend]) -> None:
    if pair[0].capabilities.device_memory:
        pytest.skip("this machine has what it takes")
    with pytest.raises(BackendUnavailable) as caught:
        pair[0].allocate(4096, "cuda:0")
    assert caught.value.hint


class Switch:
    """An event that happens when told."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()


@pytest.mark.parametrize("what", ["length", "src_offset", "dst_offset", "src_region", "dst_region", "src.segment"])
def test_a_batchs_arrays_may_be_reused_at_once(pair: tuple[LocalBackend, LocalBackend], what: str) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), target.epoch)
    content = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    write_bytes(writer._segments[0], 0, content)
    batch, switch = pages(3, 16, 64, (SIZE,), (SIZE,)), Switch()
    expected = np.zeros(SIZE, np.uint8)
    apply_batch(batch, [content], [expected])
    transfer = writer.write(peer, batch, after=switch)
    owner = batch.src if what == "src.segment" else batch
    array = getattr(owner, what.rpartition(".")[2])
    array.fill(7 if array.dtype == np.uint32 else 4096)
    switch.happened.set()
    assert eventually(lambda: transfer.poll() is TransferState.DONE), transfer.error
    assert np.array_equal(read_bytes(target._segments[0], 0, SIZE), expected)


def test_without_threads_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(BackendUnavailable, match="thread"):
        create_backend("local", epoch=1)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the listing's own


@pytest.mark.parametrize("threaded", [False, True])
def test_a_fork_that_closes_everything_proves_nothing_of_its_parent(
    pair: tuple[LocalBackend, LocalBackend], threaded: bool
) -> None:
    """It said goodbye on the socket that it shares with its parent, whose write then landed in released memory."""
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    switch = Switch()
    transfer = writer.write(peer, pages(1, 64, 16384, (SIZE,), (SIZE,)), after=switch)

    def unwind() -> str:
        with writer, target:
            state = transfer.poll()
        return state.value

    assert in_fork(unwind, threaded=threaded) == "unknown"
    time.sleep(0.2)  # what a fork says is heard at once
    assert not target.revoke(11) and not target.revoke(11)
    assert transfer.poll() is TransferState.PENDING and peer.lost is None
    switch.happened.set()
    assert eventually(lambda: transfer.poll() is TransferState.DONE)
    assert target._listener._thread.is_alive()
    writer.disconnect(peer)
    assert eventually(lambda: target.revoke(11)), "its own goodbye counts"


def test_a_goodbye_that_a_fork_says_all_the_same_is_not_believed(pair: tuple[LocalBackend, LocalBackend]) -> None:
    """Another release, or a program that has the descriptor, may say it: the kernel tells who did."""
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    assert in_fork(lambda: peer._sock.send(local_link.GOODBYE)) == "1"
    time.sleep(0.2)
    assert not target.revoke(11) and peer.lost is None
    writer.disconnect(peer)
    assert eventually(lambda: target.revoke(11))


def test_a_fork_takes_no_news_from_its_parent(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    wakeup = writer.wakeup_fd()
    assert wakeup is not None
    transfer = writer.write(peer, pages(1, 200, 16384, (SIZE,), (SIZE,)))
    assert eventually(lambda: transfer.poll() is TransferState.DONE)
    for call in (writer.progress, lambda: writer.disconnect(peer), lambda: writer.fence(peer)):
        assert "not to its fork" in in_fork(call)
    in_fork(writer.close)
    assert local_link.is_dead(wakeup), "the parent's news is still there"
    writer.progress()
    target.close()
    assert eventually(lambda: local_link.is_dead(wakeup)), "and it still watches its peer"


def test_a_fork_that_lives_on_keeps_nobodys_connection_open(pair: tuple[LocalBackend, LocalBackend]) -> None:
    writer, target = pair
    peer = writer.connect(target.describe(), 22)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        target.close()
        assert eventually(lambda: peer.lost is not None)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_closing_in_a_fork_hangs_up_there_alone() -> None:
    def descriptors() -> list[str]:
        """Without memory: it stays mapped, and each mapping has a descriptor of its own."""
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        kinds = [os.readlink(link).partition(":")[0] for link in links if os.path.lexists(link)]
        return sorted(kind for kind in kinds if kind != "/memfd")

    before = in_fork(descriptors)
    with make(11) as writer, make(22) as target:
        writer.connect(target.describe(), 22)
        blob = target.describe()

        def close() -> list[str]:
            writer.close()
            target.close()
            return descriptors()

        assert in_fork(close) == before
        assert writer.connect(blob, 22).lost is None
