"""The kinds of state a request has: one descriptor a kind. A new kind is added here and nowhere else.

A descriptor answers what the planner, the handshake and the rooms ask: which index spaces may address it, how tensor
parallel ranks may hold it, when it is valid, which elements of it are live for a prompt, and which part names and
request-wide sentinels it has. An *element* is what its space counts: a token, a group of tokens, or the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from sglang_pd.protocol.errors import ManifestError, PlanError
from sglang_pd.protocol.spaces import (
    AnySpace,
    LocalTok,
    Page,
    RecurrentSlot,
    RequestRow,
    Ring,
    Scaled,
    Space,
    SwaTok,
    VirtualTok,
)

QSA_ROPE_STATE_LAYER_ID: Final = 2**32 - 2
"""Layer id of the RoPE coordinate ring, which all QSA layers of a request share."""
PLE_NGRAM_STATE_LAYER_ID: Final = 2**32 - 1
"""Layer id of the n-gram token history, which all PLE layers of a request share."""
MAX_LAYER_ID: Final = 2**32 - 1
SENTINELS: Final = frozenset({QSA_ROPE_STATE_LAYER_ID, PLE_NGRAM_STATE_LAYER_ID})


class Placement(Enum):
    """How the ranks of one instance hold a region."""

    SHARDED = "sharded"
    """Cut by unit (head, channel) over attention TP; repeated where there are fewer units than ranks. dim > 0."""
    REPLICATED = "replicated"
    """Equal on all attention-TP ranks. dim == 0 on the wire."""


class Validity(Enum):
    """When the source bytes mean anything."""

    CHUNK = "chunk"
    """Token rows are final as soon as the chunk that made them has been computed."""
    LAST = "last"
    """Only after the prompt's last chunk."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What liveness depends on: tokens of the prompt, and tokens of it that decode holds already."""

    tokens: int
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise PlanError("a prompt has at least one token", code="prompt_empty", actual=self.tokens)
        if not 0 <= self.prefix_tokens <= self.tokens:
            raise PlanError(
                "the prefix on decode is not part of the prompt",
                code="prefix_unaligned",
                expected=f"0 to {self.tokens}",
                actual=self.prefix_tokens,
            )


