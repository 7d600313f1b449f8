"""An accepted pair of instances: its plans, proofs and digest, each made once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_pd.protocol.bind import (
    Chunk,
    IndexLists,
    NeededLists,
    RoomIndices,
    chunk_elements,
    late_spaces,
    live_elements,
    needed_lists,
)
from sglang_pd.protocol.coverage import prove_coverage
from sglang_pd.protocol.errors import IncompatiblePeer
from sglang_pd.protocol.handshake import compare
from sglang_pd.protocol.indices import IndexList
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.ledger import Expected
from sglang_pd.protocol.manifest import InstanceManifest, RankId
from sglang_pd.protocol.messages import Verdict, Writer
from sglang_pd.protocol.plan import Compiler, Plan, semantic_digest
from sglang_pd.protocol.spaces import AnySpace


@dataclass(frozen=True, slots=True)
class Record:
    """A range of one component that a source rank has written: layer ids and elements, both half-open; all 0: empty."""

    kind: str
    layer_start: int
    layer_stop: int
    start: int
    stop: int
    last: bool


class Pairing:
    """Everything that follows from two manifests alone.

    Raises `IncompatiblePeer` when the verdict is a refusal, `PlanError` when coverage cannot be proven.
    """

    def __init__(self, prefill: InstanceManifest, decode: InstanceManifest, verdict: Verdict | None = None) -> None:
        self.prefill, self.decode = prefill, decode
        self.verdict = verdict or compare(prefill, decode)
        if not self.verdict.accepted:
            raise refused(prefill, decode, self.verdict)
        self.kinds = tuple(sorted(set(prefill.kinds) & set(decode.kinds)))
        self.needed = NeededLists(
            needed_lists(prefill, self.kinds), needed_lists(decode, self.kinds), late_spaces(prefill, self.kinds)
        )
        self._spare = (_spare(prefill, self.kinds), _spare(decode, self.kinds))
        self._compiler = Compiler(prefill, decode)
        self._plans: dict[tuple[RankId, RankId], Plan] = {}
        self._proven: set[RankId] = set()
        self._owed: dict[RankId, dict[str, tuple[int, ...]]] = {}
        self._digest: int | None = None

    def plan(self, src_rank: RankId, dst_rank: RankId) -> Plan:
        """The plan of one rank pair, compiled on first use; its destination rank's coverage is proven with it."""
        self.prove(dst_rank)
        return self._compiled(src_rank, dst_rank)

    def _compiled(self, src_rank: RankId, dst_rank: RankId) -> Plan:
        key = (src_rank, dst_rank)
        if key not in self._plans:
            self._plans[key] = self._compiler.compile(src_rank, dst_rank)
        return self._plans[key]

    def prove(self, dst_rank: RankId) -> None:
        """Prove that all source ranks together write every row of `dst_rank` once. Raises `PlanError`."""
        if dst_rank not in self._proven:
            plans = [self._compiled(src.rank, dst_rank) for src in self.prefill.ranks]
            prove_coverage(self.prefill, self.decode, dst_rank, plans)
            self._proven.add(dst_rank)

    def room(self, prompt: Prompt, src: IndexLists, dst: IndexLists) -> RoomIndices:
        """Check a room's index lists once, for all rank pairs. Raises as `bind.check_lists` and `prefix_unaligned`."""
        return RoomIndices.of(self.needed, prompt, src, dst)

    def needed_of(self, lists: tuple[IndexList, ...], *, source: bool) -> tuple[IndexList, ...]:
        """One side's own lists without those of components that the other side lacks. Lists of other spaces stay, to be
        refused where they are unpacked.
        """
        spare = self._spare[0 if source else 1]
        return tuple(one for one in lists if one.space not in spare) if spare else lists

    def all_plans(self) -> Iterable[tuple[RankId, RankId, Plan]]:
        """Every rank pair's plan."""
        for src in self.prefill.ranks:
            for dst in self.decode.ranks:
                yield src.rank, dst.rank, self.plan(src.rank, dst.rank)

    @property
    def digest(self) -> int:
        """Semantic digest of all plans; both sides compute it from the same manifests and compare."""
        if self._digest is None:
            self._digest = semantic_digest((plan, self.prefill.rank(src)) for src, _, plan in self.all_plans())
        return self._digest

    def component_space(self, kind: str) -> AnySpace:
        """Decode's space of a component, any rank's (they count elements alike)."""
        for rank in self.decode.ranks:
            component = rank.component(kind)
            if component is not None:
                return component.space
        raise IncompatiblePeer("no rank of decode has that kind", where=kind)

    @property
    def absent(self) -> tuple[str, ...]:
        """Kinds that decode has and prefill has not: optional ones, of which nothing is written."""
        return tuple(kind for kind in self.decode.kinds if kind not in self.kinds)

    def owed(self, src_rank: RankId) -> dict[str, tuple[int, ...]]:
        """Kinds for which a source rank owes records, each with the layer ids that its plans move, rising.

        A rank that registers a kind but whose plans move none of it owes one empty record: its layers are ().
        """
        if src_rank not in self._owed:
            layers: dict[str, set[int]] = {}
            for dst in self.decode.ranks:
                for move in self._compiled(src_rank, dst.rank).moves:
                    layers.setdefault(move.kind, set()).update(move.layer_id.tolist())
            registered = {component.kind for component in self.prefill.rank(src_rank).components}
            self._owed[src_rank] = {
                kind: tuple(sorted(layers.get(kind, ()))) for kind in self.kinds if kind in registered
            }
        return self._owed[src_rank]

    def expected(self, prompt: Prompt) -> tuple[Expected, ...]:
        """For each (writer, component) that must report: the layers and elements that its records must tile."""
        result = []
        for rank in self.prefill.ranks:
            writer = Writer(pp=rank.rank.pp_rank, tp=rank.rank.tp_rank)
            for kind, layers in self.owed(rank.rank).items():
                live = live_elements(kind, self.component_space(kind), prompt)
                result.append(Expected(writer, kind, layers, live.start, live.stop))
        return tuple(result)

    def records(self, src_rank: RankId, prompt: Prompt, chunk: Chunk) -> list[Record]:
        """What a source rank may report once a chunk's transfers to all destination ranks are DONE.

        Kinds that the chunk does not advance are left out; with the last chunk every owed kind is there, empty where
        nothing of it was left or owed.
        """
        result = []
        for kind, layers in self.owed(src_rank).items():
            elements = chunk_elements(kind, self.component_space(kind), prompt, chunk)
            if elements is None or not (len(elements) or chunk.last):
                continue
            if layers and len(elements):
                result.append(Record(kind, layers[0], layers[-1] + 1, elements.start, elements.stop, chunk.last))
            elif chunk.last:
                result.append(Record(kind, 0, 0, 0, 0, True))
        return result


def _spare(instance: InstanceManifest, kinds: tuple[str, ...]) -> frozenset[int]:
    """Digests of the list spaces of an instance that only components outside `kinds` use."""
    everything, needed = needed_lists(instance, instance.kinds), needed_lists(instance, kinds)
    return frozenset(space.digest for space in everything if space not in needed)


def refused(prefill: InstanceManifest, decode: InstanceManifest, verdict: Verdict) -> IncompatiblePeer:
    """The error for a refusal: the first mismatches in the message, their number, and where to see all."""
    first = verdict.mismatches[:4]
    listed = "; ".join(
        f"{' '.join(x for x in (m.component or 'instance', m.region) if x)} {m.field}: "
        f"prefill {m.prefill}, decode {m.decode}"
        for m in first
    )
    count = len(verdict.mismatches)
    more = f"; and {count - len(first)} more" if count > len(first) else ""
    return IncompatiblePeer(
        f"{count} mismatch{'es' if count != 1 else ''}: {listed}{more}",
        where=f"{prefill.instance_id} -> {decode.instance_id}",
        hint="`sglang-pd check` prints the whole table.",
    )
