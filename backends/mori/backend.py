"""The `mori` backend: AMD's MORI-IO over RDMA. Implemented against amd-mori 1.2.4; not yet run on AMD hardware.

What the package was measured to do, and what follows:

- Creating its backend can raise, hang, abort or `exit(-1)`. So a child process tries it first (`mori.probe`).
- `batch_write` blocks while it makes contact (5 s for a silent peer) and while the send queue is full, and
  `create_session` stops the whole interpreter meanwhile. So each peer has a thread, which uses `batch_write` alone.
- Statuses are borrowed by raw pointer, there is no cancel, and a pair of engines that failed once never works again:
  see `mori.library` and `mori.link`. Past the deadline, after `disconnect` and during `close` a status is still held.
- `alive()` and the library's list of lost peers say nothing about an idle peer. So an idle peer's door is written to.
- Its notifications stay off; there is no TCP transport, whatever its list of backends says.
- Each engine keeps one core busy, idle or not, in both of its polling modes.

Proofs. `fence(peer)` is True when every transfer ever posted to that incarnation is DONE or FAILED. A call that the
library ended with an error stays UNKNOWN, until this host's kernel shows that the peer's process is gone, if it is one
of this host and both sides' memory is the host's, see `mori.link`. `revoke` is always False: only the end of this
side's queue pairs or of its registrations would stop a writer, and the library reports neither. A destination that must
have its memory back ends its process.

`close` waits `drain_s` for unfinished calls. If one remains, engine, statuses and memory are kept for ever, on purpose
(`mori.library.leaked_engines` counts): destroying them then is what makes a later transfer succeed falsely.

A pair that broke while both processes live is rebuilt by `connect`: it takes another engine, with a new key; the broken
one goes when nobody uses it, except the first, which peers write to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sglang_pd.backends.base import (
    DEFAULT_DEADLINE_S,
    Backend,
    Capabilities,
    Connecting,
    Peer,
    Segment,
    Transfer,
    TransferState,
    check_batch,
)
from sglang_pd.backends.home import Home, keep_in_forks
from sglang_pd.backends.library.link import Work
from sglang_pd.backends.library.process import own_identity
from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.library.segments import Scope
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.mori import memory as mori_memory
from sglang_pd.backends.mori.blob import ENVELOPE, MAX_SEGMENTS, EngineBlob, SegmentEntry, decode_blob
from sglang_pd.backends.mori.library import (
    DOOR_BYTES,
    EngineHost,
    Library,
    installed_version,
    load_library,
    log,
    unpack_engine,
    unpack_memory,
)
from sglang_pd.backends.mori.link import Link, Owner, Remote
from sglang_pd.backends.mori.options import MoriOptions, check_environment, mori_settings, parse_options
from sglang_pd.backends.mori.pieces import pieces
from sglang_pd.backends.mori.probe import probe
from sglang_pd.protocol.batch import U64, WriteBatch
from sglang_pd.protocol.errors import BackendError, PdError, TransferError

VERIFIED_ON = {"rdma": "implemented against amd-mori 1.2.4; not yet run on AMD hardware"}
IDLE_REASON = "the library spins on one core for each engine, in both of its polling modes"
JOIN_S = 1.0
"""Seconds that a link's thread gets to end after its time to drain is over."""


def create(*, epoch: int, options: Mapping[str, Any]) -> MoriBackend:
    """Build the backend for the worker incarnation `epoch`; `options` as in `mori.options.MoriOptions`.

    Takes as long as the library needs to start twice, once in a child process. Raises `ConfigError` for an option or a
    `MORI_*` setting that is not acceptable, `BackendUnavailable` with what is missing or what the library did.
    """
    if not isinstance(epoch, int) or not 0 <= epoch < 1 << 64:
        raise BackendError("an epoch is an unsigned 64-bit number", where="create", actual=repr(epoch))
    parsed = parse_options(options)
    settings = mori_settings()
    check_environment(parsed, settings)
    version = installed_version(parsed)
    probe(parsed)
    return MoriBackend(epoch, parsed, load_library(version), settings)


