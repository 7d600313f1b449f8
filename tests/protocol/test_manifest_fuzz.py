"""Manifests that a peer has bent: refused by our own errors or by the verdict, never a crash, never a wrong byte.

One or two leaves of a good manifest are changed, and the result is sent through decoding, verdict, planning and bytes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pd.protocol.coverage import overlapping_regions
from sglang_pd.protocol.errors import PdError
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.pairing import Pairing

from . import oracle
from .builders import Pools, Shape, build, every_kind, roomy
from .handover import hand_over, simple

NO_WINDOW = tuple(spec for spec in every_kind(Pools()) if spec.kind != "SWA")
PREFILL = build(Shape(NO_WINDOW, pp=2, tp=2, stages={1: 1}, name="p"))
DECODE = roomy(build(Shape(every_kind(Pools(dcp=2)), tp=4, dcp=2, name="d")), 2**16)
BENT: list[Any] = [
    0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 100, 4096, 2**20, 2**24, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**40, 2**52,
    2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), True, False, None, 1.5, "", "k", "v", "KV", "MLA", "x" * 300,
    b"", [], [0], [1, 1], [4, 4, 8], [[]], {}, {"space": "virtual_token"},
    {"space": "ragged_scratch", "token_counts": [1]},
]  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything that can be changed, containers included."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, part in value.items():
            found += leaves(part, (*path, key))
    elif isinstance(value, list):
        for key, part in enumerate(value):
            found += leaves(part, (*path, key))
    return found


def bend(body: Any, rng: Random) -> None:
    """Replace, move, drop or double one leaf."""
    path = rng.choice(leaves(body))
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    how = rng.random()
    if how < 0.2 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), old)
    elif how < 0.3:
        del holder[path[-1]]
    elif how < 0.7 and isinstance(old, int):
        holder[path[-1]] = old + rng.choice([-64, -2, -1, 1, 2, 64])
    else:
        holder[path[-1]] = rng.choice(BENT)


@pytest.mark.timeout(600)
@settings(max_examples=settings().max_examples)
@given(st.integers(0, 2**63), st.integers(1, 2), st.booleans())
def test_a_bent_manifest_costs_its_sender_a_refusal_and_nobody_else_anything(
    seed: int, times: int, from_decode: bool
) -> None:
    rng = Random(seed)
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(DECODE if from_decode else PREFILL))
    for _ in range(times):
        bend(body, rng)
    try:
        bent = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=InstanceManifest)
    except (PdError, msgspec.ValidationError) as error:
        assert len(str(error)) < 20_000
        return
    prefill, decode = (PREFILL, bent) if from_decode else (bent, DECODE)
    try:
        Pairing(prefill, decode).digest  # noqa: B018  compiles and proves every plan
    except PdError as error:
        assert error.code in ("peer_incompatible", "coverage_incomplete")
        return
    if any(overlapping_regions(rank) for rank in prefill.ranks):
        return  # a source may alias its own memory; then there is no telling what it holds
    sizes = {segment.nbytes for side in (prefill, decode) for rank in side.ranks for segment in rank.segments}
    if max(sizes) > 2**17:
        return  # accepted, and too large for the oracle's memory
    hand_over(simple(prefill, decode, 11))


def test_the_pair_that_is_bent_is_a_good_one() -> None:
    hand_over(simple(PREFILL, DECODE, 11))
    assert len(leaves(msgspec.msgpack.decode(msgspec.msgpack.encode(PREFILL)))) > 1000
    assert set(oracle.LIVE) - {"SWA"} == set(PREFILL.kinds) == set(DECODE.kinds)
