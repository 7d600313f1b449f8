"""The one place that calls the `amd-mori` package (`mori.io`, the 1.2.4 API). Its exceptions end here.

What the library was measured to do decides the shape of `EngineHost`:

- It keeps a raw pointer to every status. One that is dropped early lets a later transfer succeed that never happened,
  or stops the library's completion thread. So a status is held until it has ended; one that failed until the engine is
  gone, since other parts of the same call may still be completed; the last few that succeeded a little longer, so that
  the library's thread has surely left them.
- An engine must not be destroyed while a status is unfinished. `close` then keeps engine, statuses and memory for ever.
- After one failure a pair of engines never works again; a new key is needed. A key is used once in a process.
- `StatusCode.SUCCESS` is 0 and the first code of a status is neither success nor failure: only `Succeeded()` counts.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import itertools
import logging
import mmap
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_pd.backends.base import Segment
from sglang_pd.backends.library.blob import malformed
from sglang_pd.backends.mori.options import MoriOptions
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, PdError, TransferError

log = logging.getLogger("sglang_pd.backends.mori")

PACKAGE = "amd-mori"
TESTED_VERSION = "1.2.4"
PIP = "pip install 'sglang-pd[mori]' (wheels exist for Python 3.10 alone; it needs ROCm 7 and an RDMA NIC)"
DOOR_BYTES = 4096
LINGERING = 256
"""Statuses that succeeded and are held a little longer."""

_uids = itertools.count(1)
_used_keys: set[str] = set()
_kept_for_ever: list[object] = []


@dataclass(frozen=True, slots=True)
class Library:
    """The imported package and its version."""

    api: Any
    version: str


def installed_version(options: MoriOptions) -> str:
    """Version of the package, read without touching it. Raises `BackendUnavailable`."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailable(
            f"the package {PACKAGE} is not installed",
            where=f"package {PACKAGE}",
            expected=TESTED_VERSION,
            actual="none",
            hint=PIP,
        ) from None
    if version != TESTED_VERSION and not options.allow_untested_version:
        raise BackendUnavailable(
            f"this backend was written against another {PACKAGE}",
            where=f"package {PACKAGE}",
            expected=TESTED_VERSION,
            actual=version,
            hint=f"{PIP}; or set $.backend.options.allow_untested_version: true.",
        )
    return version


def load_library(version: str) -> Library:
    """Import `mori.io`, which `mori.probe` must have tried before. Raises `BackendUnavailable`."""
    try:
        return Library(importlib.import_module("mori.io"), version)
    except Exception as error:  # the package raises OSError for a missing library file, RuntimeError for a wrong Python
        raise BackendUnavailable(
            f"{PACKAGE} does not import", where="import of mori.io", actual=_words(error), hint=PIP
        ) from error


def leaked_engines() -> int:
    """Engines of this process that were kept for ever because a transfer of theirs never ended."""
    return len(_kept_for_ever)


def fresh_key(epoch: int) -> str:
    """A key for one engine: carries the epoch, is unique in the world, and was never given out before."""
    return claim_key(f"sglang-pd-{epoch:016x}-{secrets.token_hex(8)}")


def claim_key(key: str) -> str:
    """Mark a key as used. Raises `BackendError` for one that was used before: its queue pairs may be dead for ever."""
    if key in _used_keys:
        raise BackendError("an engine key is used once", where="engine key", expected="a new key", actual=key)
    _used_keys.add(key)
    return key


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(slots=True, eq=False)
class Call:
    """One `batch_write`. `failed` says why, once it has `finished` without success."""

    status: Any
    finished: bool = False
    failed: TransferError | None = None


@dataclass(slots=True)
class Blocks:
    """What one call moves: byte offsets in one local and one remote memory, and lengths in bytes, all of one length."""

    src_offsets: list[int]
    dst_offsets: list[int]
    lengths: list[int]


