"""What `up` starts: one file for a prefill, a decode and a router, or a checkpoint folder, or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from sglang_pd.config import WorkerConfig, load_router, load_worker
from sglang_pd.config.load import read_document
from sglang_pd.protocol.errors import ConfigError

ROLES: Final = ("prefill", "decode")
QUIET: Final = {"log_level": "warning"}
"""What holds where a file says nothing: the table shows the rooms, the log what is wrong."""
ROUTER_KEYS: Final = ("prefill", "decode")
"""Keys of a router's configuration that `up` fills in itself."""


@dataclass(frozen=True)
class Deployment:
    """Two workers and a router. documents, sets: what the processes `prefill`, `decode` and `router` are given.
    configs: the workers', checked."""

    documents: Mapping[str, dict[str, Any]]
    sets: Mapping[str, Sequence[str]]
    configs: Mapping[str, WorkerConfig]

    def router_document(self, prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> dict[str, Any]:
        """The router's document once the workers have announced themselves with `url` and `bootstrap_port`."""
        first = {"url": prefill["url"], "bootstrap_port": prefill["bootstrap_port"]}
        return {**self.documents["router"], "prefill": [first], "decode": [{"url": decode["url"]}]}


def load_deployment(source: str, sets: Sequence[str] = (), *, document: Mapping[str, Any] | None = None) -> Deployment:
    """Read and check everything. source: a YAML file, a checkpoint folder, or empty for the reference engine.

    The file's keys are those of a worker and hold for both; under `prefill` and `decode` stand those of one, and under
    `router` the router's. `sets` may be `prefill.PATH=VALUE`, `decode.PATH=VALUE`, `router.PATH=VALUE`, or for both
    workers. document: instead of a file. Raises `ConfigError`.
    """
    document = {**QUIET, **(document if document is not None else _document(source))}
    router = {**QUIET, **_part(document.pop("router", None), "router")}
    parts = {role: _part(document.pop(role, None), role) for role in ROLES}
    chosen = _sets(sets)
    documents = {role: merge({"role": role, **document}, parts[role]) for role in ROLES}
    configs = {}
    for role in ROLES:
        with _within(role, source):
            configs[role] = load_worker(documents[role], sets=chosen[role])
    for role, config in configs.items():
        if config.role != role:
            raise ConfigError("the wrong role", where=f"$.{role}.role", expected=role, actual=config.role)
    for key in ROUTER_KEYS:
        if key in router:
            raise ConfigError("`up` fills in its own workers", where=f"$.router.{key}", expected="unset")
    stand_in = {"prefill": ["http://127.0.0.1:1"], "decode": ["http://127.0.0.1:2"]}
    with _within("router", source):
        load_router({**router, **stand_in}, sets=chosen["router"])
    return Deployment({**documents, "router": router}, chosen, configs)


@contextlib.contextmanager
def _within(name: str, source: str) -> Iterator[None]:
    """Adds whose configuration it is to what is wrong with it: three have keys of the same names."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            error.message,
            code=error.code,
            where=f"{name}: {error.where}",
            expected=error.expected,
            actual=error.actual,
            hint=error.hint,
            **({"file": source} if source else {}),
        ) from None


def _document(source: str) -> dict[str, Any]:
    if not source:
        return {}
    if os.path.isdir(source):
        folder = Path(source).resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(
                "no checkpoint",
                where=source,
                expected="a folder with config.json",
                actual="none in it",
                hint="Name a folder that `save_pretrained` made, or a YAML file.",
            )
        return {"engine": {"name": "transformers", "options": {"path": str(folder)}}}
    return read_document(source)


def _part(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("not a mapping", where=f"$.{where}", expected="key: value", actual=type(value).__name__)
    return dict(value)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `over` says, mappings merged key by key."""
    result = dict(base)
    for key, value in over.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merge(before, value) if both else value  # type: ignore[arg-type]
    return result


def _sets(sets: Sequence[str]) -> dict[str, list[str]]:
    chosen: dict[str, list[str]] = {"prefill": [], "decode": [], "router": []}
    for text in sets:
        side, dot, rest = text.removeprefix("$.").partition(".")
        if dot and side in chosen:
            chosen[side].append(rest)
        else:
            for role in ROLES:
                chosen[role].append(text)
    return chosen


def write_document(folder: str, name: str, document: Mapping[str, Any], sets: Sequence[str] = ()) -> list[str]:
    """Write the document of the process `name` (JSON is YAML), readable by this user alone. The process' arguments."""
    path = Path(folder) / f"{name}.yaml"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(document))
    return [name, "--config", str(path), *(part for text in sets for part in ("--set", text))]
