"""The connect blob: what a peer must know to write here; and the bytes by which it finds out who answers."""

from __future__ import annotations

import struct

import msgspec
import xxhash

from sglang_pd.backends.library.blob import (
    Envelope,
    SegmentEntry,
    check_entries,
    check_epoch,
    differs,
    malformed,
    series,
)
from sglang_pd.backends.library.process import ProcessIdentity

MAGIC = b"SGPDMNCK"
MAX_SEGMENTS = 4096
"""Most segments of one worker. The library's own descriptor must fit its handshake bound of 1 MiB too."""


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `describe` says.

    epoch, generation: the incarnation, and how often it has replaced the engine that peers write through.
    session: `host:rpc_port`, the library's name for that engine.
    identity_address: where `identity_bytes(epoch, generation)` can be read through the library.
    """

    mooncake_version: str
    transport: str
    epoch: int
    generation: int
    session: str
    identity_address: int
    segments: list[SegmentEntry]
    process: ProcessIdentity | None = None


ENVELOPE = Envelope(MAGIC, 2, Blob)


def decode(data: bytes) -> Blob:
    """Read a blob. Raises `BackendError`: `backend_unsupported` for another backend or format, `message_malformed`."""
    blob = ENVELOPE.open(data)
    check_entries(blob.segments, MAX_SEGMENTS)
    host, _, port = blob.session.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise malformed("its session is malformed", expected="host:port", actual=blob.session[:200])
    if not all(0 <= number < 1 << 64 for number in (blob.epoch, blob.generation, blob.identity_address)):
        raise malformed("a number is out of range", expected="unsigned 64-bit values")
    return blob


def decode_matching(data: bytes, epoch: int, transport: str, version: str) -> Blob:
    """Read the blob of incarnation `epoch` and compare what must be equal before the library sees it.

    Raises `BackendError` as `decode` does, `epoch_stale` for another incarnation, `backend_unsupported` for another
    transport or series of Mooncake.
    """
    blob = decode(data)
    check_epoch(blob.epoch, epoch)
    if blob.transport != transport:
        raise differs("the peer uses another transport", "transport", transport, blob.transport)
    if series(blob.mooncake_version) != series(version):
        raise differs("the peer's Mooncake is of another series", "version", version, blob.mooncake_version)
    return blob


IDENTITY_BYTES = 32
_IDENTITY = struct.Struct("<8sQQQ")


def identity_bytes(epoch: int, generation: int) -> bytes:
    """The 32 bytes a worker keeps where peers can read them: who is really at the other end of a session."""
    words = struct.pack("<8sQQ", MAGIC, epoch, generation)
    return _IDENTITY.pack(MAGIC, epoch, generation, xxhash.xxh3_64_intdigest(words))
