"""A prefill and a decode table linked over a bad link, with ranks that really take time to write.

The link holds encoded frames; the caller picks which one is delivered, repeated or dropped next. Writes are in flight
between `post` and `land`; a landing write is judged by the oracle: the destination must not have been released. Ranks
report, stop and fence as effects ask them to, when the caller says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from sglang_pd.protocol import codec
from sglang_pd.protocol.errors import ErrorInfo, RemoteProtocolError, RoomError
from sglang_pd.protocol.indices import pack_indices
from sglang_pd.protocol.ledger import Expected
from sglang_pd.protocol.messages import Heartbeat, Message, Refusal, RoomOpen, Writer, Wrote
from sglang_pd.protocol.room import Limits, State
from sglang_pd.protocol.room_events import (
    Admit,
    Alert,
    Allocated,
    Bound,
    Cancel,
    Computed,
    Effect,
    Ended,
    Fail,
    HandoffReady,
    LocalEvent,
    QueueNote,
    RankFenced,
    RankWrote,
    Releasable,
    Request,
    Revoke,
    Revoked,
    Send,
    Start,
    Stop,
    Verified,
    Verify,
)
from sglang_pd.protocol.rooms_decode import DecodeRooms
from sglang_pd.protocol.rooms_prefill import PrefillRooms

TOKENS = 8
DIGEST = 0xABCD
LIVENESS_S = 30.0
LIMITS = Limits(request_wait_s=40, lease_s=25, alloc_wait_s=50, fence_alarm_s=20, lease_renew_s=5)
W0, W1 = Writer(0, 0), Writer(0, 1)
RANKS = frozenset({"d0", "d1"})
EXPECTED = (
    Expected(W0, "KV", (0, 3), 0, TOKENS),
    Expected(W0, "MAMBA", (1,), 0, TOKENS),
    Expected(W1, "KV", (0, 3), 0, TOKENS),
    Expected(W1, "MAMBA", (), 0, TOKENS),
)
PIECES: tuple[tuple[Writer, str, int, int, int, int, bool], ...] = (
    (W0, "KV", 0, 4, 0, 4, False),
    (W0, "KV", 0, 4, 4, TOKENS, True),
    (W0, "MAMBA", 1, 2, 0, TOKENS, True),
    (W1, "KV", 0, 1, 0, TOKENS, False),
    (W1, "KV", 3, 4, 0, TOKENS, True),
    (W1, "MAMBA", 0, 0, 0, 0, True),
)
"""writer, component, layers, tokens, last: the records that tile `EXPECTED`."""


def wrote(room: int, generation: int, piece: int) -> Wrote:
    writer, component, layer_start, layer_stop, token_start, token_stop, last = PIECES[piece]
    return Wrote(
        room=room,
        generation=generation,
        writer=writer,
        component=component,
        layer_start=layer_start,
        layer_stop=layer_stop,
        token_start=token_start,
        token_stop=token_stop,
        last=last,
    )


def open_message(room: int, generation: int, to_epoch: int, digest: int = DIGEST, **more: object) -> RoomOpen:
    return RoomOpen(
        room=room,
        generation=generation,
        to_epoch=to_epoch,
        request_id=f"r{room}",
        prompt_tokens=TOKENS,
        prompt_digest=digest,
        index_lists=(pack_indices(7, [room % 1000, 5, 9]),),
        **more,  # type: ignore[arg-type]
    )


@dataclass
class Write:
    """One record's transfers to both destination ranks, in flight; landed: ranks reached already."""

    epoch: int
    record: Wrote
    pending: set[str] = field(default_factory=lambda: set(RANKS))


@dataclass
class Work:
    """What prefill's ranks have to do for a started room."""

    todo: list[int] = field(default_factory=lambda: list(range(len(PIECES))))
    done: set[int] = field(default_factory=set)
    stopped: frozenset[Writer] | None = None
    handed: bool = False


