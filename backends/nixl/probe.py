"""Which transport UCX really uses, found by asking UCX itself in a child process.

nixl cannot say it, and UCX prints its choice only when `UCX_PROTO_INFO` was set before it was loaded. So a child with
the same settings, and that one beside them, makes agents as the backend does, and the tables that UCX prints are read.
To learn about one certain peer the child loads that peer's metadata: UCX then chooses, and not one byte is written.

Run as `python -m sglang_pd.backends.nixl.probe`, with the request in JSON on standard input.
"""

from __future__ import annotations

import base64
import importlib
import json
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_pd.backends.nixl.options import NixlOptions

_TITLE = re.compile(r"\| (?P<agent>\S+) (?P<where>intra-node|inter-node) cfg#\d+ +\|")
_PUT = re.compile(r"remote memory write by ucp_put\S* from (?P<src>\w+)\S* (?:memory )?to (?P<dst>[\w/]+)")
_USED = re.compile(r"\b([a-z][a-z0-9_]*)/[\w:.-]+")
_PROBE_BYTES = 1 << 20
_PROBE_S = 5.0


@dataclass(frozen=True, slots=True)
class Transports:
    """What the child found. `paths`: (`cpu` or `cuda`, `cpu` or `cuda`), source first -> UCX transports for writes.

    `failure` says why nothing is known, where `paths` is empty.
    """

    paths: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    failure: str = ""

    def name(self, src: str, dst: str) -> str:
        """The transports of one path as text; `unknown` where UCX said nothing."""
        return "+".join(self.paths.get((src, dst), ())) or "unknown"

    def verified_without_tcp(self, src: str, dst: str) -> bool:
        """True only where UCX named the transports of this path and none of them is TCP."""
        used = self.paths.get((src, dst), ())
        return bool(used) and not any(name.startswith("tcp") for name in used)


class Probe:
    """A child process looking for the transport. Started at once, waited for by `result`."""

    def __init__(
        self, package: str, options: NixlOptions, *, metadata: bytes = b"", devices: tuple[str, ...] = ()
    ) -> None:
        self._timeout_s = options.probe_timeout_s
        self._child: subprocess.Popen[str] | None = None
        self._result: Transports | None = None
        if options.plugin != "UCX":
            self._result = Transports(failure=f"the {options.plugin} plugin does not tell")
            return
        if not sys.executable:
            self._result = Transports(failure="this process does not know its Python interpreter")
            return
        request = {
            "package": package,
            "plugin": options.plugin,
            "params": options.backend_params(),
            "metadata": base64.b64encode(metadata).decode(),
            "devices": list(devices),
        }
        hidden = ("UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO_DIR")
        environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"UCX_PROTO_INFO": "y"}
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "sglang_pd.backends.nixl.probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._result = Transports(failure=f"the child process did not start: {error}")
            return
        self._request = json.dumps(request)

    def result(self) -> Transports:
        """Wait for the child, at most `probe_timeout_s`, and read its tables. Never raises."""
        if self._result is None and self._child is not None:
            try:
                text, _ = self._child.communicate(self._request, timeout=self._timeout_s)
                self._result = read_tables(text)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.communicate()
                self._result = Transports(failure=f"the child process took longer than {self._timeout_s:g} s")
            self._child = None
        return self._result or Transports(failure="no child process")


def read_tables(text: str) -> Transports:
    """Read what UCX printed: for each pair of memory kinds, the transports of writes to another process."""
    paths: dict[tuple[str, str], set[str]] = {}
    titled = False
    current: set[str] | None = None
    for line in text.splitlines():
        if _TITLE.search(line):
            titled, current = True, None
        elif " self cfg#" in line:
            titled, current = False, None
        elif titled and (put := _PUT.search(line)):
            pair = (_kind(put["src"]), _kind(put["dst"]))
            current = paths.setdefault(pair, set())
            titled = False
        elif " cfg#" in line or " by ucp_" in line:
            titled, current = False, None
        elif current is not None:
            current.update(_USED.findall(line.rpartition("]")[2]))
    found = {pair: tuple(sorted(used)) for pair, used in paths.items() if used}
    return Transports(found, "" if found else f"UCX named no transport; its last words: {text.strip()[-300:]!r}")


