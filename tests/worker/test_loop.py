"""One turn of the control thread: in which order things happen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from sglang_pd.worker.control import PEERS
from sglang_pd.worker.loop import WorkerLoop
from sglang_pd.worker.peers.link import Link


class Recorded:
    """Link, control and rank of one loop: the control gives an order and says something to a peer, once."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self._said, self._ordered = False, False
        self.backend = SimpleNamespace(wakeup_fd=lambda: None, progress_interval_s=None)

    def wake(self) -> None: ...

    def turn(self) -> None:
        if not self._said:
            self._said = self._ordered = True

    def step(self, guard: Any, *, progress: bool) -> bool:
        if self._ordered:
            self._ordered = False
            self.happened.append("the order is carried out")
        return False

    def flush(self) -> None:
        if self._said:
            self.happened.append("the peer is told")

    def receive(self, ready: Any) -> Iterator[Any]:
        return iter(())

    def on_frame(self, party: Any, frame: bytes) -> None: ...


def test_nothing_leaves_before_the_flush_and_batches_are_bounded() -> None:
    sender, receiver = Link(None), Link(None)
    try:
        party = sender.call(receiver.listen(PEERS, "tcp://127.0.0.1:*"))
        frames = [bytes([number % 256]) * (300_000 if number == 100 else 10) for number in range(200)]
        for frame in frames:
            sender.send(party, frame)
        assert not receiver.sockets()[0].poll(200)
        sender.flush()
        got: list[bytes] = []
        while len(got) < len(frames):
            assert receiver.sockets()[0].poll(5_000)
            got += [frame for _, frame in receiver.receive()]
        assert got == frames and not receiver.counts["malformed_frames"] and not sender.counts["send_dropped"]
    finally:
        sender.close()
        receiver.close()


def test_a_peer_is_told_after_the_orders_of_the_turn_are_carried_out() -> None:
    """Told first that it was given up, a peer would connect to memory whose mapping is about to be revoked."""
    both: Any = Recorded()
    loop = WorkerLoop(both, both, both)
    loop._turn(None)
    os.close(loop._bell)
    assert both.happened == ["the order is carried out", "the peer is told"]
