"""Chunks on their way: what their transfers say, asked so that a backend that breaks its word costs one room alone."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from sglang_pd.backends.base import Peer, Transfer, TransferState
from sglang_pd.protocol.bind import Chunk
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.worker.ranks.meetings import info_of


@dataclass(slots=True)
class Flight:
    """One chunk on its way, with all its transfers and the peer of each."""

    chunk: Chunk
    transfers: list[tuple[Peer, Transfer]]
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By kind: bytes, descriptors."""

    def states(self) -> list[TransferState]:
        """Of each transfer."""
        return [state_of(transfer) for _, transfer in self.transfers]

    @property
    def quiesced(self) -> bool:
        """Whether all are DONE or FAILED."""
        return all(quiesced(transfer) for _, transfer in self.transfers)

    def cancel(self) -> None:
        """Give up what was not handed over yet."""
        for _, transfer in self.transfers:
            with contextlib.suppress(Exception):
                transfer.cancel()


def peers_of(flights: list[Flight]) -> list[Peer]:
    """Peers of transfers that may still land, each once."""
    return list({id(peer): peer for flight in flights for peer, t in flight.transfers if not quiesced(t)}.values())


def state_of(transfer: Transfer) -> TransferState:
    """UNKNOWN for one whose backend raises."""
    try:
        return transfer.poll()
    except Exception:
        return TransferState.UNKNOWN


def quiesced(transfer: Transfer) -> bool:
    """Whether it is DONE or FAILED."""
    return state_of(transfer) in (TransferState.DONE, TransferState.FAILED)


def source_free(transfer: Transfer) -> bool:
    """Whether nothing reads its source any more."""
    try:
        return transfer.source_free
    except Exception:
        return False


def cause_of(transfer: Transfer) -> ErrorInfo:
    """Why a transfer is FAILED or UNKNOWN."""
    try:
        transfer.poll()
        error = transfer.error
    except Exception as defect:
        return info_of(defect)
    return error.info() if error else ErrorInfo(code="transfer_unknown", message="the transport gave no reason")
