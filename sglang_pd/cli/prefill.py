"""`sglang-pd prefill`: a prefill worker in this process."""

from __future__ import annotations

from sglang_pd.cli.output import ConfigOption, JsonOption, SetOption
from sglang_pd.cli.worker import run


def command(config: ConfigOption = "", sets: SetOption = [], as_json: JsonOption = False) -> int:  # noqa: B006
    """Run a prefill worker until SIGTERM, which drains it. Prints a line of JSON once it serves."""
    return run("prefill", config, sets)
