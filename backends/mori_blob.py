"""What one `mori` backend tells another so that it can connect: a checked envelope around the library's descriptors.

The library's own descriptors have neither version nor checksum and change between patch releases, so the version of
the peer's library is compared for equality before any of them is unpacked.
"""

from __future__ import annotations

import re
import struct

import msgspec
import xxhash

from sglang_pd.protocol.errors import BackendError

MAGIC = b"PD-MORI\n"
FORMAT = 1
"""Version of the blob. Raise it for any change of the body; another version is refused unread."""
MAX_BLOB_BYTES = 1 << 20
MAX_SEGMENTS = 4096
MAX_DESCRIPTOR_BYTES = 4096

_HEAD = struct.Struct("<8sHHIQ")  # magic, format, reserved, body bytes, xxh3-64 of the body
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})")


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One registered segment: length in bytes, `cpu` or `cuda:N`, the library's packed descriptor."""

    nbytes: int
    device: str
    descriptor: bytes


class EngineBlob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body. `key` is the library's name for this engine; `engine` and `door` are its packed descriptors.

    The door is a few bytes of host memory that belong to nobody: first contact and heartbeats write there.
    """

    epoch: int
    mori_version: str
    key: str
    engine: bytes
    door: bytes
    segments: list[SegmentEntry]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineBlob)


def encode_blob(blob: EngineBlob) -> bytes:
    """Wrap the body. Raises `BackendError` where it exceeds `MAX_BLOB_BYTES`."""
    body = _encoder.encode(blob)
    whole = _HEAD.pack(MAGIC, FORMAT, 0, len(body), xxhash.xxh3_64_intdigest(body)) + body
    if len(whole) > MAX_BLOB_BYTES:
        raise BackendError(
            "too many segments to describe",
            where="describe",
            expected=f"at most {MAX_BLOB_BYTES} bytes",
            actual=f"{len(whole)} bytes for {len(blob.segments)} segments",
            hint="Register fewer, larger segments.",
        )
    return whole


def decode_blob(data: bytes, *, epoch: int, mori_version: str) -> EngineBlob:
    """Read a peer's blob and compare what must be equal before the library sees its descriptors.

    Raises `BackendError`: `backend_unsupported` for another backend, format or version of the library,
    `message_malformed` for damage, `epoch_stale` for another incarnation than `epoch`.
    """
    try:
        blob = _decoder.decode(_open_envelope(data))
    except msgspec.MsgspecError as error:
        raise malformed("the blob's body does not decode", actual=str(error)) from None
    if blob.mori_version != mori_version:
        raise _refused("the peer runs another amd-mori", "amd-mori version", mori_version, blob.mori_version)
    if blob.epoch != epoch:
        raise BackendError(
            "the blob is of another incarnation",
            code="epoch_stale",
            where="connect, epoch",
            expected=f"{epoch:#x}",
            actual=f"{blob.epoch:#x}",
        )
    _check_body(blob)
    return blob


def _open_envelope(data: bytes) -> bytes:
    if len(data) < _HEAD.size or data[:8] != MAGIC:
        raise _refused("the blob is of another backend", "blob magic", MAGIC, bytes(data[:8]))
    if len(data) > MAX_BLOB_BYTES:
        raise malformed("the blob is too long", actual=f"{len(data)} bytes", expected=f"<= {MAX_BLOB_BYTES} bytes")
    _, version, _, nbytes, check = _HEAD.unpack_from(data)
    if version != FORMAT:
        raise _refused("the blob has another format", "blob format", FORMAT, version)
    body = data[_HEAD.size :]
    if len(body) != nbytes or xxhash.xxh3_64_intdigest(body) != check:
        raise malformed("the blob is damaged", expected=f"{nbytes} bytes with xxh3 {check:#x}", actual=f"{len(body)}")
    return body


def _check_body(blob: EngineBlob) -> None:
    if not blob.key.startswith(f"sglang-pd-{blob.epoch:016x}-") or len(blob.key) > 128:
        raise malformed("the engine's key does not carry its epoch", expected=blob.epoch, actual=blob.key[:200])
    if len(blob.segments) > MAX_SEGMENTS:
        raise malformed("too many segments", expected=f"<= {MAX_SEGMENTS}", actual=len(blob.segments))
    packed = [blob.engine, blob.door, *(entry.descriptor for entry in blob.segments)]
    if not all(0 < len(one) <= MAX_DESCRIPTOR_BYTES for one in packed):
        raise malformed("a descriptor is empty or too long", expected=f"1 to {MAX_DESCRIPTOR_BYTES} bytes")
    for number, entry in enumerate(blob.segments):
        if not 0 < entry.nbytes < 1 << 63 or not _DEVICE.fullmatch(entry.device):
            raise malformed(f"segment {number} is impossible", actual=f"{entry.nbytes} bytes on {entry.device[:20]}")


def _refused(message: str, where: str, expected: object, actual: object) -> BackendError:
    return BackendError(message, where=f"connect, {where}", expected=expected, actual=actual)


def malformed(message: str, *, actual: object = "", expected: object = "") -> BackendError:
    """A peer's blob that cannot be believed."""
    return BackendError(message, code="message_malformed", where="connect", expected=expected, actual=actual)
