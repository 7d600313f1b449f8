"""What a control tells its own ranks, and what they report: serialisable, so that a rank may be another process.

Both sides are one version of one program, yet everything is decoded by type and bounded: the socket is a socket.
Index lists travel as the packed lists of the room protocol.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglang_pd.backends.library.process import ProcessIdentity
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.indices import IndexList
from sglang_pd.protocol.manifest import RankId, Term
from sglang_pd.protocol.manifest_size import MAX_RANKS
from sglang_pd.protocol.messages import Wrote
from sglang_pd.worker.peers.seeking import Owed

MAX_MANIFEST_BYTES = 24 * 2**20
Manifest = Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)]
Epoch = Annotated[int, msgspec.Meta(ge=0)]
RoomId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Lists = Annotated[tuple[IndexList, ...], msgspec.Meta(max_length=64)]
Address = Annotated[str, msgspec.Meta(max_length=512)]
MAX_OWED = 4_096


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all orders, control to rank."""


class Pair(Order, frozen=True, kw_only=True):
    """Meet an accepted peer instance. source: this side writes; connect to the ranks it has bytes for.

    prefill, decode: msgpack of both `InstanceManifest`s. address: at which the peer is called; empty for one that
    calls. Answered by `Paired`.
    """

    peer_epoch: Epoch
    source: bool
    prefill: Manifest
    decode: Manifest
    address: Address = ""


class Unpair(Order, frozen=True, kw_only=True):
    """Forget a peer instance and disconnect from its ranks."""

    peer_epoch: Epoch


class Through(Order, frozen=True, kw_only=True):
    """Destination: these writers of a lost peer, by their epochs, said themselves that they write no more as that peer;
    none: all of them. Answered by `Revoked` once all have their proof and the transport can be met.
    """

    peer_epoch: Epoch
    writers: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()


class Begin(Order, frozen=True, kw_only=True):
    """Both index lists of a room. A source writes chunks as its engine hands them over; a destination keeps the lists
    to verify what arrived. verify: take digests. handle: at a source, under which its engine hands chunks over.
    """

    room: RoomId
    generation: RoomId
    handle: RoomId = 0
    peer_epoch: Epoch
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)]
    src_lists: Lists
    dst_lists: Lists
    verify: bool


class Halt(Order, frozen=True, kw_only=True):
    """Source: post nothing more for the room; report `Fenced` once nothing can land, or that it cannot be proven."""

    room: RoomId
    generation: RoomId
    handle: RoomId


class Forget(Order, frozen=True, kw_only=True):
    """The room is over: drop what is kept of it. generation 0: it never began. handle: at a source, else 0."""

    room: RoomId
    generation: RoomId
    handle: RoomId = 0


class Live(Order, frozen=True, kw_only=True):
    """All rooms that are not over, by generation, and all peers: others are forgotten, as after a lost `Forget` or
    `Unpair`.
    """

    generations: Annotated[tuple[RoomId, ...], msgspec.Meta(max_length=2**17)]
    peers: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=2**17)]


class Seek(Order, frozen=True, kw_only=True):
    """Destination: seek proof that nothing of that peer's ranks lands here any more. Answered by `Revoked`.

    prefill, decode, address: as in `Pair`, for a rank that missed it; empty where nobody was ever told.
    """

    peer_epoch: Epoch
    prefill: Manifest = b""
    decode: Manifest = b""
    address: Address = ""


class Check(Order, frozen=True, kw_only=True):
    """Destination: digest what a record claims to have written here. Answered by `Checked`."""

    number: int
    record: Wrote


class Rejoin(Order, frozen=True, kw_only=True):
    """The control of that epoch does not know the rank: it must send `Joined`, again or for the first time.

    A control that is not the one the rank served knows nothing of the rooms that may still move in the rank's memory:
    the rank first proves that none does.
    """

    control_epoch: Epoch


