"""Our router, `sglang-router` and the `openai` client over our real workers: processes with the exact reference engine.

One prefill and one decode for all tests here but those that kill them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_pd.launch.plan import load_deployment
from sglang_pd.launch.stack import Stack, running

SMALL: dict[str, Any] = {
    "engine": {"name": "reference"},
    "pools": {"tokens": 2048, "rows": 8},
    "backend": {"name": "local"},
    "network": {"bootstrap_port": 0, "http_port": 0},
    "log_level": "warning",
    "router": {"port": 0},
}
PROMPT = "The quick brown fox jumps over the lazy dog."
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def quiet(name: str, line: str) -> None:
    print(f"{name}: {line}")  # shown when a test fails


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(load_deployment("", document=SMALL), quiet) as made:
        yield made


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as made:
        yield made


def generate(client: httpx.Client, **body: Any) -> Any:
    answer = client.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[Any]:
    *said, done, rest = text.split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in said]


def test_generate_streamed_and_not(client: httpx.Client) -> None:
    whole = generate(client)
    assert len(whole["output_ids"]) == 8 and whole["meta_info"]["completion_tokens"] == 8
    answer = client.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY, "stream": True})
    assert events(answer.text)[-1]["output_ids"] == whole["output_ids"]


def test_batches_and_n(client: httpx.Client) -> None:
    one = generate(client)
    both = generate(client, text=[PROMPT, "another"], sampling_params={**GREEDY, "n": 3})
    assert len(both) == 6 and [a["output_ids"] for a in both[:3]] == [one["output_ids"]] * 3
    rooms = [a["meta_info"]["bootstrap_room"] for a in both]
    assert len(set(rooms)) == 6


def test_input_logprobs(client: httpx.Client) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0}
    whole = generate(client, **asked)
    found = whole["meta_info"]["input_token_logprobs"]
    assert len(found) == whole["meta_info"]["prompt_tokens"] and found[0][0] is None and found[1][0] < 0
    body = {"text": [PROMPT, "xy"], "sampling_params": GREEDY, "stream": True, **asked}
    last = {event.get("index", 0): event for event in events(client.post("/generate", json=body).text)}
    assert last[0]["meta_info"]["input_token_logprobs"] == found
    assert len(last[1]["meta_info"]["input_token_logprobs"]) == last[1]["meta_info"]["prompt_tokens"]


def test_what_the_router_sees(stack: Stack, client: httpx.Client) -> None:
    generate(client)
    info = httpx.get(f"{stack.workers['prefill']['url']}/server_info", trust_env=False).json()
    deadline = time.monotonic() + 20
    while True:
        seen = client.get("/workers").json()
        if seen["pairs"][0]["verdict"] == "accepted" or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert seen["pairs"][0]["verdict"] == "accepted"
    assert seen["workers"][0]["epoch"] == info["epoch"] and seen["workers"][0]["instance_id"] == info["instance"]
    assert client.get("/v1/models").json()["data"][0]["id"] == info["served_model_name"]
    assert client.get("/server_info").json()["prefill"][0]["epoch"] == info["epoch"]
    assert client.post("/flush_cache", params={"timeout": 10}).json()["success"]
    assert client.get("/model_info").json()["is_generation"] and client.get("/ready").status_code == 200


def test_workers_errors_keep_their_words(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"text": "x" * 9000, "sampling_params": GREEDY})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "prompt_too_long" and not error["retryable"]
    assert error["leg"] in ("prefill", "decode")
    answer = client.post("/generate", json={"text": "x", "sampling_params": {"temprature": 1}})
    assert answer.status_code == 400 and "temperature" in answer.text


def test_a_client_that_leaves_frees_the_workers(stack: Stack, client: httpx.Client) -> None:
    body = {"text": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 1500}, "stream": True}
    with client.stream("POST", "/generate", json=body) as answer:
        next(answer.iter_raw())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not client.post("/flush_cache").json()["success"]:
        time.sleep(0.1)
    assert client.post("/flush_cache").json()["success"]  # nothing runs anywhere
    generate(client)


# The openai client


def test_the_openai_client(stack: Stack) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        name = client.models.list().data[0].id
        asked = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**asked)
        assert whole.usage.completion_tokens == 8 or whole.choices[0].finish_reason == "stop"
        parts = [part.choices[0].text for part in client.completions.create(**asked, stream=True) if part.choices]
        assert "".join(parts) == whole.choices[0].text
        several = client.completions.create(**{**asked, "prompt": [PROMPT, "b"], "n": 2})
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**{**asked, "prompt": "x" * 9000})
        assert refused.value.code == "prompt_too_long" and refused.value.type == "invalid_request_error"


# sglang-router


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def sglang_router(stack: Stack, log: Path) -> Iterator[httpx.Client]:
    port, metrics = free_port(), free_port()
    prefill, decode = stack.workers["prefill"], stack.workers["decode"]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin"]
    command += ["--prefill", prefill["url"], str(prefill["bootstrap_port"]), "--decode", decode["url"]]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # it would look for the model's tokenizer out there
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, stdin=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/readiness").status_code == 200:
                        break
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="the package sglang-router is not here")
def test_sglang_router_drives_our_workers(stack: Stack, client: httpx.Client, tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    ours = generate(client)
    with sglang_router(stack, log) as theirs:
        try:
            assert generate(theirs)["output_ids"] == ours["output_ids"]
            body = {"text": PROMPT, "sampling_params": GREEDY, "stream": True}
            assert events(theirs.post("/generate", json=body).text)[-1]["output_ids"] == ours["output_ids"]
            ids = list(PROMPT.encode())
            alone = generate(client, text=None, input_ids=ids)
            both = generate(theirs, text=None, input_ids=[ids, ids[:5]])  # it takes batches of ids only
            assert both[0]["output_ids"] == alone["output_ids"] and len(both) == 2
            scored = generate(theirs, return_logprob=True, logprob_start_len=0)["meta_info"]
            assert len(scored["input_token_logprobs"]) == scored["prompt_tokens"]
            asked = {"model": "any", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            mine = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            answer = theirs.post("/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == mine
            said = events(theirs.post("/v1/completions", json={**asked, "stream": True}).text)
            assert "".join(part["choices"][0]["text"] for part in said if part["choices"]) == mine
        except AssertionError:
            print(log.read_text())
            raise


# Death


@pytest.mark.slow
def test_a_killed_decode_is_a_503_until_it_is_back() -> None:
    deployment = load_deployment("", document=SMALL)
    with tempfile.TemporaryDirectory() as folder, running(deployment, quiet) as stack:
        with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client:
            before = generate(client)["output_ids"]
            killed = stack.group.processes["decode"]
            killed.tell(signal.SIGKILL)
            assert killed.wait(10)
            killed.close()
            deadline = time.monotonic() + 20
            while (
                answer := client.post("/generate", json={"text": "a", "sampling_params": GREEDY})
            ).status_code != 503:
                assert answer.status_code == 502 and answer.json()["error"]["leg"] == "decode"
                assert time.monotonic() < deadline
            assert answer.json()["error"]["leg"] == "decode" and answer.headers["retry-after"]
            port = httpx.URL(stack.workers["decode"]["url"]).port
            path = Path(folder) / "decode.yaml"
            again = {**deployment.documents["decode"], "network": {"bootstrap_port": 0, "http_port": port}}
            path.write_text(json.dumps(again))
            stack.group.start("decode", ["decode", "--config", str(path)])
            stack.group.wait_ready(60)
            deadline = time.monotonic() + 30
            while client.get("/ready").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert generate(client)["output_ids"] == before
            assert client.get("/workers").json()["workers"][1]["replaced"] == 1
