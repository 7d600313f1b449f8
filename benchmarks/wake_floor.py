"""The floor under a hand-over: the wake-ups that any design with a control thread on both sides pays, and no work.

engine thread -> eventfd -> control thread -> ZMQ over loopback -> control thread -> eventfd -> engine thread
"""

from __future__ import annotations

import os
import select
import threading
import time

import zmq


class Floor:
    """One side. Sender and receiver are two processes; times are of CLOCK_MONOTONIC."""

    def __init__(self, address: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER if address else zmq.ROUTER)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        if address:
            self._socket.connect(address)
        else:
            self._socket.bind("tcp://127.0.0.1:*")
        self.address = address or self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        threading.Thread(target=self._pass_on if address else self._take, daemon=True).start()

    def _pass_on(self) -> None:
        while True:
            select.select([self._bell], [], [])
            os.eventfd_read(self._bell)
            self._socket.send(b"x")

    def _take(self) -> None:
        while self._socket.poll():
            self._socket.recv_multipart()
            os.eventfd_write(self._bell, 1)

    def fire(self) -> float:
        """Sender's engine thread: when it rang."""
        began_s = time.monotonic()
        os.eventfd_write(self._bell, 1)
        return began_s

    def heard(self) -> float:
        """Receiver's engine thread: when it had it."""
        select.select([self._bell], [], [])
        now_s = time.monotonic()
        os.eventfd_read(self._bell)
        return now_s
