"""What the desk of rooms reaches, and the control behind it answers for."""

from __future__ import annotations

from typing import Protocol

from sglang_pd.protocol.manifest import RankId
from sglang_pd.protocol.messages import Message
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.worker.events import RoomEvent
from sglang_pd.worker.ranks.orders import AnyOrder


class Outside(Protocol):
    """What the desk reaches: peers, own ranks, the engine."""

    def send(self, peer_epoch: int, message: Message) -> None:
        """A message to the peer of that epoch; may be lost."""

    def order(self, order: AnyOrder, rank: RankId | None = None) -> None:
        """An order to one own rank, or to all."""

    def emit(self, event: RoomEvent) -> None:
        """An event for the engine."""

    def pairing(self, peer_epoch: int) -> Pairing | None:
        """The pairing agreed with that peer, or None when it is not (any more)."""
