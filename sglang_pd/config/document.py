"""YAML to plain data, strictly: YAML 1.2's scalars (`off` is a word), no key twice, no anchors, no tags.

PyYAML reads YAML 1.1, where `verify: off` is a boolean, `1:30` is ninety and `010` is eight. Anchors would be a second
way to interpolate, and a way to make a small file huge.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from sglang_pd.protocol.errors import ConfigError

MAX_DOCUMENT_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def parse_document(text: str, *, where: str = "$") -> Any:
    """Plain data of one YAML document: dicts with text keys, lists, text, numbers, true, false, null.

    Raises `ConfigError` with line and column for what is not YAML, is repeated, too deep, too long, or tagged.
    """
    if len(text.encode("utf-8", "replace")) > MAX_DOCUMENT_BYTES:
        raise ConfigError("too long", where=where, expected=f"at most {MAX_DOCUMENT_BYTES} bytes", actual=len(text))
    try:
        _refuse_extras(text, where)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"not YAML: {getattr(error, 'problem', None) or error}",
            where=_place(where, mark),
            hint="An address with brackets or colons may need quotes: '[::1]:8998'.",
        ) from None
    except RecursionError:
        raise ConfigError("nested too deeply", where=where, expected=f"{MAX_DEPTH} levels") from None
    return None if node is None else _value(node, where, 0)


def scalar(text: str) -> Any:
    """A plain scalar by YAML 1.2's core schema."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").replace(".n", "n"))
    return text


def writable(text: str, where: str) -> str:
    """The text. Raises `ConfigError` for half a surrogate pair: UTF-8 has no form for it, so that nothing which is told
    of it (a manifest, a log, the error itself) could be written."""
    if not text.isascii() and _SURROGATE.search(text):
        raise ConfigError(
            "a character that UTF-8 cannot write",
            where=where,
            expected="no half of a surrogate pair, and bytes that are UTF-8",
            actual=ascii(text[:40]),
        )
    return text


def _refuse_extras(text: str, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ConfigError(
                "anchors and aliases are not taken",
                where=_place(where, event.start_mark),
                hint="Write the value out; ${env:NAME} is the only interpolation.",
            )
        if tag := getattr(event, "tag", None):
            raise ConfigError("tags are not taken", where=_place(where, event.start_mark), actual=str(tag)[:64])
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(
                "nested too deeply", where=_place(where, event.start_mark), expected=f"{MAX_DEPTH} levels"
            )


def _value(node: yaml.Node, where: str, depth: int) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, where, depth)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(node.value)]
    quoted = getattr(node, "style", None) is not None
    text = writable(str(node.value), _place(where, node.start_mark))
    return text if quoted else scalar(text)


def _mapping(node: yaml.MappingNode, where: str, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError("a key is text", where=_place(where, key_node.start_mark))
        key = writable(str(key_node.value), _place(where, key_node.start_mark))
        if key in found:
            raise ConfigError("the key stands twice", where=_place(f"{where}.{key[:64]}", key_node.start_mark))
        found[key] = _value(value_node, f"{where}.{key[:64]}", depth + 1)
    return found


def _place(where: str, mark: Any) -> str:
    return where if mark is None else f"{where} (line {mark.line + 1}, column {mark.column + 1})"
