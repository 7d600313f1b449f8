"""Indices of one forward step, computed once for all layers: where every sequence's state lies, by the typed maps.

A step has B sequences with n new tokens each (n = 1 in decode; B = 1 in prefill, as a rule).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_pd.engines.base import Sampling
from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.grid import Rotary
from sglang_pd.memory.layout import RankLayout
from sglang_pd.memory.lease import Tables
from sglang_pd.protocol.errors import LocalProtocolError
from sglang_pd.protocol.idx import I64, Idx
from sglang_pd.protocol.indices import PromptDigest
from sglang_pd.protocol.space_maps import DivideGroups, Localize, RingAt, TokenAt
from sglang_pd.protocol.spaces import LocalTok, Ring, Scaled, VirtualTok


@dataclass
class Sequence:
    """What an engine keeps of a request between calls: facts that the handoff record carries, and where its state is.

    tokens: positions whose state is in the pools. delta: added to the coordinates on the three axes. digest: of the
    prompt's ids that were computed here.
    """

    request_id: str
    delta: tuple[int, int, int]
    sampling: Sampling
    tables: Tables
    tokens: int = 0
    drawn: int = 0
    prompt: NDArray[np.int64] | None = None
    first: tuple[int, float] | None = None
    digest: PromptDigest = field(default_factory=PromptDigest)
    _mapped: tuple[int, int] = (0, 0)
    _slots: Idx[VirtualTok] | None = None

    def token_slots(self, space: VirtualTok, stop: int) -> Idx[VirtualTok]:
        """Virtual slots of positions [0, stop)."""
        pages = _pages(self)
        if self._slots is None or self._mapped != (self.tables.generation, len(pages)):
            self._slots = TokenAt(space)(pages, np.arange(len(pages) * space.page_len, dtype=np.int64))
            self._mapped = self.tables.generation, len(pages)  # a lease only ever appends pages
        if stop > len(self._slots):
            raise LocalProtocolError(
                "the request's pages end before its tokens", code="lease_invalid", where=self.request_id,
                expected=f"pages for {stop} tokens", actual=f"{len(self._slots)}",
            )  # fmt: skip
        return self._slots[:stop]


def coordinates(positions: NDArray[np.int64], delta: tuple[int, int, int]) -> NDArray[np.int64]:
    """int64 [n, 3]: three axes that advance at different speeds, as for images and video, offset by request."""
    return np.stack([positions + delta[0], positions // 2 + 3 + delta[1], positions // 3 + 5 + delta[2]], axis=1)


@dataclass(frozen=True)
class Keys:
    """Keys that the queries of a step may read.

    slots: int64 [B, T], rows of the pool. positions: int64 [B, T] token position of each, -1 for padding. padded: there
    is padding; what is gathered there must be replaced before it is used, since a pool may hold anything.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    padded: bool

    def gather(self, pool: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] rows of a pool, zero in the padding."""
        rows = pool[self.slots]
        if self.padded:
            rows[self.positions < 0] = 0
        return rows


def take(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a pool that may lie in host memory, on the device of `slots`. A copy."""
    return pool[slots.to(pool.device)].to(slots.device)


