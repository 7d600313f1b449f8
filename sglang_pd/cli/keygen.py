"""`sglang-pd keygen`: a CURVE key pair for the control plane."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
import zmq

from sglang_pd.cli.output import JsonOption, SetOption, emit, emit_json
from sglang_pd.config.keys import certificate_text
from sglang_pd.protocol.errors import BackendUnavailable, ConfigError

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="NAME.key and NAME.key_secret are written.")]
FolderOption = Annotated[str, typer.Option("--folder", help="Where to write them.")]


def command(
    name: NameArgument,
    folder: FolderOption = ".",
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> int:
    """Make keys: NAME.key goes to the peers, NAME.key_secret stays here. Nothing is ever overwritten."""
    if sets:
        raise ConfigError("keys have no settings", where="--set", expected="nothing", actual=sets[0][:80])
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(
            "not a name for key files",
            where="NAME",
            expected="a file name",
            actual=name[:80],
            hint="Where they are written is --folder.",
        )
    if not zmq.has("curve"):
        raise BackendUnavailable(
            "this pyzmq has no CURVE",
            where="package pyzmq",
            expected="a build with libsodium",
            actual=zmq.zmq_version(),
        )
    public_path, secret_path = (Path(folder) / f"{name}.{end}" for end in ("key", "key_secret"))
    _make_folder(Path(folder))
    for path in (public_path, secret_path):
        if os.path.lexists(path):
            raise _exists(path)
    public, secret = zmq.curve_keypair()
    _write(secret_path, certificate_text(public, secret), 0o600)
    _write(public_path, certificate_text(public), 0o644)
    if as_json:
        emit_json(
            {"public_key_file": str(public_path), "secret_key_file": str(secret_path), "public_key": public.decode()}
        )
        return 0
    emit(
        f"{public_path}: give it to the peers",
        f"{secret_path}: security.curve.secret_key_file of this instance, mode 0600",
        "prefill names decode's public key in security.curve.allowed_key_files,",
        "decode names prefill's public key in security.curve.server_key_file.",
    )
    return 0


def _make_folder(folder: Path) -> None:
    """The folder and those above it, each that is made for this user alone."""
    for part in (*reversed(folder.parents), folder):
        try:
            part.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise _refused("cannot make the folder", part, error) from None


def _write(path: Path, text: str, mode: int) -> None:
    """Create, with its mode from the first moment, or refuse."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise _refused("cannot write the key file", path, error) from None
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        os.fchmod(fd, mode)
        file.write(text)


def _refused(what: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        what,
        where=str(path),
        expected="a folder that this user may write to",
        actual=error.strerror or str(error),
        hint="Name another one with --folder.",
    )


def _exists(path: Path) -> ConfigError:
    return ConfigError(
        "a key file is never overwritten",
        where=str(path),
        expected="no such file",
        hint="Move it, or take another name.",
    )
