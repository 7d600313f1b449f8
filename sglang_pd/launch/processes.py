"""Processes of ours as a group: started by name, their output prefixed, ended in order, none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from sglang_pd.protocol.errors import ConfigError, ErrorInfo, PdError, RoomError, from_info

PARENT: Final = "SGLANG_PD_PARENT"
"""In a child's environment: the pid of the process that it must not outlive."""
MAX_LINE: Final = 16_384
KEPT_LINES: Final = 40
PR_SET_PDEATHSIG: Final = 1

Say = Callable[[str, str], None]
"""(name of the process, line): called on a thread of that process."""


def follow_parent(environ: Mapping[str, str] = os.environ) -> None:
    """In a child: be told to end when the process that started it dies, however it dies."""
    parent = environ.get(PARENT, "")
    if not parent.isdigit() or int(parent) != os.getppid():
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)


class Process:
    """One `sglang-pd` command as a child. Its output goes to `say` line by line; JSON lines on standard output with a
    `url` are its announcement, those with an `error` its last words under `--json`: both are kept instead."""

    def __init__(self, name: str, arguments: Sequence[str], say: Say, environ: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.announced: dict[str, Any] = {}
        self.error: ErrorInfo | None = None
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self._say = say
        environment = {**(os.environ if environ is None else environ), PARENT: str(os.getpid())}
        command = [sys.executable, "-m", "sglang_pd.cli", *arguments]
        # A session of its own: Ctrl-C reaches us alone, and we decide the order.
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, pipe is self._popen.stdout), daemon=True)
            for pipe in (self._popen.stdout, self._popen.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: Any, is_output: bool) -> None:
        while raw := pipe.readline(MAX_LINE):
            line = raw.decode("utf-8", "replace").rstrip()
            if is_output and line.startswith("{") and self._keep(line):
                continue
            self.last.append(line)
            self._say(self.name, line)

    def _keep(self, line: str) -> bool:
        with contextlib.suppress(msgspec.MsgspecError):
            told = msgspec.json.decode(line)
            if "url" in told and not self.announced:
                self.announced = told
                return True
            if "error" in told:
                self.error = msgspec.convert(told["error"], ErrorInfo)
                return True
        return False

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._popen.poll()

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """True when it has ended within `timeout_s`, its output read."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        for reader in self._readers:
            reader.join(1.0)
        return True

    def died(self) -> PdError:
        """What to raise when it ended although it should not."""
        self.wait(1.0)
        if self.error is not None:
            error = self.error
            return ConfigError(
                error.message,
                code=error.code,
                where=f"{self.name}: {error.where}" if error.where else self.name,
                expected=error.expected,
                actual=error.actual,
                hint=error.hint,
                **error.details,
            )
        code = self.exit_code
        if code is not None and code < 0:
            named = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return from_info(
                ErrorInfo(
                    code="worker_failed", message="the process was killed", where=self.name,
                    expected="a running process", actual=named,
                    hint="Was this machine out of memory (dmesg)?" if -code == signal.SIGKILL else "",
                )
            )  # fmt: skip
        said = [line for line in self.last if line.startswith("sglang-pd: ")]
        return ConfigError(
            said[-1].removeprefix("sglang-pd: ") if said else "the process ended",
            where=self.name,
            expected="a running process",
            actual=f"exit code {self.exit_code}" + ("" if said or not self.last else f", last line: {self.last[-1]}"),
        )

    def close(self) -> None:
        """Its pipes."""
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()


class Group:
    """Processes by name, in the order of their start. Leaving the block ends them, last started first."""

    def __init__(self, say: Say, *, stop_s: float = 15.0) -> None:
        self.processes: dict[str, Process] = {}
        self._say = say
        self._stop_s = stop_s

    def start(self, name: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Process:
        """Start one more."""
        process = self.processes[name] = Process(name, arguments, self._say, environ)
        return process

    def check(self) -> None:
        """Raise `ConfigError` with the last words of a process that has ended."""
        for process in self.processes.values():
            if process.exit_code is not None:
                raise process.died()

    def wait_ready(self, timeout_s: float) -> None:
        """Until every process has announced itself. Raises as `check`; `RoomError` (`room_expired`) when it takes too
        long."""
        end_s = time.monotonic() + timeout_s
        while waiting := [name for name, process in self.processes.items() if not process.announced]:
            self.check()
            if time.monotonic() > end_s:
                raise RoomError(
                    "processes did not come up",
                    code="room_expired",
                    where=" ".join(waiting),
                    expected=f"within {timeout_s:g} s",
                )
            time.sleep(0.05)

    def stop(self) -> dict[str, int]:
        """End all: each is told, and has `stop_s` seconds; then it is killed. Exit codes by name."""
        for process in reversed(self.processes.values()):
            process.tell(signal.SIGTERM)
            if not process.wait(self._stop_s):
                self._say(process.name, f"did not end within {self._stop_s:g} s; killed")
                process.tell(signal.SIGKILL)
                process.wait(5.0)
            process.close()
        return {name: process.exit_code or 0 for name, process in self.processes.items()}

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
