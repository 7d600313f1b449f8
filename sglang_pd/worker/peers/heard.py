"""What conversations tell the control behind them."""

from __future__ import annotations

from typing import Protocol

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.messages import Message
from sglang_pd.worker.peers.conversation import Conversation


class Heard(Protocol):
    """What the control learns from conversations."""

    def agreed(self, talk: Conversation) -> None:
        """Both sides accept: ranks can meet, rooms can open."""

    def lost(self, talk: Conversation, epoch: int, error: ErrorInfo) -> None:
        """That incarnation is gone, agreed or not."""

    def refused(self, talk: Conversation) -> None:
        """The verdict is a refusal; `talk.error` says why."""

    def fenced(self, own_epoch: int) -> bool:
        """True when nothing of rooms in which this side went by that epoch is written any more."""

    def fenced_by_peer(self, epoch: int, manifest: InstanceManifest | None) -> None:
        """The instance of that manifest, which lives, says so of what it wrote as that lost peer; None: it stops, and
        states none.
        """

    def stated(self, manifest: InstanceManifest) -> None:
        """Ranks that live state these terms, and so have ended what they wrote in those before."""

    def room_message(self, talk: Conversation, message: Message) -> None:
        """A message for the room tables. Raises `RemoteProtocolError` for one that must be refused."""
