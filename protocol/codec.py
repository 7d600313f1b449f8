"""The envelope, and messages to and from bytes. Pure: bytes in, messages out.

Envelope, 48 bytes, little-endian, the same in every version of the protocol, read before any body:

    0  magic "SGPD"             24  optional feature bits   u64
    4  major            u16     32  sender's epoch          u64
    6  minor            u16     40  xxh3-64 of all the rest u64
    8  message type     u16     48  names of the critical features, ASCII, comma between (names length bytes)
   10  flags            u8      ..  body: one msgpack map (body length bytes)
   11  names length     u8
   12  body length      u32
   16  critical feature bits u64

Order of refusal: magic, major, critical features, type, size, hash, then the body itself.
"""

from __future__ import annotations

import struct
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import xxhash

from sglang_pd.protocol import messages, version
from sglang_pd.protocol.errors import LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.messages import MESSAGES, Message
from sglang_pd.protocol.version import PROTOCOL_VERSION, Version

MAGIC = b"SGPD"
_HEADER = struct.Struct("<4sHHHBBIQQQQ")
HEADER_BYTES = _HEADER.size
_NAMES_LENGTH_AT = 11
_HASH_AT = 40

FLAG_IGNORABLE = 1
"""Flag bit 0: a receiver that does not know the type drops the message and counts it; else it is refused."""

MAX_BODY_BYTES = 32 * 2**20
"""Largest body of any message, known or not."""

DEFAULT_BODY_BYTES = 16 * 2**10
BODY_BYTES: dict[str, int] = {
    "Hello": MAX_BODY_BYTES,
    "HelloReply": MAX_BODY_BYTES,
    "HelloConfirm": 8 * 2**20,
    "Refusal": 2**20,
    "RoomOpen": 16 * 2**20 + 64 * 2**10,
    "RoomRefused": 2**20,
    "Wrote": 64 * 2**10,
    "Handoff": 66 * 2**10,
    "Failed": 2**20,
    "Abort": 2**20,
    "StatusReply": 4 * 2**20,
}
"""Largest body by message; not listed: `DEFAULT_BODY_BYTES`."""

MAX_FIELDS = 256
"""Most entries in a map that stands for a struct, unknown ones included."""

IGNORABLE: frozenset[int] = frozenset()
"""Type numbers sent with `FLAG_IGNORABLE`. None in 1.0."""


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded and accepted envelope; the body was not looked at."""

    version: Version
    type: int
    ignorable: bool
    names_bytes: int
    body_bytes: int
    critical: int
    optional: int
    epoch: int
    hash: int

    @property
    def body_start(self) -> int:
        """Offset of the body in the frame, bytes."""
        return HEADER_BYTES + self.names_bytes

    @property
    def frame_bytes(self) -> int:
        """Envelope, names and body together, bytes."""
        return self.body_start + self.body_bytes


@dataclass(frozen=True, slots=True)
class Received:
    """One decoded frame. message is None for an unknown type that says it may be ignored.

    unknown_fields: paths of the fields that were ignored, for the caller to count.
    """

    header: Header
    message: Message | None
    unknown_fields: tuple[str, ...]


def body_limit(message_type: int) -> int:
    """Largest body, bytes, of a message of that type number."""
    known = MESSAGES.get(message_type)
    return MAX_BODY_BYTES if known is None else BODY_BYTES.get(known.__name__, DEFAULT_BODY_BYTES)


# --- out -------------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Message]] = {}


def _decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Message]:
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return found


def type_number(kind: type[Message]) -> int:
    """The type number of a message class; LocalProtocolError for one that is not in `MESSAGES`."""
    for number, known in MESSAGES.items():
        if known is kind:
            return number
    raise LocalProtocolError("not a message of this protocol", code="message_malformed", where=kind.__name__)


def encode_body(message: Message, *, minor: int = PROTOCOL_VERSION.minor) -> bytes:
    """The body of a message for a peer that speaks `minor`: fields that are newer are left out.

    The bytes are decoded again before they are returned, so that nothing leaves that a peer must refuse.
    Raises LocalProtocolError for a message or value that does not fit the wire, or a message newer than `minor`.
    """
    kind = type(message)
    number = type_number(kind)
    if messages.MESSAGE_SINCE.get(number, 0) > minor:
        raise LocalProtocolError(
            "the peer's version lacks this message", code="version_unsupported", where=kind.__name__, actual=minor
        )
    newer = {field for (name, field), since in messages.FIELD_SINCE.items() if name == kind.__name__ and since > minor}
    value: object = message
    if newer:
        value = {name: item for name, item in msgspec.structs.asdict(message).items() if name not in newer}
    try:
        body = _encoder.encode(value)
        _decoder(kind).decode(body)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(
            f"does not fit the wire: {error}", code="message_malformed", where=kind.__name__
        ) from error
    if len(body) > body_limit(number):
        raise LocalProtocolError(
            "the message is too large",
            code="message_malformed",
            where=kind.__name__,
            expected=f"<= {body_limit(number)} bytes",
            actual=f"{len(body)} bytes",
        )
    return body


def encode(
    message: Message, *, epoch: int, minor: int = PROTOCOL_VERSION.minor, critical: tuple[str, ...] = ()
) -> bytes:
    """One frame: envelope and body. epoch: the sender's. critical: names of features the peer must know.

    Raises LocalProtocolError as `encode_body` does, and for an epoch outside u64 or an unknown feature.
    """
    number = type_number(type(message))
    body = encode_body(message, minor=minor)
    try:
        mask = version.feature_mask(critical)
        names = ",".join(critical).encode("ascii")
        fields = (
            MAGIC,
            PROTOCOL_VERSION.major,
            minor,
            number,
            FLAG_IGNORABLE if number in IGNORABLE else 0,
            len(names),
            len(body),
            mask,
            version.feature_mask(tuple(version.FEATURES.values())) & ~mask,
            epoch,
        )
        head = _HEADER.pack(*fields, 0)[:_HASH_AT]
    except (struct.error, KeyError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"the envelope cannot say that: {error}", code="message_malformed") from error
    return head + frame_hash(head, names + body).to_bytes(8, "little") + names + body


def frame_hash(head: bytes | memoryview, rest: bytes | memoryview) -> int:
    """xxh3-64 (seed 0) of a frame without its hash. head: the envelope's first 40 bytes. rest: names and body."""
    hasher = xxhash.xxh3_64(head)
    hasher.update(rest)
    return hasher.intdigest()


