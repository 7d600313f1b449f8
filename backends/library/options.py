"""Options of a backend, read into its dataclass, and settings of the environment. Every refusal names the path."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from sglang_pd.protocol.errors import ConfigError

PATH = "$.backend.options"

T = TypeVar("T")


def read_options(kind: type[T], options: Mapping[str, Any]) -> T:
    """The dataclass `kind` with these options, names and types checked. Raises `ConfigError`; ranges are `expect`'s."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise unknown(f"{PATH}.{name}", name, known)
    try:
        return msgspec.convert(dict(options), kind, strict=True)
    except msgspec.ValidationError as error:
        said, _, at = str(error).partition(" - at `$")
        where = PATH + at.rstrip("`")
        wanted, _, found = said.removeprefix("Expected ").partition(", got ")
        raise ConfigError("an option has the wrong type", where=where, expected=wanted, actual=found) from error


def unknown(where: str, name: object, valid: Iterable[str]) -> ConfigError:
    """An option that does not exist; lists those that do and suggests one."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    return ConfigError(
        "no such option",
        where=where,
        expected=" | ".join(names),
        actual=name,
        hint=f"Did you mean {close[0]!r}?" if close else "",
    )


def expect(condition: bool, name: str, expected: str, actual: object) -> None:
    """Raise `ConfigError` for the value of option `name` unless `condition`."""
    if not condition:
        raise ConfigError(
            "an option's value is not acceptable", where=f"{PATH}.{name}", expected=expected, actual=repr(actual)
        )


def expect_ranges(options: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse the first option outside its range; lowest and highest are both allowed, NaN never."""
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        expect(low <= value <= high, name, f"{low:,} to {high:,}", value)


def settings_in_force(*prefixes: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment settings whose names start so. They are read, never written, by this library."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}