@dataclass(slots=True)
class Door:
    """The bytes that peers may always write to. Nobody reads them."""

    view: Any = field(default_factory=lambda: np.frombuffer(mmap.mmap(-1, DOOR_BYTES), np.uint8))

    def segment(self) -> Segment:
        """The door as a segment."""
        return Segment(address=int(self.view.ctypes.data), nbytes=DOOR_BYTES, device="cpu", keep_alive=self.view)


class EngineHost:
    """One engine of the library with its RDMA backend, and everything that must live as long as it does.

    dead: keys of remote engines with which a queue pair broke.
    contacted: (remote key, source segment, destination segment) of every pair of memories that was written once.
    condemned: why no success that the engine reports from now on can be believed, or None.
    """

    def __init__(self, library: Library, options: MoriOptions, epoch: int, port: int = 0) -> None:
        self._library = library
        self.key = fresh_key(epoch)
        self.dead: set[str] = set()
        self.contacted: set[tuple[str, int, int]] = set()
        self.condemned: PdError | None = None
        self.inside = 0
        self._lock = threading.Lock()
        self._open: set[Call] = set()
        self._failed: list[Any] = []
        self._lingering: deque[Any] = deque(maxlen=LINGERING)
        self._segments: list[Segment] = []
        self.memories: list[Any] = []
        self._engine: Any = self._start(options, port)
        self._door = Door()
        self.door = self._register(self._door.segment())

    def _start(self, options: MoriOptions, port: int) -> Any:
        api = self._library.api
        mode = api.PollCqMode.POLLING if options.poll_cq_mode == "polling" else api.PollCqMode.EVENT
        try:
            engine = api.IOEngine(self.key, api.IOEngineConfig(host=options.host, port=port))
            config = api.RdmaBackendConfig(
                qp_per_transfer=options.qp_per_transfer,
                num_worker_threads=options.num_worker_threads,
                poll_cq_mode=mode,
                enable_notification=False,
            )
            engine.create_backend(api.BackendType.RDMA, config)
            self.desc = engine.get_engine_desc()
        except Exception as error:
            raise BackendUnavailable(
                "the library cannot start its RDMA backend",
                where=f"{PACKAGE} on {options.host}",
                expected="an active RDMA device and a ROCm GPU",
                actual=_words(error),
            ) from error
        return engine

    # Memory and peers

    def register(self, segment: Segment) -> bytes:
        """Add a segment, numbered in order, and return its packed descriptor. Raises `BackendError`."""
        desc = self._register(segment)
        self.memories.append(desc)
        packed: bytes = desc.pack()
        return packed

    def _register(self, segment: Segment) -> Any:
        api = self._library.api
        on_host = segment.device == "cpu"
        where = api.MemoryLocationType.CPU if on_host else api.MemoryLocationType.GPU
        index = -1 if on_host else int(segment.device.partition(":")[2])
        try:
            desc = self._engine.register_memory(segment.address, segment.nbytes, index, where)
        except Exception as error:
            raise BackendError(
                "the library refuses the memory",
                code="memory_refused",
                where=f"{segment.nbytes} bytes on {segment.device}",
                actual=_words(error),
                backend="mori",
            ) from error
        self._segments.append(segment)
        return desc

    def pack(self) -> tuple[bytes, bytes]:
        """Packed descriptors of the engine and of its door."""
        return self.desc.pack(), self.door.pack()

    def add_peer(self, desc: Any) -> None:
        """Tell the library where a remote engine listens. Contacts nobody."""
        self._guarded("naming a peer", self._engine.register_remote_engine, desc)

    def drop_peer(self, desc: Any) -> None:
        """Let the library forget the address. Cancels nothing."""
        self._guarded("forgetting a peer", self._engine.deregister_remote_engine, desc)

    def _guarded(self, doing: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            words = f"mori: {_words(error)}"
            raise TransferError(words, code="transfer_unknown", where=doing, backend="mori") from None

    # Writing

    def post(self, local: Any, remote: Any, blocks: Blocks) -> Call:
        """Hand one piece to the library. May block for seconds; must not run in the owner's thread.

        Raises `TransferError`, before anything was handed over if this pair of memories had never been used.
        """
        counts = {len(blocks.src_offsets), len(blocks.dst_offsets), len(blocks.lengths)}
        if len(counts) != 1 or counts == {0}:
            # The library ends the process over this.
            raise TransferError("a piece's lists differ in length", code="internal", where="write", actual=counts)
        with self._lock:
            self.inside += 1
        try:
            lists = ([blocks.src_offsets], [remote], [blocks.dst_offsets], [blocks.lengths], [next(_uids)])
            statuses = self._guarded("writing to a peer", self._engine.batch_write, [local], *lists)
            call = Call(statuses[0])
            self._open.add(call)
        finally:
            with self._lock:
                self.inside -= 1
        self.check(call)
        return call

    def check(self, call: Call) -> bool:
        """Whether the call has finished; looks at its status once."""
        if call.finished:
            return True
        status = call.status
        # In this order: the library's threads move the status on between two looks, and a terminal one stays.
        if status.Init() or status.InProgress():
            return False
        if status.Succeeded():
            self._lingering.append(status)
        else:
            call.failed = TransferError(
                f"mori: {status.Code()}: {status.Message()}", code="transfer_unknown", where="write", backend="mori"
            )
            self._failed.append(status)
        call.finished = True
        call.status = None
        self._open.discard(call)
        return True

    def wait(self, call: Call, within_s: float) -> None:
        """Wait for a call to end, at most about `within_s` seconds, without keeping other threads from running."""
        began = time.monotonic()
        call.status.WaitFor(max(1, int(within_s * 1000)))
        if not self.check(call) and time.monotonic() - began < within_s / 2:
            time.sleep(within_s)  # a status that was not taken up yet returns at once

    def contacted_with(self, key: str) -> bool:
        """Whether anything was ever handed over for that remote engine."""
        return any(pair[0] == key for pair in list(self.contacted))

    def unfinished(self) -> int:
        """Calls whose status has not ended, those being handed over included."""
        return len(self._open) + self.inside

    def close(self) -> bool:
        """Destroy the engine; False where that is not safe: engine, statuses and memory are then kept for ever."""
        if self._engine is None:
            return True
        if self.unfinished() or self.condemned is not None:
            keep = (self._engine, self._open, self._failed, self._lingering, self._segments, self._door)
            if not _kept_for_ever:
                # Nor may the interpreter's own end destroy them.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept_for_ever))
            _kept_for_ever.append(keep)
            log.warning(
                "%d calls of engine %s did not end, or it lost track of one: it is kept for ever (%d such engines)",
                self.unfinished(),
                self.key,
                len(_kept_for_ever),
            )
            self._engine = None
            return False
        self._engine = None
        self._failed.clear()
        self._lingering.clear()
        return True


def unpack_engine(library: Library, packed: bytes, key: str) -> Any:
    """A peer's engine descriptor. Raises `BackendError` for one that does not unpack or has another key."""
    desc = _unpack(library.api.EngineDesc, packed)
    if desc.key != key:
        raise malformed("the engine's descriptor has another key", expected=key, actual=str(desc.key)[:200])
    return desc


def unpack_memory(library: Library, packed: bytes, key: str, segment: tuple[int, str]) -> Any:
    """A peer's memory descriptor; `segment`: length in bytes and device that it must have. Raises `BackendError`."""
    desc = _unpack(library.api.MemoryDesc, packed)
    wanted = library.api.MemoryLocationType.CPU if segment[1] == "cpu" else library.api.MemoryLocationType.GPU
    if desc.engine_key != key or desc.size != segment[0] or desc.loc != wanted:
        raise malformed(
            "a memory descriptor contradicts the segment table",
            expected=f"{segment[0]} bytes on {segment[1]} of {key}",
            actual=f"{desc.size} bytes, {desc.loc}, of {str(desc.engine_key)[:200]}",
        )
    return desc


def _unpack(kind: Any, packed: bytes) -> Any:
    try:
        return kind.unpack(packed)
    except Exception as error:
        raise malformed("the library cannot unpack a peer's descriptor", actual=_words(error)) from None
