"""The envelope: order of refusals, versions, features, unknown fields, size caps, garbage."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol import codec, messages, version
from sglang_pd.protocol.codec import HEADER_BYTES, FrameReader, Header
from sglang_pd.protocol.errors import LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.messages import MESSAGES, Heartbeat, RoomEnd
from sglang_pd.protocol.version import HISTORY, PROTOCOL_VERSION, Version, spoken_minor

from .message_samples import EPOCH, SAMPLES

BEAT = SAMPLES["heartbeat"]


def frame(body: bytes, **parts: Any) -> bytes:
    """A frame put together by hand, as the specification says, with parts replaced."""
    names = parts.get("names", b"")
    head = struct.pack(
        "<4sHHHBBIQQQQ",
        parts.get("magic", b"SGPD"),
        parts.get("major", PROTOCOL_VERSION.major),
        parts.get("minor", PROTOCOL_VERSION.minor),
        parts.get("type", 64),
        parts.get("flags", 0),
        len(names),
        parts.get("size", len(body)),
        parts.get("critical", 0),
        parts.get("optional", 0),
        parts.get("epoch", EPOCH),
        0,
    )[:40]
    hash_ = parts.get("hash", xxhash.xxh3_64_intdigest(head + names + body))
    return head + hash_.to_bytes(8, "little") + names + body


GARBAGE = b"\xc1" * 20
"""Bytes that are no msgpack: whoever reads them fails loudly."""

BODY = msgspec.msgpack.encode(BEAT)


def refused(data: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(data)
    return caught.value


def test_layout_is_the_one_specified() -> None:
    assert HEADER_BYTES == 48
    assert codec.encode(BEAT, epoch=EPOCH) == frame(BODY)
    known = frame(BODY, minor=7, optional=5)
    header = codec.read_header(known)
    assert header == Header(
        version=Version(PROTOCOL_VERSION.major, 7),
        type=64,
        ignorable=False,
        names_bytes=0,
        body_bytes=len(BODY),
        critical=0,
        optional=5,
        epoch=EPOCH,
        hash=xxhash.xxh3_64_intdigest(known[:40] + known[48:]),
    )


@pytest.mark.parametrize("major", [0, 1, 3, 65_535])
def test_another_major_is_refused_with_both_versions_and_the_body_unread(major: int) -> None:
    error = refused(frame(GARBAGE, major=major, minor=3, hash=0, type=9_999, critical=1, size=2**32 - 1))
    assert error.code == "version_unsupported"
    assert f"{major}.3" in str(error) and str(PROTOCOL_VERSION) in str(error)


def test_an_unknown_critical_feature_is_refused_by_name_and_the_body_unread() -> None:
    error = refused(frame(GARBAGE, hash=0, critical=1 << 40, names=b"qsa-deltas"))
    assert error.code == "feature_unsupported" and "qsa-deltas" in str(error) and "40" in str(error)
    assert "unnamed" in str(refused(frame(GARBAGE, critical=1 << 40)))


def test_known_features_pass_and_unknown_optional_ones_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "FEATURES", {3: "staged", 5: "digests"})
    data = codec.encode(BEAT, epoch=1, critical=("staged",))
    header = codec.decode(data).header
    assert (header.critical, header.optional, header.names_bytes) == (1 << 3, 1 << 5, 6)
    assert codec.decode(frame(BODY, optional=1 << 63)).message == BEAT
    with pytest.raises(LocalProtocolError):
        codec.encode(BEAT, epoch=1, critical=("unheard",))
    monkeypatch.setattr(version, "FEATURES", {})
    assert "staged" in str(refused(data))


def test_peers_speak_the_lower_minor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spoken_minor(Version(1, 4), Version(1, 2)) == spoken_minor(Version(1, 2), Version(1, 4)) == 2
    monkeypatch.setattr(messages, "FIELD_SINCE", {("Heartbeat", "rooms"): 2})
    monkeypatch.setattr(messages, "MESSAGE_SINCE", {65: 3})
    old = codec.decode(codec.encode(BEAT, epoch=1, minor=1))
    assert old.header.version == Version(PROTOCOL_VERSION.major, 1)
    assert old.message == msgspec.structs.replace(BEAT, rooms=0), "a newer field is not sent to an older peer"
    assert codec.decode(codec.encode(BEAT, epoch=1, minor=2)).message == BEAT
    with pytest.raises(LocalProtocolError) as caught:
        codec.encode(SAMPLES["draining"], epoch=1, minor=2)
    assert caught.value.code == "version_unsupported"


def test_a_newer_minor_with_unknown_fields_is_read_and_they_are_counted() -> None:
    fields = msgspec.to_builtins(SAMPLES["status_reply"], builtin_types=(bytes,))
    fields["shiny"] = {"deep": [1, 2, {"er": None}]}
    fields["error"]["colour"] = "red"
    fields["wrote"][0]["speed"] = 1.5
    received = codec.decode(frame(msgspec.msgpack.encode(fields), type=28, minor=9))
    assert received.message == SAMPLES["status_reply"]
    assert sorted(received.unknown_fields) == [".error.colour", ".shiny", ".wrote[].speed"]


def test_an_absent_optional_field_takes_its_default_and_an_absent_mandatory_one_is_refused() -> None:
    body = msgspec.msgpack.encode({"peer_epoch": 1, "seq": 2, "state": "ready"})
    assert codec.decode(frame(body)).message == Heartbeat(peer_epoch=1, seq=2, state="ready", rooms=0)
    assert "seq" in str(refused(frame(msgspec.msgpack.encode({"peer_epoch": 1, "state": "ready"}))))


def test_a_field_that_appears_twice_is_refused() -> None:
    twice = b"\x84" + b"".join(
        msgspec.msgpack.encode(part) for part in ("peer_epoch", 1, "seq", 2, "state", "ready", "seq", 3)
    )
    assert "twice" in str(refused(frame(twice)))
    nested = msgspec.msgpack.encode(SAMPLES["wrote"])
    assert codec.decode(frame(nested, type=20)).message == SAMPLES["wrote"]


def test_unknown_types_are_refused_unless_they_may_be_ignored() -> None:
    assert "type 9999" in str(refused(frame(GARBAGE, type=9_999)))
    received = codec.decode(frame(GARBAGE, type=9_999, flags=codec.FLAG_IGNORABLE))
    assert received.message is None and received.header.ignorable


@pytest.mark.parametrize("number", sorted(MESSAGES))
def test_the_size_cap_of_each_message_is_judged_from_the_envelope(number: int) -> None:
    limit = codec.body_limit(number)
    assert limit <= codec.MAX_BODY_BYTES
    error = refused(frame(b"", type=number, size=limit + 1))
    assert "too large" in str(error) and MESSAGES[number].__name__ in str(error)


def test_broken_envelopes() -> None:
    assert "shorter" in str(refused(frame(BODY)[:47]))
    assert "magic" in str(refused(frame(BODY, magic=b"HTTP")))
    assert "length" in str(refused(frame(BODY)[:-1]))
    assert "length" in str(refused(frame(BODY) + b"x"))
    assert "not what was sent" in str(refused(frame(BODY, hash=1)))


def test_what_is_not_a_message_is_not_encoded() -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode(msgspec.structs.replace(BEAT, seq=-1), epoch=1)
    with pytest.raises(LocalProtocolError):
        codec.encode(BEAT, epoch=2**64)
    with pytest.raises(LocalProtocolError):
        codec.encode(messages.RoomMessage(room=1, generation=1), epoch=1)


def test_too_large_a_message_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.BODY_BYTES, "RoomEnd", 10)
    with pytest.raises(LocalProtocolError, match="too large"):
        codec.encode(RoomEnd(room=1, generation=1, records=1), epoch=1)


PICKLE = b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)


@given(st.sampled_from(sorted(MESSAGES)), st.one_of(st.binary(max_size=300), st.just(PICKLE)))
def test_random_bodies_decode_or_are_refused(number: int, body: bytes) -> None:
    try:
        message = codec.decode(frame(body, type=number)).message
    except RemoteProtocolError as error:
        assert error.code == "message_malformed"
    else:
        assert isinstance(message, MESSAGES[number])


@given(st.sampled_from(sorted(SAMPLES)), st.integers(0, 10**9), st.integers(1, 255))
def test_a_changed_byte_never_passes_as_the_message(name: str, where: int, change: int) -> None:
    good = codec.encode(SAMPLES[name], epoch=EPOCH)
    at = where % len(good)
    bad = good[:at] + bytes([good[at] ^ change]) + good[at + 1 :]
    with pytest.raises(RemoteProtocolError):
        codec.decode(bad)


@given(st.sampled_from(sorted(SAMPLES)), st.integers(0, 10**9), st.integers(0, 255))
def test_a_changed_body_with_a_matching_hash_is_valid_or_refused(name: str, where: int, value: int) -> None:
    number = codec.type_number(type(SAMPLES[name]))
    body = bytearray(codec.encode_body(SAMPLES[name]))
    body[where % len(body)] = value
    try:
        message = codec.decode(frame(bytes(body), type=number)).message
    except RemoteProtocolError:
        return
    assert message is not None
    assert codec.decode(codec.encode(message, epoch=1)).message == message, "what is taken can be said again"


@pytest.mark.parametrize("depth", [500, 100_000])
def test_deep_nesting_is_refused_or_skipped_not_fatal(depth: int) -> None:
    deep = b"\x84" + BODY[1:] if BODY[0] == 0x83 else b"\x85" + BODY[1:]
    body = deep + msgspec.msgpack.encode("odd") + b"\x91" * depth + b"\x00"
    try:
        assert codec.decode(frame(body, size=len(body))).unknown_fields == (".odd",)
    except RemoteProtocolError as error:
        assert error.code == "message_malformed"


def test_too_many_fields_are_refused() -> None:
    body = msgspec.msgpack.encode({**msgspec.to_builtins(BEAT), **{f"x{n}": 0 for n in range(codec.MAX_FIELDS)}})
    assert "length" in str(refused(frame(body)))


@given(st.lists(st.sampled_from(sorted(SAMPLES)), max_size=4), st.integers(1, 97))
def test_a_stream_is_cut_into_the_same_frames(names: list[str], step: int) -> None:
    frames = [codec.encode(SAMPLES[name], epoch=EPOCH) for name in names]
    stream, reader, out = b"".join(frames), FrameReader(), []
    for start in range(0, len(stream), step):
        out += reader.feed(stream[start : start + step])
        assert reader.held_bytes <= max(map(len, frames)) + step
    assert out == frames and reader.held_bytes == 0


def test_a_stream_out_of_step_stays_broken() -> None:
    reader = FrameReader()
    assert reader.feed(frame(BODY)[:30]) == []
    with pytest.raises(RemoteProtocolError):
        reader.feed(bytes(400))
    with pytest.raises(RemoteProtocolError):
        reader.feed(frame(BODY))
    assert reader.held_bytes == 0
    named = frame(GARBAGE, critical=1 << 9, names=b"n" * 200)
    slow = FrameReader()
    assert slow.feed(named[:100]) == [], "names are waited for, so that the refusal can name them"
    with pytest.raises(RemoteProtocolError, match="nnnn"):
        slow.feed(named[100:])


def test_history_is_in_order_and_ends_at_what_is_spoken() -> None:
    versions = [entry for entry, _ in HISTORY]
    assert versions == sorted(set(versions)) and versions[-1] == PROTOCOL_VERSION
    assert all(text for _, text in HISTORY)