def _kind(word: str) -> str:
    return "cuda" if word.lower().startswith(("cuda", "gpu")) else "cpu"


# The child


def _agent(request: Mapping[str, Any], name: str) -> Any:
    api = importlib.import_module(f"{request['package']}._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(request["plugin"], request["params"])
    return agent


def _buffers(agent: Any, devices: list[str]) -> dict[str, tuple[Any, int, int]]:
    """Registered memory of each kind: what keeps it alive, address, device number."""
    host = np.frombuffer(mmap.mmap(-1, _PROBE_BYTES), np.uint8)
    agent.register_memory([(host.ctypes.data, _PROBE_BYTES, 0, "")], "DRAM")
    made = {"cpu": (host, int(host.ctypes.data), 0)}
    for device in devices[:1]:
        torch = importlib.import_module("torch")
        torch.cuda.set_device(device)
        tensor = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        index = int(device.partition(":")[2])
        agent.register_memory([(tensor.data_ptr(), _PROBE_BYTES, index, "")], "VRAM")
        made["cuda"] = (tensor, int(tensor.data_ptr()), index)
    return made


def _target(request: Mapping[str, Any]) -> None:
    """A second child: holds memory and lets the library advance until its standard input ends."""
    agent = _agent(request, "probe-target")
    made = _buffers(agent, request["devices"])
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print("@" + json.dumps({"metadata": metadata, "at": {k: v[1:] for k, v in made.items()}}), flush=True)
    os.set_blocking(0, False)
    until = time.monotonic() + 20 * _PROBE_S
    while time.monotonic() < until and os.getppid() != 1:
        try:
            if os.read(0, 1) == b"":
                return
        except BlockingIOError:
            pass
        agent.get_new_notifs()
        time.sleep(0.0005)


def _write_all(request: Mapping[str, Any]) -> None:
    """Write once along every pair of memory kinds to a target on the last device named."""
    agent = _agent(request, "probe")
    made = _buffers(agent, request["devices"])
    second = dict(request, devices=request["devices"][-1:], role="target")
    child = subprocess.Popen(
        [sys.executable, "-m", "sglang_pd.backends.nixl.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if child.stdin is None or child.stdout is None:
        return
    child.stdin.write(json.dumps(second) + "\n")
    child.stdin.flush()
    answer = next(line for line in child.stdout if line.startswith("@"))
    target = json.loads(answer[1:])
    name = agent.add_remote_agent(base64.b64decode(target["metadata"])).decode()
    kinds = {"cpu": "DRAM", "cuda": "VRAM"}
    for src, (_, address, index) in made.items():
        for dst, (remote, remote_index) in target["at"].items():
            local = agent.get_xfer_descs([(address, _PROBE_BYTES, index)], kinds[src])
            there = agent.get_xfer_descs([(remote, _PROBE_BYTES, remote_index)], kinds[dst])
            handle = agent.initialize_xfer("WRITE", local, there, name)
            state, until = agent.transfer(handle), time.monotonic() + _PROBE_S
            while state == "PROC" and time.monotonic() < until:
                state = agent.check_xfer_state(handle)
    child.kill()


def _probe(request: Mapping[str, Any]) -> None:
    if request.get("role") == "target":
        _target(request)
    elif request["metadata"]:
        _agent(request, f"probe-{os.getpid()}").add_remote_agent(base64.b64decode(request["metadata"]))
    elif request["devices"]:
        _write_all(request)
    else:
        target = _agent(request, "probe-target")
        buffers = _buffers(target, [])
        _agent(request, "probe").add_remote_agent(target.get_agent_metadata())
        del buffers


if __name__ == "__main__":
    try:
        _probe(json.loads(sys.stdin.readline()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # A process that has loaded UCX dies with SIGSEGV in the regular way out. This one holds nothing of anybody's.
        os._exit(0)
