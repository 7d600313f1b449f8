"""What this process listens on, read from /proc: the library tells nobody where its ports are bound."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

_LISTEN = "0A"
_QUICK_ACCEPT_US = 5_000


@dataclass(frozen=True, slots=True)
class Socket:
    """One TCP socket of this process. address: IPv4 or IPv6 text; `listening` or an established connection."""

    inode: int
    descriptor: int
    address: str
    port: int
    listening: bool

    @property
    def on_all_interfaces(self) -> bool:
        """True for a socket bound to no address in particular."""
        return self.address in ("0.0.0.0", "::")


def own_sockets() -> list[Socket]:
    """Every TCP socket of this process, those of libraries included."""
    mine = _own_inodes()
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for local, state, inode in _rows(table):
            if inode in mine:
                host, port = _address(local, family)
                found.append(Socket(inode, mine[inode], host, port, state == _LISTEN))
    return found


def own_listeners() -> list[Socket]:
    """Every socket this process listens on."""
    return [one for one in own_sockets() if one.listening]


def quicken_accept(port: int) -> bool:
    """Shorten the library's wait for a connection on its own `port`, so that its thread can be joined in milliseconds.

    The library's accept loop waits a second at a time, and its destructor waits for the loop while it holds the
    interpreter's lock. The wait is an option of the socket, and the socket is this process's own. Returns False where
    the socket was not found.
    """
    for one in own_listeners():
        if one.port != port:
            continue
        try:
            with socket.socket(fileno=os.dup(one.descriptor)) as mine:
                mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, _QUICK_ACCEPT_US))
            # The wait now under way ends with a connection, which the loop finds empty and drops.
            target = "127.0.0.1" if one.on_all_interfaces else one.address
            with socket.create_connection((target, port), 1.0):
                return True
        except OSError:
            return False
    return False


def reserve(port: int) -> socket.socket | None:
    """Hold a port without listening, so that nothing here can listen on it again; None where somebody else has it."""
    held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("::", port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # needed to take it, and nobody shall share it
    except OSError:
        held.close()
        return None
    return held


def reserve_all(ports: Iterable[int]) -> list[socket.socket]:
    """`reserve` each. Raises `OSError`, and holds none, where this process has no descriptor for it."""
    held: list[socket.socket] = []
    try:
        for port in ports:
            one = reserve(port)
            held += [one] if one is not None else []
    except OSError:
        for one in held:
            one.close()
        raise
    return held


def _own_inodes() -> dict[int, int]:
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found[int(target[8:-1])] = int(name)
    return found


def _rows(table: str) -> list[tuple[str, str, int]]:
    try:
        with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
            rows = [line.split() for line in lines][1:]
    except FileNotFoundError:  # a kernel without IPv6
        return []
    return [(row[1], row[3], int(row[9])) for row in rows]


def _address(text: str, family: socket.AddressFamily) -> tuple[str, int]:
    digits, _, port = text.partition(":")
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    # Each 32-bit word is printed in the machine's own byte order.
    packed = b"".join(word.to_bytes(4, "little") for word in words)
    return socket.inet_ntop(family, packed), int(port, 16)
