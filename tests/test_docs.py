"""Documents for operators and engine authors against the code: error codes, keys, commands, paths, examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deploy.files import parse_command_line

import sglang_pd
from sglang_pd.config.schema import RouterConfig, WorkerConfig
from sglang_pd.protocol.errors import CODES
from sglang_pd.worker.events import EventKind

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NAMES = ("operations.md", "embedding.md", "migration.md")
SECTIONS = "engine|topology|pools|backend|network|security|limits|liveness|observe"


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def runbook() -> dict[str, str]:
    """Code -> its entry."""
    _, _, entries = text_of("operations.md").partition("\n## Error codes\n")
    parts = re.split(r"^### `(\w+)`$", entries, flags=re.MULTILINE)[1:]
    assert len(set(parts[::2])) == len(parts[::2]), "a code has two entries"
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_error_code_has_its_entry_and_no_other() -> None:
    assert list(runbook()) == list(CODES), "the order of protocol/errors.py"


@pytest.mark.parametrize("code", CODES)
def test_an_entry_says_what_where_and_what_to_do(code: str) -> None:
    entry, facts = runbook()[code], CODES[code]
    kind = "retryable" if facts.retryable else "not retryable"
    assert f"{facts.http_status}, {kind}: {facts.summary}." in " ".join(entry.split()), "stale facts"
    for lead in ("**Look at**: ", "**Do**: "):
        (found,) = re.findall(rf"^{re.escape(lead)}(.+)$", entry, re.MULTILINE)
        assert len(found) > 10
    for other in re.findall(r"[Ss]ee `(\w+)`", entry):
        assert other in CODES


def keys_of(schema: type[msgspec.Struct], prefix: str = "") -> set[str]:
    """Every dotted key of a configuration."""
    found = set()
    for field in msgspec.structs.fields(schema):
        found.add(prefix + field.name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found |= keys_of(field.type, f"{prefix}{field.name}.")
        for inner in getattr(field.type, "__args__", ()):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                found |= keys_of(inner, f"{prefix}{field.name}.")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_keys_exist(name: str) -> None:
    known = keys_of(WorkerConfig) | keys_of(RouterConfig)
    named = set(re.findall(rf"`(?:\$\.)?((?:{SECTIONS})\.[a-z_]+(?:\.[a-z_]+)*)", text_of(name)))
    assert named - known == set(), f"keys that the schema does not have: {sorted(named - known)}"
    for key, value in re.findall(r"`(role|verify|policy|resolve): (\w+)`", text_of(name)):
        schema = WorkerConfig if key in ("role", "verify") else RouterConfig
        field = {f.name: f.type for f in msgspec.structs.fields(schema)}[key]
        msgspec.convert(value, field)


def command_lines(text: str) -> list[list[str]]:
    """Our command lines in fenced blocks and in code spans, as words after `sglang-pd`."""
    lines = re.findall(r"^sglang-pd (.+)$", text, re.MULTILINE) + re.findall(r"`sglang-pd ([^`]+)`", text)
    return [line.split() for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name: str) -> None:
    lines = command_lines(text_of(name))
    assert lines
    for command, *words in lines:
        if not words:
            words = {"check": ["P", "D"], "explain": ["P"], "keygen": ["NAME"], "dump": ["SOCKET"]}.get(command, [])
        parse_command_line([command, *("8998" if word == "PORT" else word for word in words)])


@pytest.mark.parametrize("name", NAMES)
def test_paths_and_names_exist(name: str) -> None:
    text = text_of(name)
    for path in re.findall(r"`((?:deploy|docs|protocol|sglang_pd|configs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{path} is not there"
    for path in re.findall(r"`(\w+\.md)`", text):
        assert (DOCS / path).is_file(), f"{path} is not there"
    for module, names in re.findall(r"^from (sglang_pd[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        loaded: Any = __import__(module, fromlist=["_"])
        assert all(hasattr(loaded, name.strip()) for name in names.split(","))


def test_the_event_contract_is_told_in_full() -> None:
    told = re.findall(r"^\| `([A-Z]+)` \|", text_of("embedding.md"), re.MULTILINE)
    assert told == [kind.name for kind in EventKind]
    for name in re.findall(
        r"`(\w*Endpoint|RankSetup|ControlConfig|Network|create_backend|new_epoch)\b", text_of("embedding.md")
    ):
        assert hasattr(sglang_pd, name)


def test_the_example_runs(tmp_path: Path) -> None:
    (source,) = re.findall(
        r"<!-- example: embedding -->\n```python\n(.*?)```\n<!-- /example -->", text_of("embedding.md"), re.DOTALL
    )
    script = tmp_path / "example.py"
    script.write_text(source)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=55)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "the first token, and other small facts True\n"


def test_every_key_of_the_network_has_its_row() -> None:
    rows = re.findall(r"^\| `network\.(\w+)` \|", text_of("operations.md"), re.MULTILINE)
    fields = {key.removeprefix("network.") for key in keys_of(WorkerConfig) if key.startswith("network.")}
    assert set(rows) == fields - {"bootstrap_port", "http_port"}


def test_what_becomes_of_network_keys_is_true() -> None:
    from sglang_pd.config.network import FABRIC_KEYS, HONOURS

    table = [line for line in text_of("operations.md").splitlines() if line.startswith("| `network.")]
    for line in table:
        key, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        key = key.strip("`").removeprefix("network.")
        if key not in FABRIC_KEYS:
            continue
        for backend, cell in zip(("nixl", "mooncake", "mori", "local"), cells, strict=True):
            honours = HONOURS[backend]
            takes = key in honours.options or key in honours.environment
            assert cell.startswith("refused") is not takes, f"{backend}, {key}"
            assert all(f"`{name}`" in cell for name in honours.environment.get(key, ()))
