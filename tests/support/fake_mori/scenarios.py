"""What a process does with the backend over the stand-in; each ends the process with status 0 if all held.

Run as `python scenarios.py NAME`, with this folder on PYTHONPATH. Writer and destinations are backends of one process.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_pd.backends.base import Segment, TransferState
from sglang_pd.backends.mori import backend as mori
from sglang_pd.backends.mori import library as mori_library
from sglang_pd.backends.mori.backend import MoriBackend, MoriPeer
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.batch import RegionTable, WriteBatch
from sglang_pd.protocol.errors import BackendError, PdError, TransferError

PAGE = 4096
PAGES = 64
UNKNOWN, DONE, FAILED = TransferState.UNKNOWN, TransferState.DONE, TransferState.FAILED


class Side:
    """A backend with two segments of `PAGES` pages."""

    def __init__(self, epoch: int, **options: Any) -> None:
        made = create_backend("mori", epoch=epoch, options=options)
        mori.probe = lambda options: None  # once a process is enough for a test
        assert isinstance(made, MoriBackend)
        self.backend = made
        self.segments = made.register([made.allocate(PAGES * PAGE) for _ in range(2)])
        self.bytes: list[Any] = [segment.keep_alive for segment in self.segments]

    def connect(self, other: Side) -> MoriPeer:
        return self.backend.connect(other.backend.describe(), other.backend.epoch)

    @property
    def host(self) -> mori_library.EngineHost:
        return self.backend._engines[0]


def pages(rows: Any, segment: int = 0) -> WriteBatch:
    """Page i of the source's segment to page i of the destination's, for the given rows."""
    row = np.asarray(list(rows), np.uint64)
    size = np.array([PAGES * PAGE], np.uint64)
    table = RegionTable(np.array([segment], np.uint32), np.zeros(1, np.uint64), size)
    region, offset = np.zeros(row.shape[0], np.uint32), row * np.uint64(PAGE)
    return WriteBatch(table, table, region, offset, region, offset, np.full(row.shape[0], PAGE, np.uint64))


def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.001)


def state_of(transfer: Any) -> TransferState:
    until(lambda: transfer.poll() is not TransferState.PENDING)
    return transfer.poll()


def delay(ms: int) -> None:
    os.environ["FAKE_MORI_DELAY_MS"] = str(ms)


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> PdError:
    try:
        function(*arguments, **named)
    except PdError as error:
        return error
    raise AssertionError("accepted")


def pair(**options: Any) -> tuple[Side, Side, MoriPeer]:
    writer, target = Side(1, **options), Side(2)
    return writer, target, writer.connect(target)


# The scenarios


def late_transfer_is_held() -> None:
    """Past its deadline, its caller's reference gone: still UNKNOWN, then DONE, and it spoils no other transfer."""
    writer, target, peer = pair()
    writer.bytes[0][:] = 7
    delay(400)
    late = writer.backend.write(peer, pages([1]), deadline_s=0.05)
    assert state_of(late) is UNKNOWN and late.error is not None and late.error.code == "transfer_timeout"
    assert not late.quiesced and not writer.backend.fence(peer)
    dropped = writer.backend.write(peer, pages([2]), deadline_s=0.05)
    assert state_of(dropped) is UNKNOWN
    del dropped
    gc.collect()
    delay(0)
    after = writer.backend.write(peer, pages(range(10, 60, 2)))
    assert state_of(after) is DONE
    assert all((target.bytes[0][row * PAGE : (row + 1) * PAGE] == 7).all() for row in range(10, 60, 2))
    assert late.poll() is DONE and late.error is None
    until(lambda: writer.backend.fence(peer))


def a_status_that_ends_between_two_looks() -> None:
    """The library's own threads end a transfer while we ask for its state."""

    class Moving:
        """Ends well right after the first look at it, whichever that is."""

        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            def look(*arguments: Any) -> Any:
                answer = getattr(self._real, name)(*arguments)
                until(self._real.Succeeded)
                return answer

            return look

    writer, _, peer = pair()
    assert state_of(writer.backend.write(peer, pages([0]))) is DONE
    host, whole = writer.host, writer.host._engine.batch_write
    host._engine.batch_write = lambda *lists: [Moving(status) for status in whole(*lists)]
    delay(20)
    for row in range(1, 4):
        assert state_of(writer.backend.write(peer, pages([row]))) is DONE


