"""CURVE keys of the control plane: the certificate files that `sglang-pd keygen` writes, read with suspicion."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from sglang_pd.config.schema import SecuritySection
from sglang_pd.protocol.errors import ConfigError

MAX_KEY_FILE_BYTES = 16_384
_PAIR = re.compile(r"""^\s*(public-key|secret-key)\s*=\s*"([^"\s]{40})"\s*$""")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Keys in Z85, 40 characters each. server: prefill's public key, for a decode. allowed: who may connect; this
    instance's own ranks may as well."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes | None = None
    allowed: frozenset[bytes] = frozenset()


def load_keys(security: SecuritySection) -> CurveKeys | None:
    """The keys that a configuration names, or None where it names none.

    Raises `ConfigError` for a file that is missing, is no certificate, or whose secret others can read
    (`insecure_refused`).
    """
    curve = security.curve
    if curve is None:
        return None
    where = "$.security.curve"
    own = read_certificate(curve.secret_key_file, where=f"{where}.secret_key_file", secret=True)
    server = None
    if curve.server_key_file is not None:
        server = read_certificate(curve.server_key_file, where=f"{where}.server_key_file")["public-key"]
    allowed = {
        read_certificate(path, where=f"{where}.allowed_key_files[{i}]")["public-key"]
        for i, path in enumerate(curve.allowed_key_files)
    }
    return CurveKeys(own["public-key"], own["secret-key"], server, frozenset(allowed | {own["public-key"]}))


def read_certificate(path: str | Path, *, where: str, secret: bool = False) -> dict[str, bytes]:
    """`public-key`, and with `secret` also `secret-key`, of a certificate file. Raises as `load_keys`."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(MAX_KEY_FILE_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(
            f"cannot read the key file: {error.strerror}",
            where=where,
            expected="a file of `sglang-pd keygen`",
            actual=str(path),
        ) from None
    if secret and mode & 0o077:
        raise ConfigError(
            "others can read this secret key",
            code="insecure_refused",
            where=where,
            expected="mode 0600",
            actual=f"mode {mode:04o} of {path}",
            hint=f"chmod 600 {path}",
        )
    found = {m[1]: m[2].encode() for m in map(_PAIR.match, text.splitlines()) if m}
    for name in ("public-key", "secret-key") if secret else ("public-key",):
        if name not in found:
            raise ConfigError(f"the key file has no {name}", where=where, actual=str(path))
    return found


def certificate_text(public: bytes, secret: bytes | None = None) -> str:
    """A certificate file's content; the secret one when `secret` is given."""
    warning = "DO NOT GIVE THIS FILE TO ANYBODY" if secret else "give this file to the peers"
    lines = [
        f"#  sglang-pd CURVE certificate: {warning}.",
        "metadata",
        "curve",
        f'    public-key = "{public.decode()}"',
    ]
    if secret:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"