# --- in --------------------------------------------------------------------------------------------------------------


def read_header(data: bytes | memoryview) -> Header:
    """Judge the envelope at the start of `data` (at least `HEADER_BYTES` long; names may still be missing there).

    Raises RemoteProtocolError: `message_malformed` for a wrong magic, an unknown type that may not be ignored, or a
    body over its bound; `version_unsupported` for another major (both versions in the error); `feature_unsupported`
    for a critical feature not known here. The body is not read.
    """
    if len(data) < HEADER_BYTES:
        raise RemoteProtocolError("shorter than an envelope", expected=f">= {HEADER_BYTES} bytes", actual=len(data))
    magic, major, minor, kind, flags, names_bytes, body_bytes, critical, optional, epoch, hash_ = _HEADER.unpack_from(
        data
    )
    if magic != MAGIC:
        raise RemoteProtocolError("not a message of this protocol", where="magic", expected=MAGIC, actual=magic)
    peer = Version(major, minor)
    if major != PROTOCOL_VERSION.major:
        raise RemoteProtocolError(
            f"the peer speaks protocol {peer}, this side speaks {PROTOCOL_VERSION}",
            code="version_unsupported",
            where="envelope",
            expected=f"major {PROTOCOL_VERSION.major}",
            actual=f"major {major}",
            hint="run the same major version of sglang-pd on both sides",
        )
    _check_features(critical, bytes(data[HEADER_BYTES : HEADER_BYTES + names_bytes]), peer)
    known = MESSAGES.get(kind)
    if known is None and not flags & FLAG_IGNORABLE:
        raise RemoteProtocolError("unknown message type", where="envelope", actual=f"type {kind} of protocol {peer}")
    if body_bytes > body_limit(kind):
        where = known.__name__ if known else f"type {kind}"
        raise RemoteProtocolError(
            "the message is too large",
            where=where,
            expected=f"<= {body_limit(kind)} bytes",
            actual=f"{body_bytes} bytes",
        )
    return Header(
        version=peer,
        type=kind,
        ignorable=bool(flags & FLAG_IGNORABLE),
        names_bytes=names_bytes,
        body_bytes=body_bytes,
        critical=critical,
        optional=optional,
        epoch=epoch,
        hash=hash_,
    )


def _check_features(critical: int, raw_names: bytes, peer: Version) -> None:
    if not critical:
        return
    unknown = [bit for bit in range(64) if critical >> bit & 1 and bit not in version.FEATURES]
    if not unknown:
        return
    given = [name for name in raw_names.decode("ascii", "replace").split(",") if name]
    strange = [name for name in given if name not in version.FEATURES.values()]
    raise RemoteProtocolError(
        f"the peer (protocol {peer}) requires features that are not spoken here: {', '.join(strange) or 'unnamed'}",
        code="feature_unsupported",
        where="envelope",
        expected=f"of {sorted(version.FEATURES.values())}",
        actual=f"bits {unknown}",
    )


