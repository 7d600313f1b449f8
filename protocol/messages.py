"""Every message that two controls exchange, as frozen structs with a bound on every field.

A message travels as a msgpack map from field name to value behind the envelope of `codec.py`, which also carries its
type number (`MESSAGES`) and its sender's epoch. Ranges are half-open. Rules:
- room messages name (room, generation); with the envelope's epoch that makes duplicates and late ones harmless;
- only durations cross the wire, never a time of day;
- a field is added with a default and listed in `FIELD_SINCE` (see `version.py` for the bump rule).

Orders and reports between a control and its own ranks will join `MESSAGES` in the range `RANK_TYPES`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.indices import MAX_INDICES_PER_OPEN, MAX_LISTS, IndexList

U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U64 = Annotated[int, Meta(ge=0)]
"""msgpack itself ends at 2**64 - 1."""

Generation = Annotated[int, Meta(ge=1, le=2**63 - 1)]
LayerBound = Annotated[int, Meta(ge=0, le=2**32)]
"""A layer id (u32, sentinels included), or one past the largest."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=2_000)]
MAX_VALUE = 512
"""Characters of a request's name, a trace context, a version."""
Value = Annotated[str, Meta(max_length=MAX_VALUE)]
Millis = Annotated[int, Meta(ge=1, le=2**32 - 1)]

MAX_LOST = 64
"""Most epochs that one `Hello` asks about."""
Epochs = Annotated[tuple[U64, ...], Meta(max_length=MAX_LOST)]

MAX_MANIFEST_BYTES = 24 * 2**20
MAX_RECORD_BYTES = 64 * 2**10
MAX_MISMATCHES = 16_384
MAX_WRITERS = 4_096
MAX_REPLAY = 512
"""Most `Wrote` records in one `StatusReply`."""

RANK_TYPES = range(128, 192)
"""Type numbers kept for orders and reports between a control and its own ranks."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


class RoomMessage(Message, frozen=True, kw_only=True):
    """Base of messages about one generation of one room.

    room: the router's 63-bit id. generation: minted by decode's rank 0, rising within one decode epoch, from 1.
    """

    room: U63
    generation: Generation


class Writer(msgspec.Struct, frozen=True, order=True):
    """A source rank, by its place in the prefill instance."""

    pp: U16
    tp: U16

    def __str__(self) -> str:
        return f"pp{self.pp}.tp{self.tp}"


# --- handshake -------------------------------------------------------------------------------------------------------


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """One fact in which two instances differ; empty component or region: the fact is about the whole above it."""

    component: Value
    region: Value
    field: Value
    prefill: Value
    decode: Value


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to two manifests. Refused exactly when it lists a mismatch."""

    accepted: bool
    mismatches: Annotated[tuple[Mismatch, ...], Meta(max_length=MAX_MISMATCHES)] = ()

    def __post_init__(self) -> None:
        if self.accepted == bool(self.mismatches):
            raise ValueError("a verdict is accepted exactly when it lists no mismatch")


class Hello(Message, frozen=True, kw_only=True):
    """Decode's control introduces its instance to prefill's control.

    manifest: msgpack of an `InstanceManifest`, decoded only after the envelope was accepted.
    manifest_digest: xxh3-64 of `manifest`; names the pair of manifests from here on.
    packing_rules: numbers of the packing orders this side can bind, best first.
    heartbeat_ms: how often this side sends a `Heartbeat`; liveness_ms: how long it waits for one. Raises ValueError
    when liveness_ms is under twice heartbeat_ms. lost: epochs under which this prefill spoke to decode before, and
    decode lost it, whose rooms are not all fenced.
    """

    instance: Name
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    manifest_digest: U64
    packing_rules: Annotated[tuple[U16, ...], Meta(min_length=1, max_length=16)]
    heartbeat_ms: Millis
    liveness_ms: Millis
    software: Value = ""
    lost: Epochs = ()

    def __post_init__(self) -> None:
        if self.liveness_ms < 2 * self.heartbeat_ms:
            raise ValueError("liveness_ms must be at least twice heartbeat_ms")


