"""The connections of a control to its ranks in other processes: which rank speaks where, and who missed orders."""

from __future__ import annotations

from sglang_pd.protocol.manifest import RankId
from sglang_pd.worker.peers.link import Link, Party
from sglang_pd.worker.ranks.orders import AnyOrder, Rejoin, Welcome, encode
from sglang_pd.worker.ranks.roster import Reach


class RankConnections:
    """By the party of each rank. Control thread only."""

    def __init__(self, link: Link, control_epoch: int, liveness_s: float) -> None:
        self._link = link
        self._rejoin = Rejoin(control_epoch=control_epoch)
        self._welcome = Welcome(control_epoch=control_epoch, liveness_s=liveness_s)
        self._by_party: dict[Party, RankId] = {}
        self._missed: set[RankId] = set()

    def rank_at(self, party: Party) -> RankId | None:
        """Who joined from there, and from nowhere else since."""
        return self._by_party.get(party)

    def settle(self, rank: RankId, party: Party) -> None:
        """That rank speaks from there now."""
        self._by_party = {p: other for p, other in self._by_party.items() if other != rank}
        self._by_party[party] = rank
        self._missed.discard(rank)
        self.welcome(party)

    def welcome(self, party: Party) -> None:
        """Tell a rank that it is heard, and belongs here."""
        self._send(party, self._welcome)

    def rejoin(self, party: Party) -> None:
        """Have whoever speaks there introduce itself."""
        self._send(party, self._rejoin)

    def note_dropped(self) -> None:
        """Before anything is heard in a turn: orders that the last one gave may not have left. No order is repeated by
        itself, so whoever missed one is where it would be after a broken connection.
        """
        self._missed |= {self._by_party[party] for party in self._link.dropped if party in self._by_party}

    def missed(self, rank: RankId) -> bool:
        """Whether a rank that is heard missed orders. It is told again, which may be dropped as well."""
        if rank not in self._missed:
            return False
        self._missed.discard(rank)
        self._link.counts["ranks_told_again"] += 1
        return True

    def reach(self, party: Party) -> Reach:
        """How to give orders to the rank that speaks there."""
        return lambda order: self._send(party, order)

    def _send(self, party: Party, order: AnyOrder) -> None:
        self._link.send(party, encode(order))
