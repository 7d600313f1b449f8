"""`sglang-pd prefill`: a prefill worker in this process."""

from __future__ import annotations

from sglang_pd.cli.output import ConfigOption, FileArgument, JsonOption, SetOption, one_file
from sglang_pd.cli.worker import run


def command(
    file: FileArgument = "",
    config: ConfigOption = "",
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> int:
    """Run a prefill worker until SIGTERM, which drains it. Prints a line of JSON once it serves."""
    return run("prefill", one_file(config, file), sets)