class Welcome(Order, frozen=True, kw_only=True):
    """Answer to `Joined` and to every `Alive` of a rank in another process: the control of that epoch has it.

    liveness_s: a rank that hears nothing for so long connects anew, as one that is not heard is given up.
    """

    control_epoch: Epoch
    liveness_s: Annotated[float, msgspec.Meta(gt=0)]


class Stop(Order, frozen=True, kw_only=True):
    """The instance ends: close the backend and end the process or thread."""


AnyOrder = Pair | Unpair | Through | Begin | Halt | Forget | Live | Seek | Check | Rejoin | Welcome | Stop


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all reports, rank to control."""


class Joined(Report, frozen=True, kw_only=True):
    """A rank is there, with its `RankManifest` in msgpack. Sent at start, when a control comes back, and with a changed
    manifest (a backend that had to be rebuilt). control_epoch: the control that asked for it (`Rejoin`), and has the
    rank from then on; 0: none has asked. Void at any other control. This rank writes nothing for a former control any
    more. owed: those who may still write into it for one; until the last of them is proven to have ended (`Revoked`, or
    another `Joined` without it) no room may have this rank's memory.
    """

    control_epoch: Epoch = 0
    term: Term
    """As in the manifest. Another agent over the same transport knows nothing of what the former one wrote."""
    owed: Annotated[tuple[Owed, ...], msgspec.Meta(max_length=MAX_OWED)] = ()
    process: ProcessIdentity | None = None
    """Of a rank in another process, so that its death can be proven on one host."""
    rebuilt: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How often the transport was built anew; when it rises, whatever peers had connected to is gone."""

    rank: RankId
    epoch: Epoch
    manifest: Manifest


class Paired(Report, frozen=True, kw_only=True):
    """The rank is connected to the peer, or says why not. transport: what carries the bytes."""

    peer_epoch: Epoch
    transport: str = ""
    error: ErrorInfo | None = None


class WroteRange(Report, frozen=True, kw_only=True):
    """A range of one component is DONE at all destinations of this rank. descriptors: pieces it was posted in."""

    record: Wrote
    descriptors: int = 0


class HandedOff(Report, frozen=True, kw_only=True):
    """The handoff record, from the rank that made it, all its transfers DONE."""

    room: RoomId
    generation: RoomId
    covered_tokens: int
    record: Annotated[bytes, msgspec.Meta(max_length=2**16)]


class RoomFault(Report, frozen=True, kw_only=True):
    """A room cannot go on at this rank: the first cause. generation 0: it has not begun here, `handle` says which."""

    room: RoomId
    generation: RoomId
    handle: RoomId = 0
    error: ErrorInfo


class PeerFault(Report, frozen=True, kw_only=True):
    """The transport to a peer's rank is gone for good: this pair must shake hands again."""

    peer_epoch: Epoch
    error: ErrorInfo


class Fenced(Report, frozen=True, kw_only=True):
    """Answer to `Halt`: True proves that nothing more of the room lands; False that it cannot be proven (yet).

    source_free: nothing reads this rank's memory for the room any more, whatever may still land.
    """

    room: RoomId
    generation: RoomId
    fenced: bool
    source_free: bool = False
    reason: str = ""


class Revoked(Report, frozen=True, kw_only=True):
    """Answer to `Seek` and `Through`: nothing of the peer lands here any more."""

    peer_epoch: Epoch


class Checked(Report, frozen=True, kw_only=True):
    """Answer to `Check`: this rank's contribution to the record's digests, by layer id; None: nothing to compare."""

    number: int
    room: RoomId
    digests: dict[int, Annotated[int, msgspec.Meta(ge=0)]]
    error: ErrorInfo | None = None


class Alive(Report, frozen=True, kw_only=True):
    """Heartbeat of a rank towards its own control, with its counters. Answered by `Welcome`, or `Rejoin`."""

    counters: dict[str, float] = {}


AnyReport = (
    Joined | Paired | WroteRange | HandedOff | RoomFault | PeerFault | Fenced | Revoked | Checked | Alive
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(AnyOrder).decode
decode_report = msgspec.msgpack.Decoder(AnyReport).decode
