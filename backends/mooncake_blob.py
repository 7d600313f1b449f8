"""The connect blob: what a peer must know to write here. Bounded, versioned, self-checking."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import xxhash

from sglang_pd.protocol.batch import U64
from sglang_pd.protocol.errors import BackendError

MAGIC = b"SGPDMNCK"
BLOB_VERSION = 1
"""Raised when a field changes its meaning or a reader must understand a new one. 1: first."""

MAX_BLOB_BYTES = 1 << 20
MAX_SEGMENTS = 4096
"""Most segments of one worker. The library's own descriptor must fit its handshake bound of 1 MiB too."""

_HEAD = struct.Struct("<8sHHI")
_CHECK = struct.Struct("<Q")


class ProcessMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a process to others of its host: kernel boot, PID namespace, PID and start time in clock ticks."""

    boot: str
    pid_namespace: str
    pid: int
    start_ticks: int


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `describe` says.

    epoch, generation: the incarnation, and how often it has replaced the engine that peers write through.
    session: `host:rpc_port`, the library's name for that engine.
    identity_address: where `identity_bytes(epoch, generation)` can be read through the library.
    addresses, sizes: little-endian uint64, one a segment, packed. devices: one a segment.
    """

    mooncake_version: str
    transport: str
    epoch: int
    generation: int
    session: str
    identity_address: int
    addresses: bytes
    sizes: bytes
    devices: tuple[str, ...]
    process: ProcessMark | None = None

    @property
    def base(self) -> U64:
        """Address of each segment in its owner's process, uint64 of shape [segments]."""
        return np.frombuffer(self.addresses, "<u8").astype(np.uint64)

    @property
    def segment_bytes(self) -> U64:
        """Length of each segment, uint64 of shape [segments]."""
        return np.frombuffer(self.sizes, "<u8").astype(np.uint64)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Blob)


def encode(blob: Blob) -> bytes:
    """The blob on the wire. Raises `BackendError` (`memory_refused`) past `MAX_BLOB_BYTES`."""
    body = _ENCODER.encode(blob)
    head = _HEAD.pack(MAGIC, BLOB_VERSION, 0, len(body))
    whole = head + body
    whole += _CHECK.pack(xxhash.xxh3_64_intdigest(whole))
    if len(whole) > MAX_BLOB_BYTES:
        raise BackendError(
            "too many segments to describe",
            code="memory_refused",
            where="mooncake connect blob",
            expected=f"at most {MAX_BLOB_BYTES} bytes",
            actual=len(whole),
        )
    return whole


def decode(data: bytes) -> Blob:
    """Read a blob. Raises `BackendError` (`backend_unsupported`) for anything but a whole blob of this version."""
    if len(data) > MAX_BLOB_BYTES:
        raise _refused("it is too large", f"at most {MAX_BLOB_BYTES} bytes", len(data))
    if len(data) < _HEAD.size + _CHECK.size:
        raise _refused("it is cut", f"at least {_HEAD.size + _CHECK.size} bytes", len(data))
    magic, version, _, body_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise _refused("it is of another backend", MAGIC.decode(), repr(bytes(magic)))
    if version != BLOB_VERSION:
        raise _refused("it has another version", BLOB_VERSION, version)
    if len(data) != _HEAD.size + body_bytes + _CHECK.size:
        raise _refused("its length is wrong", _HEAD.size + body_bytes + _CHECK.size, len(data))
    (check,) = _CHECK.unpack_from(data, len(data) - _CHECK.size)
    if xxhash.xxh3_64_intdigest(data[: -_CHECK.size]) != check:
        raise _refused("its check value is wrong", "xxh3 of its bytes", f"{check:#x}")
    try:
        blob = _DECODER.decode(data[_HEAD.size : -_CHECK.size])
    except msgspec.DecodeError as error:
        raise _refused("its body does not decode", "the fields of version 1", str(error)) from error
    _check(blob)
    return blob


def _check(blob: Blob) -> None:
    count = len(blob.devices)
    if count > MAX_SEGMENTS or len(blob.addresses) != 8 * count or len(blob.sizes) != 8 * count:
        sizes = f"{count} devices, {len(blob.addresses)} and {len(blob.sizes)} bytes"
        raise _refused("its segment table is inconsistent", f"at most {MAX_SEGMENTS} segments", sizes)
    host, _, port = blob.session.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise _refused("its session is malformed", "host:port", blob.session[:200])
    numbers = (blob.epoch, blob.generation, blob.identity_address)
    ends = blob.base.astype(object) + blob.segment_bytes.astype(object)
    if not all(0 <= number < 1 << 64 for number in numbers) or any(not 0 < end < 1 << 64 for end in ends):
        raise _refused("a number is out of range", "unsigned 64-bit values", "a larger or negative one")


def _refused(why: str, expected: object, actual: object) -> BackendError:
    return BackendError(
        f"the connect blob is refused: {why}", where="mooncake connect blob", expected=expected, actual=actual
    )


IDENTITY_BYTES = 32
_IDENTITY = struct.Struct("<8sQQQ")


def identity_bytes(epoch: int, generation: int) -> bytes:
    """The 32 bytes a worker keeps where peers can read them: who is really at the other end of a session."""
    words = struct.pack("<8sQQ", MAGIC, epoch, generation)
    return _IDENTITY.pack(MAGIC, epoch, generation, xxhash.xxh3_64_intdigest(words))
