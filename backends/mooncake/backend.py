"""Backend over Mooncake's transfer engine: TCP, RDMA, or NVLink within a node.

What is proven, and what is not
-------------------------------
*   DONE: the library says that every descriptor was applied in the destination's memory (TCP: acknowledged by the
    destination's engine after the last byte).
*   FAILED: nothing was submitted, or all that was submitted was acknowledged and the rest never will be. Over
    `nvlink_intra` also what the library reports as drained: copies of our own GPU that have ended.
*   Every other failure of the library is UNKNOWN: its queue is neither cancelled nor awaited, and bytes that left wait
    in sockets of the destination. `fence` is True when all transfers are DONE or FAILED, or when this host's kernel
    says that the destination's process has ended and, over TCP, the library has nothing for it any more: what is queued
    it writes to whoever listens at that port next (measured), so that a peer's death ends the engine first. Closing the
    engine that issued the writes proves nothing else over a network, so it is not offered as a fence.
*   `source_free` of what stays UNKNOWN (TCP): the engine that carried it has ended, so that nothing here reads the
    source; its other peers write through another engine. Measured with 200 MB under way to a stopped peer, the source
    filled anew, and the peer going on: 64 MiB of the new content arrived where the engine ran on, none where it had
    ended.
*   `revoke` (TCP): this side's engine is closed and joined, and its successor listens elsewhere, so whatever a dead,
    stopped or living writer still sends finds nobody. It costs every connection (`revoke_scope` `backend`). Over RDMA
    and NVLink there is no proof: a NIC or a mapping writes without us.

Environment: Mooncake obeys `MC_*` variables, not arguments. `environment(options)` says which must be set before it is
imported; this module sets none, and refuses a process in which they are missing or contradict the options.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from sglang_pd.backends.base import (
    DEFAULT_DEADLINE_S,
    Backend,
    Capabilities,
    Peer,
    Segment,
    TransferState,
    check_batch,
)
from sglang_pd.backends.home import Home, keep_in_forks
from sglang_pd.backends.library.blob import SegmentEntry
from sglang_pd.backends.library.connect import ThreadedConnecting
from sglang_pd.backends.library.lives import kept, lives
from sglang_pd.backends.library.process import own_identity
from sglang_pd.backends.library.rows import NO_ROWS, Rows
from sglang_pd.backends.mooncake.blob import ENVELOPE, Blob, decode_matching
from sglang_pd.backends.mooncake.inbound import Inbound
from sglang_pd.backends.mooncake.library import Library, load
from sglang_pd.backends.mooncake.links import Links
from sglang_pd.backends.mooncake.memory import Memory
from sglang_pd.backends.mooncake.options import MooncakeOptions, check_environment, environment, parse_options
from sglang_pd.backends.mooncake.pump import Pump
from sglang_pd.backends.mooncake.transfer import MooncakePeer, MooncakeTransfer, Outbound
from sglang_pd.backends.sides import one_range
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.errors import BackendError, PdError, TransferError

__all__ = ["MooncakeBackend", "create", "environment"]

VERIFIED_ON = {
    "tcp": "loopback, two x86-64 cores, host memory: non-cuda 0.3.13.post1, cuda13 0.3.14",
    "rdma": "not yet run on an RDMA NIC",
    "nvlink_intra": "two H200s of one host over NVLink, cuda13 0.3.14, 2026-11-30",
}


def create(*, epoch: int, options: Mapping[str, Any]) -> Backend:
    """Build the backend for the worker incarnation `epoch`.

    Raises `ConfigError` for options or an environment that are not acceptable (`insecure_refused` where the library
    listens on all interfaces and that was not allowed), `BackendUnavailable` for a missing package, library file or
    device.
    """
    parsed = parse_options(options)
    in_force = check_environment(parsed, os.environ)
    lives.check_kept()
    return MooncakeBackend(epoch, parsed, load(parsed), in_force)


class MooncakeBackend(Backend):
    """See the module's docstring; `create` builds it."""

    def __init__(self, epoch: int, options: MooncakeOptions, library: Library, in_force: dict[str, str]) -> None:
        self._home = Home("the backend", "mooncake")
        keep_in_forks(self)
        self._epoch = epoch
        self._options = options
        self._library = library
        self._in_force = in_force
        self._memory = Memory(host=options.transport != "nvlink_intra", device=self._device_memory())
        self._scope = self._memory.scope
        self._inbound = Inbound(library, options, epoch, self._scope)
        self._links = Links(library, options, self._sources)
        self._pump = Pump(library, options, self._verify, self._links.reap)
        self._links.at_pump, self._links.ended = self._pump.call, self._pump.engine_ended
        self._peers: dict[int, MooncakePeer] = {}
        self._made = 0
        self._described = False
        self._closed = False

    def _device_memory(self) -> bool:
        # Over TCP the library would stage device memory through the host, 64 KiB at a time: not offered.
        return self._library.device_memory and self._options.transport != "tcp"

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        transport = self._options.transport
        return Capabilities(
            name="mooncake",
            host_memory=transport != "nvlink_intra",
            device_memory=self._device_memory(),
            same_host_only=transport == "nvlink_intra",
            adopts_host=transport != "nvlink_intra",
            adopts_device=self._device_memory(),
            revoke_proof="engine_closed" if transport == "tcp" else "none",
            revoke_scope="backend",
            revoke_within_s=5.0 if transport == "tcp" else 0.0,
            verified_on=VERIFIED_ON,
        )

    @property
    def epoch(self) -> int:
        """See `Backend.epoch`."""
        return self._epoch

    @property
    def engines_replaced(self) -> int:
        """See `Backend`: those that write, and those that peers write through."""
        return self._links.rebuilds + max(0, self._inbound.generation - 1)

    def report(self) -> dict[str, Any]:
        """Facts for operators: version, transport asked for, settings in force, listening sockets, counters.

        Mooncake has no call that tells which transport it installed; the number of its listening ports was checked.
        """
        return {
            "version": self._library.version,
            "transport": self._options.transport,
            "support": dict(self._library.flags),
            "tickets": self._library.has_tickets,
            "arrays": self._library.has_arrays,
            "environment": dict(self._in_force),
            "listening": self._inbound.listening(),
            "lives": kept(),
            "generation": self._inbound.generation,
            "engine_rebuilds": self._links.rebuilds,
            "not_replaced": str(self._inbound.failed or ""),
            "queued_transfers": self._pump.queued,
            **self._pump.counters,
        }

    # memory

    def allocate(self, nbytes: int, device: str = "cpu") -> Segment:
        """See `Backend.allocate`."""
        self._check_open()
        return self._memory.allocate(nbytes, device)

    def adopt(self, segment: Segment) -> Segment:
        """See `Backend.adopt`. The probe is a real registration, taken back at once."""
        self._check_open()
        self._memory.check_adoptable(segment)
        if not self._scope.overlaps(segment):
            engine = self._inbound.engine
            engine.register([segment.address], [segment.nbytes])
            engine.unregister([segment.address])
        return self._scope.admit(segment)

    def register(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """See `Backend.register`. Refused after `describe`: the library's peers never look again."""
        self._check_open()
        if self._described:
            raise BackendError("register comes before describe", code="memory_refused", where="mooncake")
        numbered = self._scope.number(segments)
        self._inbound.engine.register([one.address for one in numbered], [one.nbytes for one in numbered])
        self._scope.commit(numbered)
        return numbered

    def _sources(self) -> tuple[list[int], list[int]]:
        segments = self._scope.segments
        return [one.address for one in segments], [one.nbytes for one in segments]

    # peers

    def describe(self) -> bytes:
        """See `Backend.describe`. Changes with every revocation; raises `BackendError` while one is under way."""
        self._check_open()
        engine = self._inbound.engine
        self._described = True
        return ENVELOPE.seal(
            Blob(
                mooncake_version=self._library.version,
                transport=self._options.transport,
                epoch=self._epoch,
                generation=self._inbound.generation,
                session=engine.session,
                identity_address=self._inbound.identity_address,
                segments=[SegmentEntry(one.address, one.nbytes, one.device) for one in self._scope.segments],
                process=own_identity(),
            )
        )

    def connect(self, blob: bytes, epoch: int) -> Peer:
        """See `Backend.connect`. Reads the peer's identity through the library before anything may be written."""
        return self.start_connect(blob, epoch).wait()

    def start_connect(self, blob: bytes, epoch: int) -> ThreadedConnecting[Outbound]:
        """See `Backend`. The library may wait a minute for a peer that hangs; we wait `connect_timeout_s` at most."""
        self._check_open()
        described = decode_matching(blob, epoch, self._options.transport, self._library.version)
        connecting = ThreadedConnecting(
            lambda: self._links.reach(described),
            lambda outbound: self._joined(described, outbound),
            self._links.abandon,
            self._pump.tell,
        )
        within_s = self._options.connect_timeout_s
        return connecting.start("sglang-pd-mooncake-connect", within_s=within_s, where=f"mooncake, {described.session}")

    def _joined(self, described: Blob, outbound: Outbound) -> MooncakePeer:
        self._made += 1
        peer = MooncakePeer(self._made, described, outbound)
        peer.home = self._epoch
        self._links.join(outbound, peer)
        self._peers[peer.number] = peer
        return peer

    def disconnect(self, peer: Peer) -> None:
        """See `Backend.disconnect`."""
        self._home.check()
        mine = self._peers.pop(self._own(peer).number, None)
        if mine is None:
            return
        mine.connected = False
        self._pump.call(lambda: self._forget(mine))

    def _forget(self, peer: MooncakePeer) -> None:
        self._pump.halt(peer, TransferError("the peer was disconnected", where=f"mooncake, {peer.label}"))
        self._links.leave(peer)

    def _verify(self, peer: MooncakePeer) -> None:
        self._links.verify(peer, lambda: self._pump.call(lambda: self._pump.settle_peer(peer)))

    # transfers

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> MooncakeTransfer:
        """See `Backend.write`. Also refuses (`queue_full`) past `max_queued_transfers`."""
        self._check_open()
        mine = self._own(peer)
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise BackendError("a deadline is a time to come", where="write", expected="> 0 s", actual=deadline_s)
        pieces, nbytes = self._pieces(batch, mine)
        lost = mine.lost
        if not len(batch) or lost is not None or not mine.connected:
            return self._ended(mine, lost if len(batch) else None, batch)
        if self._pump.queued >= self._options.max_queued_transfers:
            raise BackendError(
                "too many transfers wait",
                code="queue_full",
                where=f"mooncake, {mine.label}",
                expected=f"at most {self._options.max_queued_transfers}",
            )
        transfer = MooncakeTransfer(mine, pieces, nbytes, deadline_s, after)
        transfer.provable = self._scope.side.host_only and mine.side.host_only
        self._pump.post(mine, transfer)
        return transfer

    def _pieces(self, batch: WriteBatch, peer: MooncakePeer) -> tuple[Rows, int]:
        """The checked batch, and its bytes. Raises `BackendError` (`segment_invalid`)."""
        own, there = self._scope.side, peer.side
        one = one_range(batch, own, there)
        if one is not None:
            return Rows.single(*one), one[2]
        check_batch(batch, own.nbytes, there.nbytes, peer=peer.label)
        return Rows.of(batch, own.base, there.base), batch.total_bytes

    def _ended(self, peer: MooncakePeer, lost: PdError | None, batch: WriteBatch) -> MooncakeTransfer:
        """A transfer that never was: DONE without descriptors, FAILED to a peer that is gone."""
        transfer = MooncakeTransfer(peer, NO_ROWS, batch.total_bytes, 1.0, None)
        if len(batch):
            gone = TransferError("the peer was disconnected", code="peer_lost", where=f"mooncake, {peer.label}")
            transfer.blame(lost or gone)
        transfer.set_state(TransferState.FAILED if len(batch) else TransferState.DONE)
        return transfer

    def fence(self, peer: Peer) -> bool:
        """See `Backend.fence`, and the module's docstring for what it can prove."""
        self._home.check()
        mine = self._own(peer)
        if mine.resolved == mine.posted:
            return True
        # What the library still has it would write to whoever listens at that port next.
        return mine.dead() and (mine.transport != "tcp" or mine.through == mine.posted)

    def revoke(self, epoch: int) -> bool:
        """See `Backend.revoke`. Over TCP the first call starts to replace the engine that all peers write through."""
        self._check_open()
        if self._options.transport != "tcp":
            return False
        return self._inbound.revoke(epoch, self._pump.tell)

    def admit(self, epoch: int, blob: bytes) -> None:
        """See `Backend.admit`. The proof is the end of this side's engine and asks nothing about the writer."""
        self._home.check()
        self._inbound.admit(epoch)

    # the owner's loop

    def progress(self) -> None:
        """See `Backend.progress`: empties the wake-up; the work is done by threads of the backend's own."""
        if not self._closed:
            self._home.check()
        self._pump.drain_wakeup()

    def wakeup_fd(self) -> int | None:
        """See `Backend.wakeup_fd`."""
        if self._closed:
            return None
        self._home.check()
        return self._pump.wakeup_fd()

    def close(self) -> None:
        """See `Backend.close`. Memory is given back only if the engines are proven to have ended."""
        if self._closed:
            return
        self._closed = True
        self._pump.stop()
        if not self._home.here:
            return  # engines and links are the parent's
        gone = [self._inbound.close(), self._links.close(5.0)]
        if all(gone):
            self._memory.release()
        for peer in self._peers.values():
            peer.watch.close()
        self._peers.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the backend is closed", where="mooncake")
        self._home.check()

    def _own(self, peer: Peer) -> MooncakePeer:
        if not isinstance(peer, MooncakePeer) or peer.home != self._epoch:
            raise BackendError("this is no peer of this backend", code="peer_unknown", where="mooncake", actual=peer)
        return peer
