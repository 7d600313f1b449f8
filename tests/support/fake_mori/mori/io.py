"""The stand-in's `mori.io`; the package's docstring says what it reproduces."""

from __future__ import annotations

import enum
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from mori import _control
from mori._nic import SLOTS, Device, Job, Pair, Registrations
from mori._slab import StatusCode, TransferStatus, update

__all__ = ["IOEngine", "IOEngineConfig", "RdmaBackendConfig", "StatusCode", "TransferStatus"]


class BackendType(enum.Enum):
    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(enum.Enum):
    Unknown = 0
    CPU = 1
    GPU = 2


class PollCqMode(enum.Enum):
    POLLING = 0
    EVENT = 1


class PeerFailureReason(enum.Enum):
    UNKNOWN = 0
    PEER_UNREACHABLE = 1


@dataclass
class PeerFailureEvent:
    reason: PeerFailureReason


@dataclass
class IOEngineConfig:
    host: str = ""
    port: int = 0


@dataclass
class RdmaBackendConfig:
    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = -1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True
    notif_per_qp: int = 1024
    enable_transfer_chunking: bool = False
    chunk_bytes: int = 65536
    max_chunks_per_transfer: int = 64
    num_nics_per_transfer: int = 1


def _unpack(packed: bytes, fields: int) -> list[Any]:
    try:
        found = msgspec.msgpack.decode(packed)
    except msgspec.MsgspecError:
        raise RuntimeError("insufficient bytes") from None
    if not isinstance(found, list) or len(found) != fields:
        raise RuntimeError("std::bad_cast")
    return found


@dataclass
class EngineDesc:
    key: str
    node_id: str
    hostname: str
    host: str
    port: int
    pid: int

    def pack(self) -> bytes:
        return msgspec.msgpack.encode([self.key, self.node_id, self.hostname, self.host, self.port, self.pid])

    @staticmethod
    def unpack(packed: bytes) -> EngineDesc:
        return EngineDesc(*_unpack(packed, 6))


@dataclass
class MemoryDesc:
    engine_key: str
    id: int
    device_id: int
    data: int
    size: int
    loc: MemoryLocationType

    def pack(self) -> bytes:
        fields = [self.engine_key, self.id, self.device_id, self.data, self.size, self.loc.value]
        return msgspec.msgpack.encode(fields + [0] * (_layout() - len(fields)))

    @staticmethod
    def unpack(packed: bytes) -> MemoryDesc:
        fields = _unpack(packed, _layout())
        return MemoryDesc(*fields[:5], MemoryLocationType(fields[5]))


def _layout() -> int:
    return 9 if os.environ.get("FAKE_MORI_LAYOUT") == "1.0.0" else 15


def _abort(assertion: str) -> None:
    print(f"Assertion `{assertion}' failed.", file=sys.stderr, flush=True)
    os.abort()


@dataclass
class _Blocks:
    local: MemoryDesc
    remote: MemoryDesc
    local_offsets: list[int]
    remote_offsets: list[int]
    sizes: list[int]

    def outside(self) -> bool:
        ends = [(self.local_offsets, self.local.size), (self.remote_offsets, self.remote.size)]
        return any(o < 0 or o + n > size for offsets, size in ends for o, n in zip(offsets, self.sizes, strict=True))


