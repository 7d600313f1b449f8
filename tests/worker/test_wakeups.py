"""What threads are told about waiting: theirs alone in a library, the whole process where that was asked for."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.local_pair import LocalPair
from support.worker_pair import wait_until

from sglang_pd.worker.wakeups import SWITCH_INTERVAL_S, TIMER_SLACK_NS

READ = "import ctypes, sys; print(sys.getswitchinterval(), ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))"


def slack_ns() -> int:
    """Of the calling thread."""
    return int(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    made = LocalPair()
    yield made
    made.close()


def test_the_control_thread_alone_wakes_without_slack(pair: LocalPair) -> None:
    found = list[int]()
    before = slack_ns(), sys.getswitchinterval()
    pair.decode.at._loop.submit(lambda: found.append(slack_ns()))
    wait_until(lambda: bool(found))
    assert found == [TIMER_SLACK_NS]
    assert (slack_ns(), sys.getswitchinterval()) == before, "an engine's own threads are its owner's business"


def test_a_process_that_asks_for_it_has_both_in_every_thread() -> None:
    code = f"""
import threading, sglang_pd
sglang_pd.prefer_latency()
thread = threading.Thread(target=exec, args=({READ!r},))
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    interval_s, slack = done.stdout.split()
    assert float(interval_s) == pytest.approx(SWITCH_INTERVAL_S, abs=1e-6) and int(slack) == TIMER_SLACK_NS
