"""Facts about this machine that decide whether a worker can run here. Each check gives findings; none raises."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sglang_pd.config import WorkerConfig, load_keys
from sglang_pd.config.address import Address
from sglang_pd.protocol.errors import ConfigError

Level = Literal["ok", "info", "warn", "bad"]
PREFIXES = ("UCX_", "NIXL_", "MC_", "MORI_", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
TAKEN = "taken by another process"
MIN_FILES = 4096
MIN_KERNEL = (5, 3)

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?$")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fact. `bad` keeps a worker from running; `warn` may slow or surprise it."""

    area: str
    name: str
    level: Level
    found: str
    expected: str = ""
    hint: str = ""


def system() -> Iterator[Finding]:
    """Interpreter and kernel."""
    version = platform.python_version()
    yield Finding(
        area="system",
        name="python",
        level="ok" if sys.version_info >= (3, 10) else "bad",
        found=version,
        expected="3.10 or newer",
    )
    release = platform.release()
    kernel = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    good = sys.platform == "linux" and kernel >= MIN_KERNEL
    yield Finding(
        area="system",
        name="kernel",
        level="ok" if good else "bad",
        found=f"{sys.platform} {release}",
        expected="Linux 5.3 or newer",
        hint="" if good else "The backend `local` needs memfd and pidfd.",
    )


def libraries(extras: frozenset[str] = frozenset()) -> Iterator[Finding]:
    """Every requirement of the package: installed or not, inside the range that was tried or not.

    extras: those that the configuration needs; a package of another extra may be missing.
    """
    seen: set[str] = set()
    for text in importlib.metadata.requires("sglang-pd") or ():
        match = _REQUIREMENT.match(text.strip())
        if match is None:
            continue
        name, wanted, marker = match[1], match[2].strip(" ()"), match[3] or ""
        extra = _EXTRA.search(marker)
        if name == "sglang-pd" or name in seen or (extra and extra[1] == "dev"):
            continue
        seen.add(name)
        yield _library(name, wanted, extra[1] if extra else "", extras)


def _library(name: str, wanted: str, extra: str, extras: frozenset[str]) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        needed = not extra or extra in extras
        pip = f"pip install 'sglang-pd[{extra}]'" if extra else "pip install sglang-pd"
        return Finding(
            area="library",
            name=name,
            level="bad" if needed else "info",
            found="not installed",
            expected=wanted,
            hint=pip,
        )
    inside = in_range(version, wanted)
    return Finding(
        area="library",
        name=name,
        level="ok" if inside else "warn",
        found=version,
        expected=wanted,
        hint="" if inside else "Outside the range that was tried.",
    )


def in_range(version: str, wanted: str) -> bool:
    """Whether a version satisfies `>=A,<B,==C`. Only the numbers count: `0.3.13.post1` is 0.3.13."""
    have = _numbers(version)
    for part in filter(None, (piece.strip() for piece in wanted.split(","))):
        match = re.match(r"(>=|<=|==|!=|~=|>|<)\s*(.+)", part)
        if match is None:
            return False
        bound = _numbers(match[2].removesuffix(".*"))
        width = max(len(have), len(bound))
        a, b = ((*x, *[0] * (width - len(x))) for x in (have, bound))
        verdicts = {">=": a >= b, "<=": a <= b, ">": a > b, "<": a < b, "==": a == b, "!=": a != b}
        if not verdicts.get(match[1], a >= b and a[: len(bound) - 1] == b[: len(bound) - 1]):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def devices(*, needs_gpu: bool = False) -> Iterator[Finding]:
    """GPUs and RDMA devices, as the system shows them; no driver is touched."""
    folder = Path("/dev")
    nvidia = sorted(p.name for p in folder.glob("nvidia[0-9]*")) if folder.is_dir() else []
    amd = ["kfd"] if (folder / "kfd").exists() else []
    rdma_folder = Path("/sys/class/infiniband")
    rdma = sorted(p.name for p in rdma_folder.iterdir()) if rdma_folder.is_dir() else []
    for name, found in (("NVIDIA GPUs", nvidia), ("AMD GPUs", amd), ("RDMA devices", rdma)):
        missing = name == "NVIDIA GPUs" and needs_gpu and not nvidia and not amd
        yield Finding(
            area="device",
            name=name,
            level="bad" if missing else "info",
            found=" ".join(found) or "none",
            expected="one, for pools.device" if missing else "",
            hint="In a container: --gpus all. Or set pools.device to cpu." if missing else "",
        )


