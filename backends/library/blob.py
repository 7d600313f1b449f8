"""The envelope of a connect blob: bounded, versioned, self-checking. What is inside is each backend's own.

Layout, little-endian: 8 bytes of magic, format (uint16), reserved (uint16, zero), bytes of the body (uint32), xxh3-64
of all that and the body (uint64); then the body, one msgspec structure as MessagePack.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import xxhash

from sglang_pd.protocol.errors import BackendError

MAX_BLOB_BYTES = 1 << 20
DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})")
"""How a segment's device is written."""

_HEAD = struct.Struct("<8sHHI")
_CHECK = struct.Struct("<Q")
_START = _HEAD.size + _CHECK.size

Body = TypeVar("Body", bound=msgspec.Struct)


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One registered segment: address of its first byte in its process, length in bytes, `cpu` or `cuda:N`."""

    address: int
    nbytes: int
    device: str


@dataclass(frozen=True)
class Envelope(Generic[Body]):
    """How one backend wraps its bodies.

    magic: 8 bytes that tell the backend. version: raised for any change of the body; another one is refused unread.
    """

    magic: bytes
    version: int
    body: type[Body]

    def seal(self, body: Body) -> bytes:
        """Wrap a body. Raises `BackendError` where the whole exceeds `MAX_BLOB_BYTES`."""
        data = msgspec.msgpack.encode(body)
        head = _HEAD.pack(self.magic, self.version, 0, len(data))
        if _START + len(data) > MAX_BLOB_BYTES:
            raise BackendError(
                "too many segments to describe",
                code="memory_refused",
                where="describe",
                expected=f"at most {MAX_BLOB_BYTES} bytes",
                actual=f"{_START + len(data)} bytes",
                hint="Register fewer, larger segments.",
            )
        return head + _CHECK.pack(_digest(head, data)) + data

    def open(self, data: bytes) -> Body:
        """The body, whole and of the right form; whether its values make sense is the backend's to judge.

        Raises `BackendError`: `backend_unsupported` for another backend or format, `message_malformed` for damage.
        """
        if len(data) < _START or data[: len(self.magic)] != self.magic:
            raise differs("the blob is of another backend", "blob magic", self.magic, bytes(data[: len(self.magic)]))
        if len(data) > MAX_BLOB_BYTES:
            raise malformed("the blob is too long", actual=f"{len(data)} bytes", expected=f"<= {MAX_BLOB_BYTES} bytes")
        _, version, _, nbytes = _HEAD.unpack_from(data)
        if version != self.version:
            raise differs("the blob has another format", "blob format", self.version, version)
        (check,) = _CHECK.unpack_from(data, _HEAD.size)
        body = data[_START:]
        if len(body) != nbytes or _digest(data[: _HEAD.size], body) != check:
            expected = f"{nbytes} bytes with xxh3 {check:#x}"
            raise malformed("the blob is damaged", expected=expected, actual=f"{len(body)} bytes")
        try:
            return msgspec.msgpack.decode(body, type=self.body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise malformed("the blob's body does not decode", actual=str(error)) from None


def _digest(head: bytes, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(head + body)


def check_epoch(found: int, expected: int) -> None:
    """Refuse (`epoch_stale`) the blob of another incarnation than the one asked for."""
    if found != expected:
        raise BackendError(
            "the blob is of another incarnation",
            code="epoch_stale",
            where="connect, epoch",
            expected=f"{expected:#x}",
            actual=f"{found:#x}",
        )


def check_entries(entries: list[SegmentEntry], most: int) -> None:
    """Refuse (`message_malformed`) a table of more than `most` segments, or one that no memory can have."""
    if len(entries) > most:
        raise malformed("too many segments", expected=f"<= {most}", actual=len(entries))
    for number, entry in enumerate(entries):
        inside = 0 < entry.address and 0 < entry.nbytes and entry.address + entry.nbytes < 1 << 64
        if not inside or not DEVICE.fullmatch(entry.device):
            raise malformed(f"segment {number} is impossible", actual=str(entry)[:200])


def differs(message: str, where: str, expected: object, actual: object) -> BackendError:
    """A peer's blob that is well, and of something else than what is here (`backend_unsupported`)."""
    return BackendError(message, where=f"connect, {where}", expected=expected, actual=actual)


def malformed(message: str, *, actual: object = "", expected: object = "") -> BackendError:
    """A peer's blob that cannot be believed (`message_malformed`)."""
    return BackendError(message, code="message_malformed", where="connect", expected=expected, actual=actual)


def series(version: str) -> str:
    """The first two numbers of a library's version, by which it is compared with a peer's."""
    return ".".join(version.split(".")[:2])
