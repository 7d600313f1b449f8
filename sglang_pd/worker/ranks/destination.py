"""The destination side of one rank: seeks proof against lost writers, and verifies what arrived."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sglang_pd.backends.base import Backend
from sglang_pd.protocol.bind import RoomIndices, live_elements
from sglang_pd.protocol.errors import ErrorInfo, IntegrityError, PdError, RemoteProtocolError
from sglang_pd.protocol.kinds import Elements
from sglang_pd.protocol.manifest import RankId
from sglang_pd.protocol.messages import Wrote
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.verify import RowDigest, layer_digests
from sglang_pd.worker.peers.seeking import Owed
from sglang_pd.worker.ranks.orders import (
    AnyReport,
    Begin,
    Check,
    Checked,
    Forget,
    Paired,
    Revoked,
    Through,
)

log = logging.getLogger("sglang_pd.worker")

MAX_PROVEN: Final = 65_536
"""Source instances remembered as proven; of one that is forgotten nothing is said."""


@dataclass(slots=True)
class _Writers:
    """A source instance: its pairing, for which control, where it is called, and the epochs of its ranks that may still
    write here.
    """

    pairing: Pairing
    seeking: bool = False
    control_epoch: int = 0
    address: str = ""
    open_epochs: set[int] = field(default_factory=set)
    through: set[int] = field(default_factory=set)
    """Those of them that gave the proof themselves; only the transport may still be busy with its own."""


class DestinationSide:
    """Receives rooms. All methods are called by the rank's control thread."""

    def __init__(
        self, rank: RankId, backend: Backend, report: Callable[[AnyReport], None], *, digest: RowDigest
    ) -> None:
        self._rank = rank
        self._backend = backend
        self._report = report
        self._digest = digest
        self.control_epoch = 0
        """Of the control that this rank serves; 0: one in its own process, or none yet."""
        self._writers: dict[int, _Writers] = {}
        self._proven: OrderedDict[int, None] = OrderedDict()
        self._rooms: dict[tuple[int, int], tuple[Begin, RoomIndices]] = {}

    def pair(self, peer_epoch: int, pairing: Pairing, address: str = "") -> None:
        """Meet an accepted source instance, which is called at that address. Answered by `Paired`."""
        self.admit(peer_epoch, pairing, address)
        self._report(Paired(peer_epoch=peer_epoch))

    def admit(self, peer_epoch: int, pairing: Pairing, address: str = "") -> None:
        """Remember which ranks of a source instance write here; they connect to this rank."""
        writers = [src for src in pairing.prefill.ranks if pairing.plan(src.rank, self._rank).moves]
        epochs = {src.epoch for src in writers}
        self._proven.pop(peer_epoch, None)  # of what it writes from here on nothing is proven
        self._writers[peer_epoch] = _Writers(
            pairing, control_epoch=self.control_epoch, address=address, open_epochs=epochs
        )
        for src in writers:
            self._backend.admit(src.epoch, src.transport.connect)  # it may die before it ever connects

    def unpair(self, peer_epoch: int) -> None:
        """Forget a source instance, unless its fence is still sought."""
        writers = self._writers.get(peer_epoch)
        if writers is not None and not writers.seeking:
            del self._writers[peer_epoch]

    def through(self, order: Through) -> None:
        """See `Through`."""
        writers = self._writers.get(order.peer_epoch)
        if writers is not None:
            writers.seeking = True
            writers.through |= set(order.writers) if order.writers else writers.open_epochs
        elif not order.writers or order.peer_epoch in self._proven:
            self._report(Revoked(peer_epoch=order.peer_epoch))

    def _prove(self, peer_epoch: int) -> None:
        del self._writers[peer_epoch]
        self._proven[peer_epoch] = None
        if len(self._proven) > MAX_PROVEN:
            self._proven.popitem(last=False)

    def leave_all(self) -> None:
        """Forget every room, and seek the proof against everyone who wrote here."""
        self._rooms.clear()
        for writers in self._writers.values():
            writers.seeking = True

    def stay(self) -> None:
        """It does not leave its control after all: what that one seeks, it orders again."""
        for writers in self._writers.values():
            if writers.control_epoch == self.control_epoch:
                writers.seeking, writers.through = False, set()

    def begin(self, order: Begin, indices: RoomIndices) -> None:
        """Keep a room's lists for verification."""
        self._rooms[order.room, order.generation] = (order, indices)

    def forget(self, order: Forget) -> None:
        """Drop a room's lists."""
        self._rooms.pop((order.room, order.generation), None)

    def keep(self, generations: frozenset[int], peers: frozenset[int]) -> None:
        """Drop lists of rooms, and instances against which no proof is sought, that are not among these."""
        self._writers = {e: writers for e, writers in self._writers.items() if writers.seeking or e in peers}
        self._rooms = {key: kept for key, kept in self._rooms.items() if key[1] in generations}

    @property
    def idle(self) -> bool:
        """Whether nobody may write here: no instance is paired with, and none has its proof outstanding. Rooms do not
        tell: only those that are verified are known here.
        """
        return not self._writers

    @property
    def writers(self) -> int:
        """Source instances that may write here."""
        return len(self._writers)

    def owed(self) -> tuple[Owed, ...]:
        """See `Joined.owed`."""
        former = [(e, writers) for e, writers in self._writers.items() if writers.control_epoch != self.control_epoch]
        return tuple(
            Owed(
                peer_epoch=peer_epoch,
                address=writers.address,
                instance=writers.pairing.prefill.instance_id,
                writers={rank.epoch: rank.term for rank in writers.pairing.prefill.ranks},
            )
            for peer_epoch, writers in former
        )

    def knows(self, peer_epoch: int) -> bool:
        """Whether this rank was told of that instance: its writers may have connected all the same."""
        return peer_epoch in self._writers or peer_epoch in self._proven

    def seek(self, peer_epoch: int) -> None:
        """Start seeking the proof; `step` reports it. What was proven is told again. Of an instance that this rank does
        not know nothing can be said.
        """
        writers = self._writers.get(peer_epoch)
        if writers is not None:
            writers.seeking = True
        elif peer_epoch in self._proven:
            self._report(Revoked(peer_epoch=peer_epoch))
        else:
            log.error("a proof is sought against a peer (%016x) that this rank was never told of", peer_epoch)

    @property
    def seeking(self) -> bool:
        """True while a fence is sought."""
        return any(writers.seeking for writers in self._writers.values())

    def step(self) -> None:
        """Ask the backend again for every fence that is sought.

        A proof that costs the whole backend changes what `describe` says; the agent notices and joins anew. Raises the
        first of what `revoke` raised, after everybody was asked about.
        """
        raised: Exception | None = None
        for peer_epoch, writers in list(self._writers.items()):
            if writers.through and not self.rebuilding:
                writers.open_epochs -= writers.through
            for epoch in sorted(writers.open_epochs - writers.through) if writers.seeking else ():
                try:
                    if self._backend.revoke(epoch):
                        writers.open_epochs.discard(epoch)
                except Exception as error:
                    raised = raised or error
            if writers.seeking and not writers.open_epochs:
                self._prove(peer_epoch)
                self._report(Revoked(peer_epoch=peer_epoch))
        if raised is not None:
            raise raised

    @property
    def rebuilding(self) -> bool:
        """Whether the transport is in the middle of a proof that costs it its engine."""
        try:
            self._backend.describe()
        except PdError:
            return True
        return False

    def check(self, order: Check) -> None:
        """Digest what a record claims to have written into this rank."""
        record = order.record
        digests: dict[int, int] = {}
        error = None
        try:
            begun, indices = self._rooms[record.room, record.generation]
            pairing = self._writers[begun.peer_epoch].pairing
            src = RankId(record.writer.pp, record.writer.tp)
            part = (record.component, Elements(record.token_start, record.token_stop))
            own = pairing.decode.rank(self._rank)
            _require_live(pairing, indices, record)
            digests = layer_digests(pairing.plan(src, self._rank), (own, "destination"), indices, part, self._digest)
        except KeyError:
            error = IntegrityError(
                "the room to verify is unknown here", code="room_unknown", where=str(record.room)
            ).info()
        except PdError as reason:
            error = reason.info()
        except Exception as reason:  # unanswered, the room would wait for this check for ever
            error = ErrorInfo(code="internal", message=f"{type(reason).__name__}: {reason}"[:2000])
        self._report(Checked(number=order.number, room=record.room, digests=digests, error=error))


def _require_live(pairing: Pairing, indices: RoomIndices, record: Wrote) -> None:
    """Refuse a record of more than the room's live range: what a peer claims must not size what is read here."""
    live = live_elements(record.component, pairing.component_space(record.component), indices.prompt)
    if not live.start <= record.token_start <= record.token_stop <= live.stop:
        raise RemoteProtocolError(
            "the record lies outside the live range",
            code="range_conflict",
            where=f"room {record.room} {record.writer}/{record.component}",
            expected=f"within [{live.start}, {live.stop})",
            actual=f"[{record.token_start}, {record.token_stop})",
        )