class _Rdma:
    """The RDMA backend of an engine: control server, device, queue pairs by remote key, memories asked for so far."""

    def __init__(self, engine: IOEngine, config: RdmaBackendConfig) -> None:
        if "FAKE_MORI_HANG" in os.environ:
            _control.spin_for_ever()
        if "FAKE_MORI_ABORT" in os.environ:
            _abort("devices.size() > 0")
        if "FAKE_MORI_NO_NIC" in os.environ:
            raise RuntimeError("no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0 to use XGMI")
        if "FAKE_MORI_NO_GPU" in os.environ:
            print("rocm_smi: no device", file=sys.stderr, flush=True)
            os._exit(255)
        self.config = config
        self.device = Device()
        self.pairs: dict[str, Pair] = {}
        self.met: set[tuple[str, int]] = set()
        self.inbox: dict[tuple[str, int], int] = {}
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.bind(b"\0fake-mori-" + secrets.token_hex(8).encode())
        if config.enable_notification:
            threading.Thread(target=self._listen, args=(self._notes,), daemon=True).start()
        self._registrations, self._memories = engine.registrations, engine.memories
        self.server = _control.Server(engine.config.host, engine.config.port, self._answer)
        self._lock = threading.Lock()
        self._contacting: dict[str, threading.Lock] = {}
        self._addresses: dict[str, bytes] = {}

    def _answer(self, question: Any) -> Any:
        if question["op"] == "connect":
            return [os.getpid(), self._registrations.fd, self._notes.getsockname()]
        memory = self._memories.get(question["id"])
        return 0 if memory is None else memory.size

    def _listen(self, notes: socket.socket) -> None:
        while data := notes.recv(256):
            key, uid = data.decode().rsplit(" ", 1)
            # One message a transfer is expected, so a uid that comes again counts below zero.
            self.inbox[key, int(uid)] = self.inbox.get((key, int(uid)), 1) - 1

    def contact(self, address: tuple[str, int], remote: MemoryDesc, hold: bool = False) -> Pair:
        with self._lock:
            contacting = self._contacting.setdefault(remote.engine_key, threading.Lock())
        with contacting:
            pair = self.pairs.get(remote.engine_key)
            if pair is None:
                pid, fd, notes = _control.ask(address, {"op": "connect"}, hold)
                pair = self.pairs[remote.engine_key] = Pair.connect(pid, fd)
                self._addresses[remote.engine_key] = notes
            if (remote.engine_key, remote.id) not in self.met:
                size = _control.ask(address, {"op": "memory", "id": remote.id}, hold)
                if size != remote.size:
                    raise RuntimeError(f"remote MR size mismatch memId={remote.id} expected={remote.size} got={size}")
                self.met.add((remote.engine_key, remote.id))
            return pair

    def post(self, engine_key: str, blocks: _Blocks, place: int, uid: int) -> None:
        pair, remote = self.pairs[blocks.remote.engine_key], blocks.remote
        notify = (self._addresses[remote.engine_key], engine_key, uid) if self.config.enable_notification else None
        src = np.array(blocks.local_offsets, np.uint64) + np.uint64(blocks.local.data)
        dst = np.array(blocks.remote_offsets, np.uint64) + np.uint64(remote.data)
        job = Job(pair, place, remote.id, src, dst, np.array(blocks.sizes, np.uint64), notify=notify)
        self.device.post(job)

    def close(self) -> None:
        self.device.stop()
        self.server.close()
        try:
            self._notes.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._notes.close()


class IOEngineSession:
    def __init__(self, engine: IOEngine, local: MemoryDesc, remote: MemoryDesc) -> None:
        self._engine, self._local, self._remote = engine, local, remote

    def allocate_transfer_uid(self) -> int:
        return self._engine.allocate_transfer_uid()

    def batch_write(self, loffs: list[int], roffs: list[int], sizes: list[int], uid: int) -> TransferStatus:
        status = TransferStatus()
        if not len(loffs) == len(roffs) == len(sizes):
            status.Update(StatusCode.ERR_INVALID_ARGS, "length mismatch")
        else:
            self._engine.submit(_Blocks(self._local, self._remote, loffs, roffs, sizes), status, uid)
        return status

    def write(self, loff: int, roff: int, size: int, uid: int) -> TransferStatus:
        return self.batch_write([loff], [roff], [size], uid)

    def alive(self) -> bool:
        return self._engine.pair_alive(self._remote.engine_key)


