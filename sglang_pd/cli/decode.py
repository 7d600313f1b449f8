"""`sglang-pd decode`: a decode worker in this process."""

from __future__ import annotations

from sglang_pd.cli.output import ConfigOption, JsonOption, SetOption
from sglang_pd.cli.worker import run


def command(config: ConfigOption = "", sets: SetOption = [], as_json: JsonOption = False) -> int:  # noqa: B006
    """Run a decode worker until SIGTERM, which drains it. Prints a line of JSON once it serves."""
    return run("decode", config, sets)
