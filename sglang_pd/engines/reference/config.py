"""Shape of a reference model, and the state that follows from it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import xxhash
from msgspec import Meta

from sglang_pd.memory.spec import ComponentSpec, RegionSpec, StateSpec
from sglang_pd.protocol.errors import ConfigError

LayerKind = Literal["gdn", "qsa", "full", "swa", "mla"]
Size = Annotated[int, Meta(ge=1, le=65_536)]

MAX_TOKENS = 8192
"""Longest sequence: attention's sums of up to this many values (below 16, on 2**-36) stay exact."""


class ReferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hybrid model. The default is tiny, has every kind of state, and head counts that divide by 4.

    layers: kind of each layer. ple_layers: layers with a per-layer n-gram embedding. coupling: `sparse` selects blocks
    and tokens by index score within the budgets; `soft` selects all and adds the score to the attention logits, so that
    every index state shows in the output. verify_window: tokens of a speculative step, 1 without; the pending ring has
    qsa_ratio + verify_window - 1 slots. window: keys a sliding-window query sees before its own position. mla_rope 0:
    no rotary part (and no such region). *_budget: in tokens. seed: of the weights. ple_offload: PLE state lies in host
    memory beside the device's.
    """

    layers: tuple[LayerKind, ...] = ("gdn", "gdn", "qsa", "gdn", "full", "qsa", "swa", "mla")
    ple_layers: tuple[int, ...] = (0, 3)
    coupling: Literal["sparse", "soft"] = "sparse"
    vocab: Size = 251
    hidden: Size = 64
    mlp: Size = 96
    heads: Size = 8
    kv_heads: Size = 4
    head_dim: Size = 16
    gdn_key_heads: Size = 4
    gdn_value_heads: Size = 8
    gdn_key_dim: Size = 8
    gdn_value_dim: Size = 8
    gdn_kernel: Annotated[int, Meta(ge=2, le=64)] = 4
    qsa_ratio: Size = 4
    qsa_budget: Size = 8
    qsa_heads: Size = 2
    qsa_dim: Size = 16
    verify_window: Size = 1
    window: Size = 12
    mla_latent: Size = 32
    mla_rope: Annotated[int, Meta(ge=0, le=65_536)] = 8
    index_heads: Size = 2
    index_dim: Size = 16
    index_budget: Size = 8
    ngram: Annotated[int, Meta(ge=2, le=8)] = 3
    ngram_primes: tuple[int, ...] = (101, 103, 107, 109)
    ple_dim: Size = 32
    ple_kernel: Annotated[int, Meta(ge=2, le=64)] = 4
    eos: Annotated[int, Meta(ge=0, le=65_536)] = 2
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    ple_offload: bool = False

    def __post_init__(self) -> None:
        n = len(self.layers)
        orders = self.ngram - 1
        rules = (
            ("layers", "1 to 1024 layers", 1 <= n <= 1024),
            ("ple_layers", f"rising layers below {n}", list(self.ple_layers) == sorted(set(self.ple_layers))
             and all(0 <= layer < n for layer in self.ple_layers)),
            ("kv_heads", "a divisor of heads", self.heads % self.kv_heads == 0),
            ("gdn_key_heads", "a divisor of gdn_value_heads", self.gdn_value_heads % self.gdn_key_heads == 0),
            ("qsa_budget", "at least qsa_ratio", self.qsa_budget >= self.qsa_ratio),
            ("head_dim", "at least 8", min(self.head_dim, self.qsa_dim, self.index_dim) >= 8),
            ("mla_rope", "0, or at least 8", self.mla_rope == 0 or self.mla_rope >= 8),
            ("ngram_primes", f"a multiple of {orders} that divides ple_dim", bool(self.ngram_primes)
             and len(self.ngram_primes) % orders == 0 and self.ple_dim % len(self.ngram_primes) == 0),
            ("eos", "a token of the vocabulary", self.eos < self.vocab),
        )  # fmt: skip
        for field, expected, good in rules:
            if not good:
                raise ConfigError(
                    "impossible reference model",
                    where=f"engine.{field}",
                    expected=expected,
                    actual=getattr(self, field),
                )

    def layers_of(self, *kinds: str) -> tuple[int, ...]:
        """Ids of the layers of some kinds."""
        return tuple(i for i, kind in enumerate(self.layers) if kind in kinds)

    @property
    def ring_width(self) -> int:
        """Slots of the pending ring."""
        return self.qsa_ratio + self.verify_window - 1

    @property
    def gdn_groups(self) -> tuple[int, int, int]:
        """Channels of the convolution's q, k and v blocks."""
        key = self.gdn_key_heads * self.gdn_key_dim
        return key, key, self.gdn_value_heads * self.gdn_value_dim

    @property
    def fingerprint(self) -> str:
        """Identity of the model: the weights follow from the configuration.

        Left out: what only one side's memory depends on (the ring's width, and where PLE state lies).
        """
        model = msgspec.structs.replace(self, verify_window=1, ple_offload=False)
        return f"reference-{xxhash.xxh3_64_hexdigest(msgspec.json.encode(model))}"

    @property
    def page_multiple(self) -> int:
        """page_tokens must be a multiple of this."""
        return self.qsa_ratio if self.layers_of("qsa") else 1


