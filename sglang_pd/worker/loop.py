"""The control thread of a worker: one loop that owns sockets, room tables and every poll of the backend.

It sleeps in one `poll` over sockets, the backend's wake-up descriptor and an eventfd that engine calls ring; nothing
spins while idle. No exception ends it: what escapes a turn is kept as the last fault, logged with a limit, and counted.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import zmq

from sglang_pd.backends.home import Home
from sglang_pd.protocol.errors import PdError, RoomError
from sglang_pd.worker.peers.link import Link, Party
from sglang_pd.worker.ranks.agent import RankAgent
from sglang_pd.worker.wakeups import set_timer_slack

log = logging.getLogger("sglang_pd.worker")

IDLE_S: Final = 0.25
"""Longest sleep: bounds how late a silent loss is noticed when nothing else wakes the loop."""
BUSY_WITH_FD_S: Final = 0.02
BUSY_WITHOUT_FD_S: Final = 0.001
SEEKING_S: Final = 0.05
MAX_CALLS: Final = 65_536


class Driven(Protocol):
    """What the loop drives besides the rank: the control, or a rank's connection to a control elsewhere."""

    def on_frame(self, party: Party, frame: bytes) -> None:
        """One frame."""

    def wake(self) -> None:
        """A turn begins; nothing has been done in it yet."""

    def turn(self) -> None:
        """What is due now."""

    def next_timer_s(self) -> float | None:
        """When `turn` is due next (monotonic seconds)."""


class WorkerLoop:
    """Runs one `Driven` and one rank agent over one link. `start`, `submit` and `stop` may be called by any thread."""

    def __init__(self, link: Link, driven: Driven, agent: RankAgent | None, *, name: str = "sglang-pd") -> None:
        self._home = Home("the control thread", "worker")
        self._link = link
        self._driven = driven
        self._agent = agent
        self._calls: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = threading.Lock()
        self._rung = False
        self._stop = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.faults = 0
        self.last_fault = ""
        self.turns = 0
        self.last_turn_s = time.monotonic()

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` where the system has none left."""
        self._home.check()
        try:
            self._thread.start()
        except BaseException:
            self._close_bell()
            raise

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def ring(self) -> None:
        """Wake the loop."""
        self._home.check()
        with self._bell_lock:  # after `stop` the descriptor's number may be somebody else's
            if not self._rung and not self._closed:
                self._rung = True
                os.eventfd_write(self._bell, 1)

    def submit(self, call: Callable[[], None]) -> None:
        """Run a call on the control thread, after those submitted before.

        Raises `RoomError`: `queue_full`, or `draining` when the thread was stopped; `BackendUnavailable` in a fork.
        """
        self._home.check()
        if self._stop:
            raise RoomError("the endpoint is closed", code="draining", where="worker")
        if len(self._calls) >= MAX_CALLS:
            raise RoomError("the control thread does not keep up", code="queue_full", where="worker")
        self._calls.append(call)
        self.ring()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after its current turn. False when it did not end in time. A fork has none to end."""
        if not self._home.here:
            if not self._closed:  # without the lock, which a thread may have held when the fork came
                self._closed = self._stop = True
                os.close(self._bell)
            return True
        self._stop = True
        self._rung = False
        self.ring()
        if self._thread.ident is None:
            return True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        set_timer_slack()
        poller, polled = zmq.Poller(), set[object]()
        ready: set[object] | None = None
        while not self._stop:
            try:
                busy = self._turn(ready)
                wanted = self._sources()
                if wanted != polled:
                    for source in wanted - polled:
                        poller.register(source, zmq.POLLIN)
                    for source in polled - wanted:
                        poller.unregister(source)
                    polled = wanted
                ready = {source for source, _ in poller.poll(math.ceil(self._timeout_s(busy) * 1000))}
            except Exception as error:  # a poller that is beyond repair must not end the thread, nor spin it
                self._fault(error, defect=True)
                poller, polled, ready = zmq.Poller(), set[object](), None
                time.sleep(BUSY_WITHOUT_FD_S)
        self._close_bell()

    def _close_bell(self) -> None:
        with self._bell_lock:
            self._closed = True
            os.close(self._bell)

    def _sources(self) -> set[object]:
        fd = self._agent.backend.wakeup_fd() if self._agent is not None else None
        return {self._bell, self._link.bell, *self._link.sockets(), *(() if fd is None else (fd,))}

    def _turn(self, ready: set[object] | None) -> bool:
        """One turn. ready: which sources have news; None: any may have.

        Only those are asked: beside a busy engine thread every system call costs a wait for the interpreter.
        """
        self.turns += 1
        self.last_turn_s = time.monotonic()
        self._guard(self._driven.wake)
        for _ in range(len(self._calls)):
            self._guard(self._calls.popleft())
        for party, frame in self._link.receive(ready):
            self._guard(lambda party=party, frame=frame: self._driven.on_frame(party, frame))  # type: ignore[misc]
        busy, progress = False, self._progress_due(ready)

        def step() -> None:
            nonlocal busy
            busy = self._agent.step(self._guard, progress=progress) if self._agent is not None else False

        self._guard(step)
        self._guard(self._driven.turn)
        self._guard(step)  # orders that this turn gave start now, not at the next wake-up
        self._guard(self._driven.turn)
        # Last: a peer acts on what it is told (that it was given up, say), so this turn's orders (that its mapping is
        # revoked) are carried out first.
        self._guard(self._link.flush)
        if self._rung:  # calls that came since then rang no more: `_timeout_s` sees them
            self._rung = False
            self._guard(lambda: os.eventfd_read(self._bell))
        return busy

    def _progress_due(self, ready: set[object] | None) -> bool:
        if self._agent is None or ready is None:
            return True
        fd = self._agent.backend.wakeup_fd()
        return fd is None or fd in ready or self._agent.backend.progress_interval_s is not None

    def _guard(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BlockingIOError:
            pass
        except PdError as error:
            self._fault(error)
        except Exception as error:
            self._fault(error, defect=True)

    def _fault(self, error: Exception, *, defect: bool = False) -> None:
        self.faults += 1
        self.last_fault = f"{type(error).__name__}: {error}"
        if self.faults <= 20 or self.faults % 1000 == 0:
            trace = error if defect else None
            log.warning("control thread fault %d: %s", self.faults, self.last_fault, exc_info=trace)

    def _timeout_s(self, busy: bool) -> float:
        if self._calls or self._rung or (self._agent is not None and self._agent.called):
            return 0.0
        waits = [IDLE_S]
        due_s = self._driven.next_timer_s()
        if due_s is not None:
            waits.append(max(0.0, due_s - time.monotonic()))
        if self._agent is not None:
            backend = self._agent.backend
            if self._agent.seeking:
                waits.append(SEEKING_S)
            if busy:
                waits.append(BUSY_WITHOUT_FD_S if backend.wakeup_fd() is None else BUSY_WITH_FD_S)
            if backend.progress_interval_s is not None:
                waits.append(backend.progress_interval_s)
        return min(waits)