def put(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows of a pool that may lie in host memory."""
    pool[slots.to(pool.device)] = rows.to(pool.device)


@dataclass(frozen=True)
class Closing:
    """Groups of QSA keys that close in this step, of all sequences. int64 [groups] unless said otherwise.

    sequence: number in the batch. target: compressed slot. member: [groups, r], rows of the members in the request's
    ring (`width` rows) followed by the step's own tokens.
    """

    sequence: torch.Tensor
    target: torch.Tensor
    member: torch.Tensor


@dataclass(frozen=True)
class Pending:
    """Tokens of this step that stay in the open group. int64 [tokens]: number in the batch, offset in the step, and
    ring slot."""

    sequence: torch.Tensor
    offset: torch.Tensor
    slot: torch.Tensor


@dataclass(frozen=True)
class Qsa:
    """What QSA layers need. ring: int64 [B, width], ring slots of each request. compressed: all closed groups.
    closed: int64 [B, n], groups visible to each query."""

    ring: torch.Tensor
    compressed: Keys
    closed: torch.Tensor
    closing: Closing
    pending: Pending


@dataclass
class Step:
    """Everything a layer needs to know of the batch. Tensors lie on the engine's device.

    ids, positions: int64 [B, n]. coordinates: int64 [B, n, 3]. rotary: of all new tokens. slot: int64 [B] recurrent
    slots. write: int64 [B * n], rows of the token pools for the new tokens. local, local_write: the same in a pool cut
    over context-parallel ranks; local_write is (which of the B * n tokens this rank owns, their rows). window,
    window_write: in the sliding-window pool. rope_ring, history: the request-wide rings as they were before this step.
    """

    batch: int
    count: int
    ids: torch.Tensor
    positions: torch.Tensor
    coordinates: torch.Tensor
    rotary: Rotary
    slot: torch.Tensor | None = None
    keys: Keys | None = None
    write: torch.Tensor | None = None
    local: Keys | None = None
    local_write: tuple[torch.Tensor, torch.Tensor] | None = None
    window: Keys | None = None
    window_write: torch.Tensor | None = None
    qsa: Qsa | None = None
    rope_ring: torch.Tensor | None = None
    history: torch.Tensor | None = None
    choices: dict[tuple[int, int], Any] = field(default_factory=dict)


class StepBuilder:
    """Builds steps for one rank."""

    def __init__(self, config: ReferenceConfig, layout: RankLayout, device: str) -> None:
        self._config, self._roots, self._device = config, layout.roots, device
        mla, ring, scaled = (layout.component(k) for k in ("MLA", "QSA_PENDING", "QSA_COMPRESSED"))
        self._local = mla.space if mla is not None else None
        self._ring = ring.space if ring is not None and isinstance(ring.space, Ring) else None
        self._scaled = scaled.space if scaled is not None and isinstance(scaled.space, Scaled) else None

    def build(self, sequences: list[Sequence], ids: NDArray[np.int64]) -> Step:
        """ids: int64 [B, n], the tokens of positions [tokens, tokens + n) of each sequence."""
        batch, count = ids.shape
        positions = np.stack([np.arange(s.tokens, s.tokens + count, dtype=np.int64) for s in sequences])
        coords = np.stack([coordinates(p, s.delta) for p, s in zip(positions, sequences, strict=True)])
        coords_t = self._tensor(coords)
        step = Step(batch, count, self._tensor(ids), self._tensor(positions), coords_t, Rotary.of(coords_t))
        if self._roots.slots is not None:
            step.slot = self._tensor(np.array([_only(s.tables.slot) for s in sequences], dtype=np.int64))
        if self._roots.tokens is not None:
            self._tokens(step, sequences, self._roots.tokens)
        if self._roots.swa is not None:
            self._window(step, sequences)
        if self._ring is not None and self._scaled is not None and self._roots.tokens is not None:
            step.qsa = self._qsa(step, sequences, (self._ring, self._scaled, self._roots.tokens))
        return step

    def _tensor(self, values: I64) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self._device)

    def _keys(self, slots: list[I64], positions: list[I64]) -> Keys:
        longest = max((len(s) for s in slots), default=0)
        table = np.zeros((len(slots), longest), dtype=np.int64)
        where = np.full((len(slots), longest), -1, dtype=np.int64)
        for row, (s, p) in enumerate(zip(slots, positions, strict=True)):
            table[row, : len(s)], where[row, : len(s)] = s, p
        padded = any(len(s) < longest for s in slots)
        return Keys(self._tensor(table), self._tensor(where), padded)

    def _tokens(self, step: Step, sequences: list[Sequence], space: VirtualTok) -> None:
        stops = [s.tokens + step.count for s in sequences]
        slots = [s.token_slots(space, stop) for s, stop in zip(sequences, stops, strict=True)]
        everywhere = [np.arange(stop, dtype=np.int64) for stop in stops]
        step.keys = self._keys([s.lower() for s in slots], everywhere)
        step.write = self._tensor(np.concatenate([s.lower()[-step.count :] for s in slots]))
        if isinstance(self._local, LocalTok):
            localize = Localize(self._local.virtual, self._local.dcp_rank)
            owned = [localize(s) for s in slots]
            step.local = self._keys([o.idx.lower() for o in owned], [o.positions for o in owned])
            fresh = [localize(s[len(s) - step.count :]) for s in slots]
            rows = [o.positions + number * step.count for number, o in enumerate(fresh)]
            step.local_write = (
                self._tensor(np.concatenate(rows)),
                self._tensor(np.concatenate([o.idx.lower() for o in fresh])),
            )
        else:
            step.local = step.keys
            step.local_write = (self._tensor(np.arange(len(step.write), dtype=np.int64)), step.write)

    def _window(self, step: Step, sequences: list[Sequence]) -> None:
        space = self._roots.swa
        if space is None:
            return
        slots, positions, fresh = [], [], []
        for s in sequences:
            seen = np.arange(max(0, s.tokens - self._config.window), s.tokens + step.count, dtype=np.int64)
            if s.tables.swa_pages is None:
                raise LocalProtocolError("a request without window pages", code="internal", where=s.request_id)
            at = TokenAt(space, s.tables.swa_first_page)(s.tables.swa_pages, seen).lower()
            slots.append(at)
            positions.append(seen)
            fresh.append(at[-step.count :])
        step.window = self._keys(slots, positions)
        step.window_write = self._tensor(np.concatenate(fresh))

    def _qsa(self, step: Step, sequences: list[Sequence], spaces: tuple[Ring, Scaled, VirtualTok]) -> Qsa:
        ring, scaled, tokens = spaces
        r, width, n = ring.group_tokens, ring.width, step.count
        rings, groups, closing, pending = [], [], [], []
        for number, s in enumerate(sequences):
            stop, row = s.tokens + n, s.tables.row
            if row is None:
                raise LocalProtocolError("a request without a row", code="internal", where=s.request_id)
            rings.append(RingAt(ring)(row, np.arange(width, dtype=np.int64)).lower())
            firsts = s.token_slots(tokens, stop)[: stop // r * r : r]
            at = DivideGroups(scaled)(firsts).lower()
            groups.append(at)
            fresh = np.arange(s.tokens // r, stop // r, dtype=np.int64)
            members = fresh[:, None] * r + np.arange(r, dtype=np.int64)
            member = np.where(members >= s.tokens, members - s.tokens + width, members % width)
            closing.append((np.full(len(fresh), number), at[fresh], member))
            left = np.arange(max(s.tokens, stop // r * r), stop, dtype=np.int64)
            pending.append((np.full(len(left), number), left - s.tokens, RingAt(ring)(row, left).lower()))
        closes = Closing(*(self._tensor(np.concatenate(parts)) for parts in zip(*closing, strict=True)))
        return Qsa(
            self._tensor(np.stack(rings)),
            self._keys(groups, groups),
            (step.positions + 1) // r,
            closes,
            Pending(*(self._tensor(np.concatenate(parts)) for parts in zip(*pending, strict=True))),
        )


def _only(idx: Idx[Any] | None) -> int:
    if idx is None or len(idx) != 1:
        raise LocalProtocolError("a request has exactly one slot and one row", code="internal", where="tables")
    return int(idx.lower()[0])


def _pages(sequence: Sequence) -> Idx[Any]:
    if sequence.tables.pages is None:
        raise LocalProtocolError("a request without pages", code="internal", where=sequence.request_id)
    return sequence.tables.pages
