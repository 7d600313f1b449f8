"""Options of the local backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_pd.protocol.errors import ConfigError


class LocalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the backend. copy_threads: threads that copy between host memories, 1 to 64."""

    copy_threads: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.copy_threads <= 64:
            raise ValueError(f"copy_threads must be 1 to 64, not {self.copy_threads}")


def parse_options(options: Mapping[str, Any]) -> LocalOptions:
    """The options. Raises `ConfigError` for one that it does not know, or a value that is not acceptable."""
    try:
        return msgspec.convert(dict(options), LocalOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            str(error),
            where="$.backend.options",
            expected=f"options {', '.join(LocalOptions.__struct_fields__)}",
            actual=repr(dict(options))[:200],
        ) from error