class MoriPeer(Peer):
    """One incarnation of a remote `mori` backend."""

    def __init__(self, blob: EngineBlob, link: Link, home: int) -> None:
        self.epoch = blob.epoch
        self.home = home  # epoch of the backend whose peer it is
        self.segment_bytes = tuple(entry.nbytes for entry in blob.segments)
        self.transport = "rdma"
        self.link = link
        self.disconnected = False
        self.bytes: U64 = np.array(self.segment_bytes, np.uint64)
        self.host_only = all(entry.device == "cpu" for entry in blob.segments)

    @property
    def lost(self) -> PdError | None:
        """Why nothing more reaches the peer over this connection, or None."""
        return self.link.lost


class _FirstContact(Connecting):
    """The greeting that a link's thread writes to the peer's door."""

    def __init__(self, link: Link, hello: LibraryTransfer, peer: MoriPeer) -> None:
        self._link, self._hello, self._peer = link, hello, peer

    def poll(self) -> MoriPeer | None:
        """See `Connecting`."""
        self._link.home.check()
        state = self._hello.poll()
        if state in (TransferState.PENDING, TransferState.DONE):
            return self._peer if state is TransferState.DONE else None
        cause, remote = self._hello.error, self._link.remote
        self.cancel()
        raise TransferError(
            "nobody answers where the peer said it would be",
            code="peer_lost",
            where=f"connect, peer {remote.key} at {remote.engine.host} port {remote.engine.port}",
            actual=cause.message if cause else "",
            backend="mori",
        )

    def cancel(self) -> None:
        """See `Connecting`."""
        why = TransferError("the first contact failed", code="peer_lost", where=f"peer {self._link.remote.key}")
        self._link.stop(why)


