"""What a worker that has ended was known by stays nobody's: over real processes that are killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_pd.backends.library import lives as module
from sglang_pd.backends.library import process
from sglang_pd.backends.library.lives import STATE_DIR, Life, Lives
from sglang_pd.backends.library.process import pid_namespace, same_namespace
from sglang_pd.backends.mooncake import backend as mooncake
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.errors import BackendUnavailable

WORKER = """
import sys
from sglang_pd.backends.library.lives import lives
lives.keep_ports(frozenset(int(one) for one in sys.argv[1:]))
lives.keep_pid()
print("kept", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    return tmp_path / "state"


@contextmanager
def worker(*ports: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WORKER, *map(str, ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"kept\n"
        yield process
        process.kill()


def killed(*ports: int) -> int:
    """A worker that had them, and its process id."""
    with worker(*ports) as process:
        pass
    return process.pid


def test_ports_of_other_workers_are_known_whether_they_live_or_were_killed(folder: Path) -> None:
    mine = Lives()
    mine.keep_ports(frozenset({20_009}))
    with worker(20_001, 20_002):
        killed(20_003)
        assert mine.former_ports() == {20_001, 20_002, 20_003}
    assert mine.former_ports() == {20_001, 20_002, 20_003}


def test_who_looks_at_the_same_time_sees_the_same(folder: Path) -> None:
    killed(20_001)
    (path,) = folder.iterdir()
    with open(path) as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert Lives().former_ports() == {20_001}


def test_what_is_long_over_is_forgotten_and_no_sooner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(20_001)
    now = 1000.0
    monkeypatch.setattr(module, "since_boot_s", lambda: now)
    assert Lives().former_ports() == {20_001}, "whoever finds it first starts the clock"
    now += module.HOLD_S - 1
    assert Lives().former_ports() == {20_001}
    with worker(20_002):
        now += 2
        assert Lives().former_ports() == {20_002}
        now += 2 * module.HOLD_S
        assert Lives().former_ports() == {20_002}, "it lives"
    assert Lives().former_ports() == {20_002}
    now += module.HOLD_S + 1
    assert Lives().former_ports() == frozenset() and not list(folder.iterdir())


def test_another_boot_starts_the_clock_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(20_001)
    (path,) = folder.iterdir()
    with open(path, "ab") as file:
        file.write(b'\n{"ended": ["another boot", 5.0]}')
    monkeypatch.setattr(module, "since_boot_s", lambda: 10.0 + module.HOLD_S)
    assert Lives().former_ports() == Lives().former_ports() == {20_001}


def test_a_line_that_was_not_finished_takes_nothing_away(folder: Path) -> None:
    mine = Lives()
    mine.keep_ports(frozenset({20_001}))
    (path,) = folder.iterdir()
    with open(path, "ab") as file:
        file.write(b'\n{"ports": [20_0')
    mine.keep_ports(frozenset({20_001, 20_002}))
    mine.forget_parent()
    assert Lives().former_ports() == {20_001, 20_002}


def test_a_fork_has_a_life_of_its_own(folder: Path) -> None:
    code = WORKER.replace('print("kept"', "pid = os.fork()\nlives.keep_ports(frozenset({20_009 if pid else 20_008}))\n"
                          'if not pid: os.kill(os.getpid(), 9)\nos.waitpid(pid, 0)\nprint("kept"')  # fmt: skip
    command = [sys.executable, "-c", "import os\n" + code, "20007"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"kept\n"
        process.kill()
    assert Lives().former_ports() == {20_007, 20_008, 20_009}


def test_a_process_id_is_known_by_its_namespace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = killed()
    assert not Lives().had_this_pid()
    monkeypatch.setattr(module, "_thread_ids", lambda: [os.getpid(), before])
    assert Lives().had_this_pid()
    with pytest.raises(BackendUnavailable, match="the id of a worker"):
        Lives().check_pid("here")
    monkeypatch.setattr(module, "_own_pid", lambda: ("another namespace", os.getpid()))
    assert not Lives().had_this_pid()
    monkeypatch.setattr(module, "_own_pid", lambda: (pid_namespace(), os.getpid()))
    assert Lives().had_this_pid()


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(BackendUnavailable, match=STATE_DIR) as caught:
        Lives().others()
    assert str(folder) in str(caught.value) and "777" in str(caught.value)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "file" / "state"))
    with pytest.raises(BackendUnavailable, match=STATE_DIR):
        Lives().keep_ports(frozenset({20_001}))


def test_none_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STATE_DIR, "none")
    monkeypatch.chdir(tmp_path)
    mine = Lives()
    mine.keep_ports(frozenset({20_001}))
    assert mine.others() == [] and not list(tmp_path.iterdir()) and os.environ[STATE_DIR] == module.kept()


def test_a_worker_whose_life_cannot_be_kept_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ready and healthy, and met nobody."""
    no_folder = tmp_path / "file"
    no_folder.touch()
    monkeypatch.setenv(module.STATE_DIR, str(no_folder))
    with pytest.raises(BackendUnavailable, match="SGLANG_PD_STATE_DIR") as raised:
        create_backend("nixl", epoch=1)
    assert raised.value.where == str(no_folder)
    monkeypatch.setattr(mooncake, "check_environment", lambda options, environ: {})
    with pytest.raises(BackendUnavailable, match="SGLANG_PD_STATE_DIR"):
        mooncake.create(epoch=1, options={"insecure_data_plane": True})


def test_a_folder_that_nobody_may_write_to_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.STATE_DIR, str(tmp_path))
    Lives().check_kept()
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # the super-user may write anywhere
    with pytest.raises(BackendUnavailable, match="nothing can be written"):
        Lives().check_kept()


def test_a_folder_that_is_not_there_yet_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.STATE_DIR, str(tmp_path / "a" / "b"))
    Lives().check_kept()
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())


def first_process(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """What reading of the first process of the namespace meets."""
    real = process.Path

    def path(name: str) -> Any:
        def fails() -> bytes:
            raise error

        return SimpleNamespace(read_bytes=fails) if name == "/proc/1/stat" else real(name)

    monkeypatch.setattr(process, "Path", path)


@pytest.mark.skipif(os.getpid() == 1, reason="the first process of a namespace")
def test_an_id_is_kept_and_found_where_the_first_process_is_hidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounted with hidepid, /proc shows a worker its own processes alone: nothing was kept, and nobody refused."""
    seen = pid_namespace()
    folder.mkdir(mode=0o700)
    (folder / "ended.life").write_bytes(msgspec.json.encode(Life(pids=((seen, os.getpid()),))))
    with monkeypatch.context() as hidden:
        first_process(hidden, PermissionError("hidden"))
        assert same_namespace(pid_namespace(), seen) and pid_namespace() != seen
        with pytest.raises(BackendUnavailable, match="the id of a worker that has ended"):
            Lives().check_pid("here")
        keeper = Lives()
        keeper.keep_pid()
        assert keeper._own.pids == ((pid_namespace(), os.getpid()),)
    (folder / "ended.life").unlink()
    keeper.forget_parent()  # as if it had ended: its lock is gone
    assert Lives().had_this_pid(), "who sees more knows it too"
    assert not same_namespace(f"{seen}1", seen) and not same_namespace("another/1/", seen)


@pytest.mark.parametrize("call", [lambda one: one.check_pid("here"), lambda one: one.keep_pid()])
def test_an_identity_that_cannot_be_read_refuses_rather_than_keeps_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Lives], object]
) -> None:
    with monkeypatch.context() as short:
        first_process(short, OSError(errno.EMFILE, "too many open files"))
        with pytest.raises(BackendUnavailable, match="descriptor"):
            call(Lives())
    monkeypatch.setattr(module, "pid_namespace", lambda: "")
    with pytest.raises(BackendUnavailable, match="which process this is.*SGLANG_PD_STATE_DIR=none"):
        call(Lives())
    monkeypatch.setenv(module.STATE_DIR, module.NOT_KEPT)
    call(Lives())
