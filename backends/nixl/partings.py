"""The writer's word to a peer on this host: it says when it connects, and when nothing of it can land there any more.

A writer that uses CMA copies with its own system calls, which nobody but it, and the kernel once it has exited, can
tell the end of. So where a connection ends in order, and everything that this process ever handed over to that
incarnation of the peer is DONE or FAILED, it says so before it forgets the peer. In any other case it says nothing: the
peer then waits for this process to exit.
"""

from __future__ import annotations

import itertools

from sglang_pd.backends.library.process import ProcessIdentity, elsewhere, process_gone
from sglang_pd.backends.nixl.library import Agent, log
from sglang_pd.backends.nixl.link import Link
from sglang_pd.backends.nixl.writers import Note, greeting, parting
from sglang_pd.protocol.errors import TransferError

_numbers = itertools.count(1)


class Partings:
    """Connections to each incarnation of a peer, for as long as they may carry something. Under the engine's lock."""

    def __init__(self, epoch: int, process: ProcessIdentity) -> None:
        self._epoch, self._process = epoch, process
        self._links: dict[int, list[Link]] = {}

    def greet(self, agent: Agent, link: Link, now: float) -> None:
        """Somebody here connects to that peer, for the first time or again."""
        link.number = next(_numbers)
        if not elsewhere(link.blob.process):
            self._prune()
            links = self._links.setdefault(link.blob.epoch, [])
            if link not in links:
                links.append(link)
        link.hint(agent, greeting(Note(self._epoch, self._process, link.number)), now)

    def leave(self, agent: Agent, link: Link) -> None:
        """The library is about to forget that peer, to which nothing is in flight: say so if all of it has ended."""
        links = self._links.get(link.blob.epoch, [])
        if link.users > 0 or not link.added or link not in links:
            return
        if any(one.open or one.lost is None for one in links):
            return
        try:
            agent.notify(link.name, parting(Note(self._epoch, self._process, link.number)))
        except TransferError as error:
            log.info("%s could not be told that it was left: %s", link.name, error)

    def _prune(self) -> None:
        for epoch, links in list(self._links.items()):
            left = [one for one in links if one.lost is None or (one.open and not process_gone(one.blob.process))]
            self._links[epoch] = left
            if not left:
                del self._links[epoch]
