"""No tensor of a cache can be lost unnoticed: each is skipped, left stale, changed in one element, or swapped.

`live` compares bytes right after the hand-over, and must catch everything. Logits must catch whatever spoils a tensor
as a whole; one element may lie in a row that sparse attention did not select, or in the dead column of a window.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.reference_run import Host, How, Size, differences, hand_over, poison, same_logits
from support.spoil import FILLER, Scene, Spoil, spoils
from support.transformers_run import NAMED, engine, host, library_loop, prompt

from sglang_pd.memory.layout import RegionKey
from sglang_pd.protocol.kinds import PLE_NGRAM_STATE_LAYER_ID

QWEN4 = "Qwen4ExpForCausalLM"
LENGTH = 38
STEPS = 3
LEAN = ("skip", "stale", "one_element", "layer_swapped", "k_and_v")
WHOLE = ("skip", "stale", "zeroed", "layer_swapped", "k_and_v", "transposed_columns")
"""Ways that leave nothing of a tensor as it was."""

Case = tuple[str, RegionKey, Spoil]
Found = dict[tuple[str, RegionKey], set[str]]


def changes_nothing(name: str, key: RegionKey) -> bool:
    """Requests of equal length have equal coordinates: the one's are not stale for the other."""
    return (name, key[0]) == ("stale", "QSA_POSITIONS")


def catch(name: str, ways: tuple[str, ...]) -> Found:
    """Hand one request over once for each case, and spoil it there."""
    source = host(engine(name), Size(40, 4, 4, 20, "random", 3), filler=FILLER)
    destination = host(engine(name, number=1), Size(31, 6, 7, 20, "random", 5), filler=FILLER)
    other = source.prefill("other", prompt(LENGTH, seed=8))
    run = source.prefill("r", prompt(LENGTH))
    before, (want, _) = source.live(run), library_loop(engine(name).model, prompt(LENGTH), (), STEPS)
    cases: list[Case] = [("nothing", source.pools.keys[0], lambda scene, key: None)]
    cases += [case for case in spoils(source.pools) if case[0].startswith(ways)]
    found: Found = {}
    for way, key, spoil in cases:

        def change(*scene: Any, key: RegionKey = key, spoil: Spoil = spoil) -> None:
            spoil(Scene(scene[0], scene[1], scene[2], other.lease, scene[3], scene[4]), key)

        poison(destination.pools, FILLER)
        arrived = hand_over(source, run, destination, How(mutate=change))
        noticed = {"live"} if differences(destination.live(arrived), before) else set()
        destination.decode([arrived], STEPS)
        noticed |= set() if arrived.tokens == want.tokens else {"tokens"}
        noticed |= set() if same_logits(arrived, want) else {"logits"}
        found[way, key] = noticed
        destination.end(arrived)
    assert found.pop(("nothing", source.pools.keys[0])) == set()
    return found


def judge(found: Found, hosts: Host) -> None:
    for (way, key), noticed in found.items():
        if changes_nothing(way, key):
            assert not noticed
            continue
        assert "live" in noticed, f"{way} of {key} is not seen in the live state"
        if way.startswith(WHOLE):
            assert "logits" in noticed, f"the model does not read {key}: {way} changes nothing"
    assert {key for _, key in found} == set(hosts.pools.keys)


def test_every_tensor_of_qwen4_spoiled_as_a_whole_is_noticed() -> None:
    found = catch(QWEN4, LEAN)
    judge(found, host(engine(QWEN4), Size()))
    assert len(found) > 45
    assert ("skip", ("PLE", PLE_NGRAM_STATE_LAYER_ID, "ngram")) in found


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", NAMED)
def test_every_tensor_spoiled_in_every_way_is_noticed(name: str) -> None:
    judge(catch(name, ("",)), host(engine(name), Size()))