def limits() -> Iterator[Finding]:
    """Limits of the process that transports run into."""
    rdma = Path("/sys/class/infiniband").is_dir()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield Finding(
        area="limit",
        name="memlock",
        level="ok" if unlimited else "warn" if rdma else "info",
        found="unlimited" if unlimited else f"{soft:,} bytes",
        expected="unlimited, where RDMA registers memory",
        hint="" if unlimited or not rdma else "ulimit -l unlimited; in containers: --ulimit memlock=-1",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= MIN_FILES
    yield Finding(
        area="limit",
        name="nofile",
        level="ok" if enough else "warn",
        found=f"{soft:,} (hard {hard:,})",
        expected=f"at least {MIN_FILES:,}",
        hint="" if enough else f"ulimit -n {MIN_FILES}",
    )
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        yield Finding(area="limit", name="/dev/shm", level="info", found=f"{free:,} bytes free")


def settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What transports and allocators will read from the environment."""
    for name in sorted(environ):
        if name.startswith(PREFIXES):
            yield Finding(area="environment", name=name, level="info", found=environ[name])
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(name, "").lower():
            yield Finding(
                area="environment",
                name=name,
                level="warn",
                found=environ[name],
                expected="no expandable segments",
                hint="Memory of expandable segments cannot be exported by CUDA IPC.",
            )


def ports(config: WorkerConfig) -> Iterator[Finding]:
    """Whether the worker can listen where its configuration says."""
    for key, address in (("bootstrap_port", config.bootstrap_address), ("http_port", config.http_address)):
        why = cannot_listen(address)
        hint = f"Stop what listens there, or set network.{key} (0: any free port)." if why else ""
        expected = "free"
        if why and why != TAKEN:
            expected, hint = "network.bind: an address of this host", "Set network.bind to one that `ip addr` shows."
        yield Finding(
            area="port",
            name=f"network.{key}",
            level="bad" if why else "ok",
            found=f"{address}: {why or 'free'}",
            expected=expected,
            hint=hint,
        )
    low, high = config.network.port_range or (0, -1)
    taken = [port for port in range(low, high + 1) if cannot_listen(Address(config.bind.host, port))]
    if high >= low:
        few = high - low + 1 - len(taken) < 2
        yield Finding(
            area="port",
            name="network.ports",
            level="bad" if few else "ok",
            found=f"{high - low + 1 - len(taken)} of {high - low + 1} free",
            expected="two or more for each engine",
        )


def cannot_listen(address: Address) -> str:
    """Why nothing can listen at an address, or empty. Listens there for a moment."""
    try:
        found = socket.getaddrinfo(address.host, address.port or 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"does not resolve ({error.strerror or error})"
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
                probe.listen(1)
            except OSError as error:
                known = {
                    errno.EADDRINUSE: TAKEN,
                    errno.EADDRNOTAVAIL: "not an address of this host",
                }
                return known.get(error.errno or 0, error.strerror or str(error))
    return ""


def keys(config: WorkerConfig) -> Iterator[Finding]:
    """The key files that the configuration names."""
    try:
        found = load_keys(config.security)
    except ConfigError as error:
        yield Finding(
            area="security",
            name=error.where,
            level="bad",
            found=str(error.actual),
            expected=error.message,
            hint=error.hint,
        )
        return
    said = "none" if found is None else f"{len(found.allowed)} public keys may connect"
    yield Finding(area="security", name="CURVE keys", level="info" if found is None else "ok", found=said)
