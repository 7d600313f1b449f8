"""What a command says: JSON for programs, tables for people; and the options that all commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from sglang_pd.protocol.errors import ConfigError

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="PATH=VALUE", help="Override one key, as in network.http_port=0. Repeatable."),
]

ConfigOption = Annotated[str, typer.Option("--config", metavar="FILE", help="The worker's YAML file.")]

FileArgument = Annotated[str, typer.Argument(metavar="[FILE]", help="The same as --config FILE.")]

MIN_WIDTH = 100


def one_file(option: str, argument: str) -> str:
    """The file of `--config FILE` or of FILE alone; empty for neither. Raises `ConfigError` where both are given."""
    if option and argument:
        raise ConfigError(
            "two configurations",
            where="the command line",
            expected="--config FILE, or FILE",
            actual=f"{option}, {argument}",
        )
    return option or argument


def emit_json(payload: Any) -> None:
    """Print one JSON document."""
    print(msgspec.json.format(msgspec.json.encode(payload), indent=2).decode())


def emit(*parts: Table | str) -> None:
    """Print tables and lines. Where the output is no terminal, tables are as wide as their content."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty(), markup=False)
    if not sys.stdout.isatty():
        console = Console(file=sys.stdout, highlight=False, markup=False, width=max(MIN_WIDTH, 240))
    for part in parts:
        console.print(part)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[str] = ()) -> Table:
    """A table; the columns named in `right` are numbers. Cells are text, never markup."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    numbers = set(right)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def split_sets(sets: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Overrides of a command with two configurations: `prefill.PATH=VALUE` and `decode.PATH=VALUE` are for one side,
    others for both."""
    found: dict[str, list[str]] = {"prefill": [], "decode": []}
    for text in sets:
        side, dot, rest = text.removeprefix("$.").partition(".")
        if dot and side in found:
            found[side].append(rest)
        else:
            for entries in found.values():
                entries.append(text)
    return {side: tuple(entries) for side, entries in found.items()}
