"""From YAML, a dict and `--set path=value` to checked structs; every error names the path.

The schema guides all of it: an unknown key is refused with the nearest known one, `${env:NAME}` and `--set` values are
read as the type that stands there (so a port from the environment is a number, and an instance called `7` stays text),
and a field of bytes takes `512MiB`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as mi

from sglang_pd.config.checks import check_router, check_worker
from sglang_pd.config.document import MAX_DOCUMENT_BYTES, parse_document, scalar, writable
from sglang_pd.config.schema import RouterConfig, WorkerConfig
from sglang_pd.protocol.errors import ConfigError, wire_text

Config = TypeVar("Config", WorkerConfig, RouterConfig)
Options = TypeVar("Options", bound=msgspec.Struct)
Environment = Mapping[str, str]

_ENV = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B|[KMGT])?")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_AT = re.compile(r"(.*?) - at `(\$.*)`$", re.DOTALL)
UNITS: dict[str, int] = {"B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}


def load_worker(
    source: str | Path | Mapping[str, Any],
    *,
    sets: Iterable[str] = (),
    environ: Environment | None = None,
) -> WorkerConfig:
    """A checked `WorkerConfig` from a file's path or a dict. environ: default `os.environ`.

    Raises `ConfigError`: `where` is the path of the key, the detail `file` the file it stands in.
    """
    with _naming(source):
        config = _load(source, WorkerConfig, tuple(sets), os.environ if environ is None else environ)
        check_worker(config)
        return config


def load_router(
    source: str | Path | Mapping[str, Any],
    *,
    sets: Iterable[str] = (),
    environ: Environment | None = None,
) -> RouterConfig:
    """A checked `RouterConfig`; otherwise as `load_worker`."""
    with _naming(source):
        config = _load(source, RouterConfig, tuple(sets), os.environ if environ is None else environ)
        check_router(config)
        return config


def read_options(options: Mapping[str, Any], schema: type[Options], *, where: str) -> Options:
    """A free map (an engine's, say) as its owner's struct, with the same errors as the rest. where: its path."""
    info = mi.type_info(schema)
    data = _shaped(options, info, where, {})
    try:
        return msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        raise _explained(error, data, info, where) from None


def dump(config: WorkerConfig | RouterConfig, *, redact: bool = True) -> dict[str, Any]:
    """The configuration as plain data, which loads again. redact: tokens are replaced by `...`."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    for holder in (data, data.get("security", {})):
        for key in ("bearer_token", "worker_bearer_token"):
            if redact and holder.get(key):
                holder[key] = "..."
    return data


def read_document(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `ConfigError` naming the file."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_DOCUMENT_BYTES + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"cannot read the configuration: {reason}",
            where=str(path),
            expected="a YAML file in UTF-8",
            hint="configs/ has a ready one for each transport.",
        ) from None
    data = parse_document(text)
    if data is None:
        raise ConfigError("the configuration is empty", where=str(path), expected="key: value")
    if not isinstance(data, dict):
        raise ConfigError("not a mapping", where="$", expected="key: value", actual=type(data).__name__)
    return data


@contextmanager
def _naming(source: str | Path | Mapping[str, Any]) -> Iterator[None]:
    """Adds the file to whatever goes wrong with it."""
    try:
        yield
    except ConfigError as error:
        if isinstance(source, Mapping):
            raise
        raise ConfigError(
            error.message,
            code=error.code,
            where=error.where,
            expected=error.expected,
            actual=error.actual,
            hint=error.hint,
            file=source,
        ) from None


def _load(
    source: str | Path | Mapping[str, Any], schema: type[Config], sets: tuple[str, ...], environ: Environment
) -> Config:
    data: Any = dict(source) if isinstance(source, Mapping) else read_document(source)
    _refuse_other_kind(data, schema)
    info = mi.type_info(schema)
    data = _shaped(data, info, "$", environ)
    for text in sets:
        _apply(data, text, info, environ)
    try:
        return msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        raise _explained(error, data, info) from None


def _refuse_other_kind(data: Mapping[str, Any], schema: type[WorkerConfig] | type[RouterConfig]) -> None:
    """A file of the other kind is said to be one; else its first key would merely be unknown."""
    if schema is WorkerConfig and any(isinstance(data.get(side), list) for side in ("prefill", "decode")):
        raise ConfigError(
            "this is the configuration of a router",
            where="$",
            expected="that of a worker, with role: prefill or decode",
            actual="lists of workers",
            hint="It is for `sglang-pd router --config`.",
        )
    if schema is RouterConfig and "role" in data:
        role = str(data["role"])[:32]
        raise ConfigError(
            "this is the configuration of a worker",
            where="$.role",
            expected="that of a router, with lists prefill and decode",
            actual=f"role: {role}",
            hint=f"It is for `sglang-pd {role} --config`." if role in ("prefill", "decode") else "",
        )


def _explained(error: msgspec.ValidationError, data: Any, info: mi.Type, root: str = "$") -> ConfigError:
    """The library's words taken apart: where, what was expected, what stands there, and the nearest that is known."""
    match = _AT.match(str(error))
    message, where = match.groups() if match else (str(error), "$")
    at: Any = data
    for key in re.findall(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[(\d+)\]", where):
        at, info = _step(at, info, key[0] or int(key[1]))
    if "missing required field" in message:
        key = message.split("`")[1]
        expected = " or ".join(_choices(_step(at, info, key)[1]))
        return ConfigError("a key is missing", where=f"{root}{where[1:]}.{key}", expected=expected, actual="nothing")
    expected, hint = "", ""
    if found := re.match(r"Expected (.*?)(, got .*)?$", message):
        message, expected = "not acceptable", found[1].replace("`", "")
    if "matching regex" in expected:
        expected = _form(info) or expected
    if known := _choices(info):
        message, expected = "no such value", " | ".join(known)
        close = difflib.get_close_matches(str(at), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else ""
    if isinstance(at, list) and expected == "str":
        hint = "An address in brackets needs quotes: '[::1]'."
    actual = "..." if where.endswith("bearer_token") else repr(at)[:200]
    where = root + where[1:]
    return ConfigError(message.replace("`", "'"), where=where, expected=expected, actual=actual, hint=hint)


def _choices(info: mi.Type) -> list[str]:
    """The words that may stand there, where they are numbered."""
    return [str(v) for m, _ in _members(info) if isinstance(m, mi.LiteralType) for v in m.values]


def _form(info: mi.Type) -> str:
    """What a text has to look like, in words: a pattern says it to machines."""
    while isinstance(info, mi.Metadata):
        if form := (info.extra or {}).get("form"):
            return str(form)
        info = info.type
    return next(filter(None, map(_form, info.types)), "") if isinstance(info, mi.UnionType) else ""


def _step(at: Any, info: mi.Type, key: str | int) -> tuple[Any, mi.Type]:
    """One step along a path, in the data and in the schema."""
    members = [m for m, _ in _members(info)]
    if isinstance(key, int):
        item = next((m.item_type for m in members if isinstance(m, (mi.VarTupleType, mi.ListType))), mi.AnyType())
        return (at[key] if isinstance(at, list) and key < len(at) else None), item
    struct = next((m for m in members if isinstance(m, mi.StructType)), None)
    fields = {field.encode_name: field.type for field in struct.fields} if struct is not None else {}
    return (at.get(key) if isinstance(at, Mapping) else None), fields.get(key, mi.AnyType())


# The walk along data and schema


def _bare(info: mi.Type) -> tuple[mi.Type, bool]:
    """The type without its metadata, and whether it is a number of bytes."""
    size = False
    while isinstance(info, mi.Metadata):
        size = size or (info.extra or {}).get("unit") == "bytes"
        info = info.type
    return info, size


def _members(info: mi.Type) -> list[tuple[mi.Type, bool]]:
    bare, size = _bare(info)
    if isinstance(bare, mi.UnionType):
        return [(inner, size or inner_size) for inner, inner_size in map(_bare, bare.types)]
    return [(bare, size)]


def _shaped(value: Any, info: mi.Type, where: str, environ: Environment) -> Any:
    """The value with unknown keys refused, `${env:NAME}` replaced and sizes read."""
    members = _members(info)
    if isinstance(value, str):
        text = _interpolated(writable(value, where), where, environ)
        if text != value:
            free = any(isinstance(m, mi.AnyType) for m, _ in members)
            return scalar(text) if free else _typed(text, info, where)
        return _size(value, where) if any(size for _, size in members) else value
    if isinstance(value, Mapping):
        return _shaped_mapping(value, members, where, environ)
    if isinstance(value, (list, tuple)):
        inner = next((m.item_type for m, _ in members if isinstance(m, (mi.VarTupleType, mi.ListType))), mi.AnyType())
        return [_shaped(item, inner, f"{where}[{i}]", environ) for i, item in enumerate(value)]
    return value


def _shaped_mapping(
    value: Mapping[Any, Any], members: list[tuple[mi.Type, bool]], where: str, environ: Environment
) -> dict[str, Any]:
    struct = next((m for m, _ in members if isinstance(m, mi.StructType)), None)
    result: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ConfigError("a key is text", where=where, actual=repr(key)[:64])
        writable(key, where)
        inner: mi.Type = mi.AnyType()
        if struct is not None:
            inner = _field(struct, key, where)
        result[key] = _shaped(item, inner, f"{where}.{key}", environ)
    return result


def _field(struct: mi.StructType, key: str, where: str) -> mi.Type:
    fields = {field.encode_name: field.type for field in struct.fields}
    if key in fields:
        return fields[key]
    close = difflib.get_close_matches(key, fields, n=1)
    raise ConfigError(
        "no such key",
        where=f"{where}.{key[:64]}",
        expected=" | ".join(fields),
        actual=key[:64],
        hint=f"Did you mean {close[0]!r}?" if close else "",
    )


def _interpolated(text: str, where: str, environ: Environment) -> str:
    if "${" not in text:
        return text

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in environ:
            raise ConfigError(
                "the environment variable is not set",
                where=where,
                expected=f"{name} in the environment",
                actual="unset",
            )
        return environ[name]

    if "${" in _ENV.sub("", text):
        raise ConfigError("no such interpolation", where=where, expected="${env:NAME}", actual=text[:80])
    return writable(_ENV.sub(value, text), where)


def _typed(text: str, info: mi.Type, where: str) -> Any:
    """Text from the environment or the command line as what stands there by the schema."""
    members = _members(info)
    kinds = [m for m, _ in members]
    if any(isinstance(m, mi.NoneType) for m in kinds) and text in ("null", "~"):
        return None
    if any(size for _, size in members):
        return _size(text, where)
    if any(isinstance(m, mi.StrType) for m in kinds):
        return text
    if any(isinstance(m, mi.LiteralType) and text in m.values for m in kinds):
        return text
    if all(isinstance(m, (mi.IntType, mi.FloatType, mi.BoolType, mi.NoneType, mi.LiteralType)) for m in kinds):
        return scalar(text)
    return parse_document(text, where=where)


def _size(text: str, where: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError("not a size", where=where, expected="bytes, or a number with KiB, MiB, GiB", actual=text[:64])
    number, unit = match.groups()
    unit = unit or "B"
    scale: int = UNITS[unit if unit.endswith("B") else f"{unit}iB"]
    return int(number) * scale if "." not in number else round(float(number) * scale)


def _apply(data: dict[str, Any], text: str, info: mi.Type, environ: Environment) -> None:
    """One `path=value`: the path's last key takes the value, typed by the schema; later ones win."""
    path, equals, value = text.partition("=")
    keys = path.strip().removeprefix("$.").split(".")
    if not equals or not keys or not all(_KEY.fullmatch(key) for key in keys):
        raise ConfigError("not an override", where="--set", expected="section.key=value", actual=wire_text(text[:80]))
    where, holder = "$", data
    for depth, key in enumerate(keys):
        struct = next((m for m, _ in _members(info) if isinstance(m, mi.StructType)), None)
        free = any(isinstance(m, (mi.DictType, mi.AnyType)) for m, _ in _members(info))
        if struct is None and not free:
            raise ConfigError("has no keys below it", where=where, actual=path[:80])
        info = mi.AnyType() if struct is None else _field(struct, key, where)
        where = f"{where}.{key}"
        if depth == len(keys) - 1:
            typed = _typed(_interpolated(writable(value, where), where, environ), info, where)
            holder[key] = _shaped(typed, info, where, {}) if isinstance(typed, (dict, list)) else typed
            return
        inner = holder.get(key)
        holder[key] = dict(inner) if isinstance(inner, Mapping) else {}
        holder = holder[key]
