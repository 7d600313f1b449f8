"""All conversations of one control: who is called, who called, which incarnation each is, and whether it still lives.

A peer is known by its epoch, which is of one conversation: whoever lost an agreed peer, or was restarted, speaks under
another one from then on. An answer of another epoch, or one who does not know us, means that the agreed one is lost.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from sglang_pd.protocol.codec import Received, decode, encode
from sglang_pd.protocol.errors import CODES, ErrorInfo, PdError, RemoteProtocolError
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.messages import Heartbeat, Hello, HelloConfirm, HelloReply, Message, Refusal, RoomMessage
from sglang_pd.worker.conversation import (
    MAX_CALLERS,
    MAX_STRANGERS,
    NOW_S,
    Conversation,
    Self,
    Stage,
    answer,
    confirm,
    confirmed,
    hello,
    read_manifest,
)
from sglang_pd.worker.link import Called, Link, Party
from sglang_pd.worker.names import FORGET_CALL_S, Names

REFUSALS_PER_S: Final = 200
RETRY_REFUSED_S: Final = 2.0
"""How often a caller says Hello again to a peer that refused: it may have been replaced."""


class Heard(Protocol):
    """What the control learns from conversations."""

    def agreed(self, talk: Conversation) -> None:
        """Both sides accept: ranks can meet, rooms can open."""

    def renewed(self, talk: Conversation) -> None:
        """Both sides accept a new manifest of the same incarnation: ranks must meet again."""

    def lost(self, talk: Conversation, epoch: int, error: ErrorInfo) -> None:
        """That incarnation is gone, agreed or not."""

    def refused(self, talk: Conversation) -> None:
        """The verdict is a refusal; `talk.error` says why."""

    def unproven(self, manifest: InstanceManifest) -> bool:
        """True while the proof is sought that former writes of one of these ranks land here no more."""

    def room_message(self, talk: Conversation, message: Message) -> None:
        """A message for the room tables. Raises `RemoteProtocolError` for one that must be refused."""


class Peering:
    """Conversations of one incarnation of this side."""

    def __init__(self, own: Self, link: Link, heard: Heard) -> None:
        self.own = own
        self._link = link
        self._heard = heard
        self._names = Names()
        self._callers: OrderedDict[Party, Conversation] = OrderedDict()
        self._by_epoch: dict[int, Conversation] = {}
        self._by_rank: dict[int, Conversation] = {}
        """Who speaks for a rank, by the rank's epoch, of agreed conversations."""
        self._sequence = 0
        self._refusals_left = float(REFUSALS_PER_S)
        self._refilled_s = float("inf")
        self.counts: Counter[str] = Counter()
        self.draining = False

    # --- asked by the control ----------------------------------------------------------------------------------------

    def call(self, address: str, server_key: bytes | None, now_s: float, *, wanted: bool = False) -> Conversation:
        """The conversation with the instance at `address`; started if there is none. Raises `ConfigError`.

        wanted: keep calling while nobody answers; otherwise this ends `FORGET_CALL_S` after the last call of this.
        """
        talk = self._names.use(address, now_s, wanted=wanted)
        if talk is None:
            party = self._link.call(address, server_key)
            talk = Conversation(party, source=False, address=address, server_key=server_key)
            talk.used_s, talk.wanted = now_s, wanted
            self._names.add(talk)
        return talk

    def talk_with(self, epoch: int) -> Conversation | None:
        """The agreed conversation with that incarnation."""
        return self._by_epoch.get(epoch)

    def all(self) -> list[Conversation]:
        """Every conversation."""
        return [*self._names.all(), *self._callers.values()]

    def send(self, epoch: int, message: Message) -> None:
        """To an agreed peer; dropped and counted when there is none."""
        talk = self._by_epoch.get(epoch)
        if talk is None:
            self.counts["sent_to_nobody"] += 1
        else:
            self._say(talk, message)

    def _say(self, talk: Conversation, message: Message) -> None:
        self._link.send(talk.party, encode(message, epoch=talk.own_epoch))

    # --- frames ------------------------------------------------------------------------------------------------------

    def receive(self, party: Party, frame: bytes, now_s: float) -> None:
        """One frame of anybody. What is wrong with it costs its sender a refusal, nothing else."""
        received: Received | None = None
        try:
            received = decode(frame)
            self.counts["unknown_fields"] += len(received.unknown_fields)
            if received.message is not None:
                self._take(party, received.header.epoch, received.message, now_s)
        except RemoteProtocolError as error:
            self._refuse(party, received, error, now_s)
        except PdError as error:
            wrapped = RemoteProtocolError(error.message, code=error.code, where=error.where, actual=error.actual)
            self._refuse(party, received, wrapped, now_s)

    def _take(self, party: Party, epoch: int, message: Message, now_s: float) -> None:
        talk = self._find(party)
        if isinstance(message, Hello):
            self._on_hello(party, talk, epoch, message, now_s)
            return
        if talk is None:
            raise RemoteProtocolError("say Hello first", code="peer_unknown", where=type(message).__name__)
        if isinstance(message, Refusal):
            self._on_refusal(talk, message, now_s)
            return
        if talk.stage is Stage.AGREED and epoch != talk.epoch:
            self._restarted(talk, epoch, now_s)
        if isinstance(message, HelloReply):
            self._on_reply(talk, epoch, message)
        elif isinstance(message, HelloConfirm):
            if not talk.source or epoch != talk.epoch:
                raise RemoteProtocolError("nothing was offered to confirm", code="peer_unknown", where="HelloConfirm")
            self._on_confirm(talk, message)
        elif talk.stage is not Stage.AGREED or epoch != talk.epoch:
            raise RemoteProtocolError("no verdict stands for this incarnation", code="peer_unknown", actual=epoch)
        else:
            self._heard.room_message(talk, message)

    def _find(self, party: Party) -> Conversation | None:
        if isinstance(party, Called):
            return self._names.find(party)
        return self._callers.get(party)

    def _on_hello(self, party: Party, talk: Conversation | None, epoch: int, message: Hello, now_s: float) -> None:
        if isinstance(party, Called):
            raise RemoteProtocolError("who is called does not say Hello", where="Hello")
        if self.draining:
            raise RemoteProtocolError("the instance is stopping", code="draining", where="Hello")
        if talk is not None and talk.stage is Stage.AGREED:
            if talk.epoch == epoch and talk.manifest_digest == message.manifest_digest:
                self._say(talk, answer(self.own, talk, epoch, message))  # its reply was lost
                talk.stage = Stage.AGREED
                return
            if talk.epoch == epoch:
                self._say(talk, self._answer(talk, talk.renew(), epoch, message))
                return
            self._drop(talk, ErrorInfo(code="epoch_stale", message="the peer introduced itself anew"))
        if talk is None or (talk.epoch, talk.manifest_digest) != (epoch, message.manifest_digest):
            talk = Conversation(party, source=True)
            self._make_room()
            self._callers[party] = talk
        self._say(talk, self._answer(talk, talk, epoch, message))

    def _answer(self, talk: Conversation, current: Conversation, epoch: int, message: Hello) -> HelloReply:
        reply = answer(self.own, current, epoch, message)
        try:
            self._check_single(talk, current)
        except RemoteProtocolError:
            if current is talk:
                self._callers.pop(talk.party, None)
            talk.renewal = None
            raise
        return reply

    def _check_single(self, talk: Conversation, current: Conversation) -> None:
        """Refuse ranks that another conversation, or this instance itself, speaks for.

        Bytes of the one's rooms would be written to where the other's index lists say.
        """
        ranks = current.manifest.ranks if current.manifest is not None else ()
        own = {rank.epoch for rank in self.own.manifest.ranks}
        for rank in ranks:
            other = self._by_rank.get(rank.epoch)
            if rank.epoch not in own and (other is None or other is talk):
                continue
            holder = other.instance if other is not None else self.own.manifest.instance_id
            raise RemoteProtocolError(
                "a rank of that manifest speaks in another conversation, which stands",
                code="peer_duplicate",
                where=current.instance,
                expected="ranks of its own",
                actual=f"rank {rank.rank} (epoch {rank.epoch:016x}) of {holder}",
                hint="After a broken connection it comes in once the former conversation is given up.",
                conversation=f"{other.epoch if other is not None else 0:016x}",
            )

    def _make_room(self) -> None:
        """Bound what callers can make this side keep, before one more comes."""
        strangers = [party for party, talk in self._callers.items() if talk.stage is not Stage.AGREED]
        for party in strangers[: max(0, len(strangers) - MAX_STRANGERS + 1)]:
            del self._callers[party]
        if len(self._callers) - len(strangers) >= MAX_CALLERS:
            raise RemoteProtocolError("too many peers", code="queue_full", expected=f"<= {MAX_CALLERS}")

    def _on_reply(self, talk: Conversation, epoch: int, message: HelloReply) -> None:
        if talk.source:
            raise RemoteProtocolError("a prefill is not answered", where="HelloReply")
        current = talk.renewal or talk
        if current.stage is Stage.AGREED or message.peer_manifest_digest != self.own.digest:
            self.counts["late_replies"] += 1
            return
        if current is talk:
            manifest = read_manifest(message.manifest, message.manifest_digest)
            if self._merged(talk, self._same_ranks(manifest)):
                return
            if self._heard.unproven(manifest):
                self.counts["held_replies"] += 1  # Hello is said again at the next heartbeat
                return
        self._say(talk, confirm(self.own, current, epoch, message))
        self._settled(talk, current)

    def _same_ranks(self, manifest: InstanceManifest) -> Conversation | None:
        """The agreed conversation of exactly these ranks."""
        other = self._by_rank.get(manifest.epoch)
        if other is None or other.manifest is None:
            return None
        same = [rank.epoch for rank in other.manifest.ranks] == [rank.epoch for rank in manifest.ranks]
        return other if same else None

    def _merged(self, talk: Conversation, other: Conversation | None) -> bool:
        """True when the instance at `talk`'s address speaks with this side already, which knows it by another name."""
        if other is None or other is talk or other.source or other.stage is not Stage.AGREED:
            return False
        self._names.merge(talk, other)
        self._link.hang_up(talk.party)
        return True

    def _on_confirm(self, talk: Conversation, message: HelloConfirm) -> None:
        current = talk.renewal or talk
        if current.stage is not Stage.AGREED:
            confirmed(self.own, current, message)
            self._settled(talk, current)

    def restate(self, own: Self) -> None:
        """This side states something new of itself to those who come from now on; with the others all stands."""
        self.own = own
        for talk in self._names.all():
            if talk.stage is not Stage.AGREED:
                talk.restart()

    def renew(self, own: Self) -> None:
        """This side states something new of itself under the same epoch. Those it calls are told; rooms stay."""
        self.restate(own)
        for talk in self._names.all():
            if talk.stage is Stage.AGREED:
                talk.renew()
                talk.next_send_s = NOW_S

    def _settled(self, talk: Conversation, current: Conversation) -> None:
        if current.stage is Stage.AGREED:
            try:
                self._check_single(talk, current)  # several may have been offered the same
            except RemoteProtocolError as error:
                current.stage, current.pairing, current.error = Stage.REFUSED, None, error.info()
        if current is not talk and current.stage is Stage.AGREED:
            self._index(talk, False)
            talk.adopt(current)
            self._index(talk, True)
            self._heard.renewed(talk)
            return
        if current is not talk:
            self._drop(
                talk, current.error or ErrorInfo(code="peer_incompatible", message="the new manifest is refused")
            )
            return
        if talk.stage is not Stage.AGREED:
            self._heard.refused(talk)
            talk.manifest = None  # only what explains the refusal is kept
            return
        known = self._by_epoch.get(talk.epoch)
        if known is not None and known is not talk:
            talk.stage = Stage.REFUSED
            raise RemoteProtocolError("that incarnation talks to us already", code="epoch_stale", actual=talk.epoch)
        self._by_epoch[talk.epoch] = talk
        self._index(talk, True)
        self._heard.agreed(talk)

    def _index(self, talk: Conversation, speaks: bool) -> None:
        for rank in talk.manifest.ranks if talk.manifest is not None else ():
            if speaks:
                self._by_rank[rank.epoch] = talk
            elif self._by_rank.get(rank.epoch) is talk:
                del self._by_rank[rank.epoch]

    def _on_refusal(self, talk: Conversation, message: Refusal, now_s: float) -> None:
        self.counts[f"refusals_{message.error.code if message.error.code in CODES else 'other'}"] += 1
        if talk.stage is Stage.AGREED and message.error.code in ("peer_unknown", "epoch_stale"):
            self._drop(talk, ErrorInfo(code="peer_lost", message="the peer does not know this side any more"))
        elif message.error.code == "peer_duplicate" and talk.address and talk.stage is not Stage.AGREED:
            talk.error = message.error
            self._merged(talk, self._names.speaking_as(message.error.details.get("conversation", "")))
        elif talk.stage is Stage.CALLING and message.error.code != "peer_unknown":
            talk.error = message.error
            if message.error.code not in ("draining", "internal"):
                talk.stage = Stage.REFUSED
                talk.next_send_s = now_s + RETRY_REFUSED_S
                self._heard.refused(talk)

    def _refuse(self, party: Party, received: Received | None, error: RemoteProtocolError, now_s: float) -> None:
        self.counts[f"refused_{error.code}"] += 1
        self._refusals_left = min(
            REFUSALS_PER_S, self._refusals_left + max(0.0, now_s - self._refilled_s) * REFUSALS_PER_S
        )
        self._refilled_s = now_s
        message = received.message if received else None
        if self._refusals_left < 1 or isinstance(message, Refusal):
            return
        self._refusals_left -= 1
        room = message if isinstance(message, RoomMessage) else None
        refusal = Refusal(
            error=error.info(),
            refused_type=received.header.type if received else 0,
            room=room.room if room else 0,
            generation=room.generation if room else 0,
        )
        talk = self._find(party)
        self._link.send(party, encode(refusal, epoch=talk.own_epoch if talk else self.own.epoch))

    # --- life and death ----------------------------------------------------------------------------------------------

    def _restarted(self, talk: Conversation, epoch: int, now_s: float) -> None:
        error = ErrorInfo(
            code="peer_lost",
            message="the peer was restarted, or began anew: another incarnation answers",
            where=talk.instance,
            expected=f"epoch {talk.epoch:016x}",
            actual=f"epoch {epoch:016x}",
        )
        self._drop(talk, error)
        talk.next_send_s = now_s

    def _drop(self, talk: Conversation, error: ErrorInfo) -> None:
        epoch, agreed = talk.epoch, talk.stage is Stage.AGREED
        if self._by_epoch.get(epoch) is talk:
            del self._by_epoch[epoch]
        self._index(talk, False)
        if talk.address:
            self._names.part(talk)
            talk.restart()
        else:
            talk.stage = Stage.LOST
            self._callers.pop(talk.party, None)
        if agreed:
            self._heard.lost(talk, epoch, error)

    def give_up(self, epoch: int, error: ErrorInfo) -> None:
        """The tables lost that incarnation (silence, say): forget it, and call again where this side is the caller."""
        talk = self._by_epoch.get(epoch)
        if talk is not None:
            self._drop(talk, error)

    def tick(self, now_s: float, rooms_with: Callable[[int], int]) -> None:
        """Say what is due: Hello while not answered, a heartbeat where agreed. Whose connection closed is given up."""
        self._names.expire(now_s)
        for address, key in list(self._names.owed.items()):
            with contextlib.suppress(PdError):  # no socket is left: once more at the next turn
                self.call(address, key, now_s, wanted=True)
        for party in self._link.gone:
            if (closed := self._callers.get(party)) is not None:
                # Its ranks must not wait for the end of the liveness duration to come in over another connection.
                self._drop(closed, ErrorInfo(code="peer_lost", message="the peer's connection was closed"))
        for talk in self.all():
            if now_s < talk.next_send_s:
                continue
            if talk.stage is Stage.AGREED:
                talk.next_send_s = now_s + self.own.heartbeat_ms / 1000
                self._sequence = (self._sequence + 1) % 2**32
                beat = Heartbeat(
                    peer_epoch=talk.epoch,
                    seq=self._sequence,
                    state="draining" if self.draining else "ready",
                    rooms=rooms_with(talk.epoch),
                )
                self._say(talk, beat)
                if talk.renewal is not None and talk.address:
                    self._say(talk, hello(self.own))
            elif talk.address and not talk.wanted and now_s >= talk.used_s + FORGET_CALL_S:
                self._names.forget(talk)
                self._link.hang_up(talk.party)
            elif talk.address and not self.draining:
                refused = talk.stage is Stage.REFUSED
                talk.stage = Stage.CALLING if refused else talk.stage
                talk.next_send_s = now_s + (RETRY_REFUSED_S if refused else self.own.heartbeat_ms / 1000)
                self._say(talk, hello(self.own))

    def next_timer_s(self) -> float | None:
        """When `tick` is due."""
        due = (talk.next_send_s for talk in self.all() if talk.address or talk.stage is Stage.AGREED)
        return min(due, default=None)

    def broadcast(self, message: Message) -> None:
        """To every agreed peer."""
        for talk in list(self._by_epoch.values()):
            self._say(talk, message)