def decode(frame: bytes | memoryview) -> Received:
    """Decode exactly one frame. Raises RemoteProtocolError as `read_header`, and for a body that breaks any rule."""
    header = read_header(frame)
    if len(frame) != header.frame_bytes:
        raise RemoteProtocolError(
            "the frame's length is not the envelope's",
            expected=f"{header.frame_bytes} bytes",
            actual=f"{len(frame)} bytes",
        )
    view = memoryview(frame)
    body = view[header.body_start :]
    if frame_hash(view[:_HASH_AT], view[HEADER_BYTES:]) != header.hash:
        raise RemoteProtocolError("the frame is not what was sent", where="xxh3-64")
    kind = MESSAGES.get(header.type)
    if kind is None:
        return Received(header, None, ())
    message, unknown = decode_body(kind, body)
    return Received(header, message, unknown)


def decode_body(kind: type[Message], body: bytes | memoryview) -> tuple[Message, tuple[str, ...]]:
    """Decode a body as `kind`; gives the message and the paths of fields it has that `kind` does not.

    Raises RemoteProtocolError (`message_malformed`) for a wrong type, a bound, a repeated field, or bad msgpack.
    """
    try:
        message = _decoder(kind).decode(body)
        return message, tuple(_unknown_fields(_shape_of(kind), body, ""))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"does not decode: {error}"[:500], where=kind.__name__) from error


# --- unknown and repeated fields -------------------------------------------------------------------------------------

_map_decoder = msgspec.msgpack.Decoder(Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=MAX_FIELDS)])
_list_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class _Shape:
    """A struct's field names, and the shapes of those that hold structs (True: a list of them)."""

    fields: frozenset[str]
    nested: dict[str, tuple[_Shape, bool]]


_shapes: dict[type[Any], _Shape] = {}


def _shape_of(kind: type[msgspec.Struct]) -> _Shape:
    found = _shapes.get(kind)
    if found is None:
        nested: dict[str, tuple[_Shape, bool]] = {}
        hints = typing.get_type_hints(kind)
        for name in kind.__struct_fields__:
            inner, many = _struct_in(hints[name])
            if inner is not None:
                nested[name] = (_shape_of(inner), many)
        found = _shapes[kind] = _Shape(frozenset(kind.__struct_fields__), nested)
    return found


def _struct_in(hint: Any) -> tuple[type[msgspec.Struct] | None, bool]:
    """The struct in `S`, `S | None` or `tuple[S, ...]`, and whether it is a tuple of them."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint, False
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args:
        return _struct_in(args[0])[0], True
    if origin in (types.UnionType, typing.Union):
        for arg in args:
            inner, many = _struct_in(arg)
            if inner is not None:
                return inner, many
    return None, False


def _map_length(raw: bytes | memoryview) -> int:
    first = raw[0]
    if first == 0xDE:
        return int.from_bytes(raw[1:3], "big")
    if first == 0xDF:
        return int.from_bytes(raw[1:5], "big")
    return first & 0x0F


def _unknown_fields(shape: _Shape, raw: bytes | memoryview, path: str) -> list[str]:
    """Paths of unknown fields in a map that already decoded; ValueError for a field that appears twice."""
    found = _map_decoder.decode(raw)
    if len(found) != _map_length(raw):
        raise ValueError(f"a field appears twice at `${path}`")
    unknown = [f"{path}.{name}" for name in found if name not in shape.fields]
    for name, (inner, many) in shape.nested.items():
        part = found.get(name)
        view = memoryview(part) if part is not None else None
        if view is None or view[0] == 0xC0:
            continue
        if not many:
            unknown += _unknown_fields(inner, view, f"{path}.{name}")
            continue
        for item in _list_decoder.decode(view):
            unknown += _unknown_fields(inner, memoryview(item), f"{path}.{name}[]")
    return unknown


# --- streams ---------------------------------------------------------------------------------------------------------


class FrameReader:
    """Cuts a byte stream into frames, for links that keep no message borders. Holds at most one frame's bytes.

    After an error it stays broken: a stream out of step cannot be trusted again.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._error: RemoteProtocolError | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they come; returns the frames that are complete. Raises RemoteProtocolError, then always."""
        if self._error is not None:
            raise self._error
        self._held += data
        frames: list[bytes] = []
        try:
            while len(self._held) >= HEADER_BYTES:
                if len(self._held) < HEADER_BYTES + self._held[_NAMES_LENGTH_AT]:
                    break
                with memoryview(self._held) as view:
                    size = read_header(view).frame_bytes
                if len(self._held) < size:
                    break
                frames.append(bytes(self._held[:size]))
                del self._held[:size]
        except RemoteProtocolError as error:
            self._error = error
            self._held.clear()
            raise
        return frames

    @property
    def held_bytes(self) -> int:
        """Bytes waiting for the rest of their frame."""
        return len(self._held)
