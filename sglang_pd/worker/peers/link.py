"""The sockets of one control: a ROUTER that peers and own ranks call, and a DEALER for each peer it calls itself.

Frames of one turn leave together, without waiting; what cannot is dropped and counted. Between peers the protocol
recovers lost messages; between control and rank a loss counts as a broken connection. With CURVE keys a client whose
key is not listed is dropped by the library before any body is read. Data planes are not covered by CURVE.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from sglang_pd.backends.home import Home
from sglang_pd.protocol.errors import ConfigError, RoomError
from sglang_pd.worker.peers.dialing import Dial, split
from sglang_pd.worker.peers.resolve import Resolver
from sglang_pd.worker.peers.routing_ids import scattered

MAX_FRAME_BYTES = 32 * 2**20
SEND_HIGH_WATER, RECEIVE_HIGH_WATER = 1_000, 64
"""Batches queued for a party before further ones are dropped; batches of a party that wait here before TCP holds the
rest back at the sender."""
MAX_FRAMES_A_TURN = 512
"""Frames taken from a socket before timers and answers have their turn: a flood must not silence our heartbeats."""
MAX_BATCH = 64
"""Frames that travel as one multipart message: what a turn of the control thread has for a peer wakes it once."""
BATCH_BYTES = 256 * 2**10
"""A batch ends with the frame that makes it so large."""


@dataclass(frozen=True)
class CurveKeys:
    """CURVE keys in Z85 text: this worker's pair, and the public keys of those who may connect (its own included).
    server: public key of those that this side calls, where they do not share its own."""

    public: bytes
    secret: bytes = field(repr=False)
    authorized: frozenset[bytes] = frozenset()
    server: bytes | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who connected to a ROUTER: the routing id it was given there. socket: `peers` or `ranks`."""

    socket: str
    identity: bytes


@dataclass(frozen=True, slots=True)
class Called:
    """Somebody this side connected to: the number of its DEALER."""

    number: int


Party = Caller | Called


