"""Repetition is bounded and the first word of a kind is never held back."""

from __future__ import annotations

import logging

import pytest

from sglang_pd.observe.logs import MAX_KEYS, RateLimited, configure_logging


def test_a_burst_then_silence_then_the_number(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limited = RateLimited(logging.getLogger("t"), interval_s=10, burst=2, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        said = [limited.warning("a", "a %d", i) for i in range(5)]
        assert limited.warning("b", "b"), "another key has its own allowance"
        now[0] = 10.0
        limited.warning("a", "a again")
    assert said == [True, True, False, False, False]
    assert caplog.messages == ["a 0", "a 1", "b", "a: 3 more like the last one were not shown", "a again"]


def test_keys_are_bounded() -> None:
    logger = logging.getLogger("quiet")
    logger.setLevel(logging.CRITICAL)
    limited = RateLimited(logger)
    for i in range(3 * MAX_KEYS):
        limited.warning(str(i), "x")
    assert len(limited._windows) == MAX_KEYS


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_levels(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("sglang_pd")
    handlers, propagate, old = list(logger.handlers), logger.propagate, logger.level
    try:
        configure_logging(level, "decode ")
        for name in ("debug", "info", "warning", "error"):
            logging.getLogger("sglang_pd.x").log(getattr(logging, name.upper()), "at %s", name)
        lines = capsys.readouterr().err.splitlines()
        shown = ["debug", "info", "warning", "error"]
        assert len(lines) == len(shown) - shown.index(level) and "decode sglang_pd.x" in lines[0]
    finally:
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.setLevel(old)
