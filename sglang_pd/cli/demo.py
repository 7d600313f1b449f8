"""`sglang-pd demo`: hybrid models through prefill, decode and router processes, compared with the model run whole."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections import deque
from typing import Annotated, Any

import typer

from sglang_pd.backends.registry import check_known
from sglang_pd.cli.app import EXIT_NO
from sglang_pd.cli.output import JsonOption, SetOption, emit, emit_json, table
from sglang_pd.protocol.errors import BackendUnavailable, ConfigError, PdError

PACKAGES = {
    "torch": "torch",
    "transformers": "sglang-pd[transformers]",
    "uvicorn": "sglang-pd[server]",
    "starlette": "sglang-pd[server]",
    "httpx": "sglang-pd[server]",
    "nixl": "sglang-pd[nixl]",
    "mooncake": "sglang-pd[mooncake-cpu]",
}
BackendOption = Annotated[str, typer.Option("--backend", help="What moves the state: nixl, local or mooncake.")]
ModelOption = Annotated[list[str], typer.Option("--model", help="One model only. Repeatable.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Show what the processes say.")]


def command(
    backend: BackendOption = "nixl",
    models: ModelOption = [],  # noqa: B006
    verbose: VerboseOption = False,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> int:
    """Start prefill, decode and router, send 8 prompts, compare every token and log-probability with the model run
    whole. Exit code 1 on any difference."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ours is the process; children and this one must sum alike
    _require(backend, models)
    from sglang_pd.launch import demo  # only now: it needs the packages above

    chosen = models or list(demo.MODELS)
    for model in chosen:
        if model not in demo.MODELS:
            raise ConfigError("no such model", where="--model", expected=" | ".join(demo.MODELS), actual=model)
    began_s = time.monotonic()
    last: deque[str] = deque(maxlen=30)

    def say(name: str, line: str) -> None:
        last.append(f"{name:>7} | {line}")
        if verbose:
            print(last[-1], file=sys.stderr, flush=True)

    try:
        plan = demo.Plan(chosen, _backend(backend), tuple(sets))
        outcomes = demo.run_all(plan, say, lambda text: print(text, file=sys.stderr, flush=True))
    except PdError:
        if not verbose:
            print("\n".join(last), file=sys.stderr)
        raise
    good = all(outcome.good for outcome in outcomes)
    seconds = time.monotonic() - began_s
    if as_json:
        emit_json({"equal": good, "seconds": seconds, "models": outcomes})
    else:
        _print(outcomes, good, seconds)
    return 0 if good else EXIT_NO


def _backend(name: str) -> dict[str, Any]:
    if name == "mooncake":  # its library listens on every interface; on this machine, for a minute, that is accepted
        return {"name": name, "options": {"transport": "tcp"}}
    return {"name": name}


def _require(backend: str, models: list[str]) -> None:
    """Name everything that is missing at once. Raises `ConfigError` for what is no backend."""
    check_known(backend)
    wanted = ["torch", "uvicorn", "starlette", "httpx", *([] if models == ["reference"] else ["transformers"])]
    wanted += [backend] if backend in PACKAGES else []
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        install = " ".join(sorted({f"'{PACKAGES[name]}'" for name in missing}))
        raise BackendUnavailable(
            "the demo needs packages that are not here",
            where=" ".join(missing),
            hint=f"pip install {install}, or `make demo`, which installs everything"
            + (f". Without {backend}: --backend local" if backend in missing else ""),
        )


def _print(outcomes: list[Any], good: bool, seconds: float) -> None:
    for outcome in outcomes:
        title = f"{outcome.model}, {outcome.backend} over {outcome.transport or '?'}, {outcome.seconds:.1f} s"
        columns = ("prompt tokens", "how", "tokens equal", "logprobs equal", "total s", "waited s", "")
        rows = [
            [
                a.tokens, a.how, f"{a.equal_tokens}/{a.wanted}", f"{a.equal_logprobs}/{a.wanted}", f"{a.seconds:.3f}",
                f"{a.stages_s.get('hand_over', 0.0):.3f}", "equal" if a.good else f"DIFFERENT {a.error}",
            ]
            for a in outcome.answers
        ]  # fmt: skip
        emit("", table(title, columns, rows, right=columns[:1] + columns[2:6]))
        emit("waited: decode, from opening the room to its admission. Prefill's computing is in it, and its queue: all")
        emit("requests come at once. What the hand-over itself takes stands under wire, verify and admit below.")
        moved = outcome.bytes_by_component
        rows = [[name, nbytes] for name, nbytes in moved.items()] + [["all", sum(moved.values())]]
        emit("", table("state that moved", ("component", "bytes"), rows, right=("bytes",)))
        rows = [
            [role, *(f"{stage} {1000 * value:.1f}" for stage, value in times.items())]
            for role, times in outcome.stages_s.items()
        ]
        widest = max((len(row) for row in rows), default=1)
        sides = ["side", *("" for _ in range(widest - 1))]
        emit(
            "",
            table("mean milliseconds of a room in each stage", sides, [r + [""] * (widest - len(r)) for r in rows]),
        )
    verdict = "every token and log-probability is equal" if good else "DIFFERENT: see the lines above"
    emit("", f"{verdict}; {seconds:.1f} s in all", "")
    name = program(sys.argv[0])
    emit("try next:")
    emit(f"  {name} up                    # the same three processes, until Ctrl-C")
    emit(f"  {name} up CHECKPOINT_FOLDER  # your model")
    emit(f"  {name} check configs/nixl-prefill.yaml configs/nixl-decode.yaml")
    emit(f"  {name} explain configs/nixl-prefill.yaml configs/nixl-decode.yaml")


def program(called: str) -> str:
    """How to call us again: what is printed must work when pasted, also where no environment is activated."""
    return called if called.endswith("/sglang-pd") and shutil.which("sglang-pd") is None else "sglang-pd"
