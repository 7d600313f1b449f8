"""Drives `worker_child.py`: a worker process as an object, with its answers and events."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("worker_child.py")
TERMINAL = {"done", "failed", "aborted"}


class WorkerProcess:
    """One worker process. Every wait has a deadline and says what it saw."""

    def __init__(self, role: str, *, backend: str = "local", env: dict[str, str] | None = None, **conf: Any) -> None:
        self.conf = {"role": role, "backend": backend, "id": conf.pop("id", f"{role}-0"), **conf}
        path = os.pathsep.join([str(CHILD.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **(env or {}), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.lines: list[dict[str, Any]] = []
        self._buffer = b""
        self._numbers = 0
        try:
            self._write(self.conf)
            started = self.wait(lambda line: line.get("answer") == "start", timeout_s=60)
        except BaseException:
            self.kill()
            self.close()
            raise
        self.address, self.pid, self.epoch = started["address"], started["pid"], started["epoch"]
        self.ranks_address = started["ranks_address"]

    def _write(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def read(self, timeout_s: float = 0.0) -> bool:
        """Take what the process printed within `timeout_s`. False at its end."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not ready:
            return True
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        self.lines += [json.loads(line) for line in lines if line.startswith(b"{")]
        return bool(data)

    def wait(self, wanted: Callable[[dict[str, Any]], bool], *, timeout_s: float = 20.0) -> dict[str, Any]:
        """The first line, from the start, that is wanted; waits for it."""
        deadline_s, seen = time.monotonic() + timeout_s, 0
        while True:
            for line in self.lines[seen:]:
                if wanted(line):
                    return line
            seen = len(self.lines)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self.read(left_s):
                ended = self.process.poll()
                state = f"not seen in {timeout_s} s" if ended is None else f"the process ended with {ended}"
                raise AssertionError(f"{self.conf['id']}: {state}; last lines {self.lines[-8:]}")

    def ask(self, cmd: str, *, timeout_s: float = 20.0, **arguments: Any) -> dict[str, Any]:
        """A command and its answer."""
        self._numbers += 1
        number = self._numbers
        self._write({"cmd": cmd, "n": number, **arguments})
        return self.wait(lambda line: line.get("n") == number, timeout_s=timeout_s)

    def events(self, handle: int) -> list[str]:
        """Kinds of events of a handle so far."""
        return [line["event"] for line in self.lines if line.get("handle") == handle and "event" in line]

    def end_of(self, handle: int, *, timeout_s: float = 20.0) -> dict[str, Any]:
        """The terminal event of a handle."""
        return self.wait(
            lambda line: line.get("handle") == handle and line.get("event") in TERMINAL, timeout_s=timeout_s
        )

    def released(self, handle: int, *, timeout_s: float = 20.0) -> dict[str, Any]:
        """The RELEASABLE event of a handle."""
        return self.wait(
            lambda line: line.get("handle") == handle and line.get("event") == "releasable", timeout_s=timeout_s
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker, and to it alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and reap."""
        self.process.kill()
        self.process.wait(10)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def close(self) -> None:
        """End the process: gently, then not."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._close_pipes()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def free_address() -> str:
    """A loopback address that stays free while nobody listens: outside the range of outgoing connections."""
    for _ in range(1_000):
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return f"tcp://127.0.0.1:{port}"
    raise AssertionError("no free port")


def settled(worker: WorkerProcess, *, timeout_s: float = 20.0) -> dict[str, Any]:
    """The conservation oracle: waits until nothing is leased, withheld or open; gives the answer of `check`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        answer = worker.ask("check")
        if not (answer["leases"] or answer["quarantined"] or answer["rooms"]):
            return answer
        assert time.monotonic() < deadline_s, f"not settled in {timeout_s} s: {answer} {worker.ask('stats')}"
        time.sleep(0.05)