class MoriBackend(Backend):
    """See the module. `settings`: the `MORI_*` environment settings in force, by name."""

    def __init__(self, epoch: int, options: MoriOptions, library: Library, settings: Mapping[str, str]) -> None:
        self._epoch, self._options, self._library = epoch, options, library
        self.settings = dict(settings)
        self._scope = Scope("mori", MAX_SEGMENTS)
        self._entries: list[SegmentEntry] = []
        self._links: list[Link] = []
        self._open: dict[int, set[LibraryTransfer]] = {}
        self._prover: mori_memory.Prover | None = None
        self._closed = False
        self._home = Home("the backend", "mori")
        keep_in_forks(self)
        # The first engine is the one that peers know; it lives as long as the backend.
        self._engines = [EngineHost(library, options, epoch, options.port)]
        self._replaced = 0
        self._news_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        log.info("amd-mori %s over rdma as %s; settings in force: %s", library.version, self._engines[0].key, settings)

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do here."""
        device = mori_memory.rocm_present()
        return Capabilities(
            name="mori",
            host_memory=True,
            device_memory=device,
            same_host_only=False,
            adopts_host=True,
            adopts_device=device,
            revoke_proof="none",
            revoke_scope="peer",
            revoke_within_s=0.0,
            verified_on=VERIFIED_ON,
            idle_cpu=1.0 * max(1, len(self._engines)),
            idle_reason=IDLE_REASON,
        )

    @property
    def epoch(self) -> int:
        """Random 64-bit identity of this incarnation."""
        return self._epoch

    # Memory

    def allocate(self, nbytes: int, device: str = "cpu") -> Segment:
        """Zeroed memory, page aligned on the host. Raises `BackendError` (`memory_refused`)."""
        self._check_open()
        return self._scope.admit(mori_memory.allocate(nbytes, device))

    def adopt(self, segment: Segment) -> Segment:
        """Accept memory of this process after one byte of it was really written out by the RDMA device."""
        self._check_open()
        mori_memory.check_adoptable(segment)
        if self._prover is None:
            self._prover = mori_memory.Prover(self._library, self._options, self._engines[0])
        try:
            self._prover.prove(segment)
        except PdError:
            self._end_prover()
            raise
        return self._scope.admit(segment)

    def _end_prover(self) -> None:
        if self._prover is not None:
            self._prover.close()
            self._prover = None

    def register(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """Number and register segments. Raises `BackendError` (`memory_refused`)."""
        self._check_open()
        self._end_prover()
        numbered = self._scope.number(segments)
        for segment in numbered:
            packed = self._engines[0].register(segment)
            for engine in self._engines[1:]:
                _register_further(engine, segment)
            self._entries.append(SegmentEntry(segment.nbytes, segment.device, packed))
            self._scope.commit((segment,))
        return numbered

    # Peers

    def describe(self) -> bytes:
        """The connect blob."""
        self._check_open()
        engine, door = self._engines[0].pack()
        return ENVELOPE.seal(
            EngineBlob(
                epoch=self._epoch,
                mori_version=self._library.version,
                key=self._engines[0].key,
                process=own_identity(),
                engine=engine,
                door=door,
                segments=self._entries,
            )
        )

    def connect(self, blob: bytes, epoch: int) -> MoriPeer:
        """Connect and write to the peer's door, within `connect_timeout_s`. Errors as in the contract."""
        peer = self.start_connect(blob, epoch).wait()
        assert isinstance(peer, MoriPeer)
        return peer

    def start_connect(self, blob: bytes, epoch: int) -> Connecting:
        """See `Backend`. The link's thread waits for the first contact."""
        self._check_open()
        body = decode_blob(blob, epoch=epoch, mori_version=self._library.version)
        if body.epoch == self._epoch:
            raise BackendError("a backend does not connect to itself", where="connect", actual=f"{epoch:#x}")
        remote = self._unpack(body)
        engine = self._engine_for(remote.key)
        engine.add_peer(remote.engine)
        link = Link(engine, remote, self._options, Owner(self._open.setdefault(epoch, set()), self._news))
        self._links.append(link)
        return _FirstContact(link, link.greet(self._options.connect_timeout_s), MoriPeer(body, link, self._epoch))

    def _unpack(self, body: EngineBlob) -> Remote:
        library, key = self._library, body.key
        memories = [unpack_memory(library, e.descriptor, key, (e.nbytes, e.device)) for e in body.segments]
        door = unpack_memory(library, body.door, key, (DOOR_BYTES, "cpu"))
        engine = unpack_engine(library, body.engine, key)
        return Remote(body.epoch, key, body.process, engine, door, tuple(memories))

    def _engine_for(self, key: str) -> EngineHost:
        """An engine whose pair with `key` is not dead; a new one where there is none."""
        self._reap()
        for engine in self._engines:
            if key not in engine.dead and engine.condemned is None:
                return engine
        if len(self._engines) >= self._options.max_engines:
            raise TransferError(
                "the pair of engines is dead, and no more engines may be made",
                where=f"connect, peer {key}",
                expected=f"fewer than {self._options.max_engines} engines ($.backend.options.max_engines)",
                actual=len(self._engines),
                backend="mori",
            )
        engine = EngineHost(self._library, self._options, self._epoch)
        for segment in self._scope.segments:
            engine.register(segment)
        self._engines.append(engine)
        self._replaced += 1
        log.warning("peer %s is connected anew over a new engine, %s", key, engine.key)
        return engine

    def _reap(self) -> None:
        """Forget links whose threads have ended, and destroy engines that nobody uses."""
        for link in [link for link in self._links if link.ended]:
            self._links.remove(link)
            if not any(other.engine is link.engine and other.remote.key == link.remote.key for other in self._links):
                _drop(link)
        connected = {link.remote.epoch for link in self._links}
        for epoch in [epoch for epoch, open_ in self._open.items() if not open_ and epoch not in connected]:
            del self._open[epoch]
        for engine in self._engines[1:]:
            if not any(link.engine is engine for link in self._links):
                self._engines.remove(engine)
                engine.close()

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer. Its thread goes on until every status has ended."""
        self._home.check()
        own = self._own(peer)
        if not own.disconnected:
            own.disconnected = True
            where = f"peer {own.link.remote.key}"
            own.link.stop(TransferError("the peer was disconnected", where=where, backend="mori"))
            self._reap()

    # Transfers

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        """Check the batch and give it to the peer's thread."""
        self._check_open()
        own = self._own(peer)
        if own.disconnected:
            raise BackendError("the peer was disconnected", where=f"write to peer {own.link.remote.key}")
        check_batch(batch, self._scope.side.nbytes, own.bytes, peer=f"{own.epoch:#x}")
        transfer = LibraryTransfer("mori", own.link.remote.key, batch.total_bytes, deadline_s)
        if not len(batch):
            transfer.settle(TransferState.DONE)
            return transfer
        open_ = self._open.setdefault(own.epoch, set())
        open_.add(transfer)
        try:
            # Both sides' bases are 0, so that offsets stand for addresses: the library knows memory by descriptor.
            rows = Rows.of(batch, np.zeros_like(self._scope.side.base), np.zeros_like(own.bytes))
            host_only = self._scope.side.host_only and own.host_only
            own.link.submit(Work(transfer, pieces(rows, self._options), host_only, after))
        except PdError:
            open_.discard(transfer)
            raise
        return transfer

    def fence(self, peer: Peer) -> bool:
        """True when every transfer ever posted to that incarnation is DONE or FAILED."""
        self._home.check()
        own = self._own(peer)
        own.link.prove()
        return all(transfer.final for transfer in list(self._open.get(own.epoch, ())))

    def revoke(self, epoch: int) -> bool:
        """Always False: there is no proof (`Capabilities.revoke_proof` is `none`)."""
        self._home.check()
        return False

    def admit(self, epoch: int, blob: bytes) -> None:
        """See `Backend`. Nothing was ever proven that this could end."""
        self._home.check()

    def progress(self) -> None:
        """Clear the wake-up; forget what has ended. The library advances by itself."""
        if self._closed:
            return  # the descriptor's number may be somebody else's
        self._home.check()
        try:
            os.eventfd_read(self._news_fd)
        except BlockingIOError:
            pass
        if any(link.ended for link in self._links):
            self._reap()

    @property
    def engines_replaced(self) -> int:
        """See `Backend`: one for each pair of engines that broke and was connected again."""
        return self._replaced

    def wakeup_fd(self) -> int | None:
        """Readable when a transfer or a peer may have news."""
        if self._closed:
            return None
        self._home.check()
        return self._news_fd

    def _news(self) -> None:
        try:
            os.eventfd_write(self._news_fd, 1)
        except BlockingIOError:
            pass  # readable already

    # The end

    def close(self) -> None:
        """Stop, wait at most `drain_s` for unfinished calls, destroy the engines or keep them for ever. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._home.here:  # engines, statuses and links are the parent's
            os.close(self._news_fd)
            return
        until = time.monotonic() + self._options.drain_s
        closed = TransferError("the backend was closed", code="transfer_unknown", where="close", backend="mori")
        for link in self._links:
            link.stop(closed, until)
        joined = sum(link.join(until + JOIN_S) for link in self._links) == len(self._links)
        for open_ in self._open.values():
            for transfer in list(open_):
                transfer.settle(TransferState.UNKNOWN, closed)
        self._end_prover()
        for engine in self._engines:
            engine.close()
        self._engines, self._links = [], []
        self._scope.clear()
        if joined:
            os.close(self._news_fd)  # a thread that is left behind may still write to it

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the backend is closed", where="mori")
        self._home.check()

    def _own(self, peer: Peer) -> MoriPeer:
        if not isinstance(peer, MoriPeer) or peer.home != self._epoch:
            raise BackendError("a peer of another backend", where="mori", actual=type(peer).__name__)
        return peer


def _drop(link: Link) -> None:
    try:
        link.engine.drop_peer(link.remote.engine)
    except TransferError as error:
        log.warning("peer %s is not forgotten by the library: %s", link.remote.key, error)


def _register_further(engine: EngineHost, segment: Segment) -> None:
    try:
        engine.register(segment)
    except BackendError as error:
        engine.condemned = error  # its numbers no longer agree with ours