@dataclass(frozen=True, slots=True)
class Elements:
    """A half-open range of elements. Empty when stop == start."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


LiveRule = Callable[[Prompt, AnySpace], Elements]
"""Which elements decode must receive. The space gives ratio, window or group; the prompt gives L and prefix."""


def live_tokens(prompt: Prompt, space: AnySpace) -> Elements:
    """Token rows [prefix, L)."""
    return Elements(prompt.prefix_tokens, prompt.tokens)


def live_groups(prompt: Prompt, space: AnySpace) -> Elements:
    """Closed groups [prefix / r, L // r), of a sliding window those inside it; the open group is pending state."""
    if not isinstance(space, Scaled):
        return live_tokens(prompt, space)
    start = -(-live_window(prompt, space.of).start // space.ratio)
    return Elements(start, max(start, prompt.tokens // space.ratio))


def live_window(prompt: Prompt, space: AnySpace) -> Elements:
    """Token rows of the sliding window that decode does not hold: [max(prefix, L - window), L)."""
    window = space.window_tokens if isinstance(space, SwaTok) else prompt.tokens
    return Elements(max(prompt.prefix_tokens, prompt.tokens - window, 0), prompt.tokens)


def live_pending(prompt: Prompt, space: AnySpace) -> Elements:
    """Tokens of the open group: [L // r * r, L). Empty when r divides L; the ring is dead then."""
    group = space.group_tokens if isinstance(space, Ring) else 1
    return Elements(prompt.tokens // group * group, prompt.tokens)


def live_whole(prompt: Prompt, space: AnySpace) -> Elements:
    """The state as a whole: one element."""
    return Elements(0, 1)


@dataclass(frozen=True)
class Kind:
    """Descriptor of one kind.

    name: on the wire. spaces: index spaces that may address a region of this kind. placements: ways to hold it.
    validity: when it may be read. live: which elements move. parts: region names within a layer.
    request_wide: part -> sentinel layer id, for parts that exist once a request rather than once a layer.
    optional: a peer may lack the kind, if the side that has it marks its component optional.
    """

    name: str
    summary: str
    spaces: tuple[type[Space], ...]
    placements: frozenset[Placement]
    validity: Validity
    live: LiveRule
    parts: tuple[str, ...]
    request_wide: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False

    def __post_init__(self) -> None:
        strangers = set(self.request_wide) - set(self.parts)
        if not self.name or len(self.name) > 64 or not self.spaces or not self.parts or strangers:
            raise ManifestError(
                "impossible kind descriptor",
                where=self.name,
                expected="a name, a space, a part; request-wide parts among the parts",
                actual=f"spaces={self.spaces}, parts={self.parts}, request_wide={dict(self.request_wide)}",
            )


_SHARDED = frozenset({Placement.SHARDED})
_REPLICATED = frozenset({Placement.REPLICATED})
_EITHER = _SHARDED | _REPLICATED
_TOKENS: tuple[type[Space], ...] = (VirtualTok, LocalTok)

KINDS: Final[dict[str, Kind]] = {}
"""Every registered kind by name."""


def register_kind(kind: Kind) -> Kind:
    """Add a kind. Raises `ManifestError` when the name is taken by another descriptor."""
    if KINDS.get(kind.name, kind) != kind:
        raise ManifestError("a kind of that name exists", code="kind_unknown", where=kind.name)
    KINDS[kind.name] = kind
    return kind


def kind_of(name: str) -> Kind:
    """The descriptor. Raises `ManifestError` (`kind_unknown`) listing the kinds that exist."""
    try:
        return KINDS[name]
    except KeyError:
        raise ManifestError(
            "no such kind", code="kind_unknown", where=name[:64], expected=" | ".join(sorted(KINDS))
        ) from None


for _kind in (
    Kind("KV", "paged keys and values of full attention", _TOKENS, _EITHER, Validity.CHUNK, live_tokens, ("k", "v")),
    Kind(
        "MLA", "latent keys (and their RoPE part)", _TOKENS, _REPLICATED, Validity.CHUNK, live_tokens,
        ("latent", "rope"),
    ),
    Kind(
        "INDEX_K", "index keys of sparse attention, at virtual slots on every rank", (VirtualTok, Scaled), _REPLICATED,
        Validity.LAST, live_groups, ("key", "scale"),
    ),
    Kind(
        "INDEX_K_TAIL", "open group of pooled index keys", (Ring,), _REPLICATED, Validity.LAST, live_pending,
        ("key", "score"),
    ),
    Kind("SWA", "keys and values inside a sliding window", (SwaTok,), _EITHER, Validity.LAST, live_window, ("k", "v")),
    Kind(
        "QSA_PENDING", "raw index keys of the open group, and their coordinates", (Ring,), _REPLICATED, Validity.LAST,
        live_pending, ("key", "rope"), {"rope": QSA_ROPE_STATE_LAYER_ID},
    ),
    Kind("QSA_COMPRESSED", "index keys of closed groups", (Scaled,), _REPLICATED, Validity.LAST, live_groups, ("key",)),
    Kind("QSA_RAW_K", "raw index keys of all tokens", _TOKENS, _REPLICATED, Validity.LAST, live_tokens, ("key",)),
    Kind("QSA_POSITIONS", "coordinates of all tokens", _TOKENS, _REPLICATED, Validity.LAST, live_tokens, ("position",)),
    Kind(
        "MAMBA", "linear attention: convolution window and recurrent state", (RecurrentSlot,), _EITHER, Validity.LAST,
        live_whole, ("conv", "temporal"),
    ),
    Kind(
        "PLE", "short convolution window, and n-gram token history", (RecurrentSlot,), _REPLICATED, Validity.LAST,
        live_whole, ("conv", "ngram"), {"ngram": PLE_NGRAM_STATE_LAYER_ID},
    ),
    Kind(
        "DRAFT_KV", "keys and values of a draft model", _TOKENS, _EITHER, Validity.CHUNK, live_tokens, ("k", "v"),
        optional=True,
    ),
    Kind(
        "BLOCK_SCALE", "per-block scales of quantised keys and values", (VirtualTok, LocalTok, SwaTok), _EITHER,
        Validity.LAST, live_window, ("k", "v"),
    ),
    Kind(
        "REQUEST_ROW", "large tensors of the hand-over (draft seed, hidden state)", (RequestRow,), _REPLICATED,
        Validity.LAST, live_whole, ("row",), optional=True,
    ),
):  # fmt: skip
    register_kind(_kind)


def list_tokens(list_space: AnySpace, prompt: Prompt) -> Elements:
    """Token range that one side's index list over pages must cover; for rows and slots, the single index.

    Pages of a full-attention space cover [prefix, L), pages of a sliding window [max(prefix, L - window), L). The
    destination passes the prefix it holds; a source always lists the whole prompt, so it passes 0.
    """
    if isinstance(list_space, Page):
        return live_window(prompt, list_space.of)
    return Elements(0, 1)


def list_count(list_space: AnySpace, prompt: Prompt) -> int:
    """Exact length of an index list: pages of `page_len` tokens that hold the range of `list_tokens`, or one."""
    tokens = list_tokens(list_space, prompt)
    if not isinstance(list_space, Page):
        return 1
    if not len(tokens):
        return 0
    length = list_space.of.page_len
    return -(-tokens.stop // length) - tokens.start // length


def first_page(list_space: AnySpace, prompt: Prompt) -> int:
    """Position, in pages from the start of the prompt, of the first page of the list."""
    return list_tokens(list_space, prompt).start // list_space.of.page_len if isinstance(list_space, Page) else 0
