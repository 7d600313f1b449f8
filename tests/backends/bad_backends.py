"""Backends that break the contract, each in one way, over the local one. The suite must fail every one of them.

Chosen by option `mode`. Not a test module: the suite's child processes import it by name.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang_pd.backends.base import DEFAULT_DEADLINE_S, Backend, Peer, Transfer, TransferState
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.errors import PdError, TransferError
from sglang_pd.testing.faults import WrappedBackend


class Claimed(Transfer):
    """A transfer that says what it is told to say."""

    def __init__(self, nbytes: int, state: TransferState) -> None:
        self.nbytes = nbytes
        self.state = state

    def poll(self) -> TransferState:
        return self.state

    @property
    def error(self) -> PdError | None:
        if self.state in (TransferState.FAILED, TransferState.UNKNOWN):
            return TransferError("claimed", code="transfer_unknown")
        return None


class BadBackend(WrappedBackend):
    """Breaks nothing: shows that the wrapper itself passes."""

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        if len(batch) == 0 or after is not None:
            return super().write(peer, batch, after=after, deadline_s=deadline_s)
        return self.bad_write(peer, batch)

    def bad_write(self, peer: Peer, batch: WriteBatch) -> Transfer:
        return self.inner.write(peer, batch)


class DoesNothing(BadBackend):
    """Says DONE and moves nothing."""

    def bad_write(self, peer: Peer, batch: WriteBatch) -> Transfer:
        return Claimed(batch.total_bytes, TransferState.DONE)


class DoneEarly(BadBackend):
    """Moves everything, 20 ms after it said DONE."""

    def bad_write(self, peer: Peer, batch: WriteBatch) -> Transfer:
        timer = threading.Timer(0.02, self.inner.write, (peer, batch))
        timer.daemon = True
        timer.start()
        return Claimed(batch.total_bytes, TransferState.DONE)


class LosesOne(BadBackend):
    """Leaves the last descriptor out where there are several."""

    def bad_write(self, peer: Peer, batch: WriteBatch) -> Transfer:
        keep = slice(0, max(1, len(batch) - 1))
        columns = ("src_region", "src_offset", "dst_region", "dst_offset", "length")
        return self.inner.write(peer, replace(batch, **{name: getattr(batch, name)[keep] for name in columns}))


class WritesAfterFence(BadBackend):
    """Holds every batch back for 50 ms; a fence calls what waits DONE and is True, and it lands later."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.waiting: list[Claimed] = []

    def bad_write(self, peer: Peer, batch: WriteBatch) -> Transfer:
        claimed = Claimed(batch.total_bytes, TransferState.PENDING)
        self.waiting.append(claimed)

        def land() -> None:
            transfer = self.inner.write(peer, batch)
            while not transfer.quiesced:
                pass
            if claimed.state is TransferState.PENDING:
                claimed.state = TransferState.DONE

        timer = threading.Timer(0.05, land)
        timer.daemon = True
        timer.start()
        return claimed

    def fence(self, peer: Peer) -> bool:
        for claimed in self.waiting:
            if claimed.state is TransferState.PENDING:
                claimed.state = TransferState.DONE
        return True


class NeverFences(BadBackend):
    """Gives no proof, ever."""

    def fence(self, peer: Peer) -> bool:
        return False


class HangsUpInFork(BadBackend):
    """Its fork ends the parent's connections when it closes."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.pid = os.getpid()
        self.peers: list[Peer] = []

    def bad_write(self, peer: Peer, batch: WriteBatch) -> Transfer:
        self.peers = [peer]
        return super().bad_write(peer, batch)

    def close(self) -> None:
        if os.getpid() != self.pid:
            with contextlib.suppress(OSError):  # the second time
                for peer in self.peers:
                    peer._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        super().close()


class AlwaysUnknown(BadBackend):
    """Moves everything and never says so."""

    def bad_write(self, peer: Peer, batch: WriteBatch) -> Transfer:
        self.inner.write(peer, batch)
        return Claimed(batch.total_bytes, TransferState.UNKNOWN)


class PostsCancelled(BadBackend):
    """Says that a cancelled transfer has failed, and lets it land when its event comes."""

    def write(
        self, peer: Peer, batch: WriteBatch, *, after: Any = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Transfer:
        posted = self.inner.write(peer, batch, after=after, deadline_s=deadline_s)
        return posted if after is None else FailedInName(posted)

    def fence(self, peer: Peer) -> bool:
        return True


class FailedInName(Claimed):
    """FAILED from `cancel` on, whatever becomes of it."""

    def __init__(self, posted: Transfer) -> None:
        super().__init__(posted.nbytes, TransferState.PENDING)
        self.posted = posted

    def poll(self) -> TransferState:
        return self.state if self.state is TransferState.FAILED else self.posted.poll()

    @property
    def error(self) -> PdError | None:
        return TransferError("claimed") if self.state is TransferState.FAILED else self.posted.error

    def cancel(self) -> None:
        self.state = TransferState.FAILED


MODES = {
    "none": BadBackend,
    "does_nothing": DoesNothing,
    "done_early": DoneEarly,
    "loses_one": LosesOne,
    "writes_after_fence": WritesAfterFence,
    "never_fences": NeverFences,
    "hangs_up_in_fork": HangsUpInFork,
    "always_unknown": AlwaysUnknown,
    "posts_cancelled": PostsCancelled,
}


def create(*, epoch: int, options: Mapping[str, Any]) -> Backend:
    return MODES[options["mode"]](create_backend("local", epoch=epoch))
