"""One posted batch of the local backend: the parts it was split into, and what they add up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_pd.backends.base import Transfer, TransferState
from sglang_pd.backends.home import fork_count, unknown_in_fork
from sglang_pd.protocol.errors import PdError, TransferError


class Part(Protocol):
    """Ranges of a batch that one engine (a copier, a kernel) moves."""

    @property
    def settled(self) -> bool:
        """True when nothing more of it can land; `error` is then final."""

    @property
    def error(self) -> PdError | None:
        """Why not all of it landed."""

    @property
    def doubt(self) -> PdError | None:
        """Why it will never be known whether it landed; such a part never settles."""

    def cancel(self, cause: PdError) -> None:
        """Start nothing more of it."""

    def withdraw(self, cause: PdError) -> bool:
        """Start nothing of it, and True; False, and no effect, where any of it was started."""


class HeldPart:
    """A part that starts once `gate` has settled.

    gate: a job of no bytes behind the event that the bytes depend on, for an event that the part's own engine cannot
    wait for. start: called by the owner's thread.
    """

    def __init__(self, gate: Part, start: Callable[[], Part]) -> None:
        self._gate, self._start = gate, start
        self._part: Part | None = None
        self._error: PdError | None = None
        self._doubt: PdError | None = None

    @property
    def settled(self) -> bool:
        """See `Part`."""
        if self._part is None and self._error is None and self._doubt is None and self._gate.settled:
            self._begin()
        return self._error is not None or (self._part is not None and self._part.settled)

    def _begin(self) -> None:
        if self._gate.error is not None:
            self._error = self._gate.error
            return
        try:
            self._part = self._start()
        except PdError as refused:
            self._error = refused
        except Exception as defect:
            # It may have started something before it failed.
            words = f"{type(defect).__name__}: {defect}"
            self._doubt = TransferError("the copy failed", code="transfer_unknown", where="local", actual=words[:500])

    @property
    def error(self) -> PdError | None:
        """See `Part`."""
        return self._error or (self._part.error if self._part is not None else None)

    @property
    def doubt(self) -> PdError | None:
        """See `Part`."""
        return self._part.doubt if self._part is not None else self._doubt

    def cancel(self, cause: PdError) -> None:
        """See `Part`."""
        if self._part is not None:
            self._part.cancel(cause)
        elif self._error is None:
            self._error = cause
            self._gate.cancel(cause)

    def withdraw(self, cause: PdError) -> bool:
        """See `Part`."""
        if self._part is not None or self._doubt is not None:
            return False
        self.cancel(cause)
        return True


class LocalTransfer(Transfer):
    """A transfer with a deadline. `failed`: it never started, for this reason."""

    def __init__(self, nbytes: int, deadline: float, parts: Sequence[Part], failed: PdError | None = None) -> None:
        self.nbytes = nbytes
        self._deadline = deadline
        self._parts = list(parts)
        self._error = failed
        self._forks = fork_count()
        self._state = TransferState.PENDING
        if failed is not None:
            self._state = TransferState.FAILED
        elif not self._parts:
            self._state = TransferState.DONE

    def poll(self) -> TransferState:
        """See `Transfer`. Past the deadline what has not started is dropped, so that the transfer soon is FAILED."""
        if self._state in (TransferState.DONE, TransferState.FAILED):
            return self._state
        if fork_count() != self._forks:
            self._error = self._error or unknown_in_fork("local")
            return TransferState.UNKNOWN
        late = self._state is TransferState.PENDING and time.monotonic() > self._deadline
        if late:  # before a look at the parts, which starts those whose event has come
            self.stop(TransferError("the transfer passed its deadline", code="transfer_timeout", where="local"))
        if all(part.settled for part in self._parts):
            errors = [part.error for part in self._parts if part.error is not None]
            self._error = errors[0] if errors else None
            self._state = TransferState.FAILED if errors else TransferState.DONE
            self._parts = []
        elif any(part.doubt for part in self._parts):
            self._state = TransferState.UNKNOWN
            self._error = next(part.doubt for part in self._parts if part.doubt)
        elif late:
            self._state = TransferState.UNKNOWN
        return self._state

    @property
    def error(self) -> PdError | None:
        """See `Transfer`."""
        return self._error

    def cancel(self) -> None:
        """See `Transfer`. What a device's stream was put behind the event is handed over."""
        if fork_count() != self._forks:
            return
        cause = TransferError("cancelled before anything was posted", where="local")
        # The copier's part is the last of two: where that has begun, the one before is not stopped either.
        for part in reversed(self._parts):
            if not part.withdraw(cause):
                return

    def stop(self, cause: PdError) -> None:
        """Start nothing more of it."""
        self._error = self._error or cause
        for part in self._parts:
            part.cancel(cause)
