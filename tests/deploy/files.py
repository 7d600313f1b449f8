"""What tests of `deploy/` share: its files as data, and the command line's own idea of its options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
import yaml

from sglang_pd.cli.app import build_app
from sglang_pd.cli.router import join_ports

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def document(path: Path) -> Any:
    """The one document of a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def documents(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file."""
    return [found for found in yaml.safe_load_all(path.read_text(encoding="utf-8")) if found]


def of_kind(path: Path, kind: str) -> dict[str, Any]:
    """The one document of that kind in a file."""
    (found,) = [d for d in documents(path) if d["kind"] == kind]
    return found


def pod(path: Path) -> dict[str, Any]:
    """The pod's specification of the one Deployment in a file."""
    spec: dict[str, Any] = of_kind(path, "Deployment")["spec"]["template"]["spec"]
    return spec


def walk(value: Any) -> Iterator[Any]:
    """Every mapping below a value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from walk(item)


def parse_command_line(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and its parameters, as the real command line reads them, without running it. Raises click's error
    for a command or an option that does not exist."""
    group: Any = typer.main.get_command(build_app())
    command = group.commands[words[0]]
    with command.make_context(words[0], join_ports(words[1:])) as context:
        return words[0], dict(context.params)
