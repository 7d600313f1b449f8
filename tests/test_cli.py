"""The command line itself: its shape, its exits, its keys, its dump."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from sglang_pd.cli import app as cli_app
from sglang_pd.cli.app import COMMANDS, EXIT_USAGE, Command, run
from sglang_pd.cli.demo import program
from sglang_pd.cli.output import split_sets
from sglang_pd.config import load_keys, load_worker
from sglang_pd.observe import AdminServer, Identity, Recorder, RoomFacts, RoomKey, Stage
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.protocol.room import Role
from sglang_pd.protocol.version import PROTOCOL_VERSION

Capture = pytest.CaptureFixture[str]


def test_every_command_takes_json_and_set(capsys: Capture) -> None:
    for command in COMMANDS:
        assert run([command.name, "--help"]) == 0
        text = capsys.readouterr().out
        assert "--json" in text and "--set" in text, command.name
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command.name in text for command in COMMANDS)


def test_a_wrong_command_or_option_is_a_usage_error(capsys: Capture) -> None:
    assert run(["nope"]) == EXIT_USAGE
    assert run(["check", "--nope"]) == EXIT_USAGE
    assert run([]) in (0, EXIT_USAGE)
    capsys.readouterr()
    for arguments in (["nope"], ["check", "--nope"], ["dump"], ["explain", "--set"]):
        assert run([*arguments, "--json"]) == EXIT_USAGE
        said = capsys.readouterr()
        assert json.loads(said.out)["error"]["where"] == "the command line" and said.err == ""


@pytest.mark.parametrize("command", ["prefill", "decode", "doctor"])
def test_a_file_may_be_named_with_or_without_its_option(command: str, tmp_path: Path, capsys: Capture) -> None:
    """`check` and `explain` take files as arguments."""
    missing, other = str(tmp_path / "none.yaml"), str(tmp_path / "other.yaml")
    for arguments in ([missing], ["--config", missing]):
        assert run([command, *arguments]) == EXIT_USAGE
        assert missing in capsys.readouterr().err
    assert run([command, missing, "--config", other]) == EXIT_USAGE
    assert "two configurations" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: Capture) -> None:
    assert run(["--version"]) == 0
    said = capsys.readouterr().out
    assert said == f"sglang-pd {version('sglang-pd')}, protocol {'.'.join(map(str, PROTOCOL_VERSION))}\n"


def test_the_demo_refuses_what_is_no_backend_before_it_looks_for_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["demo", "--backend", "foo"]) == EXIT_USAGE
    said = capsys.readouterr()
    assert said.err.startswith("sglang-pd: [backend_unknown]") and not said.out


def test_an_error_is_one_message_or_one_document(capsys: Capture, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    assert run(["check", missing, missing]) == EXIT_USAGE
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("sglang-pd: [config_invalid]") and missing in said.err
    assert run(["check", missing, missing, "--json"]) == EXIT_USAGE
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["code"] == "config_invalid" and said.err == ""


def test_a_new_command_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "made_up_command.py").write_text("def command(x: int) -> int:\n    '''Made up.'''\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cli_app, "COMMANDS", [*COMMANDS, Command("made-up", "made_up_command")])
    assert run(["made-up", "7"]) == 7
    assert run(["made-up", "x"]) == EXIT_USAGE
    capsys.readouterr()


PROGRAM = """
import atexit, sys
atexit.register(lambda: print("finalised"))
sys.argv = ["sglang-pd", {arguments}]
from sglang_pd.cli import main
main()
"""


def _program(arguments: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(arguments=arguments)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)


def test_the_process_ends_flushed_and_without_finalisers() -> None:
    done = _program('"capabilities", "--json"')
    assert done.returncode == 0 and json.loads(done.stdout)["transports"], done.stderr
    done = _program('"nope"')
    assert done.returncode == EXIT_USAGE and "No such command" in done.stderr


def test_a_missing_package_is_named() -> None:
    program = "import sys; sys.modules['typer'] = None\nfrom sglang_pd.cli import main\nmain()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and "sglang-pd[server]" in done.stderr and "Traceback" not in done.stderr


def test_commands_import_no_transport_and_no_engine() -> None:
    program = (
        "import sys\nfrom sglang_pd.cli.app import build_app\nbuild_app()\n"
        "print([m for m in ('torch', 'nixl', 'mooncake', 'mori', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_entry_point_is_declared(repository: Path) -> None:
    assert 'sglang-pd = "sglang_pd.cli:main"' in (repository / "pyproject.toml").read_text(encoding="utf-8")


def test_overrides_of_a_pair() -> None:
    found = split_sets(["prefill.a.b=1", "c=2", "decode.d=3", "$.decode.e=4"])
    assert found == {"prefill": ("a.b=1", "c=2"), "decode": ("c=2", "d=3", "e=4")}


# Keys


def test_keys_are_made_once_and_load(tmp_path: Path, capsys: Capture) -> None:
    old = os.umask(0)
    try:
        for name in ("prefill", "decode"):
            assert run(["keygen", name, "--folder", str(tmp_path)]) == 0
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"prefill.key": 0o644, "prefill.key_secret": 0o600, "decode.key": 0o644, "decode.key_secret": 0o600}
    assert "secret-key" not in (tmp_path / "prefill.key").read_text()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(["keygen", "prefill", "--folder", str(tmp_path)]) == EXIT_USAGE
    (tmp_path / "prefill.key").unlink()
    assert run(["keygen", "prefill", "--folder", str(tmp_path)]) == EXIT_USAGE, "the secret half is there still"
    (tmp_path / "prefill.key").write_bytes(before["prefill.key"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    capsys.readouterr()
    curve = {
        "secret_key_file": str(tmp_path / "prefill.key_secret"),
        "allowed_key_files": [str(tmp_path / "decode.key")],
    }
    config = load_worker({"role": "prefill", "network": {"bind": "10.0.0.1"}, "security": {"curve": curve}}, environ={})
    keys = load_keys(config.security)
    assert keys is not None and len(keys.public) == len(keys.secret) == 40
    assert keys.public in keys.allowed and len(keys.allowed) == 2 and keys.server is None
    assert keys.secret.decode() not in repr(keys)


def test_keys_are_what_the_library_reads(tmp_path: Path, capsys: Capture) -> None:
    import zmq
    import zmq.auth

    assert run(["keygen", "a", "--folder", str(tmp_path), "--json"]) == 0
    public, secret = zmq.auth.load_certificate(tmp_path / "a.key_secret")
    assert json.loads(capsys.readouterr().out)["public_key"].encode() == public
    assert secret is not None and zmq.curve_public(secret) == public
    assert zmq.auth.load_certificate(tmp_path / "a.key") == (public, None)


def test_the_folder_of_keys_is_made_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["keygen", "prefill", "--folder", "made/keys"]) == 0
    for folder in (tmp_path / "made", tmp_path / "made" / "keys"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert run(["keygen", "decode", "--folder", "made/keys"]) == 0, "one that is there is taken"
    capsys.readouterr()
    assert run(["keygen", "a", "--folder", "made/keys/decode.key", "--json"]) == EXIT_USAGE
    error = json.loads(capsys.readouterr().out)["error"]
    assert "decode.key" in error["where"] and error["expected"] and error["hint"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden"])
def test_names_of_keys(name: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(["keygen", name, "--folder", str(tmp_path)]) == EXIT_USAGE
    assert not list(tmp_path.iterdir()) and "--folder" in capsys.readouterr().err


def test_a_link_is_not_followed(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.key_secret").symlink_to(tmp_path / "elsewhere")
    assert run(["keygen", "a", "--folder", str(tmp_path)]) == EXIT_USAGE
    assert not (tmp_path / "elsewhere").exists() and "never overwritten" in capsys.readouterr().err


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, capsys: Capture) -> None:
    run(["keygen", "a", "--folder", str(tmp_path)])
    secret = tmp_path / "a.key_secret"

    def load(path: Path) -> ConfigError:
        curve = {"secret_key_file": str(path), "server_key_file": str(tmp_path / "a.key")}
        security = load_worker({"role": "decode", "security": {"curve": curve}}, environ={}).security
        with pytest.raises(ConfigError) as caught:
            load_keys(security)
        return caught.value

    secret.chmod(0o640)
    assert load(secret).code == "insecure_refused"
    assert load(tmp_path / "none").where == "$.security.curve.secret_key_file"
    (tmp_path / "junk").write_bytes(b"\xff" * 100_000)
    (tmp_path / "junk").chmod(0o600)
    assert "public-key" in load(tmp_path / "junk").message


# Dump


def test_dump_of_a_running_worker(tmp_path: Path, capsys: Capture) -> None:
    path = str(tmp_path / "a.sock")
    recorder = Recorder(Identity(Role.DECODE, "decode-1", 5, "local"))
    recorder.room_opened(RoomKey(42, 1), RoomFacts(peer="prefill-1"), Stage.QUEUE)
    recorder.decision("pp0/tp0", "allocated", RoomKey(42, 1), "3 pages")
    config = tmp_path / "c.yaml"
    config.write_text(f"role: decode\nobserve:\n  admin_socket: {path}\n")
    with AdminServer(path, recorder.answer):
        assert run(["dump", path]) == 0
        text = capsys.readouterr().out
        assert "42" in text and "prefill-1" in text and "allocated" in text
        assert run(["dump", str(config), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rooms"][0]["room"] == 42
        assert run(["dump", str(config), "--set", "observe.admin_socket="]) == EXIT_USAGE
    assert run(["dump", path]) == EXIT_USAGE
    assert "nobody answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefill", "http://h:1", "abc", "--decode", "http://h:2"], "--prefill: not a port"),
        (["--prefill", "http://h:1", "999999", "--decode", "http://h:2"], "--prefill: not a port"),
        (["--prefill", "http://h:1"], "only --prefill"),
        (["--decode", "http://h:1"], "only --decode"),
    ],
)
def test_what_a_router_lacks_is_named(arguments: list[str], said: str, capsys: Capture) -> None:
    assert run(["router", *arguments]) == EXIT_USAGE
    assert said in capsys.readouterr().err


def test_the_demo_prints_commands_that_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert program(".venv/bin/sglang-pd") == ".venv/bin/sglang-pd"
    assert program("/x/cli/__main__.py") == "sglang-pd"
