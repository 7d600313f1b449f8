"""The engine that peers write through, and its end as the destination's proof.

Once it is closed and joined, no thread of this process stores bytes that a peer sent, whatever waits in sockets, and
those sockets are gone. Its successor must listen on other ports: a stopped writer that wakes up still holds the old
ones, with descriptors queued for them, and the memory is the same. So old ports stay reserved, see `library.ports`;
and those of workers that have ended are not taken either, see `library.lives`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from sglang_pd.backends.library import ports
from sglang_pd.backends.library.ports import Exposure
from sglang_pd.backends.library.segments import Scope
from sglang_pd.backends.mooncake.blob import identity_bytes
from sglang_pd.backends.mooncake.engine import Engine
from sglang_pd.backends.mooncake.library import Library
from sglang_pd.backends.mooncake.links import IdentityPage
from sglang_pd.backends.mooncake.options import MooncakeOptions
from sglang_pd.backends.shortage import in_words, start_thread
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, PdError

CLOSE_WITHIN_S = 5.0
RETRY_S = 0.5
"""Pause before an engine that could not be replaced is tried again."""

_LOG = logging.getLogger(__name__)


class Inbound:
    """Owns the engine that exports our memory. `generation` counts its engines, from 1."""

    def __init__(self, library: Library, options: MooncakeOptions, epoch: int, scope: Scope) -> None:
        self._library = library
        self._options = options
        self._epoch = epoch
        self._scope = scope
        self._lock = threading.Lock()
        self._page = IdentityPage(options.transport)
        self._exposure = Exposure()
        self._revoked: set[int] = set()
        self._asked: set[int] = set()
        self._replacing: set[int] = set()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._closing: Engine | None = None
        """To be replaced, and its end not proven yet."""
        self._failed: PdError | None = None
        """Why the last attempt to replace the engine failed; None after one that did not."""
        self.generation = 0
        self._engine: Engine | None = None
        self._open()

    @property
    def engine(self) -> Engine:
        """The engine now. Raises `BackendError` while it is being replaced, or what keeps it from being replaced."""
        with self._lock:
            if self._engine is not None:
                return self._engine
            if self._failed is not None:
                raise self._failed
            raise BackendError("the engine that peers write through is being replaced: ask again", where="mooncake")

    @property
    def failed(self) -> PdError | None:
        """Why the engine was not replaced, though asked for; it is tried again."""
        return self._failed

    @property
    def identity_address(self) -> int:
        """Where peers read who we are."""
        return self._page.address

    def listening(self) -> tuple[str, ...]:
        """`address:port` of the engine's sockets; none while it is being replaced."""
        engine = self._engine
        return engine.listening() if engine is not None else ()

    def _open(self) -> None:
        engine = Engine(self._library, self._options)
        self.generation += 1
        self._page.write(identity_bytes(self._epoch, self.generation))
        try:
            engine.register([self._page.address], [self._page.nbytes])
            segments = self._scope.segments
            engine.register([one.address for one in segments], [one.nbytes for one in segments])
            self._exposure.listens(engine.ports)
        except Exception:
            engine.stop(CLOSE_WITHIN_S)
            raise
        with self._lock:
            self._engine, self._failed = engine, None

    def revoke(self, epoch: int, news: Callable[[], None]) -> bool:
        """True once an engine that `epoch` may have written through is closed and joined, and its successor there.

        Starts that, and never waits. Without a successor nobody could be told where to write now: who asks for the
        proof goes on asking until there is one.
        """
        with self._lock:
            proven = epoch in self._revoked
            if not proven:
                self._asked.add(epoch)
            if self._thread is None and not (proven and self._engine is not None):
                with contextlib.suppress(BackendUnavailable):  # no thread now: who asks again tries again
                    self._thread = start_thread(lambda: self._run(news), "sglang-pd-mooncake-revoke", "mooncake")
            return proven and self._engine is not None

    def admit(self, epoch: int) -> None:
        """That incarnation may write through the engine now: what was proven of the one before does not cover it.

        Raises `BackendUnavailable` where the ports cannot be kept from those who come after this process.
        """
        self._exposure.admit()
        with self._lock:
            for known in (self._revoked, self._asked, self._replacing):
                known.discard(epoch)

    def _run(self, news: Callable[[], None]) -> None:
        """Replace the engine, however often that takes: a shortage of descriptors or ports passes."""
        try:
            while not (self._replace() or self._ending.wait(RETRY_S)):
                pass
        finally:
            with self._lock:
                self._thread = None
            news()

    def _replace(self) -> bool:
        """One attempt. Where it fails, everything stands as if nobody had tried, but for an engine that has ended."""
        with self._lock:
            self._replacing |= self._asked
            self._asked = set()
            engine, self._engine = self._engine or self._closing, None
            self._closing = engine
        try:
            if engine is not None:
                self._close(engine)
            with self._lock:
                self._closing = None
                self._revoked |= self._replacing
                self._replacing = set()
            self._open()
        except Exception as error:
            cause = in_words(error, "mooncake, the engine that peers write through")
        else:
            return True
        if self._failed is None or str(self._failed) != str(cause):
            _LOG.warning("the engine that peers write through is not replaced yet: %s", cause)
        with self._lock:
            self._failed = cause
            self._asked |= self._replacing
            self._replacing = set()
            if self._closing is not None and self._closing.running:
                self._engine, self._closing = self._closing, None
        return False

    def _close(self, engine: Engine) -> None:
        """Raises where the end of the engine is not proven, or its ports are not kept from whoever comes next."""
        ports.retire(engine.ports)
        if not engine.stop(CLOSE_WITHIN_S):
            raise BackendError("the library's engine did not close, so nothing is proven", where="mooncake")
        ports.hold(engine.ports)

    def close(self) -> bool:
        """End the engine; True when that is proven. Idempotent."""
        self._ending.set()
        thread = self._thread
        if thread is not None:
            thread.join(2 * CLOSE_WITHIN_S)
        with self._lock:
            engine, self._engine = self._engine or self._closing, None
            self._closing = engine
            self._failed = BackendError("the backend is closed", where="mooncake")
        if engine is not None:
            self._exposure.leaves(engine.ports)
        closed = engine is None or engine.stop(CLOSE_WITHIN_S)
        if engine is not None:
            self._exposure.left(engine.ports)
        if closed:
            self._page.release()
        return closed and (thread is None or not thread.is_alive())
