"""Creates a backend in a child process and says what came of it: transport libraries may abort, hang or crash at exit.

Run as `python -m sglang_pd.cli.probe`, with the request in JSON on standard input.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang_pd.backends.base import Capabilities
from sglang_pd.backends.registry import create_backend
from sglang_pd.config.network import BackendSettings
from sglang_pd.memory.scope import Scope
from sglang_pd.protocol.errors import BackendUnavailable, ErrorInfo, PdError

MARK = "@sglang-pd-probe "
TIMEOUT_S = 60.0
REGISTERED_PER_S = 2**30
"""Bytes that the slowest transport pins in a second, with room to spare."""
MAX_WORDS = 400
"""Most characters that are shown of what a library said."""


class Request(msgspec.Struct, frozen=True):
    """The backend to create. Its environment is the child's own. memory: (bytes, device) of what it is to register."""

    name: str
    options: dict[str, Any]
    memory: list[tuple[int, str]] = []


class Answer(msgspec.Struct, frozen=True):
    """What the backend can do here, or why it cannot be had."""

    capabilities: Capabilities | None = None
    error: ErrorInfo | None = None


def probe_backend(
    settings: BackendSettings,
    environ: Mapping[str, str],
    memory: Sequence[tuple[int, str]] = (),
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Create the backend in a child with `environ` and what the settings add to it, and register `memory`: (bytes,
    device) of each piece. Never raises."""
    request = msgspec.json.encode(Request(settings.name, dict(settings.options), list(memory)))
    timeout_s += sum(nbytes for nbytes, _ in memory) / REGISTERED_PER_S
    environment = {**settings.defaults, **environ, **settings.environment}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "sglang_pd.cli.probe"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return _unavailable(settings.name, f"no child process: {error}")
    try:
        said, _ = child.communicate(request, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # its own children hold our pipe
        child.communicate()
        return _unavailable(settings.name, f"the backend does not start within {timeout_s:g} s")
    text = said.decode("utf-8", "replace")
    line = next((x for x in text.splitlines() if x.startswith(MARK)), None)
    if line is not None:
        return msgspec.json.decode(line.removeprefix(MARK), type=Answer)
    status = child.returncode
    ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return _unavailable(settings.name, f"the library ended the process ({ended}): {text.strip()[-MAX_WORDS:]}")


def _unavailable(name: str, why: str) -> Answer:
    return Answer(error=BackendUnavailable(why, where=f"backend {name}").info())


def _answer(request: Request) -> Answer:
    try:
        with create_backend(request.name, epoch=secrets.randbits(64), options=request.options) as backend:
            scope = Scope(backend)
            for nbytes, device in request.memory:
                scope.allocate(nbytes, device)
            if request.memory:
                scope.register()
            return Answer(capabilities=backend.capabilities)
    except PdError as error:
        return Answer(error=error.info())


def _main() -> None:
    try:
        answer = _answer(msgspec.json.decode(sys.stdin.buffer.read(1 << 20), type=Request))
        print(MARK + msgspec.json.encode(answer).decode(), flush=True)
    finally:
        sys.stderr.flush()
        os._exit(0)  # a process that has loaded UCX dies in its finalisers


if __name__ == "__main__":
    _main()
