"""Processes in network and PID namespaces of their own, joined by a bridge over veth, as pods are. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NETWORK = "10.77.209"
LISTEN, ESTABLISHED = "0A", "01"
_numbers = itertools.count()
CLI = str(Path(sys.executable).with_name("sglang-pd"))
ASK = """
import sys, urllib.request as u
request = u.Request(sys.argv[1], (sys.argv[2] or None) and sys.argv[2].encode())
for header in sys.argv[3:]:
    request.add_header(*header.split(": ", 1))
try:
    answer = u.urlopen(request, timeout=60)
except u.HTTPError as error:
    answer = error
print(answer.status); print(answer.read().decode())
"""


def unavailable() -> str:
    """Why namespaces cannot be made here, or empty."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = "ip link add pdprobe type bridge && mount --bind /etc/hostname /etc/hosts"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe], capture_output=True, timeout=30
    )
    return f"namespaces are not permitted: {made.stderr.decode()[-200:]}" if made.returncode else ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@dataclass
class Host:
    """A network namespace with one address, beside loopback."""

    netns: str
    address: str

    def ask(self, url: str, body: Any = None, *headers: str) -> tuple[int, str]:
        """HTTP from inside: status and body."""
        data = "" if body is None else json.dumps(body)
        done = subprocess.run(
            ["ip", "netns", "exec", self.netns, sys.executable, "-c", ASK, url, data, *headers],
            capture_output=True, timeout=90, check=True,
        )  # fmt: skip
        status, _, text = done.stdout.decode().partition("\n")
        return int(status), text

    def sockets(self, state: str) -> list[tuple[str, int, str]]:
        """Local address, local port and remote address of the TCP sockets in a state; loopback left out."""
        command = ["ip", "netns", "exec", self.netns, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        lines = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.decode().splitlines()
        found = []
        for words in (line.split() for line in lines):
            if len(words) > 3 and words[3] == state:
                (local, port), (remote, _) = (word.split(":") for word in words[1:3])
                if not _dotted(local).startswith("127."):
                    found.append((_dotted(local), int(port, 16), _dotted(remote)))
        return found


def _dotted(text: str) -> str:
    """An IPv4 address of `/proc/net/tcp`, or one that an IPv6 address carries."""
    return ".".join(str(b) for b in reversed(bytes.fromhex(text[-8:])))


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """Network namespaces on one bridge, by name. The bridge has one too: this machine's stays as it is."""
    tag, made = f"pd{os.getpid()}n{next(_numbers)}", []
    try:
        bridge = f"{tag}-bridge"
        _ip("netns", "add", bridge)
        made.append(bridge)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        found = {}
        for number, name in enumerate(names, 2):
            host = found[name] = Host(f"{tag}-{name}", f"{NETWORK}.{number}")
            _ip("netns", "add", host.netns)
            made.append(host.netns)
            _ip("-n", bridge, "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", host.netns)
            _ip("-n", bridge, "link", "set", f"v{number}", "master", "br0", "up")
            _ip("-n", host.netns, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.netns, "link", "set", "eth0", "up")
            _ip("-n", host.netns, "link", "set", "lo", "up")
        yield found
    finally:
        for netns in made:
            subprocess.run(["ip", "netns", "del", netns], capture_output=True, timeout=30)


@dataclass
class Process:
    """Our command line in a namespace. Its output goes to `log`."""

    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[bytes] | None = None

    @staticmethod
    def inside(host: Host, etc_hosts: Path, words: list[str], *, own_pids: bool = True) -> list[str]:
        """A command line in a host's network namespace, with PID and mount namespaces of its own."""
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        pids = ["--pid", "--fork", "--mount-proc", "--kill-child"] if own_pids else []
        enter = ["ip", "netns", "exec", host.netns, "unshare", "--mount", *pids]
        return [*enter, "sh", "-c", script, str(etc_hosts), *words]

    def __enter__(self) -> Process:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )  # fmt: skip
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.popen is not None
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(30)

    def text(self) -> str:
        """What it said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, wanted: str, timeout_s: float = 90.0) -> None:
        """Until it has said that."""
        assert self.popen is not None
        deadline_s = time.monotonic() + timeout_s
        while wanted not in self.text():
            assert self.popen.poll() is None, f"it ended: {self.text()[-3000:]}"
            assert time.monotonic() < deadline_s, f"it did not say {wanted!r}: {self.text()[-3000:]}"
            time.sleep(0.1)
