"""`sglang-pd up`: a whole 1P1D in one terminal, its logs prefixed, its rooms in a table, until Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_pd.launch.plan import ROLES, Deployment
from sglang_pd.launch.stack import Stack, running
from sglang_pd.observe import ask
from sglang_pd.observe.decisions import Dump
from sglang_pd.protocol.errors import ConfigError

LOOK_S: Final = 0.5
COLOURS: Final = {"prefill": "cyan", "decode": "magenta", "router": "green"}
MAX_ROWS: Final = 12


def up(deployment: Deployment, *, as_json: bool = False) -> int:
    """Run until Ctrl-C or SIGTERM, or until a process ends. The exit code: 1 when one ended by itself.

    as_json: once everything serves, one JSON line on standard output; what people read goes to standard error.
    """
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    lock = threading.Lock()

    def say(name: str, line: str) -> None:
        with lock:
            console.print(Text.assemble((f"{name:>7} | ", COLOURS.get(name, "")), line))

    with stopping() as stop:
        with running(deployment, say) as stack:
            say("up", f"router {stack.url}, " + ", ".join(f"{r} {stack.workers[r]['url']}" for r in ROLES))
            if as_json:
                ready = {"event": "ready", "url": stack.url, "workers": stack.workers}
                print(msgspec.json.encode(ready).decode(), flush=True)
            for line in try_next(stack.url):
                say("up", line)
            ended = _watch(stack, console, stop)
            say("up", "stopping: open rooms may end, then everything does" if not ended else ended)
    say("up", "down")
    return 1 if ended else 0


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set. A second signal ends the wait for a clean stop."""
    event = threading.Event()

    def handler(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _watch(stack: Stack, console: Console, stop: threading.Event) -> str:
    """Until told to stop, or until a process ended: then why."""
    live = Live(Text(""), console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while not stop.wait(LOOK_S):
            try:
                stack.group.check()
            except ConfigError as error:
                return str(error)
            if live is not None:
                live.update(rooms_table(stack.sockets), refresh=True)
    return ""


def rooms_table(sockets: Mapping[str, str]) -> RenderableType:
    """Open rooms of both workers, and the last that ended."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "room", "state", "tokens", "MiB", "age s", "peer or cause"):
        table.add_column(column, justify="right" if column in ("tokens", "MiB", "age s") else "left")
    heads = []
    for role, path in sockets.items():
        dump = look(path)
        if dump is None:
            heads.append(f"{role}: no answer")
            continue
        heads.append(f"{role}: {dump.condition} {dump.reason}".strip())
        for room in dump.rooms[:MAX_ROWS]:
            row = (room.stage, room.prompt_tokens, room.moved_bytes, room.age_s, room.peer)
            table.add_row(role, *_cells(room.room, row))
        for ended in dump.ended[-3:]:
            cause = ended.get("cause") or {}
            row = (ended["result"], ended["prompt_tokens"], sum(ended["bytes"].values()), ended["total_s"],
                   cause.get("code") or ended["peer"])  # fmt: skip
            table.add_row(role, *_cells(ended["room"], row), style="dim")
    return Group(Text("   ".join(heads), style="bold"), table)


def _cells(room: int, row: tuple[str, int, int, float, str]) -> list[str]:
    state, tokens, nbytes, age_s, about = row
    return [str(room), state, f"{tokens:,}", f"{nbytes / 2**20:.2f}", f"{age_s:.2f}", about[:40]]


def look(path: str) -> Dump | None:
    """A worker's dump, or None where it does not answer."""
    try:
        return msgspec.json.decode(ask(path, "dump"), type=Dump)
    except (ConfigError, msgspec.MsgspecError):
        return None


def try_next(url: str) -> list[str]:
    """Commands that work now."""
    body = '{"text": "Hello", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}'
    chat = '{"model": "m", "prompt": "Hello", "max_tokens": 16, "stream": true}'
    kind = "-H 'content-type: application/json'"
    return [
        f"try: curl -s {url}/generate {kind} -d '{body}'",
        f"     curl -sN {url}/v1/completions {kind} -d '{chat}'",
    ]
