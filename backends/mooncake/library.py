"""The Mooncake package: found, versioned, and asked what it can do. The only module that imports it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from dataclasses import dataclass
from typing import Any

from sglang_pd.backends.mooncake.options import MooncakeOptions
from sglang_pd.protocol.errors import BackendUnavailable

DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
)
MIN_VERSION = (0, 3, 13)
"""First version whose TCP writes are acknowledged by the destination and whose lanes are bounded as assumed here."""

RDMA_DEVICES = "/sys/class/infiniband"

_DEBIAN = {
    "libibverbs.so.1": "apt-get install libibverbs1",
    "libmlx5.so.1": "apt-get install ibverbs-providers",
    "libnuma.so.1": "apt-get install libnuma1",
    "libcurl.so.4": "apt-get install libcurl4",
    "libcuda.so.1": "install the NVIDIA driver, or take mooncake-transfer-engine-non-cuda",
    "libcudart.so.13": "pip install nvidia-cuda-runtime, or import torch first",
    "libcudart.so.12": "pip install nvidia-cuda-runtime-cu12, or import torch first",
}


@dataclass(frozen=True, slots=True)
class Library:
    """The imported package and what this version of it can do.

    module: `mooncake.engine`. version: of the distribution, as text. flags: its `SUPPORT_*` constants.
    has_tickets: it can tell whether a failed batch has drained (0.3.14). has_arrays: it takes arrays, not only lists.
    """

    module: Any
    version: str
    flags: dict[str, bool]
    has_tickets: bool
    has_arrays: bool

    @property
    def device_memory(self) -> bool:
        """Whether the build knows CUDA memory."""
        return self.flags.get("SUPPORT_CUDA", False)


def version_tuple(text: str) -> tuple[int, ...]:
    """`0.3.13.post1` -> (0, 3, 13). An unreadable version is ()."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def load(options: MooncakeOptions) -> Library:
    """Import Mooncake and verify that this build and this host can do `options.transport`.

    Raises `BackendUnavailable` naming the package, library file or device that is missing, and the command that gets
    it.
    """
    if options.transport == "rdma":
        _check_rdma_devices(options)
    module = _import()
    version = _version(module)
    if version_tuple(version) < MIN_VERSION:
        raise BackendUnavailable(
            "this version of Mooncake does not acknowledge writes",
            where="package mooncake-transfer-engine",
            expected=">= " + ".".join(map(str, MIN_VERSION)),
            actual=version or "unknown",
            hint="pip install -U " + DISTRIBUTIONS[0],
        )
    engine = module.TransferEngine
    library = Library(
        module=module,
        version=version,
        flags={name: bool(getattr(module, name)) for name in dir(module) if name.startswith("SUPPORT_")},
        has_tickets=hasattr(engine, "submit_scatter_write") and hasattr(module, "ScatterTransferTicket"),
        has_arrays=hasattr(engine, "batch_transfer_async_write_arrays"),
    )
    if options.transport == "nvlink_intra" and not library.flags.get("SUPPORT_INTRA_NVLINK", False):
        raise BackendUnavailable(
            "this build of Mooncake has no intra-node NVLink transport, and would use TCP without a word",
            where=f"package mooncake-transfer-engine {version}",
            expected="SUPPORT_INTRA_NVLINK",
            actual=", ".join(name for name, on in library.flags.items() if on) or "no SUPPORT_* flag",
            hint="pip install mooncake-transfer-engine-cuda13 (0.3.14 or later)",
        )
    return library


def _import() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            "Mooncake is not installed",
            where="package mooncake-transfer-engine",
            actual=str(error),
            hint=f"pip install {DISTRIBUTIONS[0]} (no GPU) or {DISTRIBUTIONS[1]}",
        ) from error
    except ImportError as error:
        missing = re.match(r"(lib[\w.+-]+\.so[\w.]*)", str(error))
        name = missing.group(1) if missing else "a shared library"
        raise BackendUnavailable(
            "Mooncake is installed, but a library that it needs is missing",
            where=name,
            actual=str(error),
            hint=_DEBIAN.get(name, "Find the package that has this file"),
        ) from error


def _version(module: Any) -> str:
    """Of the distribution that the imported file belongs to: two may be installed, one over the other."""
    file = os.path.realpath(str(getattr(module, "__file__", "")))
    found = ""
    for name in DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if os.path.realpath(str(distribution.locate_file("mooncake/" + os.path.basename(file)))) == file:
            return distribution.version
        found = found or distribution.version
    return found


def _check_rdma_devices(options: MooncakeOptions) -> None:
    present = sorted(os.listdir(RDMA_DEVICES)) if os.path.isdir(RDMA_DEVICES) else []
    missing = [name for name in options.devices if name not in present] if present else ["any RDMA device"]
    if missing:
        raise BackendUnavailable(
            "an RDMA device is missing",
            where=RDMA_DEVICES,
            expected=", ".join(options.devices) or "at least one device",
            actual=", ".join(present) or "none",
            hint="Load the NIC's driver, name a device that exists, or choose transport tcp",
        )
