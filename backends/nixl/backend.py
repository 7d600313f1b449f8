"""The `nixl` backend: the real nixl package, its UCX plugin by default.

One thread of ours drives the library's agent (`nixl.engine`); the owner of the backend never waits for it but in
`register`, `adopt` and `connect`. What the library was measured to do, and what follows:

- `transfer()` copies in the calling thread where UCX uses CMA. So it is called in our thread, piece by piece; a small
  write to an idle peer is called in the owner's, since to change threads takes longer than the copy.
- A handle that ended well, polled to its end, is the only sign of DONE. Releasing a handle does not cancel it, so none
  is released before it has ended, and one past its deadline is polled on: UNKNOWN may still become DONE.
- A transfer that the library ended with an error is UNKNOWN, whatever the error says; a lost connection included, since
  bytes may wait in the peer's sockets. It becomes FAILED when the kernel shows that the peer's process has exited (a
  pidfd; same host and PID namespace, host memory on both sides). A transfer of which nothing was handed over, or
  whose every piece that was handed over ended well, needs no such proof.
  Nor does one to a peer that both sides reach by CMA alone, once the library has closed the connection: what this
  process copies with its own system calls waits nowhere.
- To make a peer known is to connect to it, in the calling thread, for minutes where nothing answers there. So its
  addresses, which its blob states, are tried before (`nixl.reach`).
- Deregistering revokes nothing (bytes still land, and over TCP a target that also freed the memory dies). So segments
  stay registered until `close`, and `revoke` closes this side's whole agent and builds another one.

What `revoke(epoch)` proves: the destination's agent has been destroyed, with every socket that held bytes of that epoch
(`engine_closed`; it costs every connection, `describe` has changed and peers connect anew, outgoing ones too). That
stops UCX over TCP. It does not stop a writer on this host that uses CMA, since that copies with its own system calls:
where CMA is possible the answer is True only once the kernel also shows that each process that called itself `epoch`
has exited. `admit` tells which process that is, from the writer's own blob: its greeting comes over the library and may
never arrive. While such a process lives, closing the agent would prove nothing and take from that writer the only
proof there is, its own `fence`, since what it has in flight would end in an error, UNKNOWN for ever. So the agent is
left alone then, and closed when every such process has exited; at once where none can reach this memory by CMA, or
where no process is known of that epoch (which proves nothing over CMA). There is no proof for device memory, RDMA and
LIBFABRIC: `capabilities` says `none` where those are possible.
An epoch that is given the new blob is admitted anew (`admit`), and the proof of before covers it no longer.

Environment: `UCX_*` and `NIXL_*` are read and reported, never set. A process that has loaded UCX may die with SIGSEGV
at interpreter exit (its libraries' finalisers): programs should flush and end with `os._exit`; this library never does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from sglang_pd.backends.base import (
    DEFAULT_DEADLINE_S,
    Backend,
    Capabilities,
    Peer,
    Segment,
    Transfer,
    TransferState,
    check_batch,
)
from sglang_pd.backends.home import Home, keep_in_forks
from sglang_pd.backends.library.blob import SegmentEntry
from sglang_pd.backends.library.connect import ThreadedConnecting
from sglang_pd.backends.library.link import Work
from sglang_pd.backends.library.lives import lives
from sglang_pd.backends.library.process import ProcessIdentity, elsewhere, same_host, same_pid_namespace
from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.library.segments import Scope, refused
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.nixl import memory as nixl_memory
from sglang_pd.backends.nixl.blob import ENVELOPE, MAX_SEGMENTS, AgentBlob, decode_blob
from sglang_pd.backends.nixl.engine import Engine
from sglang_pd.backends.nixl.library import Library, load_library, log
from sglang_pd.backends.nixl.link import Link, NixlWork
from sglang_pd.backends.nixl.options import (
    NixlOptions,
    check_environment,
    may_use_rdma,
    parse_options,
    rdma_devices,
    settings_digest,
    ucx_settings,
)
from sglang_pd.backends.nixl.pieces import Bounds, bounds, cut, pieces, single_piece
from sglang_pd.backends.nixl.probe import Probe, Transports
from sglang_pd.backends.nixl.reach import ANSWER_S, check_answers
from sglang_pd.backends.sides import Side
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.errors import BackendError, PdError

IDLE_CPU = 0.02
REVOKE_WITHIN_S = 5.0
SMALL_BYTES, SMALL_ROWS = 256 << 10, 64
"""What the owner may post itself: copied in about 0.1 ms where the copy happens in the call (CMA, 2.5 GB/s)."""
VERIFIED_ON = {
    "cma": "nixl 1.5.1 (UCX 1.23), host memory, two-core AMD EPYC machine",
    "tcp": "nixl 1.5.1 (UCX 1.23), host memory, loopback, two-core AMD EPYC machine",
    "cuda_ipc": "two H200s of one host over NVLink, nixl 1.5.1, 2026-11-30",
    "rdma": "not yet run on an RDMA NIC",
    "libfabric": "not yet run",
}

_found: dict[tuple[int, str, tuple[str, ...]], Transports] = {}


def create(*, epoch: int, options: Mapping[str, Any]) -> NixlBackend:
    """Build the backend for the worker incarnation `epoch`; `options` as in `nixl.options.NixlOptions`.

    Takes a second or two: a child process finds out which transport UCX uses here. Raises `ConfigError` for an option
    or a `UCX_*` setting that cannot work, `BackendUnavailable` naming the package or library file that is missing.
    """
    if not isinstance(epoch, int) or not 0 <= epoch < 1 << 64:
        raise BackendError("an epoch is an unsigned 64-bit number", where="create", actual=repr(epoch))
    parsed = parse_options(options)
    settings = ucx_settings()
    check_environment(parsed, settings, rdma_devices())
    lives.check_kept()
    return NixlBackend(epoch, parsed, settings, load_library(parsed))


class NixlPeer(Peer):
    """One incarnation of a remote `nixl` backend."""

    def __init__(self, link: Link, transport: str, home: int, most: Bounds) -> None:
        self.home = home  # epoch of the backend whose peer it is
        self.most = most
        self.epoch = link.blob.epoch
        self.segment_bytes = tuple(entry.nbytes for entry in link.blob.segments)
        self.transport = transport
        self.link = link
        self.disconnected = False
        self.side = Side(link.blob.segments)

    @property
    def lost(self) -> PdError | None:
        """Why the peer is known to be gone, or None."""
        return self.link.lost


class NixlBackend(Backend):
    """See the module. `settings`: the `UCX_*` and `NIXL_*` environment settings in force, by name."""

    def __init__(self, epoch: int, options: NixlOptions, settings: Mapping[str, str], library: Library) -> None:
        self._epoch, self._options, self._library = epoch, options, library
        self.settings = dict(settings)
        self._digest = settings_digest(options, settings)
        self._scope = Scope("nixl", MAX_SEGMENTS)
        self._device = options.device_memory and nixl_memory.cuda_present()
        self._closed = False
        self._home = Home("the backend", "nixl")
        keep_in_forks(self)
        probe = None if self._key(()) in _found else Probe(library.package, options)
        self._engine = Engine(library, options, epoch)
        try:
            self._engine.call(self._engine.start)
        except PdError:
            self._engine.stop()
            raise
        if probe is not None:
            _found[self._key(())] = probe.result()
        self._host = _found[self._key(())]
        if self._host.failure and options.plugin == "UCX":
            log.warning("the transport in use could not be found out: %s", self._host.failure)
        log.info(
            "nixl %s (%s) over %s; settings in force: %s", library.version, library.package, self.transport(), settings
        )

    def _key(self, devices: tuple[str, ...]) -> tuple[int, str, tuple[str, ...]]:
        return self._digest, self._library.package, devices

    def transport(self) -> str:
        """What UCX uses for host memory between two processes of this host; for LIBFABRIC the plugin's name."""
        return self._host.name("cpu", "cpu") if self._options.plugin == "UCX" else self._options.plugin.lower()

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do here, with these options."""
        spins = self._options.progress_thread
        device = self._device
        return Capabilities(
            name="nixl",
            host_memory=True,
            device_memory=device,
            same_host_only=False,
            adopts_host=True,
            adopts_device=device,
            revoke_proof=self._proof(),
            revoke_scope="backend",
            revoke_within_s=REVOKE_WITHIN_S,
            verified_on=VERIFIED_ON,
            idle_cpu=1.0 if spins else IDLE_CPU,
            idle_reason="the library's progress thread spins (option progress_thread)" if spins else "",
        )

    def _proof(self) -> Literal["engine_closed", "none"]:
        if self._options.plugin != "UCX" or may_use_rdma(self._options, self.settings, rdma_devices()):
            return "none"
        return "none" if self._device else "engine_closed"

    @property
    def epoch(self) -> int:
        """Random 64-bit identity of this incarnation."""
        return self._epoch

    # Memory

    def allocate(self, nbytes: int, device: str = "cpu") -> Segment:
        """Zeroed memory, page aligned on the host. Raises `BackendError` (`memory_refused`)."""
        self._check_open()
        self._check_device(nbytes, device)
        return self._scope.admit(nixl_memory.allocate(nbytes, device))

    def adopt(self, segment: Segment) -> Segment:
        """Accept host memory mapped for reading and writing, or cudaMalloc memory, after a real registration."""
        self._check_open()
        self._check_device(segment.nbytes, segment.device)
        nixl_memory.check_adoptable(segment)
        entry = _entry(segment)
        self._engine.call(lambda: self._engine.probe(entry))
        return self._scope.admit(segment)

    def register(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """Number and register the segments, kept until `close`. Raises `BackendError` (`memory_refused`)."""
        self._check_open()
        numbered = self._scope.number(segments)
        self._engine.call(lambda: self._engine.register([_entry(one) for one in numbered]))
        self._scope.commit(numbered)
        return numbered

    # Peers

    def describe(self) -> bytes:
        """The connect blob, another one whenever `revoke` closed the agent. Waits for nothing.

        Raises `BackendUnavailable` while the agent is being rebuilt, or why it could not be yet.
        """
        self._check_open()
        described = self._engine.describe()
        return ENVELOPE.seal(
            AgentBlob(
                epoch=self._epoch,
                agent=described.name,
                nixl_version=self._library.version,
                plugin=self._options.plugin,
                settings=self._digest,
                process=self._engine.process,
                host_paths=list(self._host.paths.get(("cpu", "cpu"), ())),
                segments=[_entry(one) for one in self._scope.segments],
                listens=described.listens,
                metadata=described.metadata,
            )
        )

    def connect(self, blob: bytes, epoch: int) -> Peer:
        """Connect to an incarnation; starts wiring up and waits only for what has to be found out first.

        Raises `BackendError` for a blob of another backend, version or epoch, and for device memory that would travel
        over TCP; `TransferError` (`peer_lost`) when there is nobody.
        """
        return self.start_connect(blob, epoch).wait()

    def start_connect(self, blob: bytes, epoch: int) -> ThreadedConnecting[tuple[Link, str]]:
        """See `Backend`. To find out the transport to a peer elsewhere, or to a device, takes a child that loads UCX:
        seconds, with a device sometimes half a minute."""
        self._check_open()
        body = self._decode(blob, epoch)
        if body.epoch == self._epoch:
            raise BackendError("a backend does not connect to itself", where=f"peer {body.agent}")

        def reach() -> tuple[Link, str]:
            self._check_answers(body)
            transport = self._transport_to(body)
            self._check_answers(body)  # that may have taken half a minute
            direct = self._writes_itself(body)
            return self._engine.call(lambda: self._engine.connect(body, direct=direct)), transport

        def leave(found: tuple[Link, str]) -> None:
            if not self._closed:
                with contextlib.suppress(PdError):  # it is being closed
                    self._engine.order(lambda: self._engine.disconnect(found[0]))

        def finish(found: tuple[Link, str]) -> NixlPeer:
            return NixlPeer(*found, self._epoch, bounds(self._options, direct=found[0].direct))

        return ThreadedConnecting(reach, finish, leave, self._engine.tell).start("sglang-pd-nixl-connect")

    def _check_answers(self, body: AgentBlob) -> None:
        """Refuse (`peer_lost`) a peer at whose addresses nobody answers. Where RDMA is possible UCX may need none."""
        if self._options.plugin == "UCX" and not may_use_rdma(self._options, self.settings, rdma_devices()):
            check_answers(body.listens, body.agent, ANSWER_S)

    def _decode(self, blob: bytes, epoch: int) -> AgentBlob:
        return decode_blob(blob, epoch=epoch, nixl_version=self._library.version, plugin=self._options.plugin)

    def _transport_to(self, body: AgentBlob) -> str:
        """The transports of writes to that peer. Refuses TCP, or the unknown, for device memory."""
        if self._options.plugin != "UCX":
            found = Transports(failure="the plugin does not tell")
        elif same_host(body.process) and body.settings == self._digest:
            found = self._host
        else:
            # What was found on this host with these settings does not hold there: ask UCX about that very peer.
            found = Probe(self._library.package, self._options, metadata=body.metadata).result()
        src = sorted({one for one in self._scope.side.devices if one != "cpu"})
        dst = sorted({one.device for one in body.segments if one.device != "cpu"})
        if not src and not dst:
            return found.name("cpu", "cpu") if self._options.plugin == "UCX" else self._options.plugin.lower()
        if found is self._host:
            found = self._device_transports((*src[:1], *dst[-1:]))
        pair = ("cuda" if src else "cpu", "cuda" if dst else "cpu")
        if not found.verified_without_tcp(*pair) and not self._options.allow_tcp_for_device:
            raise BackendError(
                "device memory would travel over TCP, or over a transport that could not be found out",
                where=f"connect, peer {body.agent}, {pair[0]} to {pair[1]}",
                expected="a transport of the device (cuda_ipc, an RDMA device)",
                actual=found.name(*pair) if not found.failure else found.failure[:200],
                hint="Set $.backend.options.allow_tcp_for_device to true to accept it; UCX_TLS is in the details.",
                ucx_tls=self.settings.get("UCX_TLS", "unset"),
            )
        return found.name(*pair)

    def _writes_itself(self, body: AgentBlob) -> bool:
        """Whether this process writes to that peer with its own system calls alone, so that nothing waits anywhere."""
        own, theirs = self._host.paths.get(("cpu", "cpu"), ()), tuple(body.host_paths)
        alike = own == theirs == ("cma",) and body.settings == self._digest and same_pid_namespace(body.process)
        host_only = not self._device and all(one.device == "cpu" for one in body.segments)
        own_thread = not (self._options.num_threads or self._options.progress_thread)
        return alike and host_only and own_thread

    def _device_transports(self, devices: tuple[str, ...]) -> Transports:
        if self._key(devices) not in _found:
            _found[self._key(devices)] = Probe(self._library.package, self._options, devices=devices).result()
        return _found[self._key(devices)]

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer. What is in flight to it is polled to its end all the same. Idempotent."""
        self._home.check()
        mine = self._mine(peer)
        if not mine.disconnected and not self._closed:
            mine.disconnected = True
            self._engine.order(lambda: self._engine.disconnect(mine.link))

    # Transfers

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        """Start copying the batch. Raises `BackendError` (`segment_invalid`) for a range outside its segment."""
        self._check_open()
        mine = self._mine(peer)
        link = mine.link
        limit = self._options.max_deadline_s
        work = self._work(batch, mine, deadline_s if limit is None else min(deadline_s, limit))
        work.after = after
        transfer = work.transfer
        small = work.host_only and after is None and transfer.nbytes <= SMALL_BYTES and len(batch) <= SMALL_ROWS
        if transfer.nbytes == 0:
            transfer.settle(TransferState.DONE)
        elif link.lost is not None or mine.disconnected:
            lost = link.lost or BackendError("the peer was disconnected here", code="peer_lost", where=link.name)
            transfer.settle(TransferState.FAILED, lost)
        else:
            self._engine.submit(link, work, small=small)
        return transfer

    def _work(self, batch: WriteBatch, peer: NixlPeer, deadline_s: float) -> NixlWork:
        """The checked batch. Raises `BackendError` (`segment_invalid`)."""
        own, there, name = self._scope.side, peer.side, peer.link.name
        host_only = own.host_only and there.host_only
        most = peer.most
        piece = single_piece(batch, own, there)
        if piece is not None:
            transfer = LibraryTransfer("nixl", name, batch.total_bytes, deadline_s)
            return Work(transfer, cut(piece, most.nbytes), host_only)
        check_batch(batch, own.nbytes, there.nbytes, peer=name)
        transfer = LibraryTransfer("nixl", name, batch.total_bytes, deadline_s)
        rows = Rows.of(batch, own.base, there.base)
        return Work(transfer, pieces(rows, own, there, most), host_only)

    def fence(self, peer: Peer) -> bool:
        """True when every transfer to the peer is DONE or FAILED."""
        self._home.check()
        return not self._mine(peer).link.open

    def revoke(self, epoch: int) -> bool:
        """Close this side's agent for the sake of `epoch`; see the module for when, and for what that proves."""
        self._check_open()
        if self._proof() == "none":
            return False
        cma, writers = self._cma_possible(), self._engine.writers
        if cma and writers.live(epoch, self._reaches_by_cma):
            self._engine.keep(epoch)
            return False
        return self._engine.revoke(epoch) and (not cma or writers.gone(epoch, self._reaches_by_cma))

    def admit(self, epoch: int, blob: bytes) -> None:
        """See `Backend`. The blob names the process that must have exited before `revoke` is True (CMA)."""
        self._home.check()
        process = self._decode(blob, epoch).process
        if self._cma_possible():
            lives.check_pid("nixl over CMA")  # a thread that began since
            lives.keep_pid()
        self._engine.admit(epoch, process)

    def _cma_possible(self) -> bool:
        """Whether a process of this host could write here without going through our agent."""
        used = self._host.paths.get(("cpu", "cpu"))
        return used is None or any(not name.startswith("tcp") for name in used)

    @staticmethod
    def _reaches_by_cma(process: ProcessIdentity) -> bool:
        return not elsewhere(process)

    def progress(self) -> None:
        """Make `wakeup_fd` quiet again; the library advances in its own thread."""
        if self._closed:
            return
        self._home.check()
        try:
            os.eventfd_read(self._engine.news_fd)
        except BlockingIOError:
            pass

    @property
    def engines_replaced(self) -> int:
        """See `Backend`: every `revoke` closes the agent and builds another."""
        return self._engine.rebuilds

    def wakeup_fd(self) -> int | None:
        """Readable when a transfer or a peer may have news; `progress` makes it quiet."""
        if self._closed:
            return None
        self._home.check()
        return self._engine.news_fd

    def close(self) -> None:
        """Close the agent, join the thread, let go of the memory. Have peers fenced before: a writer of this host that
        still copies with CMA would write to whatever is mapped there next. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._engine.stop()
        if self._home.here:
            self._scope.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the backend is closed", where="nixl")
        self._home.check()

    def _check_device(self, nbytes: int, device: str) -> None:
        if device != "cpu" and not self._options.device_memory:
            wanted = Segment(address=0, nbytes=nbytes, device=device)
            raise refused("nixl", "device memory is switched off", wanted, hint="$.backend.options.device_memory")

    def _mine(self, peer: Peer) -> NixlPeer:
        if not isinstance(peer, NixlPeer) or peer.home != self._epoch:
            raise BackendError("not a peer of this backend", where="nixl", actual=type(peer).__name__)
        return peer


def _entry(segment: Segment) -> SegmentEntry:
    return SegmentEntry(segment.address, segment.nbytes, segment.device)
