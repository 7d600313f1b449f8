"""One rank: its registered memory, its backend, and what its engine hands over. Takes orders, reports; decides nothing.

Thread contract: `send` and `handoff` may be called by the engine's thread; everything else belongs to the control
thread. Calls cross by a bounded queue and a wake-up callable.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from sglang_pd.backends.base import DEFAULT_DEADLINE_S, Backend, Segment
from sglang_pd.backends.library.process import own_identity
from sglang_pd.protocol.bind import Chunk, IndexLists
from sglang_pd.protocol.errors import ErrorInfo, LocalProtocolError, ManifestError, PdError, RoomError
from sglang_pd.protocol.idx import Idx
from sglang_pd.protocol.indices import IndexList
from sglang_pd.protocol.kinds import Prompt, list_count
from sglang_pd.protocol.manifest import (
    Component,
    RankId,
    RankManifest,
    SegmentInfo,
    Term,
    Transport,
)
from sglang_pd.protocol.messages import MAX_RECORD_BYTES
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.plan import region_table
from sglang_pd.protocol.spaces import AnySpace
from sglang_pd.worker.peers.pairings import pairing_of
from sglang_pd.worker.ranks.destination import DestinationSide
from sglang_pd.worker.ranks.memory_view import DeviceDigest, RegionReader
from sglang_pd.worker.ranks.orders import (
    MAX_OWED,
    AnyOrder,
    AnyReport,
    Begin,
    Check,
    Forget,
    Halt,
    Joined,
    Live,
    Pair,
    Paired,
    RoomFault,
    Seek,
    Stop,
    Through,
    Unpair,
)
from sglang_pd.worker.ranks.source import Ready, SourceSide

MAX_CALLS: Final = 16_384
"""Engine calls that may wait for the control thread; one more raises `queue_full`."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank registers: who it is, its components, and the segments they lie on, numbered by the backend."""

    rank: RankId
    epoch: int
    components: tuple[Component, ...]
    segments: tuple[Segment, ...]
    host_id: str = ""


