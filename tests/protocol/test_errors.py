"""Errors that travel: whatever their texts hold, they leave, and whatever a peer put into them, they arrive."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pd.protocol import codec
from sglang_pd.protocol.errors import ErrorInfo, PdError, from_info
from sglang_pd.protocol.messages import Abort, Refusal


@pytest.mark.parametrize("name", ["self", "message", "code", "where", "expected", "actual", "hint", "class", "a b", ""])
def test_details_may_bear_any_name(name: str) -> None:
    info = ErrorInfo(code="peer_incompatible", message="no", details={name: "x", "field": "y"})
    received = codec.decode(codec.encode(Refusal(error=info, refused_type=1), epoch=1)).message
    assert isinstance(received, Refusal)
    error = from_info(received.error)
    assert (error.code, error.message, error.details["field"]) == ("peer_incompatible", "no", "y")


def test_half_a_surrogate_pair_does_not_keep_an_error_from_leaving() -> None:
    """A file name that is no UTF-8, or a client's text: the abort of its room must reach prefill all the same."""
    bad = "no file \udcff, caf\u00e9"
    built = PdError(bad, code="internal", where=bad, expected=bad, actual=bad, hint=bad, **{bad: bad}).info()
    for info in (built, ErrorInfo(code="internal", message=bad, details={bad: bad})):
        received = codec.decode(codec.encode(Abort(room=1, generation=1, error=info), epoch=1)).message
        assert isinstance(received, Abort)
        assert received.error == info and received.error.message == "no file \\udcff, caf\u00e9"


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"where": "room 7"},
        {"where": "prompt", "expected": "at most 9", "actual": 10, "hint": "Shorten it.", "leg": "decode"},
        {"actual": 0},
    ],
)
def test_an_error_reads_the_same_here_and_after_its_journey(facts: dict[str, Any]) -> None:
    raised = PdError("the request can never fit", code="prompt_too_long", **facts)
    assert str(raised.info()) == str(raised) == str(from_info(raised.info()))
    assert all(str(value) in str(raised) for value in facts.values())
