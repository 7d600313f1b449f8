"""Whether the NICs that a configuration names are there. For the machine that the worker runs on: `check` may run
anywhere, so reading a configuration does not ask."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sglang_pd.config.schema import WorkerConfig
from sglang_pd.protocol.errors import ConfigError

SYSFS: Final = Path("/sys/class")
CLASSES: Final = ("infiniband", "net")
ANY: Final = frozenset({"all"})
"""What UCX takes for no choice."""


def require_nics(config: WorkerConfig, folder: Path = SYSFS) -> None:
    """Raise `ConfigError` naming the first that is missing and those that exist: a library that finds none of its
    devices fails in ways that point elsewhere."""
    known = sorted(path.name for name in CLASSES if (folder / name).is_dir() for path in (folder / name).iterdir())
    if not known:
        return  # no sysfs here: the library has to tell
    for number, name in enumerate(config.network.devices):
        if name not in ANY and name.partition(":")[0] not in known and name not in known:
            raise ConfigError(
                "no such network device on this machine",
                where=f"$.network.devices[{number}]",
                expected=" | ".join(known),
                actual=name,
                hint="An RDMA device may carry its port, as in mlx5_0:1.",
            )