class World:
    """Both sides, the link and the ranks."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.epochs = {"P": 11, "D": 22}
        self.prefill = PrefillRooms(11, "prefill", LIMITS)
        self.decode = DecodeRooms(22, LIMITS)
        self.prefill.add_peer(22, "decode", LIVENESS_S, self.now_s)
        self.decode.add_peer(11, "prefill", LIVENESS_S, self.now_s)
        self.link: list[tuple[str, bytes]] = []
        self.writes: list[Write] = []
        self.work: dict[tuple[int, int], Work] = {}
        self.revokes: list[Revoke] = []
        self.released: dict[str, set[tuple[int, int]]] = {"P": set(), "D": set()}
        self.ended: dict[str, dict[tuple[int, int], Ended]] = {"P": {}, "D": {}}
        self.admitted: set[tuple[int, int]] = set()
        self.checks: dict[tuple[int, int], Verify] = {}
        """Rooms whose bytes are compared just now: those with an odd id."""
        self.alerts: list[Alert] = []
        self.local_end: set[int] = set()
        """Rooms that a side ended by itself (cancel, fail, kill), so that the two ends may differ."""
        self.killed = False
        self.errors: Counter[str] = Counter()
        self.cut: set[tuple[int, str]] = set()
        self.unclaimed: Counter[tuple[str, int]] = Counter()

    def table(self, side: str) -> PrefillRooms | DecodeRooms:
        return self.prefill if side == "P" else self.decode

    # --- effects -----------------------------------------------------------------------------------------------------

    def run(self, side: str, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.post(side, effect.message)
                continue
            key = self.key_in_books(effect.room, effect.generation, isinstance(effect, Ended), side)
            if isinstance(effect, Start):
                self.work[key] = Work()
            elif isinstance(effect, Stop):
                self.work[key].stopped = effect.writers
            elif isinstance(effect, Revoke):
                self.revokes.append(effect)
            elif isinstance(effect, Releasable):
                assert key not in self.released[side], "released twice"
                self.released[side].add(key)
            elif isinstance(effect, Ended):
                assert key not in self.ended[side], "ended twice"
                self.ended[side][key] = effect
                assert (effect.error is None) == (effect.state == "done")
            elif isinstance(effect, Verify):
                assert key not in self.checks and len(effect.records) == sum(not r[3] == r[2] for r in PIECES)
                self.checks[key] = effect
            elif isinstance(effect, Admit):
                assert key not in self.admitted
                assert key[0] % 2 == 0 or key in self.checks, "admitted unseen"
                self.admitted.add(key)
                assert not any(self.key_of(write) == key for write in self.writes), "admitted before the bytes"
            else:
                self.alerts.append(effect)

    def key_in_books(self, room: int, generation: int, ends: bool, side: str) -> tuple[int, int]:
        """Rooms that nobody claimed have no generation; an id may come again when its tombstone is gone."""
        if generation:
            return room, generation
        self.unclaimed[side, room] += ends
        return room, -self.unclaimed[side, room]

    def post(self, side: str, message: Message) -> None:
        self.link.append(("D" if side == "P" else "P", codec.encode(message, epoch=self.epochs[side])))

    def local(self, side: str, room: int, event: LocalEvent) -> None:
        self.run(side, self.table(side).local(room, event, self.now_s))

    # --- the link ----------------------------------------------------------------------------------------------------

    def deliver(self, at: int, *, split: int = 0, keep: bool = False) -> None:
        """Deliver one frame, in pieces of `split` bytes when not 0; `keep` leaves a duplicate in the link."""
        target, frame = self.link[at] if keep else self.link.pop(at)
        reader, frames = codec.FrameReader(), []
        step = split or len(frame)
        for start in range(0, len(frame), step):
            frames += reader.feed(frame[start : start + step])
        assert frames == [frame] and reader.held_bytes == 0
        received = codec.decode(frame)
        assert received.message is not None and not received.unknown_fields
        try:
            effects = self.table(target).receive(received.header.epoch, received.message, self.now_s)
        except RemoteProtocolError as error:
            # Honest peers never break the protocol, whatever the link does; only lost incarnations are foreign.
            assert error.code in ("epoch_stale", "peer_unknown"), error
            self.errors[error.code] += 1
            sender = "D" if target == "P" else "P"
            if received.header.epoch == self.epochs[sender] and not isinstance(received.message, Refusal):
                self.post(target, Refusal(error=error.info(), refused_type=received.header.type))
            return
        self.run(target, effects)

    # --- both legs ---------------------------------------------------------------------------------------------------

    def request(self, room: int, digest: int = DIGEST) -> None:
        request = Request(prompt_tokens=TOKENS, prompt_digest=digest)
        try:
            self.run("P", self.prefill.request(room, request, self.now_s))
        except RoomError as error:
            assert error.code in ("room_duplicate", "room_aborted")

    def begin(self, room: int) -> None:
        try:
            self.run("D", self.decode.begin(room, self.epochs["P"], self.now_s)[1])
        except RoomError as error:
            assert error.code in ("room_duplicate", "epoch_stale")

    def allocate(self, room: int, digest: int = DIGEST) -> None:
        found = self.decode.rooms[room]
        message = open_message(room, found.generation, found.peer.epoch, digest)
        allocated = Allocated(
            open=message, expected=EXPECTED, record_writer=W0, ranks=RANKS, verify=room % 2 == 1
        )  # fmt: skip
        self.local("D", room, allocated)

    # --- ranks -------------------------------------------------------------------------------------------------------

    def bind(self, key: tuple[int, int]) -> None:
        if self.is_in(key, State.MATCHED):
            self.local("P", key[0], Bound(EXPECTED))

    def writable(self) -> list[tuple[int, int]]:
        return [
            key
            for key, work in self.work.items()
            if work.todo and work.stopped is None and self.is_in(key, State.WRITING)
        ]

    def is_in(self, key: tuple[int, int], state: State) -> bool:
        found = self.prefill.rooms.get(key[0])
        return found is not None and found.generation == key[1] and found.now_in is state

    def post_write(self, key: tuple[int, int], pick: int) -> None:
        work = self.work[key]
        piece = work.todo.pop(pick % len(work.todo))
        self.writes.append(Write(self.epochs["P"], wrote(*key, piece)))

    @staticmethod
    def key_of(write: Write) -> tuple[int, int]:
        return write.record.room, write.record.generation

    def land(self, at: int, rank: str) -> None:
        """Bytes reach one destination rank; the record is reported once all were reached."""
        write = self.writes[at]
        key = self.key_of(write)
        if any((write.epoch, cut) in self.cut for cut in write.pending):
            self.writes.remove(write)  # the destination cut the writer off: the transfer fails, and so does the room
            if write.epoch == self.epochs["P"] and self.is_in(key, State.WRITING):
                self.local_end.add(key[0])
                self.local("P", key[0], Fail(ErrorInfo(code="transfer_failed", message="cut off")))
            return
        if rank in write.pending:
            assert key not in self.released["D"], "a byte landed in memory that was released"
            assert write.epoch != self.epochs["P"] or key not in self.released["P"], "a released source was read"
            write.pending.discard(rank)
        if not write.pending:
            self.writes.remove(write)
            found = self.prefill.rooms.get(key[0])
            if write.epoch == self.epochs["P"] and found is not None and found.generation == key[1]:
                self.local("P", key[0], RankWrote(write.record))

    def hand_off(self, key: tuple[int, int]) -> None:
        work = self.work[key]
        busy = any(self.key_of(write) == key and write.record.writer == W0 for write in self.writes)
        ready = not busy and not any(PIECES[piece][0] == W0 for piece in work.todo)
        if ready and not work.handed and self.is_in(key, State.WRITING):
            work.handed = True
            self.local("P", key[0], HandoffReady(writer=W0, covered_tokens=TOKENS, record=b"facts"))

    def fence(self, key: tuple[int, int], writer: Writer, *, fenced: bool) -> None:
        """A stopped rank says so, once nothing of the room is in flight (or, `fenced` False, that it cannot tell)."""
        work, found = self.work.get(key), self.prefill.rooms.get(key[0])
        if work is None or work.stopped is None or writer not in work.stopped or found is None:
            return
        busy = any(self.key_of(write) == key and write.record.writer == writer for write in self.writes)
        if found.generation == key[1] and (not busy or not fenced):
            self.local("P", key[0], RankFenced(writer=writer, fenced=fenced, reason="" if fenced else "unknown"))

    def revoke(self, at: int, rank: str) -> None:
        """A destination rank cuts the lost peer off: its writes there are gone, and that is proof."""
        asked = self.revokes[at]
        self.cut.add((asked.peer_epoch, rank))
        if asked.room in self.decode.rooms and self.decode.rooms[asked.room].generation == asked.generation:
            self.local("D", asked.room, Revoked(rank))

    def compared(self, key: tuple[int, int], *, equal: bool) -> None:
        """What memory holds was compared with what was sent."""
        found = self.decode.rooms.get(key[0])
        if found is None or found.generation != key[1] or found.now_in is not State.VERIFYING:
            return
        if not equal:
            self.local_end.add(key[0])
        differs = Fail(ErrorInfo(code="digest_mismatch", message="other bytes"))
        self.local("D", key[0], Verified() if equal else differs)

    # --- time and death ----------------------------------------------------------------------------------------------

    def beat(self, side: str) -> None:
        self.post(side, Heartbeat(peer_epoch=0, seq=1, state="ready"))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for side in ("P", "D"):
            self.run(side, self.table(side).tick(self.now_s))

    def kill(self, side: str) -> None:
        """`kill -9` and a restart as another incarnation; the other side learns of it at once."""
        self.killed = True
        self.local_end |= set(self.prefill.rooms) | set(self.decode.rooms)
        old, new = self.epochs[side], self.epochs[side] + 100
        self.epochs[side] = new
        lost = ErrorInfo(code="peer_lost", message="killed")
        if side == "P":
            self.prefill = PrefillRooms(new, "prefill", LIMITS)
            self.prefill.add_peer(self.epochs["D"], "decode", LIVENESS_S, self.now_s)
            self.work.clear()
            for book in (self.released["P"], self.ended["P"]):
                book.clear()
            self.run("D", self.decode.lose_peer(old, lost, self.now_s))
            self.decode.add_peer(new, "prefill", LIVENESS_S, self.now_s)
        else:
            self.decode = DecodeRooms(new, LIMITS)
            self.decode.add_peer(self.epochs["P"], "prefill", LIVENESS_S, self.now_s)
            for other in (self.released["D"], self.ended["D"]):
                other.clear()
            self.admitted.clear()
            self.revokes.clear()
            self.run("P", self.prefill.lose_peer(old, lost, self.now_s))
            self.prefill.add_peer(new, "decode", LIVENESS_S, self.now_s)

    # --- a history ---------------------------------------------------------------------------------------------------

    def step(self, rng: Random, loss: float) -> None:
        """One random step forward; a frame is lost, or delivered and kept, with probability `loss` each."""
        actions: list[Callable[[], None]] = []
        if self.link:
            at = rng.randrange(min(len(self.link), 4 if loss else 1))  # nearby frames overtake each other
            dice = rng.random()
            if dice < loss:
                actions += [lambda: self.drop(at)] * 4
            else:
                actions += [lambda: self.deliver(at, split=rng.choice([0, 0, 0, 13]), keep=dice < 2 * loss)] * 4
        for room, found in self.decode.rooms.items():
            if found.now_in is State.ALLOCATING:
                actions.append(partial(self.allocate, room))
        for key, work in self.work.items():
            actions.append(partial(self.bind, key))
            if not work.handed:
                actions.append(partial(self.hand_off, key))
            for writer in work.stopped or ():
                actions.append(partial(self.fence, key, writer, fenced=rng.random() < 0.8))
        actions += [partial(self.post_write, key, rng.randrange(6)) for key in self.writable()]
        if self.writes:
            at_write = rng.randrange(len(self.writes))
            actions += [partial(self.land, at_write, rng.choice(sorted(RANKS)))] * 3
        actions += [partial(self.compared, key, equal=rng.random() < 0.8) for key in self.checks]
        if self.revokes:
            actions.append(partial(self.revoke, rng.randrange(len(self.revokes)), rng.choice(sorted(RANKS))))
        if actions:
            rng.choice(actions)()

    def drop(self, at: int) -> None:
        self.link.pop(at)

    def alive(self, side: str) -> None:
        """The other side hears this one."""
        other = self.table("D" if side == "P" else "P")
        if self.epochs[side] in other.peers:
            other.peers[self.epochs[side]].heard(self.now_s)

    def trouble(self, rng: Random, rooms: range) -> None:
        """One random fault or outside event."""
        room, side = rng.choice(rooms), rng.choice("PD")
        found = self.table(side).rooms.get(room)
        dice = rng.random()
        if dice < 0.25:
            legs, digest = rng.choice(("PD", "DP", "P", "D")), DIGEST + (rng.random() < 0.1)
            for leg in legs:
                self.request(room, digest) if leg == "P" else self.begin(room)
        elif dice < 0.35 and found is not None:
            self.local_end.add(room)
            failure = Fail(ErrorInfo(code="transfer_failed", message=f"{side} failed"))
            self.local(side, room, Cancel() if rng.random() < 0.5 else failure)
        elif dice < 0.55:
            prefill = self.prefill.rooms.get(room)
            if prefill is not None and prefill.now_in in (State.AWAIT_OPEN, State.MATCHED, State.WRITING):
                self.local("P", room, rng.choice((Computed(), QueueNote(3))))
        elif dice < 0.95:
            for alive in rng.choice(("PD", "PD", "PD", "PD", "P", "D")):
                self.alive(alive)
            self.advance(rng.choice((0.1, 1.0, 3.0, 12.0)))
        elif dice < 0.97 and not self.killed:
            self.kill(side)

    # --- the end -----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """What must hold for both sides' ends once all is quiet."""
        for side in ("P", "D"):
            assert set(self.ended[side]) == set(self.released[side]), "ended and given back, each once"
        for key, ended in self.ended["P"].items():
            other = self.ended["D"].get(key)
            assert ended.state != "done" or self.killed or (other is not None and other.state == "done")
        for key, ended in self.ended["D"].items():
            other = self.ended["P"].get(key)
            assert (ended.state == "done") == (key in self.admitted)
            if other is not None and ended.state != other.state and key[0] not in self.local_end:
                # Without anybody giving up by himself, ends differ only when one side lost the other.
                codes = {error.code for error in (ended.error, other.error) if error is not None}
                assert codes & {"peer_lost", "epoch_stale", "room_unknown"}, (ended, other)

    def check(self) -> None:
        self.prefill.check_integrity()
        self.decode.check_integrity()

    def quiesce(self) -> None:
        """From here on the link works, ranks finish, peers beat: everything must end and every byte be given back."""
        for _ in range(400):
            self.beat("P")
            self.beat("D")
            while self.link:
                self.deliver(0)
            for key in list(self.work):
                self.bind(key)
            for key in self.writable():
                self.post_write(key, 0)
            while self.writes:
                self.land(0, min(self.writes[0].pending))
            for key in list(self.work):
                self.hand_off(key)
                for writer in (W0, W1):
                    self.fence(key, writer, fenced=True)
            for key in list(self.checks):
                self.compared(key, equal=True)
            while self.revokes:
                for rank in sorted(RANKS):
                    self.revoke(0, rank)
                self.revokes.pop(0)
            self.check()
            if not (self.prefill.rooms or self.decode.rooms or self.link):
                return
            self.advance(1.0)
        raise AssertionError(f"rooms are stuck: {self.prefill.states()} {self.decode.states()}")