class IOEngine:
    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self.key, self.config = key, config
        self.registrations = Registrations()
        self.memories: dict[int, MemoryDesc] = {}
        self._ids = itertools.count()
        self._uids = itertools.count()
        self._remotes: dict[str, EngineDesc] = {}
        self._rdma: _Rdma | None = None
        self._others: set[BackendType] = set()

    def __del__(self) -> None:
        rdma = getattr(self, "_rdma", None)
        if rdma is not None:
            if rdma.device.unfinished:
                _abort("no transfer in flight when the engine is destroyed (stand-in only)")
            self.remove_backend(BackendType.RDMA)

    def get_engine_desc(self) -> EngineDesc:
        port = self._rdma.server.port if self._rdma is not None else self.config.port
        return EngineDesc(self.key, "node", socket.gethostname(), self.config.host, port, os.getpid())

    def create_backend(self, type: BackendType, config: Any = None) -> None:
        if type is BackendType.RDMA:
            self._rdma = _Rdma(self, config or RdmaBackendConfig())
        elif type is BackendType.TCP:
            if config is None:
                raise NotImplementedError("backend not implemented yet")
            _abort('false && "not implemented"')
        else:
            self._others.add(type)

    def remove_backend(self, type: BackendType) -> None:
        if type is BackendType.RDMA and self._rdma is not None:
            self._rdma.close()
            self._rdma = None
            self.memories.clear()
            self.registrations.valid[:] = 0

    def register_remote_engine(self, desc: EngineDesc) -> None:
        self._remotes[desc.key] = desc

    def deregister_remote_engine(self, desc: EngineDesc) -> None:
        self._remotes.pop(desc.key, None)

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        if not ptr:
            raise ValueError("PyCapsule_New called with null pointer")
        desc = MemoryDesc(self.key, next(self._ids), device_id, ptr, size, mem_loc)
        if desc.id >= SLOTS:
            raise RuntimeError("the stand-in has no room for more memories")
        self.memories[desc.id] = desc
        self.registrations.valid[desc.id] = 1
        return desc

    def deregister_memory(self, desc: MemoryDesc) -> None:
        self.memories.pop(desc.id, None)
        self.registrations.valid[desc.id] = 0

    def allocate_transfer_uid(self) -> int:
        return next(self._uids)

    def write(self, *arguments: Any) -> TransferStatus:
        local, loff, remote, roff, size, uid = arguments
        return self.batch_write([local], [[loff]], [remote], [[roff]], [[size]], [uid])[0]

    def batch_write(self, *arguments: Any) -> list[TransferStatus]:
        locals_, loffs, remotes, roffs, sizes, uids = arguments
        if len({len(column) for column in arguments}) != 1:
            _abort("localSrc.size() == remoteDest.size()")
        if any(uid < 0 for uid in uids):
            raise TypeError("incompatible function arguments")
        statuses = [TransferStatus() for _ in uids]
        for i, status in enumerate(statuses):
            if not len(loffs[i]) == len(roffs[i]) == len(sizes[i]):
                _abort("localOffsets.size() == remoteOffsets.size()")
            self.submit(_Blocks(locals_[i], remotes[i], loffs[i], roffs[i], sizes[i]), status, uids[i])
        return statuses

    def submit(self, blocks: _Blocks, status: TransferStatus, uid: int) -> None:
        place = status._place
        remote = self._remotes.get(blocks.remote.engine_key)
        if self._rdma is None or (remote is None and blocks.remote.engine_key not in self._rdma.pairs):
            update(place, StatusCode.ERR_BAD_STATE, "No available backend found")
            return
        if blocks.outside():
            update(place, StatusCode.ERR_INVALID_ARGS, "length out of range")
            return
        address = (remote.host, remote.port) if remote is not None else ("", 0)
        self._rdma.contact(address, blocks.remote)
        self._rdma.post(self.key, blocks, place, uid)

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession | None:
        known = self._remotes.get(remote.engine_key)
        if self._rdma is None or known is None:
            return None
        self._rdma.contact((known.host, known.port), remote, hold=True)
        return IOEngineSession(self, local, remote)

    def pair_alive(self, key: str) -> bool:
        return self._rdma is None or key not in self._rdma.pairs or self._rdma.pairs[key].alive

    def pop_peer_failure(self) -> PeerFailureEvent | None:
        if self._rdma is None or not self._rdma.device.failures:
            return None
        return PeerFailureEvent(PeerFailureReason[self._rdma.device.failures.pop(0)])

    def pop_inbound_transfer_status(self, remote_key: str, uid: int) -> TransferStatus | None:
        if self._rdma is None or self._rdma.inbox.get((remote_key, uid)) != 0:
            return None
        status = TransferStatus()
        status.Update(StatusCode.SUCCESS, "")
        return status

    def wait_all(self, statuses: list[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        end = time.monotonic() + timeout_ms / 1000
        for status in statuses:
            left = -1 if timeout_ms < 0 else max(0, int((end - time.monotonic()) * 1000))
            code = status.WaitFor(left)
            if code is not StatusCode.SUCCESS:
                return code
        return StatusCode.SUCCESS
