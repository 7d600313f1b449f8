"""`sglang-pd capabilities`: the support matrix, on the terminal or into a document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_pd.backends.registry import check_known
from sglang_pd.cli.output import JsonOption, SetOption, emit, emit_json, table
from sglang_pd.cli.support import KIND_COLUMNS, kind_rows, markdown
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.protocol.kinds import KINDS
from sglang_pd.worker.serving.transports import support

WriteOption = Annotated[str, typer.Option("--write", metavar="FILE", help="Write the matrix as Markdown to FILE.")]
COLUMNS = ("backend", "transport", "host", "device", "one host", "adopts", "proof", "last run on")


def command(write: WriteOption = "", sets: SetOption = [], as_json: JsonOption = False) -> int:  # noqa: B006
    """What works with what: backends, their transports, kinds of state. --set backend.name=NAME shows one backend."""
    chosen = _only(sets)
    entries = [s for s in support() if not chosen or s.backend == chosen]
    if write:
        Path(write).write_text(markdown(), encoding="utf-8")
    if as_json:
        kinds = [{"kind": k, "summary": KINDS[k].summary} for k in KINDS]
        emit_json({"transports": entries, "kinds": kinds, "written": write or None})
        return 0
    rows = [
        [s.backend, s.transport, s.host_memory, s.device_memory, s.same_host_only, s.adopts, s.proof, s.last_run]
        for s in entries
    ]
    emit(
        table("transports", COLUMNS, rows),
        "",
        table("kinds of state", KIND_COLUMNS, kind_rows()),
    )
    if write:
        emit(f"written: {write}")
    return 0


def _only(sets: list[str]) -> str:
    chosen = ""
    for text in sets:
        path, _, value = text.partition("=")
        if path.removeprefix("$.") != "backend.name":
            raise ConfigError(
                "not an override of this command", where="--set", expected="backend.name=NAME", actual=text[:80]
            )
        check_known(value)
        chosen = value
    return chosen
