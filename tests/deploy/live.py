"""A real run of prefill, decode and router as processes, and its metrics: rooms that succeed, and one that does not."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CLI = str(Path(sys.executable).with_name("sglang-pd"))
START_S = 90.0


class Started:
    """Our command line as a child; its first line of JSON says where it serves."""

    def __init__(self, log: Path, *words: str) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [CLI, *words], stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self.facts: dict[str, Any] = {}

    def wait(self) -> dict[str, Any]:
        """What it announced."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline_s, text = time.monotonic() + START_S, b""
        while b"\n" not in text:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline_s, "it does not start"
            text += self.process.stdout.read() or b""
            time.sleep(0.05)
        self.facts = json.loads(text.splitlines()[0])
        return self.facts

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()  # it holds nothing that outlives it
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def post(url: str, body: dict[str, Any], timeout_s: float = 30.0) -> int:
    """The status of an answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def get(url: str) -> str:
    """The body of an answer."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def metrics_of_a_run(folder: Path) -> dict[str, str]:
    """`/metrics` of prefill, decode and router after four rooms that are done and one that its client left."""
    ports = ["--set", "network.bootstrap_port=0", "--set", "network.http_port=0", "--set", "verify=full"]
    small = ["--set", "pools.memory_bytes=16MiB"]
    with contextlib.ExitStack() as stack:
        workers = {
            role: stack.enter_context(Started(folder / f"{role}.log", role, *ports, *small))
            for role in ("prefill", "decode")
        }
        prefill, decode = (worker.wait() for worker in workers.values())
        where = ["--prefill", prefill["url"], str(prefill["bootstrap_port"]), "--decode", decode["url"]]
        router = stack.enter_context(Started(folder / "router.log", "router", *where, "--set", "port=0", "--json"))
        url = router.wait()["url"]
        for length in (1, 40, 300, 64):
            body = {"input_ids": [7] * length, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
            assert post(f"{url}/generate", body) == 200
        control = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill["bootstrap_port"], "bootstrap_room": 5}
        with contextlib.suppress(TimeoutError):  # nobody sends it to prefill, and the client does not wait
            post(f"{decode['url']}/generate", {"input_ids": [7] * 8, **control}, timeout_s=1.0)
        deadline_s = time.monotonic() + 30
        while 'result="aborted"' not in get(f"{decode['url']}/metrics"):
            assert time.monotonic() < deadline_s, "the room was not aborted"
            time.sleep(0.2)
        return {
            "prefill": get(f"{prefill['url']}/metrics"),
            "decode": get(f"{decode['url']}/metrics"),
            "router": get(f"{url}/metrics"),
        }
