"""Nothing can be lost unnoticed: every region, spoiled in every way, is caught by tokens, logits or live state.

`live` compares bytes right after the hand-over, and must catch everything. Logits must catch, in soft mode, everything
but the smallest change of one element in the last layers: a test that only counted tokens would believe itself.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from support.reference_run import SOFT, SPARSE, Host, How, Size, differences, hand_over, prompt_ids, same_logits
from support.spoil import FILLER, Scene, Spoil, one_element, spoils

from sglang_pd.engines.base import DecodeItem, HandoffRecord, Sampling
from sglang_pd.engines.reference import ReferenceConfig
from sglang_pd.memory.layout import RegionKey

STEPS = 6
TOGETHER = 16
CONFIGS = {"sparse": SPARSE, "soft": SOFT}

Case = tuple[str, RegionKey, Spoil]
Found = dict[tuple[str, RegionKey], set[str]]
"""For each case, which of the oracles noticed."""


def catch(config: ReferenceConfig, length: int) -> Found:
    """Hand one request over once for each case, spoil each in its way, and decode them side by side."""
    ids = prompt_ids(length)
    source = Host(config, Size(40, 4, 4, 20, "random", 3), filler=FILLER)
    other = source.prefill("other", prompt_ids(length, seed=8))
    run = source.prefill("r", ids)
    before = source.live(run)
    cases: list[Case] = [("nothing", source.pools.keys[0], lambda scene, key: None)]
    cases += list(spoils(source.pools))
    found: Found = {}
    want = Host(config, Size(pages=20)).prefill("r", ids)
    whole = None
    for at in range(0, len(cases), TOGETHER):
        part = cases[at : at + TOGETHER]
        pages = -(-(length + STEPS) // 8) * (len(part) + 1)
        destination = Host(config, Size(pages, len(part) + 1, len(part) + 1, 4 * (len(part) + 1)), filler=FILLER)
        runs = []
        for number, (_, key, spoil) in enumerate(part):

            def change(*scene: Any, key: RegionKey = key, spoil: Spoil = spoil) -> None:
                spoil(Scene(scene[0], scene[1], scene[2], other.lease, scene[3], scene[4]), key)

            runs.append(hand_over(source, run, destination, How(mutate=change, name=f"case {number}")))
        arrived = [differences(destination.live(r), before) for r in runs]
        destination.decode(runs, STEPS)
        if whole is None:
            whole = runs[0]
            assert not arrived[0]
        for (name, key, _), r, gone in zip(part, runs, arrived, strict=True):
            noticed = {"live"} if gone else set()
            noticed |= {"tokens"} if r.tokens != whole.tokens else set()
            noticed |= {"logits"} if not same_logits(r, whole) else set()
            found[name, key] = noticed
    assert whole is not None and whole.tokens[0] == want.tokens[0]
    assert found.pop(("nothing", source.pools.keys[0])) == set()
    return found


KEY, ROPE = ("QSA_PENDING", "key"), ("QSA_PENDING", "rope")
BYTES_ONLY = {("one_row_off", KEY), ("last_row_missing", ROPE), ("one_element", ROPE)}
"""Live bytes that the model cannot tell apart: a closing group's keys are averaged, in whatever order they come, and
only the coordinates of its first member turn them."""


def judge(found: Found, mode: str) -> None:
    missed = [case for case, noticed in found.items() if "live" not in noticed]
    assert not missed, "a change of live state that the live oracle does not see"
    if mode != "soft":
        return
    for (name, (kind, layer, part)), noticed in found.items():
        if name == one_element.__name__ or (name, (kind, part)) in BYTES_ONLY:
            continue
        assert noticed & {"tokens", "logits"}, f"the model does not read {kind}/{layer}/{part}: {name} changes nothing"


@pytest.mark.parametrize("mode", CONFIGS)
def test_every_region_spoiled_in_every_way_is_noticed(mode: str) -> None:
    found = catch(CONFIGS[mode], 38)
    judge(found, mode)
    assert len(found) > 200
    assert {key for _, key in found} == set(Host(CONFIGS[mode], Size()).pools.keys)


@pytest.mark.slow
@pytest.mark.parametrize("mode", CONFIGS)
@pytest.mark.parametrize("length", [37, 39, 13])
def test_every_phase_of_a_group_notices(mode: str, length: int) -> None:
    judge(catch(CONFIGS[mode], length), mode)


@pytest.mark.parametrize("length", [1, 4, 8, 38])
@pytest.mark.parametrize("mode", CONFIGS)
def test_what_is_not_live_is_never_read(mode: str, length: int) -> None:
    """All bytes of the pools but the live rows become NaN or absurd: the answer stays, to the last bit."""
    config = CONFIGS[mode]
    source = Host(config, Size(24, 4, 4, 16, "random", 3))
    run = source.prefill("r", prompt_ids(length))
    quiet, loud = (Host(config, Size(31, 6, 7, 13, "random", 5)) for _ in range(2))

    def bury(*at: Any) -> None:
        scene = Scene(at[0], at[1], at[2], at[2], at[3], at[4])
        for key in scene.destination.keys:
            rows, slots = scene.there(key)
            kept = rows[slots].copy()
            rows[:] = np.nan if rows.dtype.kind == "f" else np.iinfo(rows.dtype).min
            rows[slots] = kept

    runs = [hand_over(source, run, quiet), hand_over(source, run, loud, How(mutate=bury))]
    for host, arrived in zip((quiet, loud), runs, strict=True):
        host.decode([arrived], 10)
    assert runs[0].tokens == runs[1].tokens
    assert same_logits(*runs)
    assert not differences(quiet.live(runs[0]), loud.live(runs[1]))


FORGED: dict[str, dict[str, Any]] = {
    "first_token": {"first_token": 9},
    "one token less": {"prompt_tokens": 37},
    "one axis": {"position_delta": None},
    "greedy": {"sampling": Sampling()},
    "another seed": {"sampling": Sampling(temperature=1.0, seed=6)},
    "a draw forgotten": {"sampled": 0},
}


@pytest.mark.parametrize("field", FORGED)
def test_every_fact_of_the_record_matters(field: str) -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    source = Host(SOFT, Size(24, 4, 4, 16, "random", 3))
    run = source.prefill("r", prompt_ids(38), sampling=sampling)
    record = source.engine.handoff("r")
    change = dict(FORGED[field])
    if "position_delta" in change:
        a, b, c = record.position_delta
        change["position_delta"] = (a, b + 1, c)
    forged = msgspec.structs.replace(record, **change)
    answers = []
    for facts in (record, forged):
        destination = Host(SOFT, Size(31, 6, 7, 13, "random", 5))
        arrived = hand_over(source, run, destination)
        destination.engine.release("r")
        destination.engine.admit("r", HandoffRecord.decode(facts.encode()), arrived.lease.tables())
        tokens = [facts.first_token]
        logits = []
        for position in range(38, 48):
            arrived.lease.advance(position + 1)
            batch = [DecodeItem("r", tokens[-1], arrived.lease.tables())]
            (output,) = destination.engine.decode(batch) or []
            tokens.append(output.token)
            logits.append(output.logits)
        answers.append(np.stack(logits).tobytes())
    assert answers[0] != answers[1]
