"""Names to backends. A name that does not exist is an error that lists those that do; nothing is ever substituted."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from sglang_pd.backends.base import Backend
from sglang_pd.backends.library.lives import lives
from sglang_pd.protocol.errors import BackendUnavailable, ConfigError, PdError


class BackendFactory(Protocol):
    """What a backend module offers as `create`."""

    def __call__(self, *, epoch: int, options: Mapping[str, Any]) -> Backend:
        """Build the backend. Raises `BackendUnavailable` or `ConfigError`; never returns another transport."""


BACKENDS: dict[str, str] = {
    "local": "sglang_pd.backends.local.backend",
    "nixl": "sglang_pd.backends.nixl.backend",
    "mooncake": "sglang_pd.backends.mooncake.backend",
    "mori": "sglang_pd.backends.mori.backend",
}
"""Backend name -> module that defines `create(*, epoch, options) -> Backend`. `register_backend` adds to it."""


def register_backend(name: str, module: str) -> None:
    """Add a third party's backend. Raises `ConfigError` if the name is taken by another module."""
    if BACKENDS.get(name, module) != module:
        raise ConfigError("backend name is taken", where=name, expected="a free name", actual=BACKENDS[name])
    BACKENDS[name] = module


def check_known(name: str) -> None:
    """Raise `ConfigError` (`backend_unknown`) for a name that is no backend's; it lists them and suggests one."""
    if name not in BACKENDS:
        close = difflib.get_close_matches(name, BACKENDS, n=1)
        raise ConfigError(
            "no such backend",
            code="backend_unknown",
            where="$.backend.name",
            expected=" | ".join(sorted(BACKENDS)),
            actual=name,
            hint=f"Did you mean {close[0]!r}?" if close else "",
        )


def create_backend(name: str, *, epoch: int, options: Mapping[str, Any] | None = None) -> Backend:
    """Build backend `name` for the worker incarnation `epoch`.

    Raises `ConfigError` (`backend_unknown`) for an unknown name, `BackendUnavailable` for a missing library or device.
    """
    check_known(name)
    try:
        lives.check_pid(name)  # whatever it is itself: the writer that goes on knows nothing of that
        module = importlib.import_module(BACKENDS[name])
        return cast(BackendFactory, module.create)(epoch=epoch, options=dict(options or {}))
    except PdError:
        raise
    except ImportError as error:
        raise ConfigError(
            "the backend's module does not import", code="backend_unavailable", where=name, actual=str(error)
        ) from error
    except OSError as error:
        raise BackendUnavailable(
            "the system refuses what the backend needs",
            where=name,
            actual=str(error),
            hint="`sglang-pd doctor` shows this process's limits (ulimit -n: open files).",
        ) from error
