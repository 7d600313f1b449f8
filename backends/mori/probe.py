"""Whether the library works here, found in a child process: it can raise, end the process, abort it or hang.

Run as `python -m sglang_pd.backends.mori.probe`, with the options in JSON on standard input.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from sglang_pd.backends.base import Segment
from sglang_pd.backends.mori.library import EngineHost, installed_version, load_library
from sglang_pd.backends.mori.options import MoriOptions
from sglang_pd.protocol.errors import BackendUnavailable, PdError

MARK = "@mori-probe "
_EXITED = (
    "it does so for an address that is not of this machine, a port in use, and a machine without a ROCm GPU "
    "(it asks librocm_smi64)"
)


def probe(options: MoriOptions) -> None:
    """Try the library in a child, at most `probe_timeout_s`. Raises `BackendUnavailable` with the reason."""
    if not sys.executable:
        raise _unavailable("this process does not know its Python interpreter")
    request = json.dumps(dataclasses.asdict(options))
    command = [sys.executable, "-m", "sglang_pd.backends.mori.probe"]
    try:
        done = subprocess.run(
            command,
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=options.probe_timeout_s,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unavailable(
            f"the library does not start within {options.probe_timeout_s:g} s",
            hint="It is known to loop for ever over an RDMA device without a PCI address (soft-RoCE).",
        ) from None
    except OSError as error:
        raise _unavailable("the child process does not start", actual=str(error)) from error
    _judge(done.returncode, done.stdout, options)


def _judge(status: int, text: str, options: MoriOptions) -> None:
    answer = next((line[len(MARK) :] for line in text.splitlines() if line.startswith(MARK)), None)
    said = f"; it said: {text.strip()[-300:]}" if text.strip() else ""
    if answer is not None:
        error = json.loads(answer)["error"]
        if error:
            facts = {name: error[name] for name in ("where", "actual", "hint")}
            raise _unavailable(error["message"], **facts)
        return
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        raise _unavailable(f"the library ends its process with {name}{said}", actual=name)
    hint = _EXITED if status == 255 else ""
    raise _unavailable(
        f"the library ends its process with status {status}{said}",
        where=f"amd-mori on {options.host} port {options.port}",
        actual=f"exit({status})",
        hint=hint,
    )


def _unavailable(message: str, **facts: str) -> BackendUnavailable:
    facts.setdefault("where", "amd-mori, tried in a child process")
    return BackendUnavailable(message, **facts)


# The child


def _try(options: MoriOptions) -> None:
    library = load_library(installed_version(options))
    host = EngineHost(library, options, 0, options.port)
    view = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    packed = host.register(Segment(address=int(view.ctypes.data), nbytes=4096, device="cpu", keep_alive=view))
    library.api.MemoryDesc.unpack(packed)


def _main() -> None:
    error: dict[str, Any] | None = None
    try:
        _try(MoriOptions(**json.loads(sys.stdin.readline())))
    except PdError as failed:
        info = failed.info()
        error = {"message": info.message, "where": info.where, "actual": info.actual, "hint": info.hint}
    except Exception as failed:
        error = {"message": str(failed), "where": "amd-mori", "actual": type(failed).__name__, "hint": ""}
    print("\n" + MARK + json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    try:
        _main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The library's own end was seen to hang. This process holds nothing of anybody's.
        os._exit(0)
