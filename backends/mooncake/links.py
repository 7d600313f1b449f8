"""The engines that write, and how a peer is reached, verified and, after a failure, reached anew.

The library caches what a session looked like at first contact and never asks again, and a queue that was overrun stays
broken for its peer. So a session that now belongs to another incarnation, and a peer after any failure, get a fresh
engine; who answers there is read through the library itself: the peer's identity page. Engines that write hold no
memory that peers could write to (over TCP; an RDMA engine must register what it sends).
"""

from __future__ import annotations

import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from sglang_pd.backends.mooncake import cuda as mooncake_cuda
from sglang_pd.backends.mooncake.blob import IDENTITY_BYTES, Blob, identity_bytes
from sglang_pd.backends.mooncake.engine import Engine
from sglang_pd.backends.mooncake.library import Library
from sglang_pd.backends.mooncake.options import MooncakeOptions
from sglang_pd.backends.mooncake.transfer import MooncakePeer, Outbound
from sglang_pd.backends.shortage import in_words, is_shortage, no_descriptor, start_thread
from sglang_pd.protocol.errors import BackendUnavailable, PdError, TransferError

FORGOTTEN_SESSIONS = 32
"""After so many peers have gone, an engine takes no new ones: their sockets stay with it until it ends."""

VERIFY_FAILURES = 3
"""So often the library at a peer's address may fail to answer, or its identity page to be read, before it is lost."""

_LONGEST_VERIFY_PAUSE_S = 15.0
_END_AGAIN_S = 0.5

_LOG = logging.getLogger(__name__)


class IdentityPage:
    """32 bytes that say who we are, where the transport can read them; or room to read somebody's."""

    def __init__(self, transport: str) -> None:
        self.device = mooncake_cuda.current_device() if transport == "nvlink_intra" else "cpu"
        if self.device == "cpu":
            self._view = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE), np.uint8)
            self.address = int(self._view.ctypes.data)
        else:
            self._segment = mooncake_cuda.allocate(mmap.PAGESIZE, self.device)
            self.address = self._segment.address
        self.nbytes = mmap.PAGESIZE

    def write(self, data: bytes) -> None:
        """Store `data` at the page's start."""
        if self.device == "cpu":
            self._view[: len(data)] = np.frombuffer(data, np.uint8)
        else:
            mooncake_cuda.write(self.address, data)

    def read(self) -> bytes:
        """The page's first `IDENTITY_BYTES`."""
        if self.device == "cpu":
            return self._view[:IDENTITY_BYTES].tobytes()
        return mooncake_cuda.read(self.address, IDENTITY_BYTES)

    def release(self) -> None:
        """Give the page back."""
        if self.device != "cpu":
            mooncake_cuda.free(self._segment)


