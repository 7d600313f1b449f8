"""Connects a DEALER to a host and port. libzmq is given numbers only; a name is resolved, and followed if it moves."""

from __future__ import annotations

import contextlib
import ipaddress

import zmq

from sglang_pd.worker.peers.resolve import Resolver

CONNECT_TIMEOUT_MS = 5_000
"""The next address of a name is tried when one does not even refuse."""


def split(address: str) -> tuple[str, int] | None:
    """Host name and port of `tcp://name:port`; None for numbers, and for what is no such address.

    Raises `ValueError` for a port that is none, and for a text that is no host's name.
    """
    if not isinstance(address, str) or not address.isascii():
        raise ValueError("not a text in ASCII")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not port.isdecimal() or not host:
        return None
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        return None
    if not 0 < int(port) < 2**16:
        raise ValueError(f"no port {port}")
    return host, int(port)


class Dial:
    """One DEALER on its way to a named host."""

    def __init__(self, dealer: zmq.Socket[bytes], host: str, port: int, resolver: Resolver) -> None:
        self._dealer, self._host, self._port, self._resolver = dealer, host, port, resolver
        self._at = ""
        self.error = ""
        """Why there is nothing to connect to; empty while the name is being looked up, and once it is known."""
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self._monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        self.turn()

    def turn(self) -> None:
        """Connect once the name is known. When connecting failed, to the next of its addresses, if it has another."""
        failed = False
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.DONTWAIT)
                failed = True
        if self._at and not failed:
            return
        outcome = self._resolver.ask(self._host)
        self.error = outcome.error if outcome is not None else ""
        if outcome is None or not outcome.addresses:
            return
        known = list(outcome.addresses)
        address = known[(known.index(self._at) + 1) % len(known)] if self._at in known else known[0]
        if address != self._at:
            if self._at:
                with contextlib.suppress(zmq.ZMQError):
                    self._dealer.disconnect(self._endpoint(self._at))
            self._at = ""
            try:
                self._dealer.connect(self._endpoint(address))
                self._at = address
            except zmq.ZMQError as error:
                self.error = f"{address}: {error}"

    def _endpoint(self, address: str) -> str:
        return f"tcp://[{address}]:{self._port}" if ":" in address else f"tcp://{address}:{self._port}"

    def close(self) -> None:
        """Before the DEALER is closed."""
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
