"""A component that may be missing at the other side: rooms go on without it, with the lists that a lease gives."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from support.local_pair import IDS, KV, Side

from sglang_pd import DecodeEndpoint, EventKind, PrefillEndpoint
from sglang_pd.memory.spec import ComponentSpec, RegionSpec
from sglang_pd.protocol.kinds import Prompt
from sglang_pd.protocol.spaces import RequestRow

ROW = ComponentSpec(
    "REQUEST_ROW", "rows", (RegionSpec("row", (0,), "float32", 1, (16,), replicated=True),), optional=True
)
DRAFT = ComponentSpec(
    "DRAFT_KV", "tokens", tuple(RegionSpec(part, (0,), "float32", 2, (4,)) for part in "kv"), optional=True
)


def room(prefill: Side, decode: Side, strange: Sequence[RequestRow] = ()) -> list[str]:
    """One room whose lists are the leases'; what decode said of it."""
    prefill.pools.array("KV", 0, "k")[:] = np.arange(1, 17).reshape(2, 8)
    source, destination = prefill.allocator.lease(len(IDS)), decode.allocator.lease(len(IDS))
    destination.arm()
    lists = dict(destination.lists(Prompt(len(IDS))))
    for space in strange:
        lists[space] = space.ingest(np.arange(1, 2))
    handle = prefill.at.request(1, IDS, source.lists(Prompt(len(IDS))))
    decode.at.open(1, prefill.at.address, IDS, lists)
    prefill.at.send(handle, 0, len(IDS), last=True)
    prefill.at.finish(handle, len(IDS), b"record")
    said = decode.released(1)
    if "done" in said:
        pages = next(iter(destination.lists(Prompt(len(IDS))).values())).lower()
        got = decode.pools.array("KV", 0, "k").reshape(-1, 16, 2, 8)[pages].reshape(-1, 2, 8)[: len(IDS)]
        assert (got == np.arange(1, 17, dtype=np.float32).reshape(2, 8)).all()
        prefill.released(1)
    return said


@pytest.mark.parametrize("extra", [ROW, DRAFT], ids=["a row", "a draft model"])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_rooms_go_on_without_a_component_that_only_one_side_has(extra: ComponentSpec, where: str) -> None:
    both, one = (KV,), (KV, extra)
    prefill = Side(PrefillEndpoint, "prefill-0", components=one if where == "prefill" else both)
    decode = Side(DecodeEndpoint, "decode-0", components=one if where == "decode" else both)
    try:
        assert room(prefill, decode) == ["admitted", "done", "releasable"]
        (admitted,) = [event for event in decode.events if event.kind is EventKind.ADMITTED]
        assert admitted.absent == ((extra.kind,) if where == "decode" else ())
        assert decode.at.peers()[0]["absent"] == list(admitted.absent)
    finally:
        prefill.close()
        decode.close()


def test_a_list_of_a_space_that_is_nobodys_is_refused_still() -> None:
    prefill, decode = Side(PrefillEndpoint, "prefill-0", components=(KV, ROW)), Side(DecodeEndpoint, "decode-0")
    try:
        began_s = time.monotonic()
        assert room(prefill, decode, [RequestRow(rows=99)]) == ["failed:space_mismatch", "releasable"]
        assert time.monotonic() - began_s < 5
    finally:
        prefill.close()
        decode.close()
