"""The router's pure parts: event boundaries, breakers, logprobs, failures, sights, command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.cli.router import join_ports, merged
from sglang_pd.config import load_router, parse_address
from sglang_pd.protocol.errors import CODES, ConfigError
from sglang_pd.router import RequestFailed, Target, failures, sse
from sglang_pd.router.breaker import Breaker, BreakerState
from sglang_pd.router.logprobs import InputLogprobs
from sglang_pd.router.probe import Seen, epoch_text, peer_views, sight_of
from sglang_pd.router.worker import Worker

# Events

PIECES = st.sampled_from([b"data: 1", b"data: [DONE]", b": c", b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b"x", b""])


@given(st.lists(PIECES, max_size=30), st.integers(min_value=1, max_value=40))
def test_a_stream_is_never_changed(pieces: list[bytes], limit: int) -> None:
    cutter, out = sse.EventCutter(limit), []
    for piece in pieces:
        out.append(cutter.feed(piece))
        assert len(cutter._held) <= limit
    so_far = b"".join(out)
    assert so_far + cutter.rest() == b"".join(pieces)
    if so_far and not cutter.torn:
        assert so_far.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


def test_events_are_read_as_the_standard_says() -> None:
    data = b": note\n\ndata: a\ndata:b\nid: 3\r\n\r\nevent: x\n\ndata: [DONE]\n\n"
    assert list(sse.events(data)) == [b"a\nb", b"[DONE]"]
    assert sse.error_in(b'data: {"error": null}\n\ndata: {"error": {"code": "x"}}\n\n') == {"code": "x"}
    assert sse.error_in(b'data: {"text": "an \\"error\\" in words"}\n\n') is None


def test_an_event_over_the_limit_passes_and_is_known() -> None:
    cutter = sse.EventCutter(10)
    assert cutter.feed(b"data: " + b"x" * 20) == b"data: " + b"x" * 20 and cutter.torn
    assert cutter.feed(b"\n\n") == b"\n\n" and not cutter.torn


# Breakers


def breaker(clock: list[float], threshold: int = 2) -> Breaker:
    return Breaker(threshold, 5.0, lambda: clock[0])


def test_a_breaker_through_all_states() -> None:
    clock = [0.0]
    b = breaker(clock)
    assert not b.failure("a") and b.state is BreakerState.CLOSED
    b.success("b")
    assert not b.failure("c") and b.failure("d") and b.state is BreakerState.OPEN and not b.allows
    b.success("late")  # of a request from before: no trial
    assert not b.failure("late") and b.state is BreakerState.OPEN
    clock[0] = 5.0
    assert b.state is BreakerState.HALF_OPEN and b.allows
    b.begin("t")
    assert not b.allows
    b.neutral("other")
    assert not b.allows
    b.neutral("t")  # a trial that told nothing: another one may
    assert b.allows
    b.begin("u")
    assert b.failure("u") and b.state is BreakerState.OPEN
    clock[0] = 10.0
    b.begin("v")
    b.progress("v")
    assert b.state is BreakerState.CLOSED and b.allows and b.opened == 2
    assert not b.failure("w")


# Logprobs


def answer(*tokens: int, **meta: Any) -> dict[str, Any]:
    return {"text": "t", "meta_info": {"input_token_logprobs": [[-0.1, t] for t in tokens], **meta}}


def merged_json(prefill: Any, decode: Any, count: int) -> Any:
    logprobs = InputLogprobs(count)
    logprobs.take(json.dumps(prefill).encode(), stream=False)
    return json.loads(logprobs.merge(json.dumps(decode).encode()))


def test_logprobs_are_put_before_decodes_own() -> None:
    found = merged_json(answer(1, 2), {"meta_info": {"input_token_logprobs": [[-9, 3]], "kept": 1}}, 1)
    assert found["meta_info"] == {"input_token_logprobs": [[-0.1, 1], [-0.1, 2], [-9, 3]], "kept": 1}
    assert "meta_info" in merged_json(answer(1), {"text": "x"}, 1)


@pytest.mark.parametrize(
    ("first", "second"), [("[1, 2]", "[3]"), ("[ ]", "[3]"), ("[1]", "[]"), ("[]", "[]"), ("[1]", "7")]
)
def test_lists_are_joined_as_they_are_written(first: str, second: str) -> None:
    prefill = b'{"meta_info": {"input_token_logprobs": ' + first.encode() + b"}}"
    logprobs = InputLogprobs(1)
    logprobs.take(prefill, stream=False)
    found = json.loads(logprobs.merge(b'{"meta_info": {"input_token_logprobs": ' + second.encode() + b', "x": 1.50}}'))
    own = json.loads(second)
    assert found["meta_info"]["input_token_logprobs"] == json.loads(first) + (own if isinstance(own, list) else [])
    assert found["meta_info"]["x"] == 1.5


def test_long_answers_are_merged_without_being_decoded() -> None:
    document = b'{"meta_info": {"input_token_logprobs": [' + b"[-1.5, 7, null]," * 100_000 + b"[-1.5, 7, null]]}}"
    tracemalloc.start()
    logprobs = InputLogprobs(1)
    logprobs.take(document, stream=False)
    merged = logprobs.merge(b'{"text": "x"}')
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(json.loads(merged)["meta_info"]["input_token_logprobs"]) == 100_001 and peak < 5 * len(document)


@pytest.mark.parametrize(("prefill", "decode"), [([answer(1)], [{}, {}]), ([answer(1), answer(2)], [{}]), (3, {})])
def test_answers_that_do_not_fit_are_refused(prefill: Any, decode: Any) -> None:
    with pytest.raises(RequestFailed, match="input logprobs"):
        merged_json(prefill, decode, 2 if isinstance(prefill, list) else 1)


def test_streams_that_carry_no_key_get_it_once() -> None:
    logprobs = InputLogprobs(1)
    logprobs.take(sse.event(answer()) + sse.event(answer(1, 2)) + b"data: [DONE]\n\n", stream=True)
    first, second, done = logprobs.merge_events(2 * sse.event({"meta_info": {}}) + b"data: [DONE]\n\n").split(b"\n\n")[
        :3
    ]
    assert json.loads(first[6:])["meta_info"]["input_token_logprobs"] == [[-0.1, 1], [-0.1, 2]]
    assert json.loads(second[6:])["meta_info"] == {} and done == b"data: [DONE]"


# Failures


def test_every_code_makes_a_failure() -> None:
    for code, facts in CODES.items():
        body = json.dumps({"error": {"code": code, "message": "m", "retryable": facts.retryable}}).encode()
        failure = failures.from_response("decode", "http://d", facts.http_status, body)
        assert failure.code == code and failure.retryable == facts.retryable and 400 <= failure.status < 600
        if facts.http_status < 500 or code in failures.SATURATED | failures.ELSEWHERE | {"draining"}:
            assert not failure.blamed, code
        else:
            assert failure.blamed, code
        event = failure.sse()
        assert event.count(b"data: ") == 2 and event.endswith(b"\n\ndata: [DONE]\n\n")
        assert RequestFailed(failure).failure is failure and str(RequestFailed(failure))


def test_a_code_that_is_not_ours_stays_as_it_is() -> None:
    failure = failures.from_response("prefill", "http://p", 418, b'{"error": {"code": "teapot", "message": "no"}}')
    assert failure.code == "teapot" and RequestFailed(failure).code == "worker_failed"
    assert failures.in_stream("decode", "http://d", "words").status == 502
    assert failures.in_stream("decode", "http://d", {"code": 400, "message": "m"}).status == 400


# What is seen of workers


def test_sights() -> None:
    good = Seen(200, {})
    assert sight_of("decode", good, Seen(404, {}), Seen(404, {})).ready
    assert sight_of("decode", good, Seen(503, {"status": "starting"}), good).reason == "not ready: starting"
    assert sight_of("decode", Seen(503, {}), good, good).up is False
    assert sight_of("decode", good, Seen(503, {"draining": True}), good).draining
    assert not sight_of("decode", good, good, Seen(200, {"disaggregation_mode": "prefill"})).ready
    assert sight_of("decode", good, good, Seen(200, {"disaggregation_mode": "null"})).ready
    assert epoch_text(255) == "00000000000000ff" == epoch_text("0x00000000000000FF")


def test_peers_from_strangers_are_bounded() -> None:
    entry = {"role": "prefill", "instance": "x" * 1000, "epoch": 1, "stage": "AGREED", "address": "tcp://h:1"}
    (view,) = peer_views({"peers": [entry, {"role": "decode"}, 3]})
    assert len(view.instance_id) == 128 and view.stage == "agreed" and view.address == "h:1"
    assert len(peer_views({"peers": [entry] * 10_000})) <= 4096 and peer_views({"peers": 3}) == []


@pytest.mark.parametrize("host", ["fe80::1%eth0", "::1", "2001:db8::1", "host", "10.0.0.1"])
def test_hosts_in_urls_and_headers(host: str) -> None:  # CF-04
    worker = Worker(Target("decode", parse_address(host, where="x").with_port(80)), Breaker(5, 5))
    inside = f"[{host}]" if ":" in host else host
    assert worker.base == f"http://{inside}:80"
    assert worker.host_header == (f"[{host.partition('%')[0]}]" if ":" in host else host) + ":80"
    assert worker.url == f"http://{inside}:80".replace("%", "%25")


# The command line


def test_ports_after_a_prefill() -> None:
    args = (
        "--prefill http://a 8998 --prefill http://b --decode http://c --prefill=http://d 9000 --prefill http://e none"
    )
    assert join_ports(args.split()) == [
        *("--prefill", "http://a 8998", "--prefill", "http://b", "--decode", "http://c"),
        *("--prefill=http://d 9000", "--prefill", "http://e none"),
    ]
    document = merged(None, ["http://a 1", "http://b none", "http://c"], ["http://d"])
    found = load_router(document).prefill_workers
    assert [worker.bootstrap_port for worker in found] == [1, 8998, 8998]
    with pytest.raises(ConfigError, match="a router needs workers"):
        merged(None, ["http://a"], [])


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "sglang_pd.cli", "router", *args]


def test_the_command_serves_and_stops(repository: Path) -> None:
    args = ["--config", str(repository / "configs" / "router.yaml"), "--set", "port=0", "--json"]
    args += ["--prefill", "http://127.0.0.1:9", "7", "--prefill", "http://127.0.0.1:10"]
    with subprocess.Popen(command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        guard = threading.Timer(50, process.kill)
        guard.start()
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["prefill"] == ["http://127.0.0.1:9 7", "http://127.0.0.1:10 8998"]
        assert said["decode"] == ["http://127.0.0.1:30001"]
        with socket.create_connection(("127.0.0.1", said["port"]), 20) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(40) == 0
        guard.cancel()


def test_a_taken_port_and_a_missing_worker_are_said() -> None:  # CF-01
    with socket.create_server(("127.0.0.1", 0)) as taken:
        workers = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:10"]
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(*workers, "--set", f"port={port}"), capture_output=True, text=True, timeout=50, check=False
        )
        assert done.returncode == 2 and f"127.0.0.1:{port}" in done.stderr and "$.port" in done.stderr
    done = subprocess.run(command("--decode", "http://x"), capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2 and "--prefill URL [PORT]" in done.stderr