class HelloReply(Message, frozen=True, kw_only=True):
    """Prefill's answer: its own manifest, its verdict, and the digest of the plans it compiled (0 when refused).

    peer_epoch, peer_manifest_digest: the epoch and `Hello.manifest_digest` of the Hello that this answers. fenced:
    those of `Hello.lost` under which nothing is written any more, said by the control that spoke under them, or by a
    later one of its process. control: random, of the control that answers; another one over the same ranks has
    replaced it. Other fields as in `Hello`.
    """

    instance: Name
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    manifest_digest: U64
    peer_epoch: U64
    peer_manifest_digest: U64
    verdict: Verdict
    plan_digest: U64
    packing_rule: U16
    heartbeat_ms: Millis
    liveness_ms: Millis
    software: Value = ""
    fenced: Epochs = ()
    control: U64 = 0

    def __post_init__(self) -> None:
        if self.liveness_ms < 2 * self.heartbeat_ms:
            raise ValueError("liveness_ms must be at least twice heartbeat_ms")


class HelloConfirm(Message, frozen=True, kw_only=True):
    """Decode's own verdict and plan digest over the same two manifests. Rooms may open once both sides agree.

    manifest_digest, peer_manifest_digest: decode's and prefill's manifests, in that order.
    """

    manifest_digest: U64
    peer_manifest_digest: U64
    verdict: Verdict
    plan_digest: U64


class Refusal(Message, frozen=True, kw_only=True):
    """A message was refused: the answer to one that is malformed, unknown or out of place. Never answered itself.

    refused_type: type number of the refused message. room, generation: those it named; 0: none could be read.
    fenced: to a `Hello`, as in `HelloReply`, from a prefill that meets nobody any more.
    """

    error: ErrorInfo
    refused_type: U16
    room: U63 = 0
    generation: U63 = 0
    fenced: Epochs = ()


# --- rooms -----------------------------------------------------------------------------------------------------------


class RoomOpen(RoomMessage, frozen=True, kw_only=True):
    """Decode -> prefill: memory is allocated, write here. Sent again unchanged when prefill does not know the room.

    to_epoch: the prefill incarnation that is meant. request_id: for logs. traceparent: W3C trace context, or empty.
    prompt_tokens, prompt_digest: length and xxh3-64 (packed little-endian u32) of the token ids.
    prefix_tokens: tokens at the start that decode holds already. index_lists: one list a space, each space once.
    ticket: the opaque text that claims a room which prefill computed first, or empty.
    """

    to_epoch: U64
    request_id: Value
    traceparent: Value = ""
    prompt_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    prompt_digest: U64
    prefix_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    index_lists: Annotated[tuple[IndexList, ...], Meta(max_length=MAX_LISTS)] = ()
    ticket: Value = ""

    def __post_init__(self) -> None:
        if self.prefix_tokens > self.prompt_tokens:
            raise ValueError("prefix_tokens exceeds prompt_tokens")
        if len({part.space for part in self.index_lists}) != len(self.index_lists):
            raise ValueError("a space has more than one index list")
        if sum(part.count for part in self.index_lists) > MAX_INDICES_PER_OPEN:
            raise ValueError(f"more than {MAX_INDICES_PER_OPEN} indices")

    @property
    def index_bytes(self) -> int:
        """Bytes that the packed index lists take."""
        return sum(len(part.data) for part in self.index_lists)


