"""How large a manifest may be, asked before any of it is built: what a stranger declares must cost it more than us."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from sglang_pd.protocol.errors import ManifestError

MAX_RANKS: Final = 1_024
"""Ranks of one instance."""
MAX_SEGMENTS: Final = 2**17
"""Segments of all ranks of an instance."""
MAX_REGIONS: Final = 2**17
"""Regions of all ranks of an instance: 128 ranks of 256 layers with four parts each."""
MAX_RANK_SEGMENTS: Final = 65_536
MAX_COMPONENTS: Final = 256
MAX_COMPONENT_REGIONS: Final = 65_536


class _Instance(msgspec.Struct):
    ranks: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_RANKS)]


class _Rank(msgspec.Struct):
    segments: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_RANK_SEGMENTS)]
    components: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]


class _Component(msgspec.Struct):
    regions: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_COMPONENT_REGIONS)]


def check_total(counts: Iterable[tuple[int, int]]) -> None:
    """Refuse too many segments and regions, counted (segments, regions) a part. Raises `ManifestError` by name, at the
    first part that is too much.
    """
    segments = regions = 0
    for more_segments, more_regions in counts:
        segments, regions = segments + more_segments, regions + more_regions
        for what, actual, most in (("segments", segments, MAX_SEGMENTS), ("regions", regions, MAX_REGIONS)):
            if actual > most:
                raise ManifestError(
                    f"an instance of too many {what}",
                    where=f"instance.{what}",
                    expected=f"at most {most} over all ranks",
                    actual=f"{actual} or more",
                )


def check_size(encoded: bytes) -> None:
    """Count an encoded `InstanceManifest` without building it.

    Raises `ManifestError` for one that is too large, msgspec's errors for what is none.
    """
    check_total(_counts(encoded))


def _counts(encoded: bytes) -> Iterable[tuple[int, int]]:
    for part in msgspec.msgpack.decode(encoded, type=_Instance).ranks:
        rank = msgspec.msgpack.decode(part, type=_Rank)
        yield len(rank.segments), 0
        for component in rank.components:
            yield 0, len(msgspec.msgpack.decode(component, type=_Component).regions)
