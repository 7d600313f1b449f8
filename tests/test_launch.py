"""Processes: what a user starts, how it serves, and how it ends. Real processes on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_pd.cli.app import run
from sglang_pd.config import load_worker
from sglang_pd.engines.base import Sampling
from sglang_pd.launch.plan import load_deployment, merge
from sglang_pd.launch.processes import Group
from sglang_pd.launch.stack import Stack, running
from sglang_pd.launch.up import look
from sglang_pd.launch.whole import Whole
from sglang_pd.protocol.errors import ConfigError, PdError
from sglang_pd.worker.serving.service import WorkerService

DOCUMENT: dict[str, Any] = {
    "engine": {"name": "reference", "chunk_tokens": 64},
    "pools": {"tokens": 2048, "rows": 4, "page_tokens": 16},
    "network": {"bootstrap_port": 0, "http_port": 0},
    "liveness": {"heartbeat_s": 0.2, "liveness_s": 3, "status_max_s": 2, "transfer_s": 10, "drain_s": 20},
    "verify": "full",
    "decode": {"pools": {"order": "random", "seed": 3, "poison": 0x7B}},
    "router": {"port": 0},
}
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
COMMAND = [sys.executable, "-m", "sglang_pd.cli"]


@contextmanager
def stack_of(**changes: Any) -> Iterator[tuple[Stack, list[str]]]:
    said: list[str] = []
    deployment = load_deployment("", document=merge(DOCUMENT, changes))
    with running(deployment, lambda name, line: said.append(f"{name}: {line}"), ENVIRON) as stack:
        yield stack, said


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with stack_of() as (made, _):
        yield made


def generate(url: str, **body: Any) -> httpx.Response:
    body = {"sampling_params": GREEDY, **body}
    return httpx.post(f"{url}/generate", json=body, timeout=40)


def until(condition: Callable[[], Any], timeout_s: float = 20) -> Any:
    end_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        time.sleep(0.05)
    return found


def ended(stack: Stack, role: str, **wanted: Any) -> list[dict[str, Any]]:
    dump = look(stack.sockets[role])
    return [r for r in (dump.ended if dump else ()) if all(r.get(k) == v for k, v in wanted.items())]


def test_a_request_through_three_processes(stack: Stack) -> None:
    prompt = [(7 * i) % 248 + 3 for i in range(150)]
    answer = generate(stack.url, input_ids=prompt).json()
    want = Whole(load_worker(merge({"role": "prefill"}, {k: DOCUMENT[k] for k in ("engine", "pools")})))
    assert answer["output_ids"] == [token for token, _ in want.run(prompt, 6, Sampling())]


def test_a_client_that_goes_away_aborts_its_room(stack: Stack) -> None:
    """In the stream, and before its first token."""
    body = {"input_ids": [5] * 20, "sampling_params": {**GREEDY, "max_new_tokens": 1500}, "stream": True}
    with httpx.stream("POST", f"{stack.url}/generate", json=body, timeout=40) as response:
        next(response.iter_lines())
    decode = stack.workers["decode"]["url"]
    until(lambda: httpx.get(f"{decode}/server_info").json()["stats"]["running"] == 0)
    room = {"bootstrap_room": 77, "bootstrap_host": "127.0.0.1"}
    prefill = stack.workers["prefill"]["url"]
    with pytest.raises(httpx.ReadTimeout):  # no decode ever opens it
        httpx.post(f"{prefill}/generate", json={"input_ids": [5], **room}, timeout=1.5)
    until(lambda: ended(stack, "prefill", room=77))
    (record,) = ended(stack, "prefill", room=77)
    assert (record["result"], record["cause"]["code"]) == ("aborted", "room_aborted")
    for url in (prefill, decode):
        pools = httpx.get(f"{url}/server_info").json()["stats"]["pools"]
        assert all(pool["held"] == pool["withheld"] == 0 for pool in pools.values())


def test_a_worker_drains_on_sigterm_and_leaves_nothing() -> None:
    with stack_of() as (stack, said):
        assert generate(stack.url, input_ids=[5]).status_code == 200
        body = {"input_ids": [5] * 20, "sampling_params": {**GREEDY, "max_new_tokens": 150}, "stream": True}
        with httpx.stream("POST", f"{stack.url}/generate", json=body, timeout=40) as response:
            lines = response.iter_lines()
            next(lines)
            decode = stack.group.processes["decode"]
            decode.tell(signal.SIGTERM)
            until(lambda: any("draining" in line for line in said))
            assert generate(stack.url, input_ids=[5]).status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["meta_info"]["completion_tokens"] == 150
        assert decode.wait(20) and decode.exit_code == 0
        codes = stack.group.stop()
        assert codes == {"prefill": 0, "decode": 0, "router": 0}, said


def test_a_killed_decode_costs_its_requests_and_is_named() -> None:
    with stack_of() as (stack, _):
        body = {"input_ids": [5] * 20, "sampling_params": {**GREEDY, "max_new_tokens": 1500}, "stream": True}
        with httpx.stream("POST", f"{stack.url}/generate", json=body, timeout=40) as response:
            lines = response.iter_lines()
            next(lines)
            stack.group.processes["decode"].tell(signal.SIGKILL)
            rest = [line for line in lines if line]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert rest[-1] == "data: [DONE]" and error["leg"] == "decode"
        late = until(lambda: (r := generate(stack.url, input_ids=[5])).status_code == 503 and r)
        assert "error" in late.json()
        with pytest.raises(PdError, match="decode.*SIGKILL"):
            stack.group.check()
        prefill = stack.workers["prefill"]["url"]
        until(lambda: httpx.get(f"{prefill}/server_info").json()["stats"]["rooms"] == 0)


def test_a_taken_port_is_named_with_its_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "prefill", "--set", f"network.http_port={port}"],
            capture_output=True, text=True, timeout=50, env=ENVIRON, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert str(port) in done.stderr and "$.network.http_port" in done.stderr and "Traceback" not in done.stderr
        with pytest.raises(ConfigError, match=rf"\$\.network\.bootstrap_port.*{port}"):
            WorkerService(load_worker({"role": "prefill", "network": {"bootstrap_port": port}}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prefill", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["prefill", "--set", "role=decode"], "$.role"),
        (["decode", "--set", "backend.name=nixxl"], "Did you mean 'nixl'"),
        (["decode", "--set", "engine.name=other"], "$.engine.name"),
        (["up", "--set", "pool.tokens=3"], "Did you mean 'pools'"),
        (["up", "--set", "router.polcy=x"], "Did you mean 'policy'"),
        (["up", "--set", "router.port=x"], "router: $.port"),
        (["up", "--set", "decode.network.http_port=x"], "decode: $.network.http_port"),
        (["up", "--set", "decode.role=prefill"], "$.decode.role"),
        (["up", "/tmp"], "config.json"),
        (["demo", "--model", "other", "--backend", "local"], "Qwen4ExpForCausalLM"),
        (["demo", "--backend", "nixxl"], "Did you mean 'nixl'"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "where"),
    [
        ({"topology": {"tp": 2}}, r"\$\.topology"),
        ({"engine": {"options": {"layers": 3}}}, r"\$\.engine\.options\.layers"),
        ({"engine": {"name": "transformers", "options": {"path": "/nowhere"}}}, r"\$\.engine\.options"),
        ({"pools": {"page_tokens": 6, "tokens": 60}}, r"\$\.pools\.page_tokens"),
        ({"pools": {"host_kinds": ["KV"]}}, r"\$\.pools\.host_kinds.*expected PLE, got KV"),
    ],
)
def test_a_worker_that_cannot_be_built_says_why(document: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        WorkerService(load_worker({"role": "prefill", "network": {"bootstrap_port": 0}, **document}))


def test_a_process_that_cannot_close_ends_all_the_same() -> None:
    program = "import time; from sglang_pd.launch.worker import ends_within\nwith ends_within(0.2): time.sleep(60)"
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 1 and time.monotonic() - began_s < 40


def test_up_ends_everything_on_ctrl_c_and_when_killed(tmp_path: Path) -> None:
    path = tmp_path / "up.yaml"
    path.write_text(json.dumps(DOCUMENT))
    for number in (signal.SIGINT, signal.SIGKILL):
        as_json = number is signal.SIGKILL
        process = subprocess.Popen(
            [*COMMAND, "up", str(path), *(["--json"] if as_json else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if as_json else subprocess.STDOUT,
            text=True,
            env=ENVIRON,
        )
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if as_json or "try: curl" in line:
                    break
            url = json.loads(lines[0])["url"] if as_json else lines[-2].partition("router ")[2].partition(",")[0]
            assert generate(url, text="hallo").status_code == 200
            children = _children(process.pid)
            assert len(children) == 3
            process.send_signal(number)
            rest = process.stdout.read()
            code = process.wait(30)
        finally:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
        until(lambda alive=children: not any(_alive(pid) for pid in alive), 30)
        if number is signal.SIGINT:
            assert code == 0 and rest.rstrip().endswith("down"), rest


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_dies_at_start_is_told_by_its_own_words() -> None:
    said: list[str] = []
    with Group(lambda name, line: said.append(line)) as group:
        group.start("bad", ["prefill", "--set", "network.mtu=77"], ENVIRON)
        with pytest.raises(ConfigError, match=r"bad: .*\$\.network\.mtu"):
            group.wait_ready(30)
        group.start("json", ["prefill", "--set", "network.mtu=77", "--json"], ENVIRON).wait(30)
        died = group.processes["json"].died()
        assert died.where == "json: $.network.mtu" and died.message.count("[") == 0 and len(said) == 1


def test_a_process_that_was_killed_is_told_by_its_signal() -> None:
    with Group(lambda name, line: None) as group:
        process = group.start("prefill", ["prefill", "--set", "engine.name=reference"], ENVIRON)
        process.tell(signal.SIGKILL)
        process.wait(30)
        died = process.died().info()
        assert (died.code, died.where, died.actual) == ("worker_failed", "prefill", "SIGKILL") and died.hint


@pytest.mark.parametrize("backend", ["local", pytest.param("nixl", marks=pytest.mark.slow)])
def test_the_demo_finds_everything_equal(backend: str) -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "--backend", backend, "--model", "reference", "--json"],
        capture_output=True, text=True, timeout=58, env=ENVIRON, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    (model,) = document["models"]
    assert document["equal"] and model["backend"] == backend and model["transport"]
    assert [answer["tokens"] for answer in model["answers"]] == [1, 2, 37, 64, 65, 200, 500, 1000]
    assert {answer["equal_tokens"] for answer in model["answers"]} == {model["answers"][0]["wanted"]}
    kinds = {"KV", "SWA", "MLA", "INDEX_K", "MAMBA", "PLE", "QSA_PENDING", "QSA_COMPRESSED"}
    assert set(model["bytes_by_component"]) == kinds