class RoomAccepted(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: the open is on record. Repeated for a repeated RoomOpen. state: prefill's room state."""

    state: Name


class RoomRefused(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: this generation was never opened and never will be; so nothing of it can land."""

    error: ErrorInfo


class Queued(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: alive, the request waits behind `ahead` others."""

    ahead: U32 = 0


class Wrote(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: these bytes of one component are DONE at every destination of this writer.

    component: the kind's name. The record covers those of the writer's layers with ids in [layer_start, layer_stop),
    for tokens [token_start, token_stop), counted in the component's own elements (tokens, closed groups, or 0 to 1 for
    a state as a whole). last: this writer writes no more of this component in this room.
    An empty record (all four bounds 0) must be last: the only record of an empty plan, or an end mark.
    nbytes: bytes moved. digests: state digests as packed little-endian u64, one a covered layer, or empty.
    """

    writer: Writer
    component: Name
    layer_start: LayerBound
    layer_stop: LayerBound
    token_start: U32
    token_stop: U32
    last: bool
    nbytes: U64 = 0
    digests: Annotated[bytes, Meta(max_length=8 * 4_096)] = b""

    def __post_init__(self) -> None:
        empty = self.layer_start == self.layer_stop == self.token_start == self.token_stop == 0
        if not empty and not (self.layer_start < self.layer_stop and self.token_start < self.token_stop):
            raise ValueError("a record covers a non-empty range of layers and tokens, or is all zeros")
        if empty and not self.last:
            raise ValueError("an empty record must be the last")
        if len(self.digests) % 8:
            raise ValueError("digests are 8 bytes each")

    @property
    def empty(self) -> bool:
        """True when the record covers nothing."""
        return self.layer_start == self.layer_stop


class Handoff(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: the facts that travel with the state; sent after its writer's transfers are DONE.

    writer: the last PP stage's TP rank 0. covered_tokens: tokens that the state stands for (decode compares it with the
    prompt's). record: the engine's own encoding, at most 64 KiB.
    """

    writer: Writer
    covered_tokens: U32
    record: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class RoomEnd(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: everything was sent; records: how many distinct `Wrote` records that was."""

    records: U32


class Failed(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: the room ended without success; error: the first cause. Fences follow as `AbortAck`."""

    error: ErrorInfo


class Admitted(RoomMessage, frozen=True, kw_only=True):
    """Decode -> prefill: everything arrived and decode goes on alone; prefill may forget the room."""


class Abort(RoomMessage, frozen=True, kw_only=True):
    """Decode -> prefill: write nothing more of this room, then say for each writer that it is fenced.

    error: the first cause (`room_aborted` when a client went away). Repeated until every writer is fenced.
    """

    error: ErrorInfo


class AbortAck(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: the fence of one writer, after Abort and after Failed.

    writer: none stands for every writer of the instance. fenced: True proves that no further byte of this generation
    from this writer can land. False: the writer stopped but cannot prove it; a later True for it is welcome.
    """

    writer: Writer | None
    fenced: bool
    reason: Text = ""


class StatusQuery(RoomMessage, frozen=True, kw_only=True):
    """Decode -> prefill: what did I miss? Idempotent.

    nonce: echoed in the reply. have: distinct `Wrote` records held. after: replay records from this one on.
    """

    nonce: U32
    have: U32 = 0
    after: U32 = 0


class StatusReply(RoomMessage, frozen=True, kw_only=True):
    """Prefill -> decode: where the room stands, with what the query may have missed.

    known: False: prefill has no trace of this generation (state "unknown"). total: distinct records sent so far.
    first, wrote: up to `MAX_REPLAY` of them from number `first` on; none when `have` equals `total`.
    handoff: once sent. ended: RoomEnd was sent. error: the first cause of a failure. acks: fences known so far.
    """

    nonce: U32
    known: bool
    state: Name
    first: U32 = 0
    total: U32 = 0
    wrote: Annotated[tuple[Wrote, ...], Meta(max_length=MAX_REPLAY)] = ()
    handoff: Handoff | None = None
    ended: bool = False
    error: ErrorInfo | None = None
    acks: Annotated[tuple[AbortAck, ...], Meta(max_length=MAX_WRITERS)] = ()

    def __post_init__(self) -> None:
        key = (self.room, self.generation)
        parts: tuple[RoomMessage, ...] = (*self.wrote, *self.acks, *((self.handoff,) if self.handoff else ()))
        if any((part.room, part.generation) != key for part in parts):
            raise ValueError("a replayed message belongs to another room or generation")


class LeaseRenew(Message, frozen=True, kw_only=True):
    """Decode -> prefill: keep this room's computed state at least lease_ms longer. Never answered."""

    room: U63
    lease_ms: Millis


# --- liveness --------------------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True, kw_only=True):
    """The sender's incarnation (its epoch is in the envelope) is alive.

    peer_epoch: the incarnation it believes it speaks to; 0: not known. rooms: rooms it holds with that peer.
    """

    peer_epoch: U64
    seq: U32
    state: Literal["ready", "draining"]
    rooms: U32 = 0


class Draining(Message, frozen=True, kw_only=True):
    """The sender stops: it takes no new rooms and gives open ones up to deadline_ms."""

    deadline_ms: Millis
    reason: Text = ""


MESSAGES: dict[int, type[Message]] = {
    1: Hello,
    2: HelloReply,
    3: HelloConfirm,
    4: Refusal,
    16: RoomOpen,
    17: RoomAccepted,
    18: RoomRefused,
    19: Queued,
    20: Wrote,
    21: Handoff,
    22: RoomEnd,
    23: Failed,
    24: Admitted,
    25: Abort,
    26: AbortAck,
    27: StatusQuery,
    28: StatusReply,
    29: LeaseRenew,
    64: Heartbeat,
    65: Draining,
}
"""Type number -> message. A number is never given a new meaning."""

MESSAGE_SINCE: dict[int, int] = {}
"""Type number -> the minor that brought it; not listed: 0."""

FIELD_SINCE: dict[tuple[str, str], int] = {}
"""(message, field) -> the minor that brought the field; not listed: 0."""
