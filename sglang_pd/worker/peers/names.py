"""Whom one side calls, by address. One instance may be called under several: all are the one conversation it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_pd.worker.peers.conversation import Conversation
from sglang_pd.worker.peers.link import Party

FORGET_CALL_S: Final = 30.0
"""An address that nobody answers at is called for so long after somebody wanted it; an alias is kept as long."""


@dataclass(slots=True)
class _Alias:
    talk: Conversation
    server_key: bytes | None
    wanted: bool
    used_s: float


class Names:
    """Conversations that this side began. An alias lasts as long as the conversation that its peer turned out to have:
    whoever is there afterwards may be two."""

    def __init__(self) -> None:
        self._called: dict[str, Conversation] = {}
        self._aliases: dict[str, _Alias] = {}
        self.owed: dict[str, bytes | None] = {}
        """Wanted addresses, with their keys, that are to be called on their own again."""

    def use(self, address: str, now_s: float, *, wanted: bool) -> Conversation | None:
        """The conversation behind an address, if there is one. wanted: keep calling it."""
        alias = self._aliases.get(address)
        if alias is not None:
            alias.used_s, alias.wanted = now_s, alias.wanted or wanted
        talk = alias.talk if alias is not None else self._called.get(address)
        if talk is not None:
            talk.used_s = now_s
            talk.wanted = talk.wanted or (wanted and alias is None)
        return talk

    def add(self, talk: Conversation) -> None:
        """A new one, under its own address."""
        self._called[talk.address] = talk
        self.owed.pop(talk.address, None)

    def find(self, party: Party) -> Conversation | None:
        """Whose connection that is."""
        return next((talk for talk in self._called.values() if talk.party == party), None)

    def speaking_as(self, own_epoch: str) -> Conversation | None:
        """In which of them this side goes by that epoch, in 16 hexadecimal digits."""
        return next((talk for talk in self._called.values() if f"{talk.own_epoch:016x}" == own_epoch), None)

    def merge(self, talk: Conversation, other: Conversation) -> None:
        """The peer behind `talk` is the one of `other`: the address becomes another name of that."""
        del self._called[talk.address]
        self._aliases[talk.address] = _Alias(other, talk.server_key, talk.wanted, talk.used_s)
        other.aliases.add(talk.address)

    def part(self, talk: Conversation) -> None:
        """The conversation is over, so its other names mean nobody; those that are wanted are `owed`."""
        for address in talk.aliases:
            alias = self._aliases.pop(address)
            if alias.wanted:
                self.owed[address] = alias.server_key
        talk.aliases.clear()

    def forget(self, talk: Conversation) -> None:
        """Call it no more."""
        del self._called[talk.address]

    def expire(self, now_s: float) -> None:
        """Drop aliases that nobody used for long: whoever may choose addresses must not make them grow."""
        for address, alias in list(self._aliases.items()):
            if not alias.wanted and now_s >= alias.used_s + FORGET_CALL_S:
                del self._aliases[address]
                alias.talk.aliases.discard(address)

    def all(self) -> list[Conversation]:
        """Each once."""
        return list(self._called.values())
