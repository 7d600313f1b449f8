"""`sglang-pd dump`: what a running worker is doing, through its admin socket."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from sglang_pd.cli.output import JsonOption, SetOption, emit
from sglang_pd.config import load_worker
from sglang_pd.observe import ask
from sglang_pd.observe.decisions import Dump
from sglang_pd.protocol.errors import ConfigError

SourceArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="The worker's configuration, or its socket.")]


def command(source: SourceArgument, sets: SetOption = [], as_json: JsonOption = False) -> int:  # noqa: B006
    """Rooms, peers and the last decisions of every rank of a running worker (needs observe.admin_socket)."""
    path = source
    if source.endswith((".yaml", ".yml")):
        path = load_worker(source, sets=sets).observe.admin_socket
        if not path:
            raise ConfigError(
                "the worker has no admin socket", where="$.observe.admin_socket", expected="a path", file=source
            )
    raw = ask(path, "dump")
    if as_json:
        sys.stdout.write(raw.decode() + "\n")
        return 0
    try:
        dump = msgspec.json.decode(raw, type=Dump)
    except msgspec.ValidationError as error:
        raise ConfigError("not the answer of a worker", where=path, actual=str(error)) from None
    emit(dump.text())
    return 0
