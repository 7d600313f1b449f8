"""Commands by name, and the way out: one message on an error, one exit code, everything flushed.

Exit codes: 0 yes; 1 the answer is no (refused, unhealthy); 2 the question was wrong (arguments, configuration).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NamedTuple, NoReturn

import msgspec
import typer

from sglang_pd.config.package import package_version
from sglang_pd.launch.processes import follow_parent
from sglang_pd.protocol.errors import ConfigError, PdError
from sglang_pd.protocol.version import PROTOCOL_VERSION

EXIT_NO: Final = 1
EXIT_USAGE: Final = 2
USAGE_ERROR: Final[Any] = typer.BadParameter.__base__
"""Click's UsageError: typer brings click along or within itself, by version, and gives that class no name."""


class Command(NamedTuple):
    """A command: its name, and the module whose function `command` is it."""

    name: str
    module: str


COMMANDS: Final[list[Command]] = [
    Command("prefill", "sglang_pd.cli.prefill"),
    Command("decode", "sglang_pd.cli.decode"),
    Command("up", "sglang_pd.cli.up"),
    Command("demo", "sglang_pd.cli.demo"),
    Command("check", "sglang_pd.cli.check"),
    Command("explain", "sglang_pd.cli.explain"),
    Command("capabilities", "sglang_pd.cli.capabilities"),
    Command("doctor", "sglang_pd.cli.doctor"),
    Command("router", "sglang_pd.cli.router"),
    Command("keygen", "sglang_pd.cli.keygen"),
    Command("dump", "sglang_pd.cli.dump"),
]
"""Every command, in the order that the help shows. Modules must import without a transport or an engine."""


def build_app() -> typer.Typer:
    """The command line with all commands."""
    app = typer.Typer(
        name="sglang-pd",
        help="Exact prefill-to-decode state transfer. Every command takes --json, and --set path=value.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name, module in COMMANDS:
        loaded = importlib.import_module(module)
        app.command(name, cls=getattr(loaded, "CommandClass", None))(_answering(loaded.command))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"sglang-pd {package_version()}, protocol {'.'.join(map(str, PROTOCOL_VERSION))}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass  # what the options do, their callbacks do


def _answering(command: Callable[..., int]) -> Callable[..., None]:
    """The command with its result as the exit code."""

    @functools.wraps(command)
    def answer(*args: Any, **kwargs: Any) -> None:
        raise typer.Exit(command(*args, **kwargs))

    return answer


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Errors of ours are shown, not raised."""
    as_json = "--json" in arguments
    try:
        code = build_app()(args=list(arguments), prog_name="sglang-pd", standalone_mode=not as_json)
        return code if isinstance(code, int) else 0
    except PdError as error:
        _show(error, as_json=as_json)
        return EXIT_USAGE
    except USAGE_ERROR as error:
        _show(ConfigError(error.format_message(), where="the command line", hint="See --help."), as_json=True)
        return EXIT_USAGE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE * bool(stop.code)


def main() -> NoReturn:
    """Entry point. Ends without running finalisers: a process that has loaded UCX would die of them by SIGSEGV."""
    code = EXIT_USAGE
    follow_parent()
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 70
    finally:
        leave(code)
    raise SystemExit(code)


def leave(code: int) -> NoReturn:
    """Flush, then end the process at once with `code`. For processes that are ours from the start."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 1  # a reader that went away
    os._exit(code)


def _show(error: PdError, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode({"error": error.info()}).decode())
        return
    print(f"sglang-pd: {error}", file=sys.stderr)
