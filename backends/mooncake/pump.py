"""The thread that feeds the library and learns how each submission ended. It alone bounds what is outstanding.

Everything here happens under one lock, held for milliseconds at most but for one case: the library's wait for a batch
whose sentinel has ended spins until the other lanes have ended too, which a peer that hangs at that very moment can
stretch to the library's progress limit (30 s). Owners therefore never wait for the lock: they put things into the
inbox, and where they help (`assist`, small writes) they only try it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.home import Home
from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.mooncake.chunk import ChunkState, merge, refused, submit
from sglang_pd.backends.mooncake.library import Library
from sglang_pd.backends.mooncake.options import MooncakeOptions
from sglang_pd.backends.mooncake.transfer import Flight, MooncakePeer, MooncakeTransfer, Outbound
from sglang_pd.backends.shortage import start_thread
from sglang_pd.protocol.errors import BackendUnavailable, PdError, TransferError

_LOG = logging.getLogger(__name__)

MAX_PIECE_BYTES = 16 << 20
CHUNK_PIECES = 512
SMALL_PIECES = 16
SMALL_BYTES = 1 << 20
"""A write so small to a peer with nothing outstanding is submitted by the owner itself."""

_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 500e-6
_STALLED_PAUSE_S = 5e-3
_STALLED_AFTER_S = 0.2
_RUNNING_SEEN = 4
_SWEEP_S = 0.02
_LINGER_S = 0.05
_YIELD_S = 50e-6
_ABANDON_S = 30.0
"""So long past its deadline a submission to a peer that is gone is no longer waited for: its engine ends with it."""


class Pump:
    """Owns the transfers of all peers from `post` to their end.

    `verify` is called, on the pump's thread and under its lock, for a peer with a failed submission; it must not block
    and leads to `settle_peer` sooner or later. `idle_engine` is called when an engine may have become unused.
    """

    def __init__(
        self,
        library: Library,
        options: MooncakeOptions,
        verify: Callable[[MooncakePeer], None],
        idle_engine: Callable[[], None],
    ) -> None:
        self._home = Home("the backend", "mooncake")
        self._library = library
        self._options = options
        self._verify = verify
        self._idle_engine = idle_engine
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._inbox: deque[Callable[[], None]] = deque()
        self._peers: dict[int, MooncakePeer] = {}
        self._swept_at = 0.0
        self._ended = False
        self._news = False
        self._stopping = False
        self._asleep = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._posted = 0
        self._left = 0
        self.counters = {"chunks": 0, "pieces": 0, "descriptors": 0, "bytes": 0, "chunks_lost": 0}
        try:
            self._thread = start_thread(self._run, "sglang-pd-mooncake", "mooncake")
        except BackendUnavailable:
            os.close(self._event)
            raise

    # the owner's side: nothing here waits

    def post(self, peer: MooncakePeer, transfer: MooncakeTransfer) -> None:
        """Take a transfer over."""
        transfer.assist = self.assist
        transfer.give_up = lambda one: self.call(lambda: self._drop_cancelled(one))
        peer.posted += 1
        self._posted += 1
        self.counters["descriptors"] += len(transfer.pieces)
        small = len(transfer.pieces) <= SMALL_PIECES and transfer.nbytes <= SMALL_BYTES and transfer.after is None
        if small and not self._inbox and self._lock.acquire(blocking=False):
            try:
                self._accept(peer, transfer)
                if not peer.flying:
                    self._feed(peer)
            finally:
                self._lock.release()
        else:
            self._inbox.append(lambda: self._accept(peer, transfer))
            self._wake.set()
        if self._asleep:
            self._wake.set()

    @property
    def queued(self) -> int:
        """Transfers posted of which something is still to be submitted or learnt."""
        return self._posted - self._left

    def assist(self, transfer: MooncakeTransfer) -> None:
        """Look whether the submissions of a transfer's peer have ended, unless somebody is looking already.

        Who holds the lock may need the interpreter's lock to go on, so a caller that polls in a loop must let go of it.
        """
        if transfer.flights and self._lock.acquire(timeout=_YIELD_S):
            try:
                self._look(transfer.peer)
            finally:
                self._lock.release()

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the pump's thread, under its lock, soon."""
        self._inbox.append(action)
        self._wake.set()

    def wakeup_fd(self) -> int:
        """Readable when a transfer has ended since `drain_wakeup`."""
        return self._event

    def tell(self) -> None:
        """Make `wakeup_fd` readable: something the owner waits for has come. From any thread."""
        if not self._stopping:
            os.eventfd_write(self._event, 1)
            self._news = True

    def drain_wakeup(self) -> None:
        """Make `wakeup_fd` unreadable until the next news."""
        if self._news and not self._stopping:  # afterwards the descriptor's number may be somebody else's
            self._news = False
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                pass

    def stop(self) -> None:
        """End the thread. What is not final becomes UNKNOWN, or FAILED where nothing was submitted. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if not self._home.here:  # the thread is the parent's, and may have held the lock when the fork came
            os.close(self._event)
            return
        self._wake.set()
        self._thread.join()
        with self._lock:
            self._take_inbox()
            error = TransferError("the backend was closed", code="transfer_unknown", where="mooncake")
            for peer in list(self._peers.values()):
                self.halt(peer, error)
                for flight in peer.flying:
                    self._mark(flight.transfer, TransferState.UNKNOWN)
                peer.flying.clear()
            self._peers.clear()
        os.close(self._event)

    # under the lock

    def halt(self, peer: MooncakePeer, error: PdError) -> None:
        """Submit nothing more for a peer. Transfers of which nothing is under way are FAILED."""
        pending = list(peer.waiting) + [flight.transfer for flight in peer.flying]
        peer.waiting.clear()
        for transfer in pending:
            transfer.halted = True
            transfer.blame(error)
            self._judge(transfer)

    def settle_peer(self, peer: MooncakePeer) -> None:
        """A verification has ended: go on submitting, or, if the peer is lost, end what waits."""
        peer.suspect = False
        self._peers[peer.number] = peer
        lost = peer.lost
        if lost is not None:
            self.halt(peer, lost)

    def _accept(self, peer: MooncakePeer, transfer: MooncakeTransfer) -> None:
        self._peers[peer.number] = peer
        peer.waiting.append(transfer)
        # Whether its process lives is asked before each submission; what a verification found is looked at here.
        if peer.found_lost is not None or not peer.connected:
            gone = TransferError("the peer was disconnected", where=f"mooncake, {peer.label}")
            self.halt(peer, peer.found_lost or gone)

    def _drop_cancelled(self, transfer: MooncakeTransfer) -> None:
        """Fail a transfer that its owner gave up, unless some of it was submitted."""
        if transfer.cursor or transfer.halted:
            return
        transfer.halted = True
        transfer.blame(transfer.withdrawn())
        self._judge(transfer)
        transfer.peer.waiting = deque(one for one in transfer.peer.waiting if one is not transfer)

    def _run(self) -> None:
        pause, moved_at = _FIRST_PAUSE_S, time.monotonic()
        while not self._stopping:
            self._wake.clear()
            try:
                with self._lock:
                    moved = self._step()
                    news, self._ended = self._ended, False
            except Exception:
                # A defect of ours. It must not strand every other transfer; deadlines make these UNKNOWN.
                _LOG.exception("the mooncake pump failed at a step and goes on")
                moved, news = False, True
                time.sleep(_STALLED_PAUSE_S)
            if news:
                self.tell()
            now = time.monotonic()
            if moved:
                pause, moved_at = _FIRST_PAUSE_S, now
                continue
            if self._peers:
                time.sleep(pause)
                longest = _LONGEST_PAUSE_S if now - moved_at < _STALLED_AFTER_S else _STALLED_PAUSE_S
                pause = min(2 * pause, longest)
            elif now - moved_at < _LINGER_S:
                # A small write that the owner submits meanwhile needs no wake-up, which would cost it more than the
                # write: it is seen at the next look.
                self._wake.wait(_LONGEST_PAUSE_S)
            else:
                self._asleep = True
                if not self._peers and not self._inbox:
                    self._wake.wait()
                self._asleep = False
                pause, moved_at = _FIRST_PAUSE_S, time.monotonic()

    def _take_inbox(self) -> bool:
        moved = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()()
        return moved

    def _step(self) -> bool:
        moved = self._take_inbox()
        now = time.monotonic()
        sweep = now - self._swept_at > _SWEEP_S
        if sweep:
            self._swept_at = now
        for peer in list(self._peers.values()):
            moved |= self._look(peer)
            if sweep:
                self._expire(peer, now)
            if peer.lost is not None:
                self._give_up(peer, peer.lost)
            if peer.suspect:
                if now >= peer.verify_at:
                    peer.verify_at = float("inf")
                    try:
                        self._verify(peer)
                    except BackendUnavailable as error:  # no thread for it now
                        _LOG.warning("%s", error)
                        peer.verify_at = now + peer.verify_pause_s
            else:
                moved |= self._feed(peer)
            # Whose engine may still read a source is asked after until it is clear whether it is there.
            unclear = peer.suspect and peer.connected and peer.outbound.unproven
            if not (peer.waiting or peer.flying or unclear):
                del self._peers[peer.number]
                self._idle_engine()
        return moved

    def _look(self, peer: MooncakePeer) -> bool:
        """Learn which submissions have ended; they end about in order, so a few that run are enough to know."""
        running, ended = 0, []
        for flight in peer.flying:
            state = self._ask(flight)
            if state is ChunkState.RUNNING:
                running += 1
                if running == _RUNNING_SEEN:
                    break
            else:
                ended.append((flight, state))
        for flight, state in ended:
            peer.flying.remove(flight)
            self._land(peer, flight, state)
        return bool(ended)

    @staticmethod
    def _ask(flight: Flight) -> ChunkState:
        try:
            return flight.chunk.poll()
        except Exception as error:
            flight.chunk.reason = f"{type(error).__name__}: {error}"
            return ChunkState.LOST

    def _land(self, peer: MooncakePeer, flight: Flight, state: ChunkState) -> None:
        peer.outstanding_pieces -= flight.pieces
        peer.outstanding_bytes -= flight.nbytes
        flight.outbound.flights -= 1
        transfer = flight.transfer
        transfer.flights -= 1
        if state is not ChunkState.DONE:
            self.counters["chunks_lost"] += 1
            transfer.halted = True
            if state is ChunkState.LOST:
                transfer.lost = True
                transfer.held_by.add(flight.outbound)
                flight.outbound.unproven.append(transfer)
            transfer.blame(
                TransferError(
                    "Mooncake reports a failure; its cause is on standard error",
                    code="transfer_unknown" if state is ChunkState.LOST else "transfer_failed",
                    where=f"mooncake, {peer.label}",
                    actual=flight.chunk.reason,
                )
            )
            if not peer.suspect and peer.found_lost is None and peer.connected:
                peer.suspect, peer.verify_at = True, 0.0
        self._judge(transfer)

    def engine_ended(self, outbound: Outbound) -> None:
        """It is proven that the engine reads nothing any more."""
        held, outbound.unproven = outbound.unproven, []
        for transfer in held:
            transfer.held_by.discard(outbound)
            self._release(transfer)

    def _release(self, transfer: MooncakeTransfer) -> None:
        """Note that the library has nothing of a transfer any more, if so."""
        if transfer.through or transfer.flights or not (transfer.halted or transfer.final):
            return
        if transfer.held_by and transfer.peer.transport == "tcp":
            return
        transfer.through = True
        transfer.peer.through += 1
        self._ended = True
        if transfer.lost and not transfer.held_by:
            transfer.let_go()

    def _judge(self, transfer: MooncakeTransfer) -> None:
        """Give a transfer the state that its submissions prove."""
        if transfer.flights:
            if transfer.halted:
                self._mark(transfer, TransferState.UNKNOWN)
        elif transfer.lost:
            self._mark(transfer, TransferState.UNKNOWN)
        elif transfer.merged and transfer.cursor == len(transfer.pieces):
            self._mark(transfer, TransferState.DONE)
        elif transfer.halted:
            # All that was submitted was acknowledged, and nothing more will be submitted.
            self._mark(transfer, TransferState.FAILED)
        self._release(transfer)

    def _mark(self, transfer: MooncakeTransfer, state: TransferState) -> None:
        if transfer.final:
            return
        transfer.set_state(state)
        self._ended = True
        if transfer.final or not transfer.flights:
            self._leave(transfer)

    def _leave(self, transfer: MooncakeTransfer) -> None:
        if transfer.final:
            transfer.peer.resolved += 1
        if not transfer.left:
            transfer.left = True
            self._left += 1

    def _expire(self, peer: MooncakePeer, now: float) -> None:
        late = [one for one in peer.waiting if now > one.expires and not one.halted]
        late += [one.transfer for one in peer.flying if now > one.transfer.expires]
        for transfer in late:
            if not transfer.halted:
                transfer.blame(transfer.late())
                transfer.halted = True
                self._judge(transfer)
        if late:
            peer.waiting = deque(one for one in peer.waiting if not one.halted)
        if peer.found_lost is not None or not peer.connected:
            self._abandon(peer, [one for one in peer.flying if now > one.transfer.expires + _ABANDON_S])

    def _give_up(self, peer: MooncakePeer, lost: PdError) -> None:
        """The peer is gone. Over TCP the library would write what it has to whoever listens there next, so that its
        engine must end: what is in it is not waited for."""
        if peer.waiting:
            self.halt(peer, lost)
        if peer.flying and peer.transport == "tcp":
            self._abandon(peer, list(peer.flying))

    def _abandon(self, peer: MooncakePeer, flights: list[Flight]) -> None:
        for flight in flights:
            flight.chunk.reason = "the library does not say how it ended"
            peer.flying.remove(flight)
            self._land(peer, flight, ChunkState.LOST)

    def _feed(self, peer: MooncakePeer) -> bool:
        """Submit what the bounds allow, oldest transfer first; one whose event has not come lets others pass."""
        moved, held = False, []
        while peer.waiting and not peer.suspect:
            transfer = peer.waiting[0]
            if transfer.cancelled and not (transfer.cursor or transfer.halted):
                self._drop_cancelled(transfer)
                continue
            if not transfer.halted and not self._ready(transfer) and not transfer.halted:
                held.append(transfer)
            elif not transfer.halted:
                moved |= self._submit_what_fits(peer, transfer)
                if transfer.cursor < len(transfer.pieces):
                    break
            peer.waiting.popleft()
        peer.waiting.extendleft(reversed(held))
        return moved

    def _submit_what_fits(self, peer: MooncakePeer, transfer: MooncakeTransfer) -> bool:
        moved = False
        while transfer.cursor < len(transfer.pieces) and peer.lost is None:
            part = self._next_part(peer, transfer)
            if part is None:
                break
            self._submit(peer, transfer, part)
            moved = True
        return moved

    def _ready(self, transfer: MooncakeTransfer) -> bool:
        if transfer.after is not None:
            try:
                if not transfer.after.query():
                    return False
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                transfer.blame(TransferError("the event of the source bytes failed", where="mooncake", actual=what))
                transfer.halted = True
                self._judge(transfer)
                return False
            transfer.after = None
        if not transfer.merged:
            transfer.pieces = merge(transfer.pieces, MAX_PIECE_BYTES)
            transfer.merged = True
            self.counters["pieces"] += len(transfer.pieces)
        return True

    def _next_part(self, peer: MooncakePeer, transfer: MooncakeTransfer) -> Rows | None:
        """The next chunk: small beside the bounds, so that the library always has some while another is prepared."""
        if len(transfer.pieces) == 1 and not peer.outstanding_pieces:
            return transfer.pieces
        free = self._options.max_descriptors_per_peer - peer.outstanding_pieces
        free_bytes = self._options.max_bytes_per_peer - peer.outstanding_bytes
        most = max(1, min(CHUNK_PIECES, self._options.max_descriptors_per_peer // 2))
        left = len(transfer.pieces) - transfer.cursor
        wanted = min(most, left)
        part = transfer.pieces.take(slice(transfer.cursor, transfer.cursor + wanted))
        total = part.length.cumsum()
        most_bytes = max(self._options.max_bytes_per_peer // 4, int(part.length[0]))
        count = int(total.searchsorted(most_bytes, side="right"))
        if peer.outstanding_pieces and (count > free or int(total[count - 1]) > free_bytes):
            return None
        return part.take(slice(0, count))

    def _submit(self, peer: MooncakePeer, transfer: MooncakeTransfer, part: Rows) -> None:
        outbound = peer.outbound
        nbytes = transfer.nbytes if part is transfer.pieces else int(part.length.sum())
        try:
            chunk = submit(self._library, outbound.engine.raw, peer.blob.session, part, peer.transport)
        except PdError as error:
            chunk = refused(str(error))
        transfer.cursor += len(part)
        transfer.flights += 1
        outbound.flights += 1
        peer.outstanding_pieces += len(part)
        peer.outstanding_bytes += nbytes
        peer.flying.append(Flight(transfer, chunk, len(part), nbytes, outbound))
        self.counters["chunks"] += 1
        self.counters["bytes"] += nbytes
