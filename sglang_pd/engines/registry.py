"""Engines by name: what each says of its model from its options alone, and how it is made. Imports none of them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from sglang_pd.config import read_options
from sglang_pd.engines.base import Engine
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.errors import BackendUnavailable, ConfigError


class Described(Protocol):
    """What an engine says of its model from its options alone; `engines.base.ModelFacts` has all of it."""

    @property
    def fingerprint(self) -> str:
        """Of weights and architecture."""

    @property
    def state(self) -> StateSpec:
        """All state that the model has."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the model allows."""

    @property
    def page_multiple(self) -> int:
        """page_tokens must be a multiple of it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """`Described`, without the engine's own module."""

    fingerprint: str
    state: StateSpec
    max_tokens: int
    page_multiple: int = 1


class Entry(NamedTuple):
    """An engine. module: its code. describe(options) and create(options, device): functions `module:name`.
    extra: what to install where its libraries are missing. host_kinds: state that may lie in host memory beside a
    device that computes; None: all of it."""

    module: str
    describe: str
    create: str
    extra: str
    host_kinds: frozenset[str] | None = None


ENGINES: Final[dict[str, Entry]] = {
    "reference": Entry(
        "sglang_pd.engines.reference.engine",
        "sglang_pd.engines.registry:describe_reference",
        "sglang_pd.engines.registry:create_reference",
        "torch",
        frozenset({"PLE"}),
    ),
    "transformers": Entry(
        "sglang_pd.engines.transformers",
        "sglang_pd.engines.transformers:describe_options",
        "sglang_pd.engines.transformers:TransformersEngine",
        "sglang-pd[transformers]",
    ),
}


def describe_engine(name: str, options: Mapping[str, Any]) -> Described:
    """Facts of an engine's model, computing nothing. Raises `ConfigError` for an unknown engine, and what it raises."""
    described: Described = _function(name, _entry(name).describe)(options)
    return described


def create_engine(name: str, options: Mapping[str, Any], device: str = "cpu") -> Engine:
    """One rank of an engine, its weights on `device`. Raises `ConfigError`, `BackendUnavailable` without its library,
    and what the engine raises for its options."""
    engine: Engine = _function(name, _entry(name).create)(options, device)
    return engine


def host_kinds_of(name: str, state: StateSpec) -> frozenset[str]:
    """Kinds of a model's state that this engine can have in host memory. Raises `ConfigError` as `describe_engine`."""
    kinds = frozenset(component.kind for component in state.components)
    known = _entry(name).host_kinds
    return kinds if known is None else kinds & known


def describe_reference(options: Mapping[str, Any]) -> Described:
    """Facts of the reference engine, from its configuration alone (its weights follow from a seed)."""
    shape = importlib.import_module("sglang_pd.engines.reference.config")
    config = read_options(options, shape.ReferenceConfig, where="$.engine.options")
    return Facts(config.fingerprint, shape.state_spec(config), shape.MAX_TOKENS, config.page_multiple)


def create_reference(options: Mapping[str, Any], device: str) -> Engine:
    """The reference engine."""
    shape = importlib.import_module("sglang_pd.engines.reference.config")
    config = read_options(options, shape.ReferenceConfig, where="$.engine.options")
    made: Engine = importlib.import_module("sglang_pd.engines.reference.engine").ReferenceEngine(config, device=device)
    return made


def _entry(name: str) -> Entry:
    entry = ENGINES.get(name)
    try:
        found = entry is not None and importlib.util.find_spec(entry.module) is not None
    except ModuleNotFoundError:
        found = False
    if entry is None or not found:
        raise ConfigError(
            "this build has no such engine", where="$.engine.name", expected=" | ".join(sorted(ENGINES)), actual=name
        )
    return entry


def _function(name: str, place: str) -> Callable[..., Any]:
    module, _, function = place.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sglang_pd"):
            raise
        raise BackendUnavailable(
            f"the engine {name!r} needs a package that is not here",
            where="$.engine.name",
            actual=error.name,
            hint=f"pip install {ENGINES[name].extra!r}",
        ) from None
    return found