class RankAgent:
    """One rank's agent over one backend."""

    def __init__(
        self,
        facts: RankFacts,
        backend: Backend,
        report: Callable[[AnyReport], None],
        *,
        wake: Callable[[], None],
        deadline_s: float = DEFAULT_DEADLINE_S,
        device_digest: DeviceDigest | None = None,
    ) -> None:
        self.facts = facts
        self.backend = backend
        self._report = report
        self._wake = wake
        self._calls: deque[Callable[[], None]] = deque()
        self._pairings: dict[int, Pairing] = {}
        self._term = Term(secrets.randbits(62) + 1, 1)
        reader = RegionReader(facts.segments, region_table(self.manifest()), device_digest)
        self.source = SourceSide(facts.rank, backend, report, digest=reader.digest, deadline_s=deadline_s)
        self.destination = DestinationSide(facts.rank, backend, report, digest=reader.digest)
        self.stopped = False
        self.control_epoch = 0
        """The control that this rank serves, where that is another process; 0: none."""
        self._next_control = 0
        """The control for which it leaves that one; 0: it stays."""
        self._served = 0
        """The control that it served last; 0: none yet."""
        self._leaving_s = 0.0
        """Since when it leaves."""
        self._rebuilt = 0
        self._described = backend.describe()

    def manifest(self) -> RankManifest:
        """What this rank states about itself. Raises `ManifestError` for components that do not fit their segments."""
        for number, segment in enumerate(self.facts.segments):
            if segment.number != number:
                raise ManifestError(
                    "a region's segment is not registered with the backend",
                    code="memory_refused",
                    where=f"rank {self.facts.rank}, segment {number}",
                    expected="memory from the worker's scope",
                    actual=f"segment number {segment.number}",
                )
        can = self.backend.capabilities
        return RankManifest(
            rank=self.facts.rank,
            epoch=self.facts.epoch,
            segments=tuple(SegmentInfo(nbytes=s.nbytes, device=s.device) for s in self.facts.segments),
            components=self.facts.components,
            transport=Transport(
                backend=can.name,
                host_memory=can.host_memory,
                device_memory=can.device_memory,
                same_host_only=can.same_host_only,
                host_id=self.facts.host_id,
                directions=can.directions,
                connect=self.backend.describe(),
            ),
            term=self._term,
        )

    def join(self) -> None:
        """Report this rank to its control: at start, whenever the control is new, and when its transport changed."""
        self._report(self.joined())

    def joined(self) -> Joined:
        """What is reported then."""
        stated = self.manifest()
        self._described = stated.transport.connect
        return Joined(
            rank=self.facts.rank,
            epoch=self.facts.epoch,
            manifest=msgspec.msgpack.encode(stated),
            control_epoch=self.control_epoch,
            term=self._term,
            process=own_identity(),
            rebuilt=self._rebuilt,
            owed=self.destination.owed(),
        )

    def rejoin(self, control_epoch: int) -> None:
        """A control that does not know this rank wants it. Another one than before gets it once it writes nothing more
        for that one, and has the proofs against its writers, as far as its own backend can give them.
        """
        if control_epoch == self.control_epoch or (not self.control_epoch and self._idle):
            self._serve(control_epoch)
            return
        if not self._next_control:
            self._leaving_s = time.monotonic()
            self._pairings.clear()
            self.source.leave_all()
            self.destination.leave_all()
        self._next_control = control_epoch

    def _serve(self, control_epoch: int) -> None:
        if self._served not in (0, control_epoch):
            # A control that it left, and that lives, may hold what was agreed with the rank it was: to that one it is
            # another. To peers this says that nothing of before is written any more.
            self._term = Term(self._term.agent, self._term.number + 1)
        elif self._next_control and control_epoch == self.control_epoch:
            self.destination.stay()
        self.control_epoch = self._served = self.destination.control_epoch = control_epoch
        self._next_control = 0
        self.join()

    @property
    def _idle(self) -> bool:
        """Nothing of any room moves here, nor can: each write was DONE or FAILED, or its backend gave the fence; none
        is UNKNOWN, none waits behind its event, and no former control has one more made, its peers being forgotten.
        """
        return not self.source.begun and self.destination.idle

    @property
    def _may_leave(self) -> bool:
        """Whether the next control may have this rank. What is not proven here by then only the writers can say, which
        that control asks (`Joined.owed`).
        """
        if self._idle:
            return True
        if self.source.begun or time.monotonic() < self._leaving_s + self.backend.capabilities.revoke_within_s:
            return False
        return not self.destination.rebuilding and self.destination.writers <= MAX_OWED

    # --- called by the engine's thread -------------------------------------------------------------------------------

    def send(self, handle: int, chunk: Chunk, *, after: Any = None, lists: IndexLists | None = None) -> None:
        """Hand over a computed chunk of the prompt of the room that goes by that handle.

        `after`: device event on which the bytes depend. lists: late source lists, with the last chunk. The source
        memory stays untouched until `RELEASABLE`.
        """
        plain = operator.index(handle)
        chunk = Chunk(operator.index(chunk.start), operator.index(chunk.stop), bool(chunk.last))
        own = None if lists is None else dict(lists)  # the engine may fill its own again at once
        self._call(lambda: self.source.chunk(plain, Ready(chunk, after, own)))

    def handoff(self, handle: int, covered_tokens: int, record: bytes) -> None:
        """Hand over the record that travels with the state: once, by the last PP stage's TP rank 0.

        Raises `LocalProtocolError` for one larger than 64 KiB.
        """
        plain, covered = operator.index(handle), operator.index(covered_tokens)
        record = bytes(memoryview(record))
        if len(record) > MAX_RECORD_BYTES:
            raise LocalProtocolError(
                "the handoff record is too large; large tensors are a REQUEST_ROW component",
                code="message_malformed",
                where=f"handle {handle}",
                expected=f"<= {MAX_RECORD_BYTES} bytes",
                actual=f"{len(record)} bytes",
            )
        self._call(lambda: self.source.handoff(plain, covered, record))

    def _call(self, call: Callable[[], None]) -> None:
        if len(self._calls) >= MAX_CALLS:
            raise RoomError("the control thread does not keep up", code="queue_full", where=f"rank {self.facts.rank}")
        self._calls.append(call)
        self._wake()

    # --- called by the control thread --------------------------------------------------------------------------------

    def order(self, order: AnyOrder) -> None:
        """Carry out one order. A failure is reported for the room or peer it concerns; it never escapes."""
        try:
            self._carry_out(order)
        except PdError as error:
            self._refuse(order, error.info())
        except Exception as error:  # a defect of ours must cost one room, not the thread
            self._refuse(order, ErrorInfo(code="internal", message=f"{type(error).__name__}: {error}"))

    def _carry_out(self, order: AnyOrder) -> None:
        if isinstance(order, Pair):
            self._pair(order)
        elif isinstance(order, Unpair):
            self._pairings.pop(order.peer_epoch, None)
            self.source.unpair(order.peer_epoch)
            self.destination.unpair(order.peer_epoch)
        elif isinstance(order, Through):
            self.destination.through(order)
        elif isinstance(order, Begin):
            self._begin(order)
        elif isinstance(order, Halt):
            self.source.halt(order)
        elif isinstance(order, Forget):
            self.source.forget(order)
            self.destination.forget(order)
        elif isinstance(order, Live):
            self._pairings = {epoch: kept for epoch, kept in self._pairings.items() if epoch in order.peers}
            self.source.keep(frozenset(order.generations), frozenset(order.peers))
            self.destination.keep(frozenset(order.generations), frozenset(order.peers))
        elif isinstance(order, Seek):
            self._seek(order)
        elif isinstance(order, Check):
            self.destination.check(order)
        elif isinstance(order, Stop):
            self.stopped = True

    def _refuse(self, order: AnyOrder, info: ErrorInfo) -> None:
        if isinstance(order, Begin):
            self._report(RoomFault(room=order.room, generation=order.generation, handle=order.handle, error=info))
        elif isinstance(order, Pair | Unpair | Seek | Through):
            self._report(Paired(peer_epoch=order.peer_epoch, error=info))
        elif isinstance(order, Halt | Forget):
            self._report(RoomFault(room=order.room, generation=order.generation, error=info))

    def _pair(self, order: Pair) -> None:
        if order.source and self._next_control:  # of the former control, it was on its way: its rooms must not begin
            raise RoomError("this rank leaves its control", code="draining", where=f"rank {self.facts.rank}")
        pairing = self._pairings[order.peer_epoch] = pairing_of(order.prefill, order.decode)
        if order.source:
            self.source.pair(order.peer_epoch, pairing)
        else:
            self.destination.pair(order.peer_epoch, pairing, order.address)

    def _seek(self, order: Seek) -> None:
        self._pairings.pop(order.peer_epoch, None)
        if order.prefill and not self.destination.knows(order.peer_epoch):
            pairing = pairing_of(order.prefill, order.decode)
            try:
                self.destination.admit(order.peer_epoch, pairing, order.address)
            finally:  # those that the transport does not admit cannot connect
                self.destination.seek(order.peer_epoch)
        else:
            self.destination.seek(order.peer_epoch)

    def _begin(self, order: Begin) -> None:
        pairing = self._pairings.get(order.peer_epoch)
        if pairing is None:
            raise RoomError("this rank knows no such peer", code="peer_unknown", where=f"room {order.room}")
        prompt = Prompt(order.prompt_tokens, order.prefix_tokens)
        needed, own = pairing.needed, self.facts.rank
        dst = unpack(needed.dst, order.dst_lists)
        if any((r.rank, r.epoch) == (own, self.facts.epoch) for r in pairing.prefill.ranks):
            self.source.begin(order, pairing.room(prompt, unpack(needed.src, order.src_lists), dst))
        else:
            self.destination.begin(order, pairing.room(prompt, placeholder_lists(needed.src, prompt), dst))

    @property
    def seeking(self) -> bool:
        """True while a fence is sought from the backend."""
        return self.destination.seeking

    @property
    def called(self) -> bool:
        """True while engine calls wait."""
        return bool(self._calls)

    def step(self, guard: Callable[[Callable[[], object]], None], *, progress: bool = True) -> bool:
        """One turn: engine calls, transfers, fences. True while something of this rank is in flight.

        guard: carries out one part; what that raises costs this part alone. progress: whether the backend is due, by
        its wake-up or its interval.
        """
        for _ in range(len(self._calls)):
            guard(self._calls.popleft())
        if progress:
            guard(self.backend.progress)
        was_seeking = self.destination.seeking
        guard(self.destination.step)
        flying = self.source.step()
        if self._next_control and not flying and self._may_leave:
            self._serve(self._next_control)
        elif self._next_control:
            self.destination.leave_all()  # of its former control an order to pair may have been on its way
        elif was_seeking and self._describes_anew():
            self._rebuilt += self.backend.capabilities.revoke_scope == "backend"
            self.join()
        return flying

    def _describes_anew(self) -> bool:
        try:
            return self.backend.describe() != self._described
        except PdError:  # it is being rebuilt just now
            return False


def placeholder_lists(needed: Mapping[AnySpace, str], prompt: Prompt) -> IndexLists:
    """Valid lists for the side whose own are not known here.

    Which rows a context-sharded source rank holds depends on token positions alone, since pages are aligned to the
    owner rule; so any lists serve to verify what arrived.
    """
    whole = Prompt(prompt.tokens)
    return {
        space: space.ingest(np.arange(list_count(space, whole)) + space.reserve, consumer="placeholder")
        for space in needed
    }


def unpack(needed: Mapping[AnySpace, str], lists: tuple[IndexList, ...]) -> IndexLists:
    """Packed lists -> typed ones, matched by space digest. Raises `PlanError` and `IndexOutOfSpace` with the space."""
    by_digest: dict[int, AnySpace] = {space.digest: space for space in needed}
    result: dict[AnySpace, Idx[Any]] = {}
    for packed in lists:
        space = by_digest.get(packed.space)
        if space is None:
            raise RoomError(
                "an index list of a space that no component needs",
                code="space_mismatch",
                expected=[f"{digest:08x}" for digest in by_digest],
                actual=f"{packed.space:08x}",
            )
        result[space] = space.ingest(packed.indices().astype(np.int64), consumer="room index list")
    return result
