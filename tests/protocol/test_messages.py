"""Golden vectors of every message, bounds of every field, and the packed index lists.

Vectors of a released version never change. A new message gets its own by `python scripts/write_vectors.py`, which
writes only what is not there.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as inspect
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol import codec
from sglang_pd.protocol.errors import LocalProtocolError, PdError, RemoteProtocolError
from sglang_pd.protocol.indices import MAX_INDICES, IndexList, PromptDigest, pack_indices, prompt_digest
from sglang_pd.protocol.messages import FIELD_SINCE, MESSAGES, RANK_TYPES, Hello, Message, RoomOpen, Verdict, Wrote
from sglang_pd.protocol.tickets import Ticket, decode_ticket, encode_ticket

from .message_samples import EPOCH, SAMPLES, VERDICT

VECTORS = Path(__file__).resolve().parent.parent / "vectors" / "v2"


def test_there_is_a_sample_and_a_vector_of_every_message() -> None:
    assert {type(message) for message in SAMPLES.values()} == set(MESSAGES.values())
    assert {path.stem for path in VECTORS.glob("*.bin")} == {path.stem for path in VECTORS.glob("*.json")}
    assert {path.stem for path in VECTORS.glob("*.bin")} >= set(SAMPLES)
    assert not set(MESSAGES) & set(RANK_TYPES)


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.bin")), ids=lambda path: path.stem)
def test_vectors_decode_and_encode_to_the_same_bytes(path: Path) -> None:
    frame = path.read_bytes()
    received = codec.decode(frame)
    message = received.message
    assert message is not None and not received.unknown_fields and received.header.epoch == EPOCH
    minor = received.header.version.minor
    assert codec.encode(message, epoch=EPOCH, minor=minor) == frame
    twin = path.with_suffix(".json").read_bytes()
    assert msgspec.json.decode(twin, type=type(message)) == message
    newer = {field for (name, field), since in FIELD_SINCE.items() if name == type(message).__name__ and since > minor}
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if name not in newer}
    assert msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n" == twin


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.bin")), ids=lambda path: path.stem)
def test_a_peer_that_knows_only_the_page_reads_the_vectors(path: Path) -> None:
    frame = path.read_bytes()
    magic, names_bytes, body_bytes, sent = frame[:4], frame[11], *struct.unpack_from("<I24xQ", frame, 12)
    body = frame[48 + names_bytes :]
    assert magic == b"SGPD" and len(body) == body_bytes and xxhash.xxh3_64_intdigest(frame[:40] + frame[48:]) == sent

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    assert plain(msgspec.msgpack.decode(body)) == json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_samples_are_their_vectors(name: str) -> None:
    assert codec.decode((VECTORS / f"{name}.bin").read_bytes()).message == SAMPLES[name]


def test_samples_leave_no_field_at_its_default() -> None:
    for message in SAMPLES.values():
        for field in msgspec.structs.fields(type(message)):
            value = getattr(message, field.name)
            default = field.default
            assert default is msgspec.NODEFAULT or value != default, f"{type(message).__name__}.{field.name}"


def test_every_integer_string_and_list_of_every_message_is_bounded() -> None:
    def judge(kind: inspect.Type, path: str) -> None:
        if isinstance(kind, inspect.IntType):
            # msgpack itself ends at 2**64 - 1, so a lower bound is enough there.
            assert kind.ge is not None, path
        elif isinstance(kind, inspect.StrType | inspect.BytesType):
            assert kind.max_length is not None, path
        elif isinstance(kind, inspect.VarTupleType | inspect.ListType):
            assert kind.max_length is not None, path
            judge(kind.item_type, path + "[]")
        elif isinstance(kind, inspect.DictType):
            assert kind.max_length is not None, path
            judge(kind.key_type, path + " keys")
            judge(kind.value_type, path + " values")
        elif isinstance(kind, inspect.UnionType):
            for part in kind.types:
                judge(part, path)
        elif isinstance(kind, inspect.StructType):
            for field in kind.fields:
                judge(field.type, f"{path}.{field.name}")
        else:
            assert isinstance(kind, inspect.BoolType | inspect.NoneType | inspect.LiteralType), (path, kind)

    for message in MESSAGES.values():
        judge(inspect.type_info(message), message.__name__)


def refuse(kind: type[Message], **fields: object) -> str:
    """Encode a raw map as a peer might, and give the refusal's text."""
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode_body(kind, msgspec.msgpack.encode(fields))
    assert caught.value.code == "message_malformed"
    return str(caught.value)


