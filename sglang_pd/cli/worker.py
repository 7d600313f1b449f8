"""What `prefill` and `decode` share: a configuration of that role, and the worker."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from sglang_pd.config import load_worker
from sglang_pd.protocol.errors import BackendUnavailable, ConfigError

NEEDED = ("uvicorn", "starlette")


def run(role: str, path: str, sets: Sequence[str]) -> int:
    """Be a worker. Without a file the defaults hold. Raises `ConfigError`, `BackendUnavailable`."""
    config = load_worker(path, sets=sets) if path else load_worker({"role": role}, sets=sets)
    if config.role != role:
        raise ConfigError("the wrong role", where="$.role", expected=role, actual=config.role, file=path)
    require(*NEEDED)
    from sglang_pd.launch.worker import run_worker  # only now: it needs the packages above

    run_worker(config)
    return 0


def require(*packages: str) -> None:
    """Raise `BackendUnavailable` naming what is not installed, and how to get it."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            "serving needs packages that are not here",
            where=" ".join(missing),
            hint="pip install 'sglang-pd[server]'",
        )
