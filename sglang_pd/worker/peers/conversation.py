"""The handshake between two controls: manifests, a verdict on each side, equal plan digests; then rooms may open.

Decode calls and says Hello; prefill answers with its manifest and verdict; decode confirms. Any message may be lost,
and is repeated by the caller; any may come twice. Who is whom is decided by epochs, never by addresses.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Final

import msgspec
import xxhash

from sglang_pd.protocol.errors import ErrorInfo, IncompatiblePeer, RemoteProtocolError
from sglang_pd.protocol.manifest import InstanceManifest, RankId
from sglang_pd.protocol.messages import Hello, HelloConfirm, HelloReply, Verdict
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.plan import PACKING_ORDER
from sglang_pd.worker.peers.judge import Judged
from sglang_pd.worker.peers.link import Party

MAX_CALLERS: Final = 1_024
"""Conversations that others started and both agreed to."""
NOW_S: Final = float("-inf")
"""A time that is always due."""
MAX_STRANGERS: Final = 64
MAX_STRANGER_BYTES: Final = 8 * 2**20
"""Conversations that others started and that are not agreed, and what they stated (decoded and compiled it takes some
ten times as much); the oldest goes first, and may say Hello again."""
STRANGER_S: Final = 10.0
"""One that does not confirm says Hello again meanwhile, or is forgotten after so long."""


def new_epoch() -> int:
    """A random 64-bit epoch."""
    return secrets.randbits(64) or 1


@dataclass(frozen=True)
class Self:
    """What an instance says of itself in every handshake. heartbeat and liveness in milliseconds."""

    manifest: InstanceManifest
    epoch: int
    heartbeat_ms: int = 500
    liveness_ms: int = 3_000

    @cached_property
    def encoded(self) -> bytes:
        """The manifest as it travels."""
        return msgspec.msgpack.encode(self.manifest)

    @cached_property
    def digest(self) -> int:
        """xxh3-64 of `encoded`."""
        return xxhash.xxh3_64_intdigest(self.encoded)


class Stage(Enum):
    """How far a conversation is."""

    CALLING = "calling"
    GREETED = "greeted"
    AGREED = "agreed"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Conversation:
    """One peer instance as this side knows it. source: this side is prefill in the pair.

    epoch, own_epoch: what the peer and this side call themselves here. One that a peer lost never returns to it, so two
    processes that lost each other and live (a broken link, a stopped process) speak anew under new ones.
    incarnation: the peer's `InstanceManifest.epoch`, 0 while unknown.
    address: where this side calls, empty for callers. server_key: the CURVE key it was given to call there. aliases:
    other addresses at which the same instance answered. wanted: keep calling it, rooms or not. paired: what the own
    ranks said of their connections. left: epochs of the peer that this side lost, and against which it seeks proof.
    control: which control of that instance answered (`HelloReply.control`). asked: when `own_epoch` was new, see
    `Speakers.changes`.
    """

    party: Party
    source: bool
    address: str = ""
    server_key: bytes | None = None
    aliases: set[str] = field(default_factory=set)
    stage: Stage = Stage.CALLING
    own_epoch: int = field(default_factory=new_epoch)
    wanted: bool = False
    epoch: int = 0
    incarnation: int = 0
    instance: str = ""
    manifest: InstanceManifest | None = None
    stated: bytes = b""
    manifest_digest: int = 0
    own_digest: int = 0
    pairing: Pairing | None = None
    verdict: Verdict | None = None
    liveness_s: float = 0.0
    error: ErrorInfo | None = None
    next_send_s: float = NOW_S
    used_s: float = 0.0
    heard_s: float = 0.0
    held: Judged | None = None
    paired: dict[RankId, ErrorInfo | None] = field(default_factory=dict)
    transports: set[str] = field(default_factory=set)
    left: tuple[int, ...] = ()
    control: int = 0
    asked: int = 0

    def describe(self) -> dict[str, Any]:
        """Its state as plain data."""
        return {
            "instance": self.instance,
            "address": self.address,
            "aliases": sorted(self.aliases),
            "role": "decode" if self.source else "prefill",
            "stage": self.stage.value,
            "epoch": f"{self.incarnation:016x}" if self.incarnation else None,
            "conversation": f"{self.epoch:016x}",
            "transports": sorted(self.transports),
            "ranks_paired": sum(error is None for error in self.paired.values()),
            "error": msgspec.to_builtins(self.error) if self.error else None,
            "absent": list(self.pairing.absent) if self.pairing and not self.source else [],
            "mismatches": msgspec.to_builtins(self.verdict.mismatches) if self.verdict else [],
        }

    def unpaired(self, ranks: Iterable[RankId]) -> list[RankId]:
        """Those own ranks that have not said that they know that peer. One that does not can prove nothing against it
        later: until then nothing is exposed to it.
        """
        return [rank for rank in ranks if rank not in self.paired or self.paired[rank] is not None]

    def restart(self, asked: int) -> None:
        """Forget an incarnation and call again, as another one."""
        self.stage, self.epoch, self.error, self.pairing = Stage.CALLING, 0, None, None
        self.incarnation, self.stated, self.held = 0, b"", None
        self.own_epoch, self.asked = new_epoch(), asked
        self.paired, self.next_send_s = {}, NOW_S

    def ask_anew(self, asked: int) -> None:
        """What was asked so far, and is not answered, is asked as another one: an answer to that is of before."""
        self.own_epoch, self.asked, self.held = new_epoch(), asked, None


def hello(own: Self, lost: tuple[int, ...] = ()) -> Hello:
    """Decode's introduction. lost: see `Hello`."""
    return Hello(
        instance=own.manifest.instance_id,
        manifest=own.encoded,
        manifest_digest=own.digest,
        packing_rules=(PACKING_ORDER,),
        heartbeat_ms=own.heartbeat_ms,
        liveness_ms=own.liveness_ms,
        lost=lost,
    )