def state_spec(config: ReferenceConfig, stage_starts: tuple[int, ...] = ()) -> StateSpec:
    """All state of the model, in the kinds of `protocol.kinds`. Everything real is float64, so that it stays exact."""
    window = config.window if config.layers_of("swa") else 0
    groups = (_attention, _mla, _qsa, _recurrent)
    components = tuple(component for group in groups for component in group(config) if component.regions)
    return StateSpec(components, len(config.layers), window, stage_starts)


def _attention(c: ReferenceConfig) -> list[ComponentSpec]:
    def pair(layers: tuple[int, ...]) -> tuple[RegionSpec, ...]:
        return tuple(RegionSpec(part, layers, "float64", c.kv_heads, (c.head_dim,)) for part in ("k", "v"))

    found = []
    if layers := c.layers_of("qsa", "full"):
        found.append(ComponentSpec("KV", "tokens", pair(layers), layout="NHD"))
    if layers := c.layers_of("swa"):
        found.append(ComponentSpec("SWA", "swa", pair(layers), layout="NHD"))
    return found


def _mla(c: ReferenceConfig) -> list[ComponentSpec]:
    layers = c.layers_of("mla")
    if not layers:
        return []

    def part(name: str, dtype: str, *shape: int) -> RegionSpec:
        return RegionSpec(name, layers, dtype, 1, shape, replicated=True)

    latent = (part("latent", "float64", c.mla_latent),)
    rope = (part("rope", "float64", c.mla_rope),) if c.mla_rope else ()
    index = (part("key", "int8", c.index_dim), part("scale", "float32"))
    return [ComponentSpec("MLA", "local_tokens", latent + rope), ComponentSpec("INDEX_K", "tokens", index)]


def _qsa(c: ReferenceConfig) -> list[ComponentSpec]:
    layers = c.layers_of("qsa")
    if not layers:
        return []
    key = RegionSpec("key", layers, "float64", 1, (c.qsa_dim,), replicated=True)
    rope = RegionSpec("rope", layers, "int64", 1, (3,), replicated=True)
    return [
        ComponentSpec(
            "QSA_PENDING", "rows", (key, rope), ring_width=c.ring_width, group_tokens=c.qsa_ratio, segment="QSA"
        ),
        ComponentSpec("QSA_COMPRESSED", "tokens", (key,), ratio=c.qsa_ratio, segment="QSA"),
    ]


def _recurrent(c: ReferenceConfig) -> list[ComponentSpec]:
    found = []
    if layers := c.layers_of("gdn"):
        conv = RegionSpec(
            "conv", layers, "float64", sum(c.gdn_groups), (c.gdn_kernel - 1,), shard_groups=c.gdn_groups
        )  # fmt: skip
        temporal = RegionSpec("temporal", layers, "float64", c.gdn_value_heads, (c.gdn_key_dim, c.gdn_value_dim))
        found.append(ComponentSpec("MAMBA", "slots", (conv, temporal), layout="q|k|v, dk*dv"))
    if c.ple_layers:
        columns = (c.ple_kernel - 1) * c.ngram
        conv = RegionSpec("conv", c.ple_layers, "float64", c.hidden, (columns,), replicated=True)
        ngram = RegionSpec("ngram", c.ple_layers, "int64", c.ngram - 1, replicated=True, initial=c.eos)
        found.append(ComponentSpec("PLE", "slots", (conv, ngram), device="cpu" if c.ple_offload else ""))
    return found
