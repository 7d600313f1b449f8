"""`sglang-pd router`: one request to a prefill and a decode worker, decode's answer to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from sglang_pd.cli.output import JsonOption, SetOption
from sglang_pd.cli.worker import require
from sglang_pd.config import Address, RouterConfig, load_router
from sglang_pd.config.address import parse_port
from sglang_pd.config.load import read_document
from sglang_pd.launch.processes import follow_parent
from sglang_pd.observe import configure_logging
from sglang_pd.protocol.errors import ConfigError

Prefill = Annotated[
    list[str],
    typer.Option("--prefill", metavar="URL [PORT]", help="A prefill worker and its control port (8998). Repeatable."),
]
Decode = Annotated[list[str], typer.Option("--decode", metavar="URL", help="A decode worker. Repeatable.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A YAML file of a router.")]


class CommandClass(TyperCommand):
    """Reads `--prefill URL 8998`: an option with one value or two."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join what belongs together, then parse as ever."""
        return super().parse_args(ctx, join_ports(args))


def command(
    config: ConfigFile = None,
    prefill: Prefill = [],  # noqa: B006
    decode: Decode = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> int:
    """Run a router, from a file or with workers named here: --prefill URL 8998 --decode URL."""
    settings = load_router(merged(config, prefill, decode), sets=sets)
    configure_logging(settings.log_level)
    require("uvicorn", "starlette", "httpx", "prometheus_client")
    from sglang_pd.router.serve import serve  # only now: it needs the packages above

    follow_parent()
    asyncio.run(serve(settings, lambda address: announce(settings, address, as_json=as_json)))
    return 0


def join_ports(args: Sequence[str]) -> list[str]:
    """`--prefill URL 8998` as one value, `URL 8998`; `none` for the port is the default port."""
    joined: list[str] = []
    for word in args:
        takes_port = len(joined) > 1 and joined[-2] == "--prefill" and " " not in joined[-1]
        takes_port = takes_port or bool(joined) and joined[-1].startswith("--prefill=") and " " not in joined[-1]
        if takes_port and not word.startswith("-"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def merged(config: Path | None, prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Any]:
    """The file with the workers of the command line, which replace a whole list of it."""
    if config is None and not (prefill and decode):
        raise ConfigError(
            "a router needs workers",
            where="sglang-pd router",
            expected="--config FILE, or --prefill URL [PORT] and --decode URL",
            actual="only --prefill" if prefill else "only --decode" if decode else "neither",
        )
    document = read_document(config) if config is not None else {}
    if prefill:
        document["prefill"] = [_prefill(text) for text in prefill]
    if decode:
        document["decode"] = [{"url": url} for url in decode]
    return document


def _prefill(text: str) -> dict[str, Any]:
    url, _, port = text.partition(" ")
    if not port or port.lower() == "none":
        return {"url": url}
    return {"url": url, "bootstrap_port": parse_port(port, where="--prefill")}


def announce(config: RouterConfig, address: Address, *, as_json: bool) -> None:
    """One line for whoever started it."""
    prefills = [f"{worker.url} {worker.bootstrap_port}" for worker in config.prefill_workers]
    decodes = [worker.url for worker in config.decode_workers]
    if as_json:
        line = {"url": address.url(), "port": address.port, "prefill": prefills, "decode": decodes}
        print(msgspec.json.encode(line).decode(), flush=True)
    else:
        text = f"sglang-pd router on {address.url()}, prefill {', '.join(prefills)}, decode {', '.join(decodes)}"
        print(text, flush=True)
