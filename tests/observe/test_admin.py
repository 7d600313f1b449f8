"""The admin socket: one line in, one JSON out; strangers, silence, garbage and leftovers do no harm."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from sglang_pd.observe.admin import MAX_LINE_BYTES, AdminServer, ask
from sglang_pd.protocol.errors import ConfigError


def answer(line: str) -> bytes:
    if line == "break":
        raise ValueError("broken")
    return json.dumps({"asked": line}).encode()


def test_ask(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with AdminServer(path, answer):
        assert json.loads(ask(path, "dump")) == {"asked": "dump"}
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not os.path.exists(path)
    with pytest.raises(ConfigError, match="nobody answers"):
        ask(path, "dump")


def test_bad_clients_do_not_stop_it(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with AdminServer(path, answer):
        for data in (b"", b"x" * (2 * MAX_LINE_BYTES), b"\x80\x04\x95pickle\n", b"no end"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                try:
                    client.sendall(data)
                    client.shutdown(socket.SHUT_WR)
                    client.recv(1000)
                except OSError:
                    pass
        with pytest.raises(ConfigError, match="cut short"):
            ask(path, "break")
        assert json.loads(ask(path, "still")) == {"asked": "still"}


def test_a_leftover_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(path)
    with AdminServer(path, answer):
        with pytest.raises(ConfigError, match="another process serves"):
            AdminServer(path, answer)
        assert json.loads(ask(path, "x"))


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="no socket"):
        AdminServer(str(path), answer)
    assert path.read_text() == "data"
    with pytest.raises(ConfigError, match="cannot listen"):
        AdminServer(str(tmp_path / "no" / "folder"), answer)


def test_close_twice_and_a_successor_keeps_its_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    first = AdminServer(path, answer)
    os.unlink(path)
    with AdminServer(path, answer):
        first.close()
        first.close()
        assert json.loads(ask(path, "x"))
