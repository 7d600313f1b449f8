"""The core of the lives of rooms over a transport whose bytes travel through sockets and whose proof is its own."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.worker_pair import hand_over, oracles, start_pair, start_room, wait_until
from support.worker_process import WorkerProcess, free_address

BACKENDS = {
    "nixl": ({"backend": "nixl", "env": {"UCX_TLS": "tcp,self"}}, "nixl"),
    "nixl-cma": ({"backend": "nixl"}, "nixl"),
    "mooncake": ({"backend": "mooncake", "options": {"insecure_data_plane": True}}, "mooncake"),
}


def configuration(name: str) -> dict[str, Any]:
    """What a worker over that backend needs; the library's environment is set in the child alone."""
    conf, module = BACKENDS[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed here")
    conf = dict(conf)
    if name == "mooncake":
        from sglang_pd.backends.mooncake.backend import environment

        conf["env"] = dict(environment(conf["options"]))
    return conf


@pytest.fixture(params=["mooncake", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nixl", "nixl-cma"))])
def conf(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    yield {**configuration(request.param), "limits": {"status_interval_s": 0.3, "status_max_s": 1.0}}


@pytest.mark.timeout(150)
def test_bytes_aborts_and_deaths(conf: dict[str, Any]) -> None:
    address = free_address()
    prefill, decode = start_pair({**conf, "bind": address, "liveness_s": 3.0}, conf)
    with decode:
        for room, tokens in ((1, 1), (2, 33), (3, 60)):
            hand_over(prefill, decode, room, tokens, chunks=[c for c in (10, 20) if c < tokens])
        for room in (4, 5):
            p, d = start_room(prefill, decode, room, 60, chunks=[10, 20, 30], pause_s=0.2)
            wait_until(lambda now=prefill: now.ask("stats")["stats"]["bytes_written"] > 0)
            (decode if room % 2 else prefill).ask("abort", room=room)
            decode.released(d)
            prefill.released(p)
        oracles(prefill, decode)
        _, d = start_room(prefill, decode, 10, 60, chunks=[10, 20], pause_s=30)
        wait_until(lambda now=prefill: now.ask("stats")["stats"]["source_rooms"] > 0)
        prefill.kill()
        end = decode.end_of(d)
        assert (end["event"], end["code"]) == ("failed", "peer_lost")
        decode.released(d, timeout_s=40)
        prefill = WorkerProcess("prefill", pages=24, bind=address, liveness_s=3.0, **conf)
        with prefill:
            hand_over(prefill, decode, 11, 33)
            oracles(prefill, decode, timeout_s=40)
            assert decode.ask("stats")["stats"]["count_engine_replaced"] >= 1  # the proof that let its memory go


@pytest.mark.timeout(150)
def test_a_writer_killed_as_soon_as_both_agree(conf: dict[str, Any]) -> None:
    """It may never have said anything over the transport; decode's memory comes back all the same."""
    prefill, decode = (WorkerProcess(role, pages=30, liveness_s=1.5, **conf) for role in ("prefill", "decode"))
    with decode:
        _, d = start_room(prefill, decode, 1, 60, chunks=[10, 20], pause_s=30)  # no call before: they meet for it
        until_s = time.monotonic() + 20
        while not any(peer["stage"] == "agreed" for peer in decode.ask("stats")["peers"]):
            assert time.monotonic() < until_s
        prefill.kill()
        assert decode.end_of(d)["code"] == "peer_lost"
        decode.released(d, timeout_s=20)


@pytest.mark.timeout(150)
def test_a_writer_that_stops_past_liveness_and_goes_on(conf: dict[str, Any]) -> None:
    address = free_address()
    prefill, decode = start_pair({**conf, "bind": address, "liveness_s": 3.0}, conf)
    with prefill, decode:
        hand_over(prefill, decode, 1, 33)
        _, d = start_room(prefill, decode, 40, 60, chunks=[10, 20, 30], pause_s=0.5)
        time.sleep(0.3)
        prefill.signal(signal.SIGSTOP)
        assert decode.end_of(d)["code"] == "peer_lost"
        prefill.signal(signal.SIGCONT)
        decode.released(d, timeout_s=40)
        hand_over(prefill, decode, 41, 33)
        oracles(prefill, decode, timeout_s=40)
