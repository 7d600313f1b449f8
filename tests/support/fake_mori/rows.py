"""Rows of the table of measured behaviour, shown on the stand-in itself: the tests of the backend are worth no more.

Run as `python rows.py NAME`, with this folder on PYTHONPATH. Engines of one process, or of two where one must die.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from mori import io
from mori.io import StatusCode

CPU, RDMA = io.MemoryLocationType.CPU, io.BackendType.RDMA
BYTES = 1 << 16


class Engine:
    """An engine with one memory."""

    def __init__(self, key: str, **config: Any) -> None:
        self.engine = io.IOEngine(key, io.IOEngineConfig(host="127.0.0.1", port=0))
        self.config = config
        self.bytes = np.zeros(BYTES, np.uint8)
        self.start()

    def start(self) -> None:
        self.engine.create_backend(RDMA, io.RdmaBackendConfig(**{"enable_notification": False, **self.config}))
        self.memory = self.engine.register_memory(self.bytes.ctypes.data, BYTES, -1, CPU)

    def meet(self, other: Engine) -> None:
        self.engine.register_remote_engine(io.EngineDesc.unpack(other.engine.get_engine_desc().pack()))

    def write(self, other: Any, offset: int = 0, size: int = 4096, uid: int | None = None) -> io.TransferStatus:
        uid = self.engine.allocate_transfer_uid() if uid is None else uid
        return self.engine.write(self.memory, offset, other, offset, size, uid)


def pair(**config: Any) -> tuple[Engine, Engine]:
    first, second = Engine("first", **config), Engine("second", **config)
    first.meet(second)
    first.bytes[:] = 7
    assert first.write(second.memory).WaitFor(5000) is StatusCode.SUCCESS
    second.bytes[:] = 0
    return first, second


def dropped_status() -> None:
    """A status dropped unfinished makes the next transfer succeed falsely; one that is held does not."""
    first, second = pair()
    os.environ["FAKE_MORI_DELAY_MS"] = "300"
    for held in (True, False):
        second.bytes[:] = 0
        status = first.write(second.memory, 0)
        keep = status if held else None
        del status
        gc.collect()
        later = first.write(second.memory, 8192)
        assert later.WaitFor(5000) is StatusCode.SUCCESS
        assert bool((second.bytes[8192:12288] == 7).all()) is held
        time.sleep(0.5)
        del keep, later


def codes() -> None:
    """SUCCESS is 0 and falsy; a fresh status is INIT and waiting for it returns at once; the first error stays."""
    status = io.TransferStatus()
    assert not StatusCode.SUCCESS and status.Init() and status.WaitFor(60_000) is StatusCode.INIT
    status.Update(StatusCode.ERR_RDMA_OP, "first")
    status.Update(StatusCode.ERR_BAD_STATE, "second")
    assert status.Failed() and status.Message() == "first"


def broken_pair() -> None:
    """After a remote access error the pair is dead for good while `alive()` says True; a new backend works."""
    first, second = pair()
    session = first.engine.create_session(first.memory, second.memory)
    second.engine.deregister_memory(second.memory)
    status = first.write(second.memory)
    assert status.WaitFor(5000) is StatusCode.ERR_RDMA_OP and status.Message() == "remote access error"
    assert session is not None and session.alive() and first.engine.pop_peer_failure() is None
    again = second.engine.register_memory(second.bytes.ctypes.data, BYTES, -1, CPU)
    first.engine.deregister_remote_engine(second.engine.get_engine_desc())
    first.meet(second)
    status = first.write(again)
    assert status.WaitFor(5000) is StatusCode.ERR_RDMA_OP and "Flushed" in status.Message()
    twin = Engine("second")
    first.meet(twin)
    assert first.write(twin.memory).WaitFor(5000) is StatusCode.ERR_RDMA_OP, "the same key stays dead"
    other = Engine("third")
    first.meet(other)
    assert first.write(other.memory).WaitFor(5000) is StatusCode.SUCCESS
    first.engine.remove_backend(RDMA)
    first.start()
    first.meet(twin)
    assert first.write(twin.memory).WaitFor(5000) is StatusCode.SUCCESS


def dead_peer() -> None:
    """A killed peer is not noticed while idle; a write fails after the retries, and then `alive()` is False."""
    os.environ["FAKE_MORI_RETRY_MS"] = "50"
    first = Engine("first")
    child = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    engine, memory = (bytes.fromhex(line) for line in (child.stdout.readline(), child.stdout.readline()))
    first.engine.register_remote_engine(io.EngineDesc.unpack(engine))
    remote = io.MemoryDesc.unpack(memory)
    session = first.engine.create_session(first.memory, remote)
    assert session is not None and session.write(0, 0, 4096, 1).WaitFor(5000) is StatusCode.SUCCESS
    child.kill()
    child.wait(10)
    child.stdout.close()
    time.sleep(0.2)
    assert session.alive() and first.engine.pop_peer_failure() is None
    status = first.write(remote)
    assert status.WaitFor(5000) is StatusCode.ERR_RDMA_OP and "retry counter" in status.Message()
    failure = first.engine.pop_peer_failure()
    assert not session.alive() and failure is not None and failure.reason is io.PeerFailureReason.PEER_UNREACHABLE


def serve() -> None:
    """The peer that dies."""
    side = Engine("served")
    print(side.engine.get_engine_desc().pack().hex(), side.memory.pack().hex(), sep="\n", flush=True)
    time.sleep(60)


def no_cancel() -> None:
    """Forgetting the remote engine stops nothing; removing the backend leaves the status in progress for ever."""
    first, second = pair()
    os.environ["FAKE_MORI_DELAY_MS"] = "300"
    status = first.write(second.memory)
    first.engine.deregister_remote_engine(second.engine.get_engine_desc())
    assert status.WaitFor(5000) is StatusCode.SUCCESS and (second.bytes[:4096] == 7).all()
    first.meet(second)
    status = first.write(second.memory)
    first.engine.remove_backend(RDMA)
    assert status.WaitFor(600) is StatusCode.IN_PROGRESS


def refusals() -> None:
    """What ends in a status, and what in an exception."""
    first, second = pair()
    status = first.write(second.memory, BYTES - 1, 2)
    assert status.Code() is StatusCode.ERR_INVALID_ARGS and status.Message() == "length out of range"
    assert first.write(second.memory).WaitFor(5000) is StatusCode.SUCCESS, "that did not break the pair"
    assert first.write(Engine("never met").memory).Code() is StatusCode.ERR_BAD_STATE
    forged = io.MemoryDesc("second", 99, -1, second.memory.data, BYTES, CPU)
    for function, words in ((lambda: first.write(forged), "got=0"), (lambda: _junk(), "insufficient bytes")):
        try:
            function()
        except RuntimeError as error:
            assert words in str(error)
        else:
            raise AssertionError(words)
    packed = first.memory.pack()
    os.environ["FAKE_MORI_LAYOUT"] = "1.0.0"
    try:
        io.MemoryDesc.unpack(packed)
    except RuntimeError as error:
        assert str(error) == "std::bad_cast"
    session = first.engine.create_session(first.memory, second.memory)
    assert session is not None and session.batch_write([0], [0, 1], [1], 5).Code() is StatusCode.ERR_INVALID_ARGS
    xgmi = io.IOEngine("xgmi", io.IOEngineConfig("127.0.0.1", 0))
    xgmi.create_backend(io.BackendType.XGMI)
    memory = xgmi.register_memory(first.bytes.ctypes.data, BYTES, -1, CPU)
    assert "No available backend" in xgmi.write(memory, 0, second.memory, 0, 8, 1).Message()


def _junk() -> None:
    io.EngineDesc.unpack(b"\xdc")


def notifications() -> None:
    """An inbound status is never used up; a uid used twice is never reported again."""
    first, second = pair(enable_notification=True)
    for uid in (1000, 1001):
        first.write(second.memory, uid=uid).WaitFor(5000)
    _until(lambda: second.engine.pop_inbound_transfer_status("first", 1000) is not None)
    assert second.engine.pop_inbound_transfer_status("first", 1000) is not None
    first.write(second.memory, uid=1001).WaitFor(5000)
    _until(lambda: second.engine._rdma is not None and second.engine._rdma.inbox.get(("first", 1001)) == -1)
    assert second.engine.pop_inbound_transfer_status("first", 1001) is None


def _until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def silent_peer() -> None:
    """A stopped control thread: `batch_write` raises and lets others run, `create_session` stops the interpreter."""
    os.environ["MORI_IO_CP_TIMEOUT_MS"] = "500"
    import socket

    first, deaf = Engine("first"), socket.create_server(("127.0.0.1", 0))
    memory = io.MemoryDesc("deaf", 0, -1, 4096, BYTES, CPU)
    first.engine.register_remote_engine(io.EngineDesc("deaf", "", "", "127.0.0.1", deaf.getsockname()[1], 1))
    moments: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            moments.append(time.monotonic())

    threading.Thread(target=tick, daemon=True).start()
    frozen_s = []
    for contact in (lambda: first.write(memory), lambda: first.engine.create_session(first.memory, memory)):
        time.sleep(0.05)
        moments.clear()
        began = time.monotonic()
        try:
            contact()
        except RuntimeError:
            moments.append(time.monotonic())
        frozen_s.append(max(b - a for a, b in zip([began, *moments], moments, strict=False)))
    stop.set()
    assert frozen_s[0] < frozen_s[1] and frozen_s[1] >= 0.45, frozen_s
    deaf.close()
    try:
        first.write(memory)
    except RuntimeError as error:
        assert "refused" in str(error)


def uneven_lists() -> None:
    """Ends the process with SIGABRT."""
    first, second = pair()
    first.engine.batch_write([first.memory], [[0, 1]], [second.memory], [[0]], [[1]], [1])


def tcp() -> None:
    """There is none: an exception, or with a configuration SIGABRT."""
    engine = io.IOEngine("tcp", io.IOEngineConfig("127.0.0.1", 0))
    try:
        engine.create_backend(io.BackendType.TCP)
    except NotImplementedError:
        engine.create_backend(io.BackendType.TCP, io.RdmaBackendConfig())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