def fields_of(name: str, **changes: object) -> dict[str, object]:
    return {**msgspec.to_builtins(SAMPLES[name], builtin_types=(bytes,)), **changes}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("room_open", {"room": 2**63}, "$.room"),
        ("room_open", {"room": -1}, "$.room"),
        ("room_open", {"generation": 0}, "$.generation"),
        ("room_open", {"room": "7"}, "$.room"),
        ("room_open", {"room": True}, "$.room"),
        ("room_open", {"prompt_tokens": 0}, "$.prompt_tokens"),
        ("room_open", {"prefix_tokens": 130}, "prefix_tokens exceeds"),
        ("room_open", {"request_id": "x" * 513}, "$.request_id"),
        ("room_open", {"index_lists": [{"space": 1, "count": 0, "form": "array", "data": b""}] * 33}, "length <= 32"),
        ("room_open", {"index_lists": [{"space": 1, "count": 0, "form": "array", "data": b""}] * 2}, "more than one"),
        ("room_open", {"index_lists": [{"space": 1, "count": 1, "form": "array", "data": b"123"}]}, "takes 4 bytes"),
        ("room_open", {"index_lists": [{"space": 1, "count": 1, "form": "list", "data": b"1234"}]}, "form"),
        ("handoff", {"record": bytes(65_537)}, "$.record"),
        ("wrote", {"writer": [0]}, "$.writer"),
        ("wrote", {"writer": [0, 65_536]}, "$.writer"),
        ("wrote", {"layer_stop": 2**32 + 1}, "$.layer_stop"),
        ("wrote", {"token_stop": 64}, "non-empty"),
        ("wrote", {"layer_start": 0, "layer_stop": 0, "token_start": 0, "token_stop": 0, "last": False}, "the last"),
        ("wrote", {"digests": b"1234567"}, "8 bytes"),
        ("hello", {"liveness_ms": 1_999}, "twice"),
        ("hello", {"heartbeat_ms": 0}, "$.heartbeat_ms"),
        ("hello", {"packing_rules": []}, "$.packing_rules"),
        ("hello_confirm", {"verdict": {"accepted": False, "mismatches": []}}, "accepted exactly"),
        ("heartbeat", {"state": "asleep"}, "asleep"),
        ("failed", {"error": {"code": "", "message": "x"}}, "$.error.code"),
        ("failed", {"error": {"code": "x", "message": "x" * 2_001}}, "$.error.message"),
        ("status_reply", {"acks": [{**fields_of("abort_ack"), "room": 1}]}, "another room"),
    ],
)
def test_values_out_of_bounds_are_refused_with_their_path(name: str, changes: dict[str, object], said: str) -> None:
    assert said in refuse(type(SAMPLES[name]), **fields_of(name, **changes))


def test_a_ranges_bomb_is_refused_before_it_expands() -> None:
    def ranges(*runs: tuple[int, int]) -> bytes:
        return np.array(runs, "<u4").tobytes()

    with pytest.raises(ValueError, match="the list says"):
        IndexList(space=1, count=5, form="ranges", data=ranges((0, 2**32 - 1)))
    with pytest.raises(ValueError, match="empty or runs past"):
        IndexList(space=1, count=2, form="ranges", data=ranges((2**32 - 1, 2)))
    with pytest.raises(ValueError, match="empty or runs past"):
        IndexList(space=1, count=3, form="ranges", data=ranges((1, 3), (1, 0)))
    big = {"count": MAX_INDICES, "form": "ranges", "data": ranges((0, MAX_INDICES))}
    lists = [{"space": n, **big} for n in range(3)]
    assert "indices" in refuse(RoomOpen, **fields_of("room_open", index_lists=lists))


