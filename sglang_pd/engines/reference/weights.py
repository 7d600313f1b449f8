"""Weights of a reference model, from its seed, cut for one rank.

Every layer has a generator of its own, so that a stage builds its layers only. Whole weights are drawn, then sliced:
all ranks of all topologies see slices of the same model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.grid import F64, WEIGHT_BITS, Matrix, snap


@dataclass(frozen=True)
class Cut:
    """A rank's share: heads and channels are cut over tp; dcp ranks with consecutive tp ranks form one group."""

    tp: int = 1
    rank: int = 0
    dcp: int = 1

    @property
    def dcp_rank(self) -> int:
        """Place within the context-parallel group."""
        return self.rank % self.dcp

    def span(self, total: int) -> slice:
        """The rank's part of `total` equal units; a unit is repeated where there are fewer units than ranks."""
        if total >= self.tp:
            return slice(self.rank * total // self.tp, (self.rank + 1) * total // self.tp)
        at = self.rank * total // self.tp
        return slice(at, at + 1)

    def group_span(self, total: int) -> slice:
        """The part of the rank's whole context-parallel group."""
        groups = self.tp // self.dcp
        group = self.rank // self.dcp
        return slice(group * total // groups, (group + 1) * total // groups)


class Draw:
    """Random numbers on the weight grid."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device

    def normal(self, *shape: int, scale: float = 0.0) -> torch.Tensor:
        """Standard normal times `scale`, by default 1 / sqrt(last axis)."""
        raw = torch.randn(*shape, generator=self._generator, dtype=F64)
        return snap(raw * (scale or shape[-1] ** -0.5), WEIGHT_BITS).to(self._device)

    def uniform(self, count: int, low: float, high: float) -> torch.Tensor:
        """Uniform in [low, high)."""
        raw = torch.rand(count, generator=self._generator, dtype=F64)
        return snap(raw * (high - low) + low, WEIGHT_BITS).to(self._device)

    def odd(self, count: int) -> torch.Tensor:
        """Odd int64 numbers below 2**32."""
        raw = torch.randint(1, 2**31, (count,), generator=self._generator)
        return (raw * 2 + 1).to(self._device)


def rows(w: torch.Tensor, width: int, part: slice) -> torch.Tensor:
    """Rows of some heads of a column-parallel matrix [heads * width, inputs]."""
    return w[part.start * width : part.stop * width]


def columns(w: torch.Tensor, width: int, part: slice) -> Matrix:
    """Columns of some heads of a row-parallel matrix [outputs, heads * width]; its partial products are summed."""
    return Matrix.of(w[:, part.start * width : part.stop * width])


@dataclass(frozen=True)
class Mlp:
    """Cut by hidden unit. into: gate | up."""

    into: Matrix
    down: Matrix


@dataclass(frozen=True)
class Attention:
    """Full, sliding-window and QSA layers, cut by head. into: q and k | v | gate, and in QSA layers | index q | index
    k, these two replicated."""

    into: Matrix
    out: Matrix


@dataclass(frozen=True)
class Gdn:
    """Gated DeltaNet, cut by head. into: mix | gate | decay | beta, where mix is the q | k | v channels of this rank;
    conv: [channels, kernel]."""

    into: Matrix
    conv: torch.Tensor
    rate: torch.Tensor
    shift: torch.Tensor
    out: Matrix


@dataclass(frozen=True)
class Mla:
    """Latent attention. into: q | latent | index q | index k, and with a rotary part | q rope | k rope; queries are
    those of the context-parallel group's heads. value, out: of the rank's own heads."""

    into: Matrix
    value: torch.Tensor
    out: Matrix


@dataclass(frozen=True)
class Ple:
    """Per-layer n-gram embedding, replicated. into: value | key. offsets: first row of each head's table."""

    table: torch.Tensor
    into: Matrix
    conv: torch.Tensor
    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """One layer's weights."""

    kind: str
    mixer: Attention | Gdn | Mla
    mlp: Mlp
    ple: Ple | None


@dataclass(frozen=True)
class Weights:
    """A stage's weights. embedding: [vocab, hidden]; head: on the last stage."""

    embedding: torch.Tensor
    head: Matrix
    layers: dict[int, Layer]


@lru_cache(maxsize=32)
def build(config: ReferenceConfig, layers: range, cut: Cut, device: str = "cpu") -> Weights:
    """The weights of one rank, kept for the next engine of the same model: nobody changes them."""
    ends = Draw(config.seed * 4096 + 4095, device)
    embedding = ends.normal(config.vocab, config.hidden, scale=1.0)
    head = Matrix.of(ends.normal(config.vocab, config.hidden))
    return Weights(embedding, head, {i: _layer(config, i, cut, device) for i in layers})


def _layer(c: ReferenceConfig, number: int, cut: Cut, device: str) -> Layer:
    draw = Draw(c.seed * 4096 + number, device)
    kind = c.layers[number]
    mixer: Attention | Gdn | Mla
    if kind == "gdn":
        mixer = _gdn(c, draw, cut)
    elif kind == "mla":
        mixer = _mla(c, draw, cut)
    else:
        mixer = _attention(c, draw, cut, kind == "qsa")
    span = cut.span(c.mlp)
    up, gate, down = draw.normal(c.mlp, c.hidden), draw.normal(c.mlp, c.hidden), draw.normal(c.hidden, c.mlp)
    mlp = Mlp(Matrix.of(gate[span], up[span]), Matrix.of(down[:, span]))
    return Layer(kind, mixer, mlp, _ple(c, draw) if number in c.ple_layers else None)


def _attention(c: ReferenceConfig, draw: Draw, cut: Cut, qsa: bool) -> Attention:
    wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
    q, k, v = draw.normal(wide, c.hidden), draw.normal(narrow, c.hidden), draw.normal(narrow, c.hidden)
    out, gate = draw.normal(c.hidden, wide), draw.normal(wide, c.hidden)
    mine, kv, width = cut.span(c.heads), cut.span(c.kv_heads), c.head_dim
    index = (draw.normal(c.qsa_heads * c.qsa_dim, c.hidden), draw.normal(c.qsa_dim, c.hidden)) if qsa else ()
    both = torch.cat([rows(q, width, mine), rows(k, width, kv)])
    return Attention(
        Matrix.of(both, rows(v, width, kv), rows(gate, width, mine), *index), columns(out, width, mine)
    )  # fmt: skip


def _gdn(c: ReferenceConfig, draw: Draw, cut: Cut) -> Gdn:
    keys, _, values = c.gdn_groups
    spans = ((keys, cut.span(c.gdn_key_heads), c.gdn_key_dim),) * 2 + (
        (values, cut.span(c.gdn_value_heads), c.gdn_value_dim),
    )
    mix = torch.cat([rows(draw.normal(n, c.hidden), width, part) for n, part, width in spans])
    conv = torch.cat([rows(draw.normal(n, c.gdn_kernel, scale=0.6), width, part) for n, part, width in spans])
    mine = cut.span(c.gdn_value_heads)
    gate = rows(draw.normal(values, c.hidden), c.gdn_value_dim, mine)
    decay, beta = (draw.normal(c.gdn_value_heads, c.hidden)[mine] for _ in range(2))
    return Gdn(
        Matrix.of(mix, gate, decay, beta),
        conv,
        draw.uniform(c.gdn_value_heads, 0.05, 0.55)[mine],
        draw.normal(c.gdn_value_heads, scale=0.3)[mine],
        columns(draw.normal(c.hidden, values), c.gdn_value_dim, mine),
    )


def _mla(c: ReferenceConfig, draw: Draw, cut: Cut) -> Mla:
    group, mine = cut.group_span(c.heads), cut.span(c.heads)
    q = draw.normal(c.heads * c.mla_latent, c.hidden)
    q_rope = draw.normal(c.heads * max(c.mla_rope, 1), c.hidden)
    latent, k_rope = draw.normal(c.mla_latent, c.hidden), draw.normal(max(c.mla_rope, 1), c.hidden)
    value = draw.normal(c.heads, c.mla_latent, c.head_dim, scale=c.mla_latent**-0.5)
    index = (draw.normal(c.index_heads * c.index_dim, c.hidden), draw.normal(c.index_dim, c.hidden))
    rope = (rows(q_rope, c.mla_rope, group), k_rope) if c.mla_rope else ()
    return Mla(
        Matrix.of(rows(q, c.mla_latent, group), latent, *index, *rope),
        value[mine],
        columns(draw.normal(c.hidden, c.heads * c.head_dim), c.head_dim, mine),
    )


def _ple(c: ReferenceConfig, draw: Draw) -> Ple:
    primes = torch.tensor(c.ngram_primes, dtype=torch.int64)
    table = draw.normal(int(primes.sum()), c.ple_dim // len(c.ngram_primes), scale=1.0)
    value, key = draw.normal(c.hidden, c.ple_dim), draw.normal(c.hidden, c.ple_dim)
    conv = draw.normal(c.hidden, c.ple_kernel, scale=0.6)
    offsets = torch.cumsum(primes, 0) - primes
    device = table.device
    return Ple(
        table, Matrix.of(value, key), conv, draw.odd(c.ngram), primes.to(device), offsets.to(device)
    )  # fmt: skip
