"""Nothing is lost unnoticed between real workers: every region, spoiled in every way, at three places.

- `transport`: the backend copies something else than it was asked to. The digests of `verify: full` refuse the room
  before it is admitted; without them the comparison with the model run whole sees it.
- `source`: prefill's own pools are wrong before they are sent, so that digests agree: the comparison sees it.
- `lists`: prefill names another request's indices, so that digests agree as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support.parity_live import CONFIGS, P, whole
from support.parity_pair import LANES, UNVERIFIED, Case, Pair, Pairs
from support.parity_tamper import tampers
from support.reference_run import Host, Size, prompt_ids
from support.spoil import FILLER, spoils

LENGTH = 39
"""Leaves three pending keys in a ring of four, and a page that is not full."""
TOGETHER = 8

pytestmark = pytest.mark.timeout(300)  # many hand-overs in one test, on a machine that may be busy

Fault = tuple[str, str, tuple[str, int, str]]


@cache
def faults(stage: str) -> list[Fault]:
    """Every fault of a stage."""
    pools = Host(CONFIGS["soft"], Size()).pools
    ways: Any = tampers(pools) if stage == "transport" else spoils(pools)
    return [(stage, way, key) for way, key, _ in ways]


def few(stage: str) -> list[Fault]:
    """A region of each kind skipped and changed by its least; every other way once."""
    chosen: dict[tuple[str, str], Fault] = {}
    for fault in faults(stage):
        way = fault[1].partition("_with_")[0]
        every_kind = way in ("skip", "one_byte", "one_element")
        chosen.setdefault((way, fault[2][0] if every_kind else ""), fault)
    return list(chosen.values())


def prepared(pair: Pair, lane: str) -> None:
    """Pools full of plausible numbers, and a request at prefill whose state a defect may send instead."""
    pair.prefill.tell("decoy", lane=lane, ids=[])
    pair.ready(lane, prefill=FILLER, decode=FILLER)
    pair.prefill.tell("decoy", lane=lane, ids=prompt_ids(LENGTH, seed=8).tolist())


def refused(pair: Pair, lane: str, fault: Fault) -> str:
    """The room fails on both sides by the digests, and nothing of it reaches the engine."""
    before = pair.ready(lane, prefill=None, decode=FILLER)  # else right bytes of the room before may lie there
    (got,) = pair.run(lane, [Case(LENGTH, P if fault[0] == "early" else 0, fault=fault)])
    assert got.error is not None, f"{fault} was admitted; it differs by {got.noticed(whole('soft', LENGTH))}"
    assert got.error["code"] == "digest_mismatch", (fault, got.error)
    assert f"/{fault[2][0]}," in got.error["where"], (fault, got.error)
    assert not got.before and not got.after
    assert got.prefill_error is not None and got.prefill_error["code"] == "digest_mismatch", (fault, got.prefill_error)
    assert pair.ready(lane, prefill=None, decode=None) > before, f"{fault} changed nothing"
    return got.error["where"]


def refuse_all(pair: Pair, lane: str, chosen: list[Fault]) -> None:
    prepared(pair, lane)
    for fault in chosen:
        refused(pair, lane, fault)
    pair.ready(lane, prefill=None)
    (clean,) = pair.run(lane, [Case(LENGTH)])
    assert not clean.explain(whole("soft", LENGTH))


def notice_all(pair: Pair, lane: str, chosen: list[Fault]) -> None:
    """Every fault is seen by live state as it arrived. Those of the transport strike all that flies: one at a time."""
    prepared(pair, lane)
    want = whole("soft", LENGTH)
    together = 1 if chosen[0][0] == "transport" else TOGETHER
    missed = []
    for at in range(0, len(chosen), together):
        part = chosen[at : at + together]
        pair.ready(lane, prefill=None, decode=FILLER)
        for fault, got in zip(part, pair.run(lane, [Case(LENGTH, fault=f) for f in part]), strict=True):
            if "before" not in got.noticed(want):
                missed.append(fault)
    assert not missed
    pair.ready(lane, prefill=None)
    (clean,) = pair.run(lane, [Case(LENGTH)])
    assert not clean.explain(want)


def test_the_digests_refuse_what_a_transport_got_wrong(pairs: Pairs) -> None:
    refuse_all(pairs.get("local", LANES), "soft", few("transport"))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "nixl", "mooncake"])
def test_the_digests_refuse_every_way_in_every_region(pairs: Pairs, transport: str) -> None:
    refuse_all(pairs.get(transport, LANES), "soft", faults("transport"))


@pytest.mark.slow
def test_without_digests_live_state_tells_what_a_transport_got_wrong(pairs: Pairs) -> None:
    notice_all(pairs.get("local", UNVERIFIED), "unverified", faults("transport"))


def test_live_state_tells_what_was_wrong_at_its_source(pairs: Pairs) -> None:
    notice_all(pairs.get("local", LANES), "soft", few("source"))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_live_state_tells_every_way_in_every_region(pairs: Pairs, transport: str) -> None:
    notice_all(pairs.get(transport, LANES), "soft", faults("source"))


def test_a_fault_in_an_early_chunk_is_refused_by_that_chunk(pairs: Pairs) -> None:
    """Of what streams: the first page goes wrong, the others follow as they should."""
    pair = pairs.get("local", LANES)
    prepared(pair, "soft")
    for way, key in [("skip", ("KV", 2, "k")), ("one_byte", ("MLA", 7, "latent")), ("one_row_off", ("KV", 5, "v"))]:
        where = refused(pair, "soft", ("early", way, key))
        assert f"elements [0, {P})" in where
    pair.ready("soft", prefill=None)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_every_fault_in_an_early_chunk_is_refused(pairs: Pairs, transport: str) -> None:
    paged = [("early", way, key) for _, way, key in faults("transport") if key[0] in ("KV", "MLA", "INDEX_K")]
    refuse_all(pairs.get(transport, LANES), "soft", paged)


@pytest.mark.parametrize(("side", "how"), [("prefill", "other"), ("prefill", "reversed"), ("decode", "reversed")])
def test_wrong_indices_are_noticed(pairs: Pairs, side: str, how: str) -> None:
    """One list space at a time, of the pages, sliding-window pages, row and slot; digests cannot see this."""
    pair = pairs.get("local", LANES)
    prepared(pair, "soft")
    names = pair.prefill.tell("cases", lane="soft")["lists"]
    assert len(names) == 4
    lying = pair.prefill if side == "prefill" else pair.decode
    for name in names if how == "other" else [name for name in names if name.startswith("Page")]:
        pair.ready("soft", prefill=None, decode=FILLER)
        lying.tell("wrong_lists", lane="soft", name=name, tokens=LENGTH, how=how)
        (got,) = pair.run("soft", [Case(LENGTH)])
        noticed = got.noticed(whole("soft", LENGTH))
        assert {"before", "logits"} <= noticed and got.error is None, (name, noticed, got.error)
    lying.tell("wrong_lists", lane="soft", name="", tokens=LENGTH)
    (clean,) = pair.run("soft", [Case(LENGTH)])
    assert not clean.explain(whole("soft", LENGTH))
