"""The state of one write, as its owner sees it, whichever library moves the bytes."""

from __future__ import annotations

import os
import threading
import time

from sglang_pd.backends.base import Transfer, TransferState
from sglang_pd.backends.home import fork_count, unknown_in_fork
from sglang_pd.protocol.errors import PdError, TransferError

FINAL = (TransferState.DONE, TransferState.FAILED)
FREE_LOOKS = 2
"""Polls of a pending transfer that cost nothing; an owner that waits on `wakeup_fd` needs no more."""


class LibraryTransfer(Transfer):
    """State of one batch to `peer`. Written by the backend's thread and, past the deadline, by whoever looks first."""

    def __init__(self, backend: str, peer: str, nbytes: int, deadline_s: float) -> None:
        self.nbytes = nbytes
        self.expires = time.monotonic() + deadline_s
        self._backend = backend
        self._peer = peer
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._state = TransferState.PENDING
        self._error: PdError | None = None
        self._looks = 0
        self._forks = fork_count()
        self._let_go = False
        self.cancelled = False
        """Whoever drives it looks at this before the first part of it is handed over."""

    @property
    def forked(self) -> bool:
        """Whether this is a fork of the process that posted it, where nothing more is learnt of it."""
        return fork_count() != self._forks

    def poll(self) -> TransferState:
        """The state now; see the contract. Never blocks; who asks again and again lets other threads run."""
        if self.forked and not self.final:
            # Without the lock, which another thread may have held when the fork came.
            self._error = self._error or unknown_in_fork(f"write to peer {self._peer}")
            self._state = TransferState.UNKNOWN
        if self._state is TransferState.PENDING and not self.expired():
            self._looks += 1
            if self._looks > FREE_LOOKS:
                # A loop of polls would otherwise keep the interpreter from the very thread that it waits for.
                os.sched_yield()
        return self._state

    def decided(self) -> TransferState:
        """The state as last decided, without a look at the clock."""
        return self._state

    @property
    def final(self) -> bool:
        """Whether it was decided as DONE or FAILED."""
        return self._state in FINAL

    def expired(self) -> bool:
        """Whether the deadline has passed; the first to see it makes an undecided transfer UNKNOWN."""
        if time.monotonic() < self.expires:
            return False
        if self._state is TransferState.PENDING:
            self.settle(TransferState.UNKNOWN, self.late())
        return True

    def late(self) -> PdError:
        """The error of a deadline that has passed."""
        return TransferError(
            f"not done within {self._deadline_s:g} s; unless the state says otherwise, bytes may still land",
            code="transfer_timeout",
            where=f"write to peer {self._peer}",
            backend=self._backend,
        )

    @property
    def source_free(self) -> bool:
        """See `Transfer`."""
        return self._let_go or self.quiesced

    def cancel(self) -> None:
        """See `Transfer`."""
        self.cancelled = True

    def withdrawn(self) -> PdError:
        """The error of one that was cancelled in time."""
        return TransferError(
            "cancelled before anything was posted", where=f"write to peer {self._peer}", backend=self._backend
        )

    def let_go(self) -> None:
        """The library holds no part of it any more, and the connection that carried it is closed."""
        self._let_go = True

    def blame(self, error: PdError) -> None:
        """Keep the first cause."""
        with self._lock:
            if self._error is None:
                self._error = error

    def settle(self, state: TransferState, error: PdError | None = None) -> bool:
        """Move to `state`; True if that was news. DONE and FAILED are final, and UNKNOWN never becomes PENDING.

        The first cause stays: a proof that comes after an UNKNOWN turns the state, not the reason.
        """
        with self._lock:
            if self._state in FINAL or self._state is state:
                return False
            if state is TransferState.DONE:
                self._error = None
            elif self._error is None:
                self._error = error
            self._state = state
            return True

    @property
    def error(self) -> PdError | None:
        """The first cause when FAILED or UNKNOWN, else None."""
        return self._error if self._state is not TransferState.PENDING else None