def test_constructors_refuse_what_the_wire_refuses() -> None:
    with pytest.raises(ValueError, match="accepted exactly"):
        Verdict(accepted=True, mismatches=VERDICT.mismatches)
    with pytest.raises(ValueError, match="twice"):
        msgspec.structs.replace(SAMPLES["hello"], liveness_ms=1)
    with pytest.raises(LocalProtocolError, match="does not fit"):
        codec.encode(msgspec.structs.replace(SAMPLES["wrote"], component="x" * 129), epoch=1)
    assert isinstance(SAMPLES["wrote"], Wrote) and isinstance(SAMPLES["hello"], Hello)


# --- index lists -----------------------------------------------------------------------------------------------------

RUNS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 40)), max_size=30)


@given(RUNS)
def test_index_lists_come_back_as_they_were_in_the_smaller_form(runs: list[tuple[int, int]]) -> None:
    indices = np.array([value for first, n in runs for value in range(first, min(first + n, 2**32))], np.int64)
    packed = pack_indices(3, indices)
    assert packed.indices().dtype == np.uint32
    np.testing.assert_array_equal(packed.indices().astype(np.int64), indices)
    breaks = 1 + sum(int(b) - int(a) != 1 for a, b in zip(indices, indices[1:], strict=False)) if len(indices) else 0
    assert len(packed.data) == min(4 * len(indices), 8 * breaks)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=IndexList) == packed


@pytest.mark.parametrize(
    "bad",
    [[-1], [2**32], [[1, 2]], [0.5], np.zeros(MAX_INDICES + 1, np.int64)],
    ids=["neg", "big", "2d", "float", "long"],
)
def test_what_is_no_index_list_is_not_packed(bad: Any) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        pack_indices(0, bad)
    assert caught.value.code == "index_invalid"


def test_prompt_digest_is_of_packed_little_endian_ids_and_takes_any_integers() -> None:
    ids = [1, 2, 2**32 - 1]
    want = xxhash.xxh3_64_intdigest(b"\1\0\0\0\2\0\0\0\xff\xff\xff\xff")
    assert prompt_digest(ids) == prompt_digest(np.array(ids, np.int64)) == prompt_digest(np.array(ids, ">u4")) == want
    assert prompt_digest([]) == xxhash.xxh3_64_intdigest(b"") == PromptDigest().value
    pieces = PromptDigest()
    for piece in (ids[:1], [], np.array(ids[1:], np.int64)):
        pieces.add(piece)
    assert pieces.value == want
    with pytest.raises(LocalProtocolError, match="index_invalid"):
        pieces.add([-1])
    assert pieces.value == want
    for bad in ([-1], [2**32], [1.5], [float("nan")], [[1, 2]], ["1"], [None], [True], np.array([2**63], np.uint64)):
        with pytest.raises(LocalProtocolError, match="index_invalid"):
            prompt_digest(bad)  # type: ignore[arg-type]


# --- tickets ---------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=60), st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1))
def test_tickets_come_back(instance: str, epoch: int, room: int) -> None:
    ticket = Ticket(instance, epoch, room)
    assert decode_ticket(encode_ticket(ticket)) == ticket


@given(st.one_of(st.text(max_size=80), st.binary(max_size=60).map(lambda raw: raw.hex())))
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(PdError) as caught:
        decode_ticket(text)
    assert caught.value.code == "message_malformed"


def test_a_changed_ticket_is_refused() -> None:
    text = encode_ticket(Ticket("prefill-0", EPOCH, 9))
    for at in range(len(text) - 1):
        other = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        with pytest.raises(RemoteProtocolError):
            decode_ticket(other)
    with pytest.raises(LocalProtocolError):
        encode_ticket(Ticket("x" * 129, 1, 1))