class Links:
    """All engines that write. Slow work runs on threads of its own; `_lock` guards the tables alone."""

    def __init__(
        self, library: Library, options: MooncakeOptions, sources: Callable[[], tuple[list[int], list[int]]]
    ) -> None:
        """`sources` gives addresses and lengths of the memory to send from, for transports that must register it.

        at_pump: runs an action where nothing is submitted meanwhile. ended: told, there, of an engine that has ended.
        Both are set before the first peer.
        """
        self.at_pump: Callable[[Callable[[], None]], None] = lambda action: action()
        self.ended: Callable[[Outbound], None] = lambda outbound: None
        self._library = library
        self._options = options
        self._sources = sources
        self._lock = threading.Lock()
        self._all: list[Outbound] = []
        self._current: Outbound | None = None
        self._threads: set[threading.Thread] = set()
        self._starting = threading.Lock()
        self._closed = False
        self._closing = threading.Event()
        self._runs_on = False
        self._burnt: list[IdentityPage] = []
        self.rebuilds = 0

    # reaching

    def reach(self, blob: Blob) -> Outbound:
        """An engine whose session to the peer is fresh and whose identity was read. Waits for the library.

        It is held until `join` or `abandon`.

        Raises `TransferError` (`peer_lost`) where nobody answers, (`epoch_stale`) where somebody else does, and
        `BackendUnavailable` where this process has no descriptor to ask with.
        """
        self._answers(blob)
        outbound = self._engine_for(blob)
        try:
            self._identify(outbound, blob)
        except BaseException:
            self.abandon(outbound)
            raise
        return outbound

    def join(self, outbound: Outbound, peer: MooncakePeer) -> None:
        """Count `peer` as one of the engine's, after `reach`."""
        with self._lock:
            outbound.peers[peer.number] = peer
            outbound.holds -= 1
        if outbound.unproven:
            self.reap()

    def abandon(self, outbound: Outbound) -> None:
        """Nobody will `join` after `reach`."""
        with self._lock:
            outbound.holds -= 1
        self.reap()

    def leave(self, peer: MooncakePeer) -> None:
        """The peer is gone from its engine; an engine without peers ends when its last submission has."""
        with self._lock:
            self._remove(peer)
        self.reap()

    def _remove(self, peer: MooncakePeer) -> None:
        outbound = peer.outbound
        if outbound.peers.pop(peer.number, None) is not None:
            outbound.forgotten += 1
            if outbound.forgotten >= FORGOTTEN_SESSIONS and outbound is self._current:
                self._current = None

    def _answers(self, blob: Blob) -> None:
        host, _, port = blob.session.rpartition(":")
        try:
            socket.create_connection((host, int(port)), self._options.connect_timeout_s).close()
        except OSError as error:
            where = f"mooncake, {blob.session}"
            if is_shortage(error):
                raise no_descriptor(error, where) from error
            raise TransferError("nobody answers", code="peer_lost", where=where, actual=error) from error
        code = self._any_engine().probe(blob.session)
        if code != 0:
            raise TransferError(
                "the library at the other end does not answer",
                code="peer_lost",
                where=f"mooncake, {blob.session}",
                expected=0,
                actual=code,
            )

    def _identify(self, outbound: Outbound, blob: Blob) -> None:
        page = IdentityPage(self._options.transport)
        if self._options.transport == "rdma":
            outbound.engine.register([page.address], [page.nbytes], remote=False)
        if not outbound.engine.read(blob.session, page.address, blob.identity_address, IDENTITY_BYTES):
            self._burnt.append(page)  # the answer may still come, so the page is never used again
            raise TransferError(
                "the peer's identity page cannot be read", code="peer_lost", where=f"mooncake, {blob.session}"
            )
        found = page.read()
        if self._options.transport == "rdma":
            outbound.engine.unregister([page.address])
        page.release()
        if found != identity_bytes(blob.epoch, blob.generation):
            raise TransferError(
                "another process, or another engine of that worker, answers at the peer's address",
                code="epoch_stale",
                where=f"mooncake, {blob.session}",
                expected=f"epoch {blob.epoch:#x}, generation {blob.generation}",
                actual=found.hex(),
            )

    # engines

    def _any_engine(self) -> Engine:
        with self._lock:
            return (self._current or self._fresh()).engine

    def _engine_for(self, blob: Blob) -> Outbound:
        mark = (blob.epoch, blob.generation)
        with self._lock:
            current = self._current or self._fresh()
            if current.sessions.get(blob.session, mark) != mark:
                current = self._fresh()
            current.sessions[blob.session] = mark
            current.holds += 1
            return current

    def _fresh(self) -> Outbound:
        if self._closed:
            raise TransferError("the backend is closed", where="mooncake")
        engine = Engine(self._library, self._options)
        if self._options.transport == "rdma":
            addresses, sizes = self._sources()
            engine.register(addresses, sizes, remote=False)
        self._current = Outbound(engine)
        self._all.append(self._current)
        return self._current

    def reap(self) -> None:
        """End engines that nobody uses, off this thread; see to it that nobody uses one with unproven transfers."""
        self._clear_spoiled()
        with self._lock:
            idle = [one for one in self._all if not (one.peers or one.flights or one.holds)]
            unused = [one for one in idle if one is not self._current]
            self._all = [one for one in self._all if one not in unused]
        for one in unused:
            try:
                self._spawn(lambda one=one: self._end(one))  # type: ignore[misc]
            except BackendUnavailable:  # another time
                with self._lock:
                    self._all.append(one)

    def _end(self, outbound: Outbound) -> None:
        while not self._stopped(outbound.engine):
            if self._closing.wait(_END_AGAIN_S):
                self._runs_on = True
                return
        # Over a socket nobody reads the source but the engine's own threads, which are joined; a NIC or a GPU might.
        if self._options.transport == "tcp" and outbound.unproven:
            self.at_pump(lambda: self.ended(outbound))

    @staticmethod
    def _stopped(engine: Engine) -> bool:
        try:
            return engine.stop(5.0)
        except OSError:  # no descriptor to look with
            return False

    # leaving an engine that may still read what it should not

    def _clear_spoiled(self) -> None:
        """Take the peers off engines with unproven transfers: who is gone at once, who is healthy by way of another."""
        with self._lock:
            spoiled = [one for one in self._all if one.unproven]
            if self._current in spoiled:
                self._current = None
            moving = []
            for peer in [peer for one in spoiled for peer in one.peers.values()]:
                if peer.found_lost is not None or not peer.connected:
                    self._remove(peer)
                elif not (peer.suspect or peer.moving):
                    peer.moving = True
                    moving.append(peer)
        for peer in moving:
            try:
                self._spawn(lambda peer=peer: self._move(peer))  # type: ignore[misc]
            except BackendUnavailable:  # another time
                peer.moving = False

    def _move(self, peer: MooncakePeer) -> None:
        """Have a healthy peer write through another engine. It goes on writing meanwhile."""
        pause_s = 0.5
        while peer.connected and peer.found_lost is None and not peer.suspect:
            try:
                outbound = self.reach(peer.blob)
            except Exception as error:
                if _is_final(error):
                    peer.lose(in_words(error, f"mooncake, {peer.label}"))
                    self.reap()
                    return
                _LOG.info("%s stays with its engine for now: %s: %s", peer.label, type(error).__name__, error)
                if self._closing.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, _LONGEST_VERIFY_PAUSE_S)
            else:
                self.at_pump(partial(self._moved, peer, outbound))
                return
        peer.moving = False

    def _moved(self, peer: MooncakePeer, outbound: Outbound) -> None:
        """Nothing is submitted at this moment."""
        peer.moving = False
        with self._lock:
            outbound.holds -= 1
            if peer.connected and peer.found_lost is None and not peer.suspect:
                peer.outbound.peers.pop(peer.number, None)
                peer.outbound = outbound
                outbound.peers[peer.number] = peer
        self.reap()

    # verifying

    def verify(self, peer: MooncakePeer, settled: Callable[[], None]) -> None:
        """Find out, on a thread of its own, whether `peer` is still the one it was; `settled` is called at the end.

        Afterwards the peer writes through a fresh engine, or is lost, or, where nobody can tell yet, is asked again
        later (`verify_at`).
        """
        self._spawn(lambda: self._verify(peer, settled))

    def _verify(self, peer: MooncakePeer, settled: Callable[[], None]) -> None:
        try:
            self._answers(peer.blob)
            with self._lock:
                fresh = self._fresh()
                fresh.sessions[peer.blob.session] = (peer.blob.epoch, peer.blob.generation)
                fresh.holds += 1
                self.rebuilds += 1
            self._identify_held(fresh, peer)
        except Exception as error:  # whatever it is: nobody else would ever ask after this peer
            if self._closed:
                return
            peer.verify_failures += not isinstance(error.__cause__ or error, OSError)
            if not (_is_final(error) or peer.verify_failures >= VERIFY_FAILURES):
                _LOG.info("%s is asked again who it is: %s: %s", peer.label, type(error).__name__, error)
                peer.verify_at = time.monotonic() + peer.verify_pause_s
                peer.verify_pause_s = min(2 * peer.verify_pause_s, _LONGEST_VERIFY_PAUSE_S)
                return
            peer.lose(in_words(error, f"mooncake, {peer.label}"))
        else:
            peer.verify_pause_s, peer.verify_failures = 0.5, 0
        self.reap()
        settled()

    def _identify_held(self, fresh: Outbound, peer: MooncakePeer) -> None:
        """Move the peer to a fresh engine if it is still who it was."""
        same = False
        try:
            self._identify(fresh, peer.blob)
            same = True
        finally:
            with self._lock:
                fresh.holds -= 1
                if same:
                    peer.outbound.peers.pop(peer.number, None)
                    peer.outbound = fresh
                    if peer.connected:
                        fresh.peers[peer.number] = peer

    def _spawn(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._starting:  # not before it was added
                    self._threads.discard(threading.current_thread())

        with self._starting:
            self._threads.add(start_thread(run, "sglang-pd-mooncake-link", "mooncake"))

    # the end

    def close(self, within_s: float) -> bool:
        """End every engine. True when all are proven gone. Call after the pump has stopped."""
        with self._lock:
            self._closed = True
            self._closing.set()
            engines = [one.engine for one in self._all]
            self._all.clear()
            self._current = None
        ends = time.monotonic() + within_s
        for thread in list(self._threads):
            thread.join(max(0.0, ends - time.monotonic()))
        gone = [engine.stop(max(0.1, ends - time.monotonic())) for engine in engines]
        return all(gone) and not self._threads and not self._runs_on


def _is_final(error: Exception) -> bool:
    """Whether an error proves that the peer is gone: its port is closed, or somebody else is there."""
    stale = isinstance(error, PdError) and error.code == "epoch_stale"
    return stale or isinstance(error.__cause__, ConnectionRefusedError)
