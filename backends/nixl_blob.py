"""What one `nixl` backend tells another so that it can connect: a checked envelope around the library's metadata."""

from __future__ import annotations

import re
import struct

import msgspec
import xxhash

from sglang_pd.backends.nixl_host import ProcessIdentity
from sglang_pd.protocol.errors import BackendError

MAGIC = b"PD-NIXL\n"
FORMAT = 1
"""Version of the blob. Raise it for any change of the body; another version is refused unread."""
MAX_BLOB_BYTES = 1 << 20
MAX_SEGMENTS = 16_384

_HEAD = struct.Struct("<8sHHIQ")  # magic, format, reserved, body bytes, xxh3-64 of the body
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})")


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One registered segment: address of its first byte in its process, length in bytes, `cpu` or `cuda:N`."""

    address: int
    nbytes: int
    device: str


class AgentBlob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body. `agent` is the library's name for this incarnation, `metadata` the library's own opaque bytes."""

    epoch: int
    agent: str
    nixl_version: str
    plugin: str
    settings: int
    process: ProcessIdentity
    segments: list[SegmentEntry]
    metadata: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AgentBlob)


def agent_name(epoch: int, build: int) -> str:
    """Name of the library's agent: the epoch, and how often this incarnation has rebuilt its agent."""
    return f"sglang-pd-{epoch:016x}-{build}"


def encode_blob(blob: AgentBlob) -> bytes:
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


def decode_blob(data: bytes, *, epoch: int, nixl_version: str, plugin: str) -> AgentBlob:
    """Read a peer's blob and compare what must be equal before the library sees it.

    Raises `BackendError`: `backend_unsupported` for another backend, format or nixl version, `message_malformed` for
    damage, `epoch_stale` for another incarnation than `epoch`.
    """
    body = _open_envelope(data)
    try:
        blob = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise _malformed("the blob's body does not decode", actual=str(error)) from None
    _check_body(blob)
    if _series(blob.nixl_version) != _series(nixl_version):
        raise _refused("the peer runs another nixl", "nixl version", _series(nixl_version), blob.nixl_version)
    if blob.plugin != plugin:
        raise _refused("the peer uses another plugin", "plugin", plugin, blob.plugin)
    if blob.epoch != epoch:
        raise BackendError(
            "the blob is of another incarnation",
            code="epoch_stale",
            where="connect, epoch",
            expected=f"{epoch:#x}",
            actual=f"{blob.epoch:#x}",
        )
    return blob


def _open_envelope(data: bytes) -> bytes:
    if len(data) < _HEAD.size or data[:8] != MAGIC:
        raise _refused("the blob is of another backend", "blob magic", MAGIC, bytes(data[:8]))
    if len(data) > MAX_BLOB_BYTES:
        raise _malformed("the blob is too long", actual=f"{len(data)} bytes", expected=f"<= {MAX_BLOB_BYTES} bytes")
    _, version, _, nbytes, check = _HEAD.unpack_from(data)
    if version != FORMAT:
        raise _refused("the blob has another format", "blob format", FORMAT, version)
    body = data[_HEAD.size :]
    if len(body) != nbytes or xxhash.xxh3_64_intdigest(body) != check:
        raise _malformed("the blob is damaged", expected=f"{nbytes} bytes with xxh3 {check:#x}", actual=f"{len(body)}")
    return body


def _check_body(blob: AgentBlob) -> None:
    if not blob.agent.startswith(f"sglang-pd-{blob.epoch:016x}-") or len(blob.agent) > 64:
        raise _malformed("the agent's name does not carry its epoch", expected=f"{blob.epoch:016x}", actual=blob.agent)
    if len(blob.segments) > MAX_SEGMENTS:
        raise _malformed("too many segments", expected=f"<= {MAX_SEGMENTS}", actual=len(blob.segments))
    for number, entry in enumerate(blob.segments):
        inside = 0 < entry.address and 0 < entry.nbytes and entry.address + entry.nbytes < 1 << 64
        if not inside or not _DEVICE.fullmatch(entry.device):
            raise _malformed(f"segment {number} is impossible", actual=str(entry)[:200])


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _refused(message: str, where: str, expected: object, actual: object) -> BackendError:
    return BackendError(message, where=f"connect, {where}", expected=expected, actual=actual)


def _malformed(message: str, *, actual: object = "", expected: object = "") -> BackendError:
    return BackendError(message, code="message_malformed", where="connect", expected=expected, actual=actual)
