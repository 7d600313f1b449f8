"""Processes of one host in namespaces of their own: who they are, and what they leave, is the same for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_pd.backends.library import boot, lives, process
from sglang_pd.backends.library.process import ProcessIdentity, own_identity, process_gone

LATER_S = 5_000


def shown(monkeypatch: pytest.MonkeyPatch, offsets: str, children: int = 7) -> None:
    """What this process reads of its time namespace."""
    inodes = {"time": 7, "time_for_children": children}
    monkeypatch.setattr(boot, "os", SimpleNamespace(stat=lambda path: SimpleNamespace(st_ino=inodes[Path(path).name])))
    monkeypatch.setattr(boot, "Path", lambda path: SimpleNamespace(read_text=lambda: offsets))


@pytest.mark.parametrize(
    ("offsets", "children", "shift"),
    [
        ("monotonic 0 0\nboottime 0 0\n", 7, 0),
        ("monotonic 3 0\nboottime -5 10000000\n", 7, -4_990_000_000),
        ("monotonic 0 0\nboottime 5 10000001\n", 7, None),
        ("monotonic 0 0\nboottime 5 0\n", 8, None),
        ("monotonic 0 0\n", 7, None),
        ("boottime five 0\n", 7, None),
    ],
)
def test_the_shift_is_read_or_not_known(
    monkeypatch: pytest.MonkeyPatch, offsets: str, children: int, shift: int | None
) -> None:
    shown(monkeypatch, offsets, children)
    assert boot.shift_ns() == shift and (boot.since_boot_s() is None) == (shift is None)


def test_a_kernel_without_time_namespaces_shifts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(boot, "os", SimpleNamespace(stat=missing))
    assert boot.shift_ns() == 0


def test_where_the_time_is_not_known_nobody_is_dead_and_no_hold_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = msgspec.structs.replace(own_identity(), start_ticks=own_identity().start_ticks + 1)
    assert process_gone(other), "another process has the number"
    life = tmp_path / "one.life"
    life.write_bytes(b'{"ports": [20001], "ended": ["%s", -1e9]}\n' % own_identity().boot_id.encode())
    monkeypatch.setattr(process, "shift_ns", lambda: None)
    monkeypatch.setattr(lives, "since_boot_s", lambda: None)
    assert not process_gone(other)
    assert lives._look(life) is not None and life.exists()
    process._forget_own()
    try:
        assert not own_identity().known
    finally:
        process._forget_own()


def apart(how: list[str], code: str) -> str:
    """What `code` prints in namespaces of its own."""
    try:
        done = subprocess.run(
            ["unshare", *how, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        pytest.skip("this system has no unshare")
    if done.returncode and not done.stdout:
        pytest.skip(f"no such namespace can be made here: {done.stderr[-200:]}")
    return done.stdout


def test_a_process_is_the_same_one_seen_from_another_time() -> None:
    asked = apart(
        ["-T", "--boottime", str(LATER_S)],
        "import msgspec, sys, time\n"
        "from sglang_pd.backends.library.boot import since_boot_s\n"
        "from sglang_pd.backends.library.process import *\n"
        "from sglang_pd.backends.library.process import _start_ticks\n"
        f"print(_start_ticks({os.getpid()}))\n"
        "print(msgspec.json.encode(own_identity()).decode())\n"
        f"print(process_gone(msgspec.json.decode({msgspec.json.encode(own_identity())!r}, type=ProcessIdentity)))\n"
        "print(pid_namespace())\n"
        "print(since_boot_s(), time.clock_gettime(time.CLOCK_BOOTTIME))\n",
    ).splitlines()
    here = boot.since_boot_s()
    assert here is not None
    assert int(asked[0]) == own_identity().start_ticks
    assert msgspec.json.decode(asked[1], type=ProcessIdentity).start_ticks <= here * 1e9 / boot.TICK_NS
    assert asked[2] == "False" and asked[3] == process.pid_namespace()
    told, clock = map(float, asked[4].split())
    assert abs(clock - told - LATER_S) < 1 and 0 <= here - told < 60


@pytest.mark.parametrize("own_proc", [True, False])
def test_nothing_is_concluded_from_another_namespaces_processes(own_proc: bool) -> None:
    """There process 1 is another one, which was taken for the death of the one that is called so here."""
    said = apart(
        ["-pf", *(["--mount-proc"] if own_proc else [])],
        "import os\n"
        "from sglang_pd.backends.library.lives import lives\n"
        "from sglang_pd.backends.library.process import *\n"
        "from sglang_pd.protocol.errors import BackendUnavailable\n"
        "print(os.getpid(), own_identity().known, process_gone(own_identity()))\n"
        "try:\n    lives.check_pid('here'); print('starts')\n"
        "except BackendUnavailable as error:\n    print(error)\n",
    ).splitlines()
    assert said[0] == f"1 {own_proc} False"
    assert said[1] == "starts" if own_proc else "/proc is of another PID namespace" in said[1]
