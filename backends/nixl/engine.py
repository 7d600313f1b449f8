"""The thread that drives the library's agent: it posts, polls, advances, connects, closes and rebuilds.

Whoever drives holds one lock, so that the library sees one thread at a time. The owner of the backend never waits for
it; where it is free and a small write is next, the owner posts that itself (`submit`): to wake the thread and to be
woken by it takes longer than the copy. Whatever is not finished then is the thread's.

How often it looks when there is nothing to do: all the time for a quarter of a second after anything moved while pieces
are in flight, then every millisecond; with peers but nothing in flight every millisecond for a tenth of a second after
the last sign of life and then every 5 ms; without peers it sleeps until called.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from sglang_pd.backends.home import Home, give_back
from sglang_pd.backends.library.blob import SegmentEntry
from sglang_pd.backends.library.ports import Exposure
from sglang_pd.backends.library.process import ProcessIdentity, own_identity
from sglang_pd.backends.nixl.blob import AgentBlob, agent_name
from sglang_pd.backends.nixl.calls import CALL_S, Bell, Call, nothing
from sglang_pd.backends.nixl.library import Agent, Described, Handle, Library, build, log
from sglang_pd.backends.nixl.link import BEAT, Link, NixlWork
from sglang_pd.backends.nixl.memory import use_device
from sglang_pd.backends.nixl.options import NixlOptions
from sglang_pd.backends.nixl.writers import Revocation, Writers, greeting
from sglang_pd.backends.shortage import in_words, start_thread
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, PdError, TransferError

T = TypeVar("T")

HOT_S = 0.25
AWARE_S = 0.1
HINTED_S = 0.05
WATCH_S = 0.01
DEFECT_PAUSE_MS = 10
REBUILD_PAUSE_S = 0.5
"""Seconds before a rebuild that failed is tried again."""
REBUILD_LATE_S = 10.0
"""Seconds after which a rebuild that has not ended is complained of, once."""
DRAIN_S = 0.2
"""Seconds that unfinished transfers of ours get before our agent closes under them."""
MAX_COMMANDS = 65_536


class Engine:
    """Owns the agent. Methods under "owner" may be called by the backend's owner; the rest under the lock."""

    def __init__(self, library: Library, options: NixlOptions, epoch: int) -> None:
        self._library, self._options, self._epoch = library, options, epoch
        self._home = Home("the backend", "nixl")
        self.process = own_identity()
        """This process. Asked once: what is read of it where descriptors are short would look like another process."""
        self.news_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell = Bell()
        self._commands: deque[tuple[Link, NixlWork] | Call] = deque()
        self._sleeping = self._stopping = self._over = False
        self._driving = threading.Lock()
        self._agent: Agent | None = None
        self._described: Described | None = None
        """Of the agent, with the segments that it has; None without one."""
        self.rebuilds = self._defects = 0
        self._segments: list[SegmentEntry] = []
        self._links: dict[str, Link] = {}
        self._ghosts: list[Link] = []
        self._serving = False
        self._closing: list[Agent] = []
        """Agents that were closed and are not known to be destroyed."""
        self._rebuilding = False
        self._rebuild_at = self._late_at = 0.0
        self.not_rebuilt: PdError | None = None
        """Why the last attempt to rebuild the agent failed; None after one that did not."""
        self._moved = self._seen = self._hinted = self._watched = 0.0
        self.writers = Writers()
        self._exposure = Exposure()
        self._revoked: dict[int, Revocation] = {}
        try:
            self._thread = start_thread(self._run, f"nixl-{epoch:016x}", "nixl")
        except BackendUnavailable:
            os.close(self.news_fd)
            os.close(self._bell.fd)
            raise

    # Owner

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the thread and return what it returns or raise what it raises."""
        call = Call(function)
        self._command(call)
        result: T = call.answer()
        return result

    def order(self, function: Callable[[], None]) -> None:
        """Have the thread run `function`, without waiting for it."""
        self._command(Call(function, awaited=False))

    def submit(self, link: Link, work: NixlWork, *, small: bool) -> None:
        """Start a transfer; `small`: its bytes are copied within a fraction of a millisecond, so that it may be posted
        by the caller. Raises `BackendError` (`queue_full`) when too many wait."""
        if len(self._commands) >= MAX_COMMANDS:
            raise BackendError("too many transfers wait", code="queue_full", where="write", actual=MAX_COMMANDS)
        self._check_alive()
        link.open.add(work.transfer)
        if not (small and self._post_here(link, work)):
            self._commands.append((link, work))
            self._wake()

    def _post_here(self, link: Link, work: NixlWork) -> bool:
        """Post in the caller's thread and look once, if nothing else is under way. False where that is the thread's."""
        if self._commands or not self._driving.acquire(blocking=False):
            return False
        try:
            # The first write to a peer wires up, which may take its time.
            if self._commands or not link.reached or link.waiting() or self._links.get(link.name) is not link:
                return False
            self._obey((link, work))
            self._step(link, time.monotonic())
        finally:
            self._driving.release()
        if link.waiting() or link.lost is not None:
            self._wake()
        return True

    def _command(self, call: Call) -> None:
        self._check_alive()
        self._commands.append(call)
        self._wake()

    def _check_alive(self) -> None:
        if self._stopping or self._over:
            raise BackendError("the backend is closed", where="nixl")

    def _wake(self) -> None:
        if self._sleeping:
            self._bell.ring()

    def revoke(self, epoch: int) -> bool:
        """Close the agent for the sake of `epoch`, once. True when it is shown to be destroyed, and another is there.

        Without another nobody could be told where to write now: who asks for the proof goes on asking until there is.
        """
        one = self._revoked.setdefault(epoch, Revocation())
        if one.closed and self._agent is not None:
            return all(agent.destroyed for agent in tuple(self._closing))
        self._ask_rebuild()
        return False

    def _ask_rebuild(self) -> None:
        now = time.monotonic()
        if self._rebuilding:
            if now > self._late_at:
                self._late_at = float("inf")
                log.error("nixl's agent is being rebuilt for longer than %g s: the library hangs", REBUILD_LATE_S)
        elif now >= self._rebuild_at:
            self._rebuilding, self._late_at = True, now + REBUILD_LATE_S
            self.order(self._rebuild)

    def describe(self) -> Described:
        """What peers need to know of the agent. From now on they may exist. Waits for nothing.

        Raises `BackendUnavailable` while the agent is being rebuilt, or why it could not be yet; asking tries again.
        """
        if not self._serving:
            self._serving = True
            self._seen = time.monotonic()
            self.order(nothing)  # the thread looks around from now on
        described = self._described
        if described is None:
            self._ask_rebuild()
        if described is None or self._rebuilding:
            raise self._gone().with_traceback(None)
        return described

    def keep(self, epoch: int) -> None:
        """The agent stays for that epoch's sake: what it was closed for earlier says nothing of what is sent now."""
        self._revoked.pop(epoch, None)

    def admit(self, epoch: int, process: ProcessIdentity) -> None:
        """That epoch, of that process, may write through the agent of now: what was shown, or is being shown, does not
        cover it. Raises `BackendUnavailable` where its ports cannot be kept for who comes later."""
        self._exposure.admit()
        self.writers.add(epoch, process)
        self.keep(epoch)

    def tell(self) -> None:
        """Make `news_fd` readable: something that the owner waits for has come. From any thread."""
        if not self._stopping:
            self._news()

    def stop(self) -> None:
        """Close the agent and end the thread. Transfers left are UNKNOWN. Idempotent. A fork has neither."""
        if not self._home.here:
            if not self._stopping:
                self._stopping = True
                give_back([self._bell.fd, self.news_fd])
        elif not self._stopping:
            self._stopping = True
            self._bell.ring()
            self._thread.join(CALL_S)
            if self._thread.is_alive():
                log.error("nixl's thread did not end within %g s; it is left behind", CALL_S)
                return
            os.close(self._bell.fd)
            os.close(self.news_fd)

    # Thread: the loop

    def _run(self) -> None:
        ended: list[Link] = []
        while not self._stopping:
            with self._driving:
                pause = self._turn(ended)
                self._sleeping = True
            try:
                ended = self._rest(pause)
            except Exception as error:  # see `_turn`
                self._defect(error, [])
                ended = []
                time.sleep(DEFECT_PAUSE_MS / 1000)
            self._sleeping = False
        with self._driving:
            self._over = True
            self._end()

    def _turn(self, ended: list[Link]) -> int | None:
        """Do what there is to do. Returns for how many milliseconds there is nothing more; None: until called."""
        now = time.monotonic()
        try:
            for link in ended:
                if link.watch.gone():
                    link.died()
            while self._commands:
                self._obey(self._commands.popleft())
            for link in [*self._links.values(), *self._ghosts]:
                self._step(link, now)
            if self._agent is not None and (self._serving or self._links):
                self._listen(self._agent, now)
            if self._links or self._ghosts:
                self._forget(self._agent)
            return self._pause_ms(now)
        except Exception as error:  # the thread must outlive any defect
            self._defect(error, [*self._links.values(), *self._ghosts])
            return DEFECT_PAUSE_MS

    def _step(self, link: Link, now: float) -> None:
        try:
            if link.step(self._agent, now):
                self._moved = self._seen = time.monotonic()
        except Exception as error:
            self._defect(error, [link])

    def _defect(self, error: Exception, links: list[Link]) -> None:
        """A defect of ours ends the links that it may have touched; not the thread, and not the owner's call."""
        self._defects += 1
        if self._defects <= 10:
            log.error("defect in nixl's engine", exc_info=error)
        fault = TransferError(f"{type(error).__name__}: {error}", code="internal", where="nixl's engine")
        for link in links:
            link.lose(fault)

    def _rest(self, pause: int | None) -> list[Link]:
        """Sleep until the pause is over or something calls. Returns the links whose watched processes ended."""
        now = time.monotonic()
        if pause == 0 and now - self._watched < WATCH_S:
            return []
        self._watched = now
        if self._commands or self._stopping:
            pause = 0
        return self._bell.sleep(pause)

    def _pause_ms(self, now: float) -> int | None:
        waiting = [link for link in [*self._links.values(), *self._ghosts] if link.waiting()]
        if waiting:
            if not any(link.urgent() for link in waiting):
                return 5
            return 0 if now - self._moved < HOT_S else 1
        if self._serving or self._links:
            if now - self._hinted < HINTED_S:
                return 0
            return 1 if now - self._seen < AWARE_S else 5
        return None

    def _obey(self, command: tuple[Link, NixlWork] | Call) -> None:
        if isinstance(command, Call):
            error = command.run()
            if error is not None:
                self._defect(error, [])
            return
        link, work = command
        self._moved = self._seen = time.monotonic()
        link.submit(work)
        if self._links.get(link.name) is not link and link not in self._ghosts:
            self._ghosts.append(link)

    def _listen(self, agent: Agent, now: float) -> None:
        try:
            notes = agent.notifications()
        except TransferError as error:
            if now - self._watched > 1.0:
                log.warning("%s", error)
            return
        for message in (one for messages in notes.values() for one in messages):
            if message == BEAT:
                continue
            self._seen = self._hinted = now
            self.writers.heard(message)

    def _news(self) -> None:
        try:
            os.eventfd_write(self.news_fd, 1)
        except BlockingIOError:
            pass  # readable already

    def _forget(self, agent: Agent | None) -> None:
        """Drop links that nobody uses, and those of lost peers, once nothing of theirs is open."""
        for name, link in list(self._links.items()):
            if (link.lost is not None or not link.users) and not link.waiting():
                del self._links[name]
                if agent is not None:
                    link.detach(agent)
                self._ghosts.append(link)
        if self._ghosts:
            for link in [link for link in self._ghosts if link.idle()]:
                self._bell.unwatch(link)
            self._ghosts = [link for link in self._ghosts if not link.idle()]

    # Thread: what the owner calls

    def start(self) -> None:
        """Build the agent. Raises `BackendUnavailable`."""
        self._agent = build(self._library, agent_name(self._epoch, 0), self._options)
        self._exposure.listens(self._agent.ports)
        self._described = Described.of(self._agent)

    def agent(self) -> Agent:
        """The agent. Raises `BackendUnavailable`, or why it could not be rebuilt yet."""
        if self._agent is None:
            raise self._gone().with_traceback(None)
        return self._agent

    def _gone(self) -> PdError:
        rebuilt = BackendUnavailable(
            "nixl's agent is being rebuilt after a revoke", where="nixl", hint="Ask again; it takes a moment."
        )
        return self.not_rebuilt or rebuilt

    def register(self, segments: list[SegmentEntry]) -> None:
        """Register the segments for life."""
        for entry in segments:
            if entry.device != "cpu":
                use_device(entry.device)
        agent = self.agent()
        agent.register(segments)
        self._segments += segments
        self._described = Described.of(agent)

    def probe(self, segment: SegmentEntry) -> None:
        """Really register a segment, and take it back."""
        if segment.device != "cpu":
            use_device(segment.device)
        agent = self.agent()
        for registered in agent.register([segment]):
            agent.deregister(registered)

    def connect(self, blob: AgentBlob, *, direct: bool = False) -> Link:
        """A link to the peer; the one that is there if it stands. `direct`: see `Link`."""
        link = self._links.get(blob.agent)
        if link is not None and link.lost is None:
            link.users += 1
            return link
        if link is not None:
            raise TransferError(
                "this incarnation is lost and transfers to it are still being given up",
                code="peer_lost",
                where=blob.agent,
            )
        link = Link(blob, self._news, direct=direct)
        if link.watch.gone():
            link.watch.close()
            raise TransferError("the peer's process has exited", code="peer_lost", where=f"peer {blob.agent}")
        try:
            link.attach(self.agent())
        except PdError:
            link.watch.close()
            raise
        link.users = 1
        self._links[link.name] = link
        self._bell.watch(link)
        self.writers.add(blob.epoch, blob.process)
        self._seen = time.monotonic()
        link.hint(self.agent(), greeting(self._epoch, self.process), self._seen)
        return link

    def disconnect(self, link: Link) -> None:
        """One user less; the last one ends the link."""
        link.users -= 1
        if link.users <= 0:
            link.lose(TransferError("disconnected here", code="peer_lost", backend="nixl"))
            self._forget(self._agent)  # who connects next, with nothing in flight, gets a new link

    # Thread: closing

    def _rebuild(self) -> None:
        """Close the agent for every epoch that asked, and build another one; where that fails, asking tries again."""
        try:
            self._replace()
            self.not_rebuilt = None
        except Exception as error:
            cause = in_words(error, "nixl's agent, which could not be rebuilt")
            if str(cause) != str(self.not_rebuilt or ""):
                log.error("nixl's agent is not rebuilt yet: %s", cause)
            self.not_rebuilt = cause
            self._rebuild_at = time.monotonic() + REBUILD_PAUSE_S
        finally:
            self._rebuilding = False
            self._news()

    def _replace(self) -> None:
        asked = [one for one in list(self._revoked.values()) if not one.closed]
        if asked:
            self._close(DRAIN_S)
            for one in asked:
                one.closed = True
        if self._agent is None:
            agent = build(self._library, agent_name(self._epoch, self.rebuilds + 1), self._options)
            try:
                agent.register(self._segments)
                self._exposure.listens(agent.ports)
                self._described = Described.of(agent)
            except Exception:
                agent.destroy(())  # nobody was told of it
                raise
            self.rebuilds += 1
            self._agent = agent

    def _close(self, drain_s: float) -> None:
        """Close the agent. It stays in `_closing` until it is known to be destroyed."""
        agent = self._agent
        until = time.monotonic() + drain_s
        while agent is not None and time.monotonic() < until:
            # Greetings that wait in our sockets are the only word of who has written here without being admitted.
            self._listen(agent, time.monotonic())
            for link in self._links.values():
                self._step(link, time.monotonic())
            time.sleep(0.001)
        error = TransferError("our own agent was closed by revoke or close", code="peer_lost", backend="nixl")
        handles: list[Handle] = []
        for link in [*self._links.values(), *self._ghosts]:
            handles += link.abandon(error)
            link.added = False
            if link not in self._ghosts:
                self._ghosts.append(link)
        self._links.clear()
        if agent is not None:
            self._closing.append(agent)
            self._agent = self._described = None
            self._exposure.leaves(agent.ports)
            agent.destroy(handles)
        for one in self._closing:
            one.destroy(())
        self._closing = [one for one in self._closing if not one.destroyed]
        if self._closing:
            log.error("nixl's agent was not destroyed; nothing is proven")
            return
        if agent is not None:
            self._exposure.left(agent.ports)
        for link in self._ghosts:
            link.closed()

    def _end(self) -> None:
        try:
            self._close(0.0)
        except Exception:
            log.exception("nixl's agent did not close")
        closed = BackendError("the backend is closed", where="nixl")
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Call):
                command.refuse(closed)
            else:
                command[0].submit(command[1])
                command[0].abandon(closed)
        for link in self._ghosts:
            self._bell.unwatch(link)
