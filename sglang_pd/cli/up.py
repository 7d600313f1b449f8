"""`sglang-pd up`: a prefill, a decode and a router in one terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_pd.cli.output import JsonOption, SetOption
from sglang_pd.cli.worker import NEEDED, require
from sglang_pd.launch.plan import load_deployment

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="[FILE]",
        help="A checkpoint folder, or a YAML file: a worker's keys, for both; under prefill:, decode: and router: those"
        " of one. Without: the reference engine.",
    ),
]


def command(source: SourceArgument = "", sets: SetOption = [], as_json: JsonOption = False) -> int:  # noqa: B006
    """Run a prefill, a decode and a router until Ctrl-C. --set prefill.PATH=, decode.PATH= or router.PATH= for one."""
    deployment = load_deployment(source, sets)
    require(*NEEDED, "httpx", "rich")
    from sglang_pd.launch.up import up  # only now: it needs the packages above

    return up(deployment, as_json=as_json)
