"""The suite is worth something only if it fails what is broken: backends, each broken in one way."""

from pathlib import Path

import pytest

from sglang_pd.testing import BackendSpec, run_suite

# mode -> case -> words of the reason it must fail with
EXPECTED = {
    "does_nothing": {"exact_single": "bytes of destination", "visible_after_done": "were visible"},
    "done_early": {"exact_batched": "bytes of destination", "visible_after_done": "were visible"},
    "loses_one": {"exact_batched": "bytes of destination", "exact_permuted": "bytes of destination"},
    "writes_after_fence": {"no_byte_after_fence": "a byte landed"},
    "never_fences": {
        "clean_drain": "fence is not True",
        "no_byte_after_fence": "no fence within",
        "fork_leaves_all_to_its_parent": "not refused: fence",
    },
    "hangs_up_in_fork": {"fork_leaves_all_to_its_parent": "ended failed"},
    "posts_cancelled": {"cancelled_before_its_event": "a byte landed"},
    "always_unknown": {"exact_single": "ended unknown", "clean_drain": "ended unknown"},
}


def bad(mode: str) -> BackendSpec:
    here = str(Path(__file__).parent)
    return BackendSpec(name="bad", module="bad_backends", options={"mode": mode}, python_path=(here,))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("mode", EXPECTED)
def test_the_suite_fails(mode: str) -> None:
    outcomes = {outcome.case: outcome for outcome in run_suite(bad(mode), EXPECTED[mode])}
    for case, words in EXPECTED[mode].items():
        assert outcomes[case].status == "failed", f"{case} let {mode} pass"
        assert words in outcomes[case].reason


@pytest.mark.timeout(150)
def test_the_wrapper_itself_passes() -> None:
    cases = sorted({case for expected in EXPECTED.values() for case in expected})
    failed = [outcome for outcome in run_suite(bad("none"), cases) if outcome.status != "passed"]
    assert not failed