class Link:
    """All ZMQ sockets of one control. Used by its control thread alone."""

    def __init__(self, curve: CurveKeys | None = None) -> None:
        self._home = Home("the link", "worker")
        self._curve = curve
        self._context = zmq.Context()
        self._routers: dict[str, zmq.Socket[bytes]] = {}
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._next = 0
        self._out: dict[Party, list[bytes]] = {}
        self.counts: Counter[str] = Counter()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when a thread that works for the owner of this link has something for it; -1 once closed."""
        self._bell_lock = threading.Lock()
        self._resolver = Resolver(self.ring)
        self._dials: dict[int, Dial] = {}
        self.gone: set[Party] = set()
        """Callers whose connection the last `flush` found closed: nobody will ever speak from there again."""
        self.dropped: set[Party] = set()
        """Whom the last `flush` did not send everything that was theirs."""
        self._zap: zmq.Socket[bytes] | None = None
        if curve is not None:
            # One authenticator a context: libzmq asks it about every new connection, before any message passes.
            self._zap = self._context.socket(zmq.REP)
            self._zap.linger = 0
            self._zap.bind("inproc://zeromq.zap.01")

    def listen(self, name: str, address: str) -> str:
        """Bind the ROUTER `name` to `tcp://host:port` (port 0 or *: any). Returns the address in force.

        Raises `ConfigError` naming the address for a port that is taken or an address that is not this host's.
        """
        with scattered():
            router = self._context.socket(zmq.ROUTER)
        self._prepare(router)
        router.setsockopt(zmq.IPV6, int("[" in address))  # else 127.0.0.1 would be told as a mapped IPv6 address
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._curve is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close(linger=0)
            raise ConfigError(
                f"cannot listen: {error.strerror}",
                where="$.network.bootstrap_port" if name == "peers" else f"$.network ({name})",
                expected="a free port of this host, or 0 for any",
                actual=address,
            ) from error
        self._routers[name] = router
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        return endpoint.rstrip(b"\0").decode() if isinstance(endpoint, bytes) else address

    def call(self, address: str, server_key: bytes | None = None) -> Called:
        """Connect a DEALER; ZMQ keeps trying for as long as it is open. A host's name is looked up meanwhile.

        server_key: default `CurveKeys.server`, or this side's own key.
        """
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:  # descriptors of this process, or sockets of libzmq
            raise RoomError(
                f"no socket for another peer: {error.strerror}", code="queue_full", where=address
            ) from error
        try:
            self._prepare(dealer)
            if self._curve is not None:
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._curve.public)
                dealer.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret)
                dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key or self._curve.server or self._curve.public)
            named = split(address)
            if named is None:
                dealer.connect(address)
            else:
                self._dials[self._next + 1] = Dial(dealer, *named, self._resolver)
        except (zmq.ZMQError, TypeError, ValueError) as error:
            dealer.close(linger=0)
            raise ConfigError(f"not an address to connect to: {error}", actual=ascii(address)) from error
        self._next += 1
        self._dealers[self._next] = dealer
        return Called(self._next)

    def trouble(self, party: Party) -> str:
        """Why there is no address to reach a called party at; empty otherwise."""
        dial = self._dials.get(party.number) if isinstance(party, Called) else None
        return dial.error if dial is not None else ""

    def ring(self) -> None:
        """Wake who polls `bell`. By any thread; after `close` it does nothing."""
        with self._bell_lock:
            if self.bell >= 0:
                os.eventfd_write(self.bell, 1)

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, SEND_HIGH_WATER),
            (zmq.RCVHWM, RECEIVE_HIGH_WATER),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.IPV6, 1),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1_000),
            (zmq.HANDSHAKE_IVL, 5_000),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            socket.setsockopt(option, value)

    def hang_up(self, party: Party) -> None:
        """Close a DEALER. Callers cannot be hung up on; they are not answered any more."""
        if isinstance(party, Called) and (dealer := self._dealers.pop(party.number, None)) is not None:
            if (dial := self._dials.pop(party.number, None)) is not None:
                dial.close()
            dealer.close(linger=0)

    def send(self, party: Party, frame: bytes) -> bool:
        """Queue one frame. It leaves with the next `flush`, never before, with others for the same party, in order."""
        self._out.setdefault(party, []).append(frame)
        return True

    def flush(self) -> None:
        """Let everything queued leave. What cannot is dropped and counted: no such party, or its queue is full."""
        self._home.check()
        self.gone.clear()
        self.dropped.clear()
        while self._out:
            party, frames = self._out.popitem()
            for batch in _batches(frames):
                self._flush(party, batch)

    def _flush(self, party: Party, frames: list[bytes]) -> None:
        try:
            if isinstance(party, Called):
                self._dealers[party.number].send_multipart(frames, zmq.DONTWAIT)
            else:
                self._routers[party.socket].send_multipart([party.identity, *frames], zmq.DONTWAIT)
        except (zmq.ZMQError, KeyError) as error:
            self.counts["send_dropped"] += len(frames)
            self.dropped.add(party)
            if isinstance(party, Caller) and getattr(error, "errno", None) == zmq.EHOSTUNREACH:
                self.gone.add(party)

    def receive(self, ready: set[object] | None = None, most: int = MAX_FRAMES_A_TURN) -> Iterator[tuple[Party, bytes]]:
        """Frames that are there now, batches that begin within the first `most` of a socket. Too large a batch is
        dropped and counted.

        ready: only of these sockets; None: of all.
        """
        self._home.check()
        if ready is None or self.bell in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.bell)
        for dial in self._dials.values():
            dial.turn()
        if ready is None or self._zap in ready:
            self._authenticate()
        for name, router in self._routers.items():
            if ready is not None and router not in ready:
                continue
            taken = 0
            while taken < most:
                try:
                    parts = router.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                taken += len(parts)
                if 2 <= len(parts) <= 1 + MAX_BATCH:
                    caller = Caller(name, parts[0])
                    for frame in parts[1:]:
                        yield caller, frame
                else:
                    self.counts["malformed_frames"] += 1
        for number, dealer in list(self._dealers.items()):
            if ready is not None and dealer not in ready:
                continue
            taken = 0
            while taken < most:
                try:
                    parts = dealer.recv_multipart(zmq.DONTWAIT)
                except (zmq.Again, zmq.ZMQError):
                    break
                taken += len(parts)
                if len(parts) <= MAX_BATCH:
                    for frame in parts:
                        yield Called(number), frame
                else:
                    self.counts["malformed_frames"] += 1

    def _authenticate(self) -> None:
        """Answer libzmq's questions about who may connect (ZAP, RFC 27)."""
        while self._zap is not None and self._curve is not None:
            try:
                version, request, _domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart(
                    zmq.DONTWAIT
                )
            except zmq.Again:
                return
            except ValueError:
                self._zap.send_multipart([b"1.0", b"", b"400", b"malformed", b"", b""])
                continue
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            good = key in self._curve.authorized or key == self._curve.public
            self.counts["clients_refused"] += not good
            status = (b"200", b"OK") if good else (b"400", b"unknown client")
            self._zap.send_multipart([version, request, *status, b"", b""])

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll for input."""
        zap = [self._zap] if self._zap is not None else []
        return [*zap, *self._routers.values(), *self._dealers.values()]

    def close(self) -> None:
        """Close everything. Idempotent. In a fork nothing: the sockets are the parent's, the descriptors ZMQ's."""
        if not self._home.here:
            return
        for dial in self._dials.values():
            dial.close()
        self._dials.clear()
        for socket in self.sockets():
            with contextlib.suppress(zmq.ZMQError):
                socket.close(linger=0)
        self._routers.clear()
        self._dealers.clear()
        self._context.destroy(linger=0)
        with self._bell_lock:  # a thread that still works must not ring at a number that is somebody else's
            if self.bell >= 0:
                os.close(self.bell)
            self.bell = -1


def _batches(frames: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for frame in frames:
        batch.append(frame)
        size += len(frame)
        if len(batch) >= MAX_BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