def peers_and_forks_of_others_are_refused() -> None:
    writer, target, peer = pair()
    error = refusal(target.backend.write, peer, pages([0]))
    assert "a peer of another backend" in str(error)
    child = os.fork()
    if not child:
        error = refusal(writer.backend.write, peer, pages([0]))
        os._exit(0 if "after the fork" in error.hint else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert state_of(writer.backend.write(peer, pages([0]))) is DONE


def rest_is_never_posted() -> None:
    """A deadline in the middle of a batch: what was handed over ends well, the rest is never handed over, so FAILED."""
    writer, target, peer = pair(calls_in_flight=1, max_blocks_per_call=1)
    writer.bytes[0][:] = 7
    delay(250)
    transfer = writer.backend.write(peer, pages(range(0, 20, 2)), deadline_s=0.6)
    assert state_of(transfer) is UNKNOWN and not writer.backend.fence(peer)
    until(lambda: transfer.poll() is FAILED)
    landed = int((target.bytes[0] == 7).sum())
    assert 0 < landed < 10 * PAGE and writer.backend.fence(peer)
    time.sleep(0.5)
    assert int((target.bytes[0] == 7).sum()) == landed


def dead_pair_is_rebuilt() -> None:
    """One failure: UNKNOWN for good and the peer lost; others go on; connecting anew takes another engine."""
    writer, target, peer = pair()
    third = Side(3)
    other = writer.connect(third)
    assert state_of(writer.backend.write(peer, pages([0]))) is DONE
    target.host._engine.deregister_memory(target.host.memories[0])
    broken = writer.backend.write(peer, pages([0]))
    assert state_of(broken) is UNKNOWN and broken.error is not None and "remote access error" in broken.error.message
    until(lambda: peer.lost is not None)
    assert state_of(writer.backend.write(peer, pages([0], segment=1))) is FAILED
    assert state_of(writer.backend.write(other, pages([0]))) is DONE and other.lost is None
    again = writer.connect(target)
    assert len(writer.backend._engines) == 2 and writer.backend._engines[1].key != writer.host.key
    assert state_of(writer.backend.write(again, pages([0], segment=1))) is DONE
    assert not writer.backend.fence(again), "what the dead pair left behind is of the same incarnation"
    assert broken.poll() is UNKNOWN and writer.backend.fence(other)
    writer.backend.disconnect(again)
    writer.backend.disconnect(peer)
    until(lambda: writer.backend.progress() or len(writer.backend._engines) == 1)


def engines_are_bounded() -> None:
    """A peer that breaks pair after pair gets no more than `max_engines` engines."""
    writer, target, peer = pair(max_engines=2)
    host = target.host
    for segment in range(2):
        assert state_of(writer.backend.write(peer, pages([0], segment=segment))) is DONE
        host._engine.deregister_memory(host.memories[segment])
        assert state_of(writer.backend.write(peer, pages([0], segment=segment))) is UNKNOWN
        if segment == 0:
            peer = writer.connect(target)
    error = refusal(writer.connect, target)
    assert "max_engines" in str(error) and len(writer.backend._engines) == 2
    assert writer.backend.engines_replaced == 1


def close_keeps_what_is_unfinished() -> None:
    """`close` with a call in flight: bounded, UNKNOWN, and the engine is not destroyed, not even at the very end."""
    writer, _, peer = pair(drain_s=0.2)
    delay(600_000)
    transfer = writer.backend.write(peer, pages([0]))
    until(lambda: writer.host.unfinished() == 1)
    writer.backend.close()
    assert transfer.poll() is UNKNOWN and mori_library.leaked_engines() == 1
    gc.collect()


def close_drains() -> None:
    """`close` waits for what ends in time, and then destroys the engine."""
    writer, target, peer = pair()
    writer.bytes[0][:] = 7
    delay(300)
    transfer = writer.backend.write(peer, pages([3]))
    until(lambda: writer.host.unfinished() == 1)
    writer.backend.close()
    assert transfer.poll() is DONE and (target.bytes[0][3 * PAGE : 4 * PAGE] == 7).all()
    assert mori_library.leaked_engines() == 0
    assert refusal(writer.backend.write, peer, pages([0])).code == "backend_unsupported"


def progress_after_close_reads_nothing() -> None:
    """Once closed, the number of the wake-up's descriptor is somebody else's."""
    writer, _, _ = pair()
    number = writer.backend.wakeup_fd()
    assert number is not None
    writer.backend.close()
    other = os.eventfd(5, os.EFD_NONBLOCK)
    os.dup2(other, number)
    writer.backend.progress()
    assert os.eventfd_read(other) == 5


def disconnect_goes_on_holding() -> None:
    """`disconnect` cancels nothing: the transfer in flight is held and decided; the peer can be connected anew."""
    writer, target, peer = pair()
    delay(300)
    transfer = writer.backend.write(peer, pages([0]))
    until(lambda: writer.host.unfinished() == 1)
    writer.backend.disconnect(peer)
    assert transfer.poll() is TransferState.PENDING and not writer.backend.fence(peer)
    assert isinstance(refusal(writer.backend.write, peer, pages([0])), BackendError)
    delay(0)
    assert state_of(transfer) is DONE
    until(lambda: writer.backend.progress() or not writer.backend._links)
    assert state_of(writer.backend.write(writer.connect(target), pages([1]))) is DONE


def silent_peer_blocks_nobody() -> None:
    """While one peer's control port is silent, `write` returns at once and other peers are served."""
    os.environ["MORI_IO_CP_TIMEOUT_MS"] = "2000"
    writer, target, peer = pair()
    third = Side(3)
    other = writer.connect(third)
    port = target.host.desc.port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    time.sleep(0.1)
    waiting = writer.backend.write(peer, pages([0]), deadline_s=0.3)
    until(lambda: writer.host.inside == 1)
    assert state_of(writer.backend.write(other, pages([0]))) is DONE
    assert writer.host.inside == 1, "the other peer waited for the silent one"
    assert state_of(waiting) is UNKNOWN, "it may still be posted"
    until(lambda: waiting.poll() is FAILED)
    assert peer.lost is not None and writer.backend.fence(peer) and other.lost is None
    for sock in silent:
        sock.close()


def nobody_there() -> None:
    """A closed backend's blob: `peer_lost` at `connect`, and no engine is spent on it."""
    writer, target = Side(1), Side(2)
    blob = target.backend.describe()
    target.backend.close()
    for _ in range(3):
        error = refusal(writer.backend.connect, blob, 2)
        assert isinstance(error, TransferError) and error.code == "peer_lost"
    assert len(writer.backend._engines) == 1
    third = Side(3)
    assert state_of(writer.backend.write(writer.connect(third), pages([0]))) is DONE


def lost_status_condemns_the_engine() -> None:
    """An exception for a pair that was used before may have orphaned a status: nothing that engine says counts."""
    writer, target, peer = pair()
    third = Side(3)
    other = writer.connect(third)
    assert state_of(writer.backend.write(peer, pages([0]))) is DONE
    delay(200)
    flying = writer.backend.write(other, pages([0]))
    until(lambda: writer.host.unfinished() == 1)
    library = writer.host._engine
    whole, library.batch_write = library.batch_write, _raise
    broken = writer.backend.write(peer, pages([1]))
    assert state_of(broken) is UNKNOWN
    del library.batch_write
    assert whole is not None and state_of(flying) is UNKNOWN and other.lost is not None
    delay(0)
    assert state_of(writer.backend.write(writer.connect(target), pages([2]))) is DONE
    writer.backend.close()
    assert mori_library.leaked_engines() == 1


def _raise(*arguments: Any) -> Any:
    raise RuntimeError("thrown in the middle")


def skewed_descriptors() -> None:
    """Another version of the library is refused before anything is unpacked; descriptors that lie are refused after."""
    from mori import io

    writer, target = Side(1), Side(2)
    honest = target.backend.describe()
    unpack, io.EngineDesc.unpack = io.EngineDesc.unpack, staticmethod(_raise)
    version, writer.backend._library = writer.backend._library, mori_library.Library(io, "1.2.5")
    error = refusal(writer.backend.connect, honest, 2)
    assert error.code == "backend_unsupported" and "1.2.5" in str(error) and "1.2.4" in str(error)
    io.EngineDesc.unpack, writer.backend._library = staticmethod(unpack), version
    os.environ["FAKE_MORI_LAYOUT"] = "1.0.0"
    error = refusal(writer.backend.connect, honest, 2)
    assert error.code == "message_malformed" and "std::bad_cast" in str(error)
    del os.environ["FAKE_MORI_LAYOUT"]
    target.backend._entries.reverse()
    target.backend._entries[0] = type(target.backend._entries[0])(1 << 40, "cpu", target.backend._entries[0].descriptor)
    error = refusal(writer.connect, target)
    assert error.code == "message_malformed" and "contradicts" in str(error)


def heartbeat_finds_a_dead_pair() -> None:
    """An idle peer that no longer can be written to is lost without a transfer being tried; an idle good one is not."""
    writer, target, peer = pair(heartbeat_s=0.05)
    third = Side(3)
    good = writer.connect(third)
    time.sleep(0.3)
    assert peer.lost is None
    target.host._engine.deregister_memory(target.host.door)
    until(lambda: peer.lost is not None)
    assert good.lost is None and writer.backend.fence(peer)


def what_the_library_gets() -> None:
    """One pair of memories a call, capped, neighbours merged, a uid never twice, lists of one length."""
    writer, target, peer = pair(max_blocks_per_call=3, max_bytes_per_call=3 * PAGE, max_block_bytes=2 * PAGE)
    calls: list[Any] = []
    library = writer.host._engine
    whole = library.batch_write
    library.batch_write = lambda *arguments: calls.append(arguments) or whole(*arguments)
    writer.bytes[0][:] = 7
    assert state_of(writer.backend.write(peer, pages([0, 1, 2, 3, 10, 12, 14, 16, 17]))) is DONE
    assert int((target.bytes[0] == 7).sum()) == 9 * PAGE
    assert all(len(column) == 1 for call in calls for column in call)
    uids = [call[5][0] for call in calls]
    assert len(set(uids)) == len(uids) and all(uid > 0 for uid in uids)
    sizes = [call[4][0] for call in calls]
    assert all(
        len(call[1][0]) == len(call[3][0]) == len(call[4][0]) <= 3 and sum(call[4][0]) <= 3 * PAGE for call in calls
    )
    assert sizes[0] == [2 * PAGE] and max(map(max, sizes)) == 2 * PAGE, sizes
    assert library._rdma.config.enable_notification is False
    uneven = mori_library.Blocks([0, 1], [0], [1])
    error = refusal(writer.host.post, writer.host.door, target.host.door, uneven)
    assert error.code == "internal", "the library would have ended the process"
    assert refusal(mori_library.claim_key, writer.host.key).code == "backend_unsupported"


class Event:
    """A device event as torch has it."""

    def __init__(self, answer: bool | Exception) -> None:
        self.answer = answer

    def query(self) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def events_are_awaited() -> None:
    """Bytes are read after the event; one that fails ends the transfer with nothing moved."""
    writer, target, peer = pair()
    event = Event(False)
    waits = writer.backend.write(peer, pages([0]), after=event)
    assert state_of(writer.backend.write(peer, pages([1]))) is DONE, "another transfer waits for it"
    assert waits.poll() is TransferState.PENDING
    event.answer = True
    assert state_of(waits) is DONE
    never = writer.backend.write(peer, pages([2]), after=Event(False), deadline_s=0.2)
    until(lambda: never.poll() is FAILED)
    writer.bytes[0][:] = 7
    fails = writer.backend.write(peer, pages([3]), after=Event(RuntimeError("device lost")))
    assert state_of(fails) is FAILED and fails.error is not None and "device lost" in fails.error.message
    assert not (target.bytes[0] == 7).any()
    assert writer.backend.fence(peer)
    assert peer.lost is None


def adoption() -> None:
    """Host memory is adopted after a byte of it was really written out; what cannot be read is refused."""
    side, target = Side(1), Side(2)
    owner = np.zeros(3 * PAGE, np.uint8)
    address = -(-owner.ctypes.data // PAGE) * PAGE
    good = Segment(address=address, nbytes=PAGE, device="cpu", keep_alive=owner)
    assert refusal(side.backend.register, [good]).code == "memory_refused"
    adopted = side.backend.adopt(good)
    assert side.backend._prover is not None
    assert side.backend.register([adopted])[0].number == 2 and side.backend._prover is None
    for bad in (Segment(address=PAGE, nbytes=PAGE, device="cpu"), Segment(address=address, nbytes=0, device="cpu")):
        assert refusal(side.backend.adopt, bad).code == "memory_refused"
    assert refusal(side.backend.adopt, Segment(address=address, nbytes=8, device="cuda:0")).code == "memory_refused"
    from mori import _nic  # the mapping looks fine, but the device cannot reach it

    whole, _nic._write = _nic._write, lambda *arguments: False
    error = refusal(side.backend.adopt, good)
    _nic._write = whole
    assert error.code == "memory_refused" and "protection" in str(error) and side.backend._prover is None
    assert state_of(target.backend.write(target.connect(side), pages([0]))) is DONE


def unusable_library() -> None:
    """Whatever the library does in the child, this process gets an error with the reason and never touches it."""
    taken = socket.create_server(("127.0.0.1", 0))
    cases: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"FAKE_MORI_NO_NIC": "1"}, {}, "no active RDMA device"),
        ({"FAKE_MORI_NO_GPU": "1"}, {}, "exit(255)"),
        ({"FAKE_MORI_ABORT": "1"}, {}, "SIGABRT"),
        ({"FAKE_MORI_HANG": "1"}, {"probe_timeout_s": 3.0}, "within 3 s"),
        ({}, {"host": "192.0.2.1"}, "exit(255)"),
        ({}, {"port": taken.getsockname()[1]}, "exit(255)"),
    ]
    for environment, options, words in cases:
        os.environ.update(environment)
        error = refusal(create_backend, "mori", epoch=1, options=options)
        for name in environment:
            del os.environ[name]
        assert error.code == "backend_unavailable" and words in str(error), str(error)
        assert not any(name.partition(".")[0] == "mori" for name in sys.modules)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
