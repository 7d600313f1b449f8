"""The ranks of one instance as their control sees them: who joined, how to reach each, who is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_pd.backends.library.process import Watch as Process
from sglang_pd.protocol.errors import ErrorInfo, ManifestError, RoomError
from sglang_pd.protocol.manifest import RankId, RankManifest, Topology
from sglang_pd.worker.peers.seeking import Owed
from sglang_pd.worker.ranks.orders import AnyOrder, Joined, Pair, Seek

log = logging.getLogger("sglang_pd.worker")

REFUSALS_LOGGED_S = 10.0

Reach = Callable[[AnyOrder], None]
"""Gives an order to one rank: a call in this process, or a frame to another."""


@dataclass(slots=True)
class _Rank:
    manifest: RankManifest
    reach: Reach
    heard_s: float
    remote: bool
    process: Process | None
    """Of a rank in another process."""
    rebuilt: int


class Ranks:
    """A registry; it decides nothing. Ranks of other processes are gone when silent for `liveness_s`."""

    def __init__(self, topology: Topology, liveness_s: float) -> None:
        self._want = tuple(RankId(p, t) for p in range(topology.pp) for t in range(topology.tp))
        self._liveness_s = liveness_s
        self._ranks: dict[RankId, _Rank] = {}
        self._lost: dict[RankId, _Rank] = {}
        self._refused_s: dict[RankId, float] = {}
        self._met: dict[int, Pair] = {}
        """How source instances were met, by their epochs."""
        self.fault: ErrorInfo | None = None
        """All have joined, but they contradict each other: how."""
        self._faulted_s = float("-inf")

    def join(self, report: Joined, reach: Reach, *, remote: bool, now_s: float) -> bool:
        """A rank is there. True when it is new, or another incarnation, or states something else than before.

        Raises `ManifestError` for a rank the topology has not, or a manifest of another rank.
        """
        if report.rank not in self._want:
            raise ManifestError("no such rank in this instance", where=str(report.rank), expected=len(self._want))
        manifest = msgspec.msgpack.decode(report.manifest, type=RankManifest)
        if (manifest.rank, manifest.epoch, manifest.term) != (report.rank, report.epoch, report.term):
            raise ManifestError(
                "a rank sent another rank's manifest", where=str(report.rank), actual=str(manifest.rank)
            )
        before = self._ranks.get(report.rank)
        process = Process(report.process) if remote else None
        self._ranks[report.rank] = _Rank(manifest, reach, now_s, remote, process, report.rebuilt)
        return before is None or before.manifest != manifest

    def disagree(self, error: ManifestError, now_s: float) -> None:
        """All have joined, and are no instance together. Logged when it changes, and again while it lasts."""
        fault = error.info()
        if fault != self.fault or now_s - self._faulted_s > REFUSALS_LOGGED_S:
            self._faulted_s = now_s
            log.error("the ranks of this instance do not fit together: %s", fault)
        self.fault = fault

    def refuses(self, report: Joined, *, serving: bool, now_s: float) -> str:
        """Why another process may not take a rank's place; empty where it may.

        The one that has it may have written, or may yet: only its own word, or its death, fences that. serving: the
        instance has been complete; before that nothing was written, and a silent one may be replaced.
        """
        holder = self._ranks.get(report.rank) or self._lost.get(report.rank)
        if holder is None or (holder.manifest.epoch, holder.manifest.term) == (report.epoch, report.term):
            return ""
        refused = f"rank {report.rank} is in the control's own process"
        if holder.remote:
            if not serving and now_s - holder.heard_s > self._liveness_s:
                return ""
            refused = f"rank {report.rank} was restarted, or two processes claim to be it"
        if now_s - self._refused_s.get(report.rank, float("-inf")) > REFUSALS_LOGGED_S:  # it asks at every heartbeat
            self._refused_s[report.rank] = now_s
            log.error("a process (epoch %016x) is not taken in: %s", report.epoch, refused)
        return refused

    def epoch_of(self, rank: RankId) -> int | None:
        """The epoch a rank joined with; None before."""
        entry = self._ranks.get(rank)
        return entry.manifest.epoch if entry else None

    def rebuilt(self, rank: RankId) -> int:
        """How often a rank has said that its transport was built anew."""
        entry = self._ranks.get(rank) or self._lost.get(rank)
        return entry.rebuilt if entry else 0

    def was_lost(self, rank: RankId) -> bool:
        """Whether a rank was given up as silent; it is back, once asked."""
        return self._lost.pop(rank, None) is not None

    def reach_of(self, rank: RankId) -> Reach:
        """How to reach a rank that joined."""
        return self._ranks[rank].reach

    def heard(self, rank: RankId, now_s: float) -> bool:
        """A sign of life. False for a rank that has not joined this control."""
        entry = self._ranks.get(rank)
        if entry is not None:
            entry.heard_s = now_s
        return entry is not None

    def forgive(self, stall_s: float) -> None:
        """This side did not listen for so long."""
        for entry in self._ranks.values():
            entry.heard_s += stall_s

    @property
    def missing(self) -> list[RankId]:
        """Ranks that have not joined."""
        return [rank for rank in self._want if rank not in self._ranks]

    @property
    def manifests(self) -> tuple[RankManifest, ...]:
        """All manifests in rank order; only when none is missing."""
        return tuple(self._ranks[rank].manifest for rank in self._want)

    @property
    def ids(self) -> tuple[RankId, ...]:
        """All ranks of the topology, in order."""
        return self._want

    def order(self, order: AnyOrder, rank: RankId | None = None) -> None:
        """Give an order to one rank, or to all. Ranks that are not there are skipped: their loss is told apart.

        `Seek` gets the manifests of the `Pair` before it, which a rank may have missed.
        """
        if isinstance(order, Pair) and not order.source:
            self._met[order.peer_epoch] = order
        elif isinstance(order, Seek) and (met := self._met.get(order.peer_epoch)) is not None:
            order = msgspec.structs.replace(order, prefill=met.prefill, decode=met.decode, address=met.address)
        for target in self._want if rank is None else (rank,):
            entry = self._ranks.get(target)
            if entry is not None:
                entry.reach(order)

    def keep_met(self, wanted: Callable[[int], bool]) -> None:
        """Forget how source instances were met, but for these."""
        self._met = {epoch: met for epoch, met in self._met.items() if wanted(epoch)}

    def lost(self, now_s: float) -> list[RankId]:
        """Remote ranks that were silent for too long; each is named once."""
        gone = [r for r, e in self._ranks.items() if e.remote and now_s - e.heard_s > self._liveness_s]
        for rank in gone:
            self._lost[rank] = self._ranks.pop(rank)
        return gone

    def dead(self) -> list[RankId]:
        """Lost ranks whose process has ended since, for certain; each is named once."""
        lost = {rank: entry.process for rank, entry in self._lost.items()}
        return [rank for rank, process in lost.items() if process and not process.known() and process.gone()]


def not_paired(ranks: list[RankId], address: str) -> RoomError:
    """Why a room was not opened at a peer with which the instance agreed."""
    return RoomError(
        "not every rank of this instance has met the peer in time",
        code="peer_unknown",
        where=address,
        expected="an answer of every rank",
        actual=f"none of {', '.join(map(str, ranks))}",
        hint="Does each of these ranks run, and is its connection to its control whole?",
    )


def not_proven(owed: list[Owed]) -> RoomError:
    """Why no room is opened though every rank has joined."""
    return RoomError(
        "an own rank came from a control that is gone, and its memory may still be written for that one",
        code="peer_unknown",
        where=", ".join(f"{one.instance} at {one.address or 'an unknown address'}" for one in owed[:8]),
        expected="their word that they write there no more, or the end of their processes",
        actual=f"{len(owed)} that have not said so",
        hint="Is each of them reachable from here? If it is not coming back, end its processes.",
    )
