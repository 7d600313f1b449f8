"""Text with stop strings: what may be shown at which moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.server.sequences import _Text
from sglang_pd.server.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer(300, 2)


def shown(text: str, stops: list[str], keep_stop: bool = False) -> tuple[list[str], str | None]:
    """What is shown after each byte, and the stop string that was found."""
    stream = _Text(TOKENIZER, stops)
    steps = []
    for token in TOKENIZER.encode(text):
        matched = stream.add(token)
        steps.append(stream.shown(keep_stop=keep_stop))
        if matched is not None:
            return steps, matched
    matched = stream.finish()
    return [*steps, stream.shown(keep_stop=keep_stop)], matched


def test_what_may_become_a_stop_string_is_held_back() -> None:
    assert shown("aENx", ["END"]) == (["a", "a", "a", "aENx", "aENx"], None)
    assert shown("aEND", ["END"]) == (["a", "a", "a", "a"], "END")
    assert shown("aEN", ["END"])[0][-1] == "aEN"  # nothing more comes


def test_the_stop_string_is_kept_on_request() -> None:
    assert shown("aENDb", ["END"], keep_stop=True) == (["a", "a", "a", "aEND"], "END")


def test_the_first_of_several_wins() -> None:
    assert shown("xabc", ["abc", "b"])[1] == "b"
    assert shown("xabc", ["abc", "ab"])[1] == "ab"


@given(st.text("ab€", max_size=20), st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3))
def test_nothing_shown_is_ever_taken_back(text: str, stops: list[str]) -> None:
    steps, matched = shown(text, stops)
    for before, after in zip(steps, steps[1:], strict=False):
        assert after.startswith(before)
    found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        assert matched is None and steps[-1] == text
    else:
        end = min(found)[0]
        assert matched is not None and text[:end].endswith(matched)
        assert steps[-1] == text[: text[:end].index(matched)]
