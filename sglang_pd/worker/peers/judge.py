"""Peers' manifests are decoded, compared and compiled by a thread of their own: a large one takes it seconds, in which
the control thread must tell other peers that it lives. One thread a control; it ends when nothing waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash

from sglang_pd.protocol.errors import ErrorInfo, PdError, RemoteProtocolError
from sglang_pd.protocol.handshake import compare
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.manifest_size import check_size
from sglang_pd.protocol.messages import Verdict
from sglang_pd.protocol.pairing import Pairing, refused
from sglang_pd.worker.peers.link import Party
from sglang_pd.worker.peers.pairings import share_pairing, used_pairing

MAX_WAITING_BYTES: Final = 64 * 2**20
"""Manifests that wait. What is too much is dropped, the largest first: its sender says Hello again."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be judged. epoch: under which the peer stated it, as which this side (own_epoch) was meant.

    own, encoded: this side's manifest; own_digest names it. source: this side is prefill in the pair.
    """

    epoch: int
    own_epoch: int
    own: InstanceManifest
    encoded: bytes
    own_digest: int
    source: bool
    stated: bytes
    digest: int


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of it. pairing: of an accepted pair, compiled and proven; else `error` says why there is none."""

    case: Case
    manifest: InstanceManifest
    verdict: Verdict
    pairing: Pairing | None = None
    error: ErrorInfo | None = None


Then = Callable[[Judged], None]


def judge(case: Case) -> Judged:
    """Raises `RemoteProtocolError` for a manifest that is too large, does not decode, or contradicts itself."""
    sides = (case.encoded, case.stated) if case.source else (case.stated, case.encoded)
    found = used_pairing(*sides)
    if found is not None:
        return Judged(case, found.decode if case.source else found.prefill, found.verdict, found)
    stated = read_manifest(case.stated, case.digest)
    prefill, decode = (case.own, stated) if case.source else (stated, case.own)
    verdict = compare(prefill, decode)
    if not verdict.accepted:
        return Judged(case, stated, verdict, error=refused(prefill, decode, verdict).info())
    try:
        pairing = Pairing(prefill, decode, verdict)
        _ = pairing.digest  # compiles and proves every rank's plans, now rather than at the first room
    except PdError as error:
        return Judged(case, stated, verdict, error=error.info())
    return Judged(case, stated, verdict, share_pairing(*sides, pairing))


def read_manifest(encoded: bytes, digest: int) -> InstanceManifest:
    """Decode a manifest that travelled. Raises `RemoteProtocolError` for one that contradicts itself or its digest."""
    if xxhash.xxh3_64_intdigest(encoded) != digest:
        raise RemoteProtocolError("the manifest is not the one its digest names", where="Hello")
    try:
        check_size(encoded)
        return msgspec.msgpack.decode(encoded, type=InstanceManifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"the manifest does not decode: {error}", code="message_malformed") from error
    except PdError as error:
        raise RemoteProtocolError(
            error.message, code=error.code, where=error.where, expected=error.expected, actual=error.actual
        ) from error


class Judge:
    """The cases of one control, one for each party. All methods belong to the control thread.

    ring: called by the judging thread when there is something to `take`.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._waiting: dict[Party, Case] = {}
        self._running = False
        self._done: deque[tuple[Party, Case, Judged | RemoteProtocolError]] = deque()
        self._asked: dict[Party, tuple[Case, Then]] = {}

    def ask(self, party: Party, case: Case, then: Then) -> bool:
        """Judge what a party states; `then` is called by `take`. An older case of it is void. False: it was dropped."""
        self._asked[party] = (case, then)
        with self._lock:
            self._waiting.pop(party, None)
            self._waiting[party] = case
            while sum(len(one.stated) for one in self._waiting.values()) > MAX_WAITING_BYTES:
                largest = max(self._waiting, key=lambda one: len(self._waiting[one].stated))
                del self._waiting[largest], self._asked[largest]
            if not self._running and self._waiting:
                try:
                    threading.Thread(target=self._run, name="pd-judge", daemon=True).start()
                    self._running = True
                except RuntimeError:  # the system has no thread left just now
                    self._waiting.clear()
                    self._asked.clear()
        return party in self._asked

    def asked(self, party: Party) -> Case | None:
        """What is being judged for that party."""
        found = self._asked.get(party)
        return found[0] if found is not None else None

    def forget(self, party: Party) -> None:
        """Nobody waits for what that party stated."""
        self._asked.pop(party, None)
        with self._lock:
            self._waiting.pop(party, None)

    def take(self) -> list[tuple[Party, Then, Judged | RemoteProtocolError]]:
        """What was judged since the last call, in that order, and whom to tell; void cases are left out."""
        taken = []
        while self._done:
            party, case, result = self._done.popleft()
            found = self._asked.get(party)
            if found is not None and found[0] is case:
                del self._asked[party]
                taken.append((party, found[1], result))
        return taken

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                # The smallest first: none waits for those who state more than others.
                party = min(self._waiting, key=lambda one: len(self._waiting[one].stated))
                case = self._waiting.pop(party)
            result: Judged | RemoteProtocolError
            try:
                result = judge(case)
            except RemoteProtocolError as error:
                result = error
            except Exception as error:  # a defect of ours, or no memory: it costs this peer its verdict
                result = RemoteProtocolError(f"{type(error).__name__}: {error}", code="internal", where="Hello")
            self._done.append((party, case, result))
            del case, result
            self._ring()
