"""All conversations of one control: who is called, who called, which incarnation each is, and whether it still lives.

A peer is known by its epoch, which is of one conversation: whoever lost an agreed peer, or was restarted, speaks under
another one from then on. An answer of another epoch, or one who does not know us, means that the agreed one is lost.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from sglang_pd.protocol.codec import Received, decode, encode
from sglang_pd.protocol.errors import CODES, ErrorInfo, PdError, RemoteProtocolError
from sglang_pd.protocol.messages import (
    MAX_LOST,
    Heartbeat,
    Hello,
    HelloConfirm,
    HelloReply,
    Message,
    Refusal,
)
from sglang_pd.protocol.peers import Peer
from sglang_pd.worker.peers.conversation import (
    MAX_CALLERS,
    MAX_STRANGER_BYTES,
    MAX_STRANGERS,
    STRANGER_S,
    Conversation,
    Self,
    Stage,
    answer,
    check_rules,
    confirm,
    confirmed,
    hello,
    offer,
)
from sglang_pd.worker.peers.heard import Heard
from sglang_pd.worker.peers.judge import Case, Judge, Judged
from sglang_pd.worker.peers.link import Called, Link, Party
from sglang_pd.worker.peers.names import FORGET_CALL_S, Names
from sglang_pd.worker.peers.refusals import Refusals, Stopping
from sglang_pd.worker.peers.seeking import Issued, Owed, Seeking
from sglang_pd.worker.peers.speakers import Speakers

RETRY_REFUSED_S: Final = 2.0
"""How often a caller says Hello again to a peer that refused: it may have been replaced."""


class Peering:
    """Conversations of one incarnation of this side."""

    def __init__(self, own: Self, link: Link, heard: Heard, seeking: Seeking) -> None:
        self.own = own
        self._seeking = seeking
        self._link = link
        self._heard = heard
        self._names = Names()
        self._callers: OrderedDict[Party, Conversation] = OrderedDict()
        self._by_epoch: dict[int, Conversation] = {}
        self._issued = Issued()
        self._speakers = Speakers()
        self._judge = Judge(link.ring)
        self._now_s = 0.0
        self._sequence = 0
        self._refusals = Refusals()
        self.counts: Counter[str] = Counter()
        self.draining = False
        self.called = True

    # --- asked by the control ----------------------------------------------------------------------------------------

    def call(self, address: str, server_key: bytes | None, now_s: float, *, wanted: bool = False) -> Conversation:
        """The conversation with the instance at `address`; started if there is none. Raises `ConfigError`.

        wanted: keep calling while nobody answers; otherwise this ends `FORGET_CALL_S` after the last call of this.
        """
        talk = self._names.use(address, now_s, wanted=wanted)
        if talk is None:
            party = self._link.call(address, server_key)
            talk = Conversation(party, source=False, address=address, server_key=server_key)
            talk.used_s, talk.wanted, talk.asked = now_s, wanted, self._speakers.changes
            self._names.add(talk)
        return talk

    def ask(self, owed: list[Owed], now_s: float) -> None:
        """Call these, who alone may know that they write here no more."""
        for one in owed:
            with contextlib.suppress(PdError):  # an address that is none, or no socket is left: at the next turn
                talk = self.call(one.address, None, now_s)
                talk.left = tuple(dict.fromkeys((*talk.left, one.peer_epoch)))[-MAX_LOST:]

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

    def take_judged(self, now_s: float) -> None:
        """What became of manifests that were judged since."""
        self._now_s = now_s
        for party, then, result in self._judge.take():
            try:
                if isinstance(result, RemoteProtocolError):
                    raise result
                then(result)
            except RemoteProtocolError as error:
                talk = self._names.find(party)
                if talk is not None and talk.stage is Stage.CALLING:
                    talk.error = error.info()  # its rooms say so when they have waited long enough
                self._refuse(party, None, error, now_s, kind=HelloReply if isinstance(party, Called) else Hello)

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
        if not self.called:
            raise RemoteProtocolError(
                "a decode is not called", code="feature_unsupported", where="Hello", expected="the address of a prefill"
            )
        check_rules(message)
        if talk is not None and talk.stage is Stage.AGREED and talk.epoch != epoch:
            self._drop(talk, ErrorInfo(code="epoch_stale", message="the peer introduced itself anew"))
            talk = None
        self._refuse_draining(message)
        if talk is not None and talk.stage in (Stage.GREETED, Stage.AGREED):
            talk.heard_s = now_s
            if (talk.epoch, talk.manifest_digest, talk.own_digest) == (epoch, message.manifest_digest, self.own.digest):
                self._say(talk, offer(self.own, talk, self._fenced(message)))  # its reply was lost
                return
            if talk.stage is Stage.AGREED:  # what was agreed is not judged again: another manifest wants another epoch
                raise RemoteProtocolError("that epoch has agreed already", code="epoch_stale", where="Hello")
        self._ask(
            party, self._case(epoch, 0, message, source=True), lambda judged: self._answer(party, message, judged)
        )

    def _case(self, epoch: int, own_epoch: int, message: Hello | HelloReply, *, source: bool) -> Case:
        own = self.own
        return Case(
            epoch, own_epoch, own.manifest, own.encoded, own.digest, source, message.manifest, message.manifest_digest
        )

    def _ask(self, party: Party, case: Case, then: Callable[[Judged], None]) -> None:
        """Have a manifest judged; `then` is told, unless the same is being judged for that party already."""
        asked = self._judge.asked(party)
        if asked is not None and asked == case:
            self.counts["repeated_while_judged"] += 1
        elif not self._judge.ask(party, case, then):
            self.counts["dropped_to_judge"] += 1

    def _answer(self, party: Party, message: Hello, judged: Judged) -> None:
        """A Hello was judged."""
        case, talk = judged.case, self._callers.get(party)
        self._refuse_draining(message)
        if case.own_digest != self.own.digest:  # this side has restated itself meanwhile
            self._ask(party, self._case(case.epoch, 0, message, source=True), lambda j: self._answer(party, message, j))
            return
        if talk is not None and talk.stage is Stage.AGREED and talk.epoch == case.epoch:
            self.counts["late_hellos"] += 1
            return
        talk = Conversation(party, source=True)
        self._issued.add(talk.own_epoch)
        talk.heard_s = self._now_s
        answer(talk, message, judged)
        self._speakers.check(talk, judged.manifest, self.own.manifest)
        self._callers.pop(party, None)
        self._make_room(len(case.stated))
        self._callers[party] = talk
        self._say(talk, offer(self.own, talk, self._fenced(message)))

    def _refuse_draining(self, message: Hello) -> None:
        """One that stops, or has failed, meets nobody, but says all the same what it is through with: its process may
        last, and nobody else can say it.
        """
        if self.draining:
            raise Stopping(self._fenced(message))

    def _fenced(self, message: Hello) -> tuple[int, ...]:
        speaking = {talk.own_epoch for talk in self._callers.values()}
        return self._issued.fenced(message.lost, speaking, self._heard.fenced)

    def leave(self, fenced: Callable[[int], bool]) -> None:
        """See `Issued.leave`."""
        self._issued.leave(fenced)

    def _hello(self, talk: Conversation) -> Hello:
        talk.left = tuple(epoch for epoch in talk.left if self._seeking.open(epoch))
        return hello(self.own, talk.left)

    def _make_room(self, more_bytes: int) -> None:
        """Bound what callers can make this side keep, before one more comes."""
        strangers = [talk for talk in self._callers.values() if talk.stage is not Stage.AGREED]
        if len(self._callers) - len(strangers) >= MAX_CALLERS:
            raise RemoteProtocolError("too many peers", code="queue_full", expected=f"<= {MAX_CALLERS}")
        kept_bytes = sum(len(talk.stated) for talk in strangers)
        for number, talk in enumerate(strangers):
            if len(strangers) - number < MAX_STRANGERS and kept_bytes + more_bytes <= MAX_STRANGER_BYTES:
                break
            kept_bytes -= len(talk.stated)
            del self._callers[talk.party]

    def _on_reply(self, talk: Conversation, epoch: int, message: HelloReply) -> None:
        if talk.source:
            raise RemoteProtocolError("a prefill is not answered", where="HelloReply")
        asked = (message.peer_epoch, message.peer_manifest_digest) == (talk.own_epoch, self.own.digest)
        if talk.stage is Stage.AGREED or not asked:
            self.counts["late_replies"] += 1
            return
        case = self._case(epoch, talk.own_epoch, message, source=False)
        self._ask(talk.party, case, lambda judged: self._replied(talk, message, judged))

    def _replied(self, talk: Conversation, message: HelloReply, judged: Judged) -> None:
        """A HelloReply was judged."""
        stated = (judged.case.own_epoch, message.peer_manifest_digest)
        if talk.stage is Stage.AGREED or stated != (talk.own_epoch, self.own.digest):
            self.counts["late_replies"] += 1
            if talk.stage is Stage.CALLING:  # it was not asked anew while this was judged
                talk.next_send_s = self._now_s
            return
        if self._speakers.changed(judged.manifest, talk.asked):
            self.counts["late_replies"] += 1
            self._ask_anew(talk)
            return
        other = self._speakers.same(judged.manifest)
        if other is not None and other is not talk and not other.source and other.control != message.control:
            # One control at a time has these ranks: this one, asked since the other agreed, has replaced it.
            self._drop(other, ErrorInfo(code="peer_lost", message="another control answers for the same ranks"))
            self._ask_anew(talk)
            return
        if self._merged(talk, self._speakers.same(judged.manifest)):
            return
        for epoch in set(message.fenced) & set(talk.left):
            self._heard.fenced_by_peer(epoch, judged.manifest)
        self._heard.stated(judged.manifest)
        if self.draining:  # it was asked for its word alone
            return
        if self._seeking.against(judged.manifest):
            self.counts["held_replies"] += 1  # Hello is said again at the next heartbeat, and asks for its word
            talk.left = tuple(dict.fromkeys((*self._seeking.of(judged.manifest), *talk.left)))[:MAX_LOST]
            talk.held = judged
            return
        talk.held = None
        self._say(talk, confirm(self.own, talk, message, judged))
        self._settled(talk)

    def _merged(self, talk: Conversation, other: Conversation | None) -> bool:
        """True when the instance at `talk`'s address speaks with this side already, which knows it by another name."""
        if other is None or other is talk or other.source or other.stage is not Stage.AGREED:
            return False
        self._names.merge(talk, other)
        self._hang_up(talk)
        return True

    def _hang_up(self, talk: Conversation) -> None:
        self._judge.forget(talk.party)
        self._link.hang_up(talk.party)

    def _on_confirm(self, talk: Conversation, message: HelloConfirm) -> None:
        if talk.stage is not Stage.AGREED:
            confirmed(self.own, talk, message)
            self._settled(talk)

    def restate(self, own: Self) -> None:
        """This side states something new of itself to those who come from now on; with the others all stands."""
        self.own = own
        for talk in self._names.all():
            if talk.stage is not Stage.AGREED:
                talk.restart(self._speakers.changes)

    def begin_anew(self, own: Self, error: ErrorInfo) -> None:
        """This side states something new of itself, and what it received as before is void: all that it calls are lost,
        so that what they may still write is proven to have ended, and are called again.
        """
        for talk in self._names.all():
            self.give_up(talk.epoch, error)
        self.restate(own)

    def _settled(self, talk: Conversation) -> None:
        if talk.stage is Stage.AGREED and talk.manifest is not None:
            try:  # several may have been offered the same
                self._speakers.check(talk, talk.manifest, self.own.manifest)
            except RemoteProtocolError as error:
                talk.stage, talk.pairing, talk.error = Stage.REFUSED, None, error.info()
        if talk.stage is not Stage.AGREED:
            self._heard.refused(talk)
            talk.manifest = None  # only what explains the refusal is kept
            return
        known = self._by_epoch.get(talk.epoch)
        if known is not None and known is not talk:
            talk.stage = Stage.REFUSED
            raise RemoteProtocolError("that incarnation talks to us already", code="epoch_stale", actual=talk.epoch)
        self._by_epoch[talk.epoch] = talk
        self._speakers.add(talk)
        self._heard.agreed(talk)

    def _on_refusal(self, talk: Conversation, message: Refusal, now_s: float) -> None:
        self.counts[f"refusals_{message.error.code if message.error.code in CODES else 'other'}"] += 1
        if talk.stage is Stage.AGREED and message.error.code in ("peer_unknown", "epoch_stale"):
            self._drop(talk, ErrorInfo(code="peer_lost", message="the peer does not know this side any more"))
        elif message.error.code == "peer_duplicate" and talk.address and talk.stage is not Stage.AGREED:
            talk.error = message.error
            self._merged(talk, self._names.speaking_as(message.error.details.get("conversation", "")))
        elif talk.stage is Stage.CALLING and message.error.code != "peer_unknown":
            talk.error = message.error
            for epoch in set(message.fenced) & set(talk.left):
                self._heard.fenced_by_peer(epoch, None)
            if message.error.code not in ("draining", "internal"):
                talk.stage = Stage.REFUSED
                talk.next_send_s = now_s + RETRY_REFUSED_S
                self._heard.refused(talk)

    def _refuse(
        self,
        party: Party,
        received: Received | None,
        error: RemoteProtocolError,
        now_s: float,
        kind: type[Message] | None = None,
    ) -> None:
        self.counts[f"refused_{error.code}"] += 1
        refusal = self._refusals.of(received, error, now_s, kind)
        if refusal is not None:
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
        self._speakers.remove(talk)
        if talk.address:
            self._names.part(talk)
            talk.left = (*talk.left, epoch)[-MAX_LOST:] if agreed else talk.left
            talk.restart(self._speakers.changes)
        else:
            talk.stage = Stage.LOST
            self._callers.pop(talk.party, None)
        if agreed:
            self._heard.lost(talk, epoch, error)

    def _ask_anew(self, talk: Conversation) -> None:
        """Who has these ranks has changed since it was asked: the answer may come from a control that has them no more,
        long after, and would be taken for that of a newer one.
        """
        talk.ask_anew(self._speakers.changes)
        talk.next_send_s = self._now_s

    def give_up(self, epoch: int, error: ErrorInfo) -> None:
        """The tables lost that incarnation (silence, say): forget it, and call again where this side is the caller."""
        talk = self._by_epoch.get(epoch)
        if talk is not None:
            self._drop(talk, error)

    def give_up_lost(self, decodes: Mapping[int, Peer], prefills: Mapping[int, Peer]) -> None:
        """Those whom the tables of rooms lost (silence, say), or do not know any more; by epoch."""
        for talk in self.all():
            peer = (decodes if talk.source else prefills).get(talk.epoch)
            if talk.stage is Stage.AGREED and (peer is None or peer.lost is not None):
                gone = ErrorInfo(code="peer_lost", message="gone")
                self.give_up(talk.epoch, peer.lost if peer is not None and peer.lost is not None else gone)

    def give_up_decodes(self, error: ErrorInfo) -> None:
        """All that this side writes to."""
        for talk in list(self._callers.values()):
            self.give_up(talk.epoch, error)

    def tick(self, now_s: float, rooms_with: Callable[[int], int]) -> None:
        """Say what is due: Hello while not answered, a heartbeat where agreed. Whose connection closed is given up."""
        self.take_judged(now_s)
        self._names.expire(now_s)
        for talk in [t for t in self._callers.values() if t.stage is not Stage.AGREED]:
            if now_s >= talk.heard_s + STRANGER_S:
                del self._callers[talk.party]
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
            elif talk.address and not talk.wanted and not talk.left and now_s >= talk.used_s + FORGET_CALL_S:
                self._names.forget(talk)
                self._hang_up(talk)
            elif talk.address and self.draining and not self._seeking.sought:  # until it is forgotten
                talk.next_send_s = max(now_s, talk.used_s) + FORGET_CALL_S
            elif talk.address and (trouble := self._link.trouble(talk.party)):
                talk.stage, talk.next_send_s = Stage.REFUSED, now_s + RETRY_REFUSED_S
                talk.error = ErrorInfo(
                    code="peer_unknown",
                    message=f"the host's name has no address: {trouble}"[:500],
                    where=talk.address,
                    hint="Does this name resolve on this worker's host?",
                )
                self._heard.refused(talk)
            elif talk.address:
                refused = talk.stage is Stage.REFUSED
                talk.stage = Stage.CALLING if refused else talk.stage
                talk.next_send_s = now_s + (RETRY_REFUSED_S if refused else self.own.heartbeat_ms / 1000)
                if self._judge.asked(talk.party) is None:
                    self._say(talk, self._hello(talk))

    def next_timer_s(self) -> float | None:
        """When `tick` is due."""
        due = (talk.next_send_s for talk in self.all() if talk.address or talk.stage is Stage.AGREED)
        return min(due, default=None)

    def broadcast(self, message: Message) -> None:
        """To every agreed peer."""
        for talk in list(self._by_epoch.values()):
            self._say(talk, message)
