"""The state description of a model, from what its caches hold."""

from __future__ import annotations

from typing import Final

from sglang_pd.engines.transformers.walk import Carried, Walk, refuse
from sglang_pd.memory.spec import DTYPE_BYTES, ComponentSpec, RegionSpec, Root, StateSpec
from sglang_pd.protocol.kinds import kind_of

ROOTS: Final[dict[str, Root]] = {
    "KV": "tokens",
    "MLA": "local_tokens",
    "INDEX_K": "tokens",
    "QSA_RAW_K": "tokens",
    "QSA_POSITIONS": "tokens",
    "SWA": "swa",
    "MAMBA": "slots",
    "PLE": "slots",
}
"""Kinds that the library's caches hold, in the order of a manifest, and the allocator behind each."""
SHARDED: Final = frozenset({"KV", "SWA", "MAMBA"})
LAYOUT: Final = "hf"
"""Tag of these layouts: convolution windows K wide, recurrent states as the library turns them."""

Form = tuple[str, str, int, tuple[int, ...]]
"""Part, dtype, units, shape of a unit."""


def state_of(walk: Walk, eos: int) -> StateSpec:
    """Components, regions and layers. eos: what a fresh n-gram history holds.

    Layers of one part may differ in form (a region spec each). Raises `ManifestError` for a precision that no region
    has, or a model without state.
    """
    components = []
    for kind, root in ROOTS.items():
        forms: dict[Form, list[int]] = {}
        for part in kind_of(kind).parts:
            for layer, form in _forms(walk, kind, part).items():
                forms.setdefault(form, []).append(layer)
        regions = tuple(
            RegionSpec(
                part, tuple(sorted(layers)), dtype, units, shape, replicated=kind not in SHARDED,
                initial=eos if part == "ngram" else 0,
            )
            for (part, dtype, units, shape), layers in forms.items()
        )  # fmt: skip
        if regions:
            components.append(ComponentSpec(kind, root, regions, layout=LAYOUT))
    window = max((c.window for c in walk.carried), default=0)
    if not components:
        refuse(0, ("layers", None), "a model with a cache", "no state at all")
    return StateSpec(tuple(components), walk.layers, window)


def _forms(walk: Walk, kind: str, part: str) -> dict[int, Form]:
    """Form of one part, by layer; tensors that share a region stand one behind the other."""
    found: dict[int, Form] = {}
    for item in walk.carried:
        if (item.kind, item.part) == (kind, part):
            units = item.first + item.shape[0]
            found[item.layer] = (part, _dtype(item), units, item.shape[1:])
    return found


def _dtype(item: Carried) -> str:
    name = str(item.dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        refuse(item.layer, item.path, " | ".join(DTYPE_BYTES), name)
    return name