def check_rules(message: Hello) -> None:
    """Raises `RemoteProtocolError` for a decode that knows none of our packing rules."""
    if PACKING_ORDER not in message.packing_rules:
        raise RemoteProtocolError(
            "no common packing rule", code="feature_unsupported", expected=PACKING_ORDER, actual=message.packing_rules
        )


def answer(talk: Conversation, message: Hello, judged: Judged) -> None:
    """Prefill's side of a Hello that was judged: remember what follows."""
    _take(talk, message, judged)
    talk.stage = Stage.GREETED if talk.pairing else Stage.REFUSED


def offer(own: Self, talk: Conversation, fenced: tuple[int, ...]) -> HelloReply:
    """The answer, as often as it is asked for. fenced: see `HelloReply`."""
    return HelloReply(
        instance=own.manifest.instance_id,
        manifest=own.encoded,
        manifest_digest=own.digest,
        peer_epoch=talk.epoch,
        peer_manifest_digest=talk.manifest_digest,
        verdict=_verdict(talk),
        plan_digest=talk.pairing.digest if talk.pairing else 0,
        packing_rule=PACKING_ORDER,
        heartbeat_ms=own.heartbeat_ms,
        liveness_ms=own.liveness_ms,
        fenced=fenced,
        control=own.epoch,
    )


def confirm(own: Self, talk: Conversation, message: HelloReply, judged: Judged) -> HelloConfirm:
    """Decode's side of the answer that was judged: compare verdicts and digests."""
    _take(talk, message, judged)
    talk.control = message.control
    digest = talk.pairing.digest if talk.pairing else 0
    own_verdict = _verdict(talk)
    settle(talk, own_verdict == message.verdict and digest == message.plan_digest)
    return HelloConfirm(
        manifest_digest=own.digest,
        peer_manifest_digest=message.manifest_digest,
        verdict=own_verdict,
        plan_digest=digest,
    )


def _take(talk: Conversation, message: Hello | HelloReply, judged: Judged) -> None:
    talk.epoch, talk.instance = judged.case.epoch, message.instance
    talk.manifest, talk.incarnation = judged.manifest, judged.manifest.epoch
    talk.stated, talk.manifest_digest, talk.own_digest = judged.case.stated, judged.case.digest, judged.case.own_digest
    talk.liveness_s = message.liveness_ms / 1000
    talk.verdict, talk.pairing, talk.error = judged.verdict, judged.pairing, judged.error


def confirmed(own: Self, talk: Conversation, message: HelloConfirm) -> None:
    """Prefill takes decode's confirmation: agreed, or refused."""
    if talk.manifest is None or (message.peer_manifest_digest, message.manifest_digest) != (
        own.digest,
        talk.manifest_digest,
    ):
        raise RemoteProtocolError("the confirmation is of other manifests", code="epoch_stale", where="HelloConfirm")
    digest = talk.pairing.digest if talk.pairing else 0
    settle(talk, message.verdict == _verdict(talk) and message.plan_digest == digest)


def settle(talk: Conversation, same: bool) -> None:
    """Both verdicts are known. same: they, and the plan digests, are equal."""
    if not same:
        talk.pairing = None
        talk.error = ErrorInfo(
            code="peer_incompatible",
            message="the two sides judge or plan differently; no byte can be proven",
            hint="Run one release of sglang-pd on both sides.",
        )
    talk.stage = Stage.AGREED if talk.pairing else Stage.REFUSED


def _verdict(talk: Conversation) -> Verdict:
    if talk.verdict is None:
        raise IncompatiblePeer("no verdict yet", where=talk.instance)
    return talk.verdict
