"""Whether anybody answers where a peer listens, asked before the library is told of it.

UCX connects in the call that makes a peer known, and waits there: two minutes, by the system's default, where the
peer's port answers nothing. That call is made by the one thread that serves all peers. So its addresses are tried here
first, by the thread that connects, which serves nobody else.

UCX can connect without waiting (`UCX_TCP_CONN_NB=y`). Then writes wait for a connection that nobody has answered yet,
and were seen to land after the target had closed its agent and built another one that got the same port.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

from sglang_pd.backends.library.sockets import own_listeners
from sglang_pd.backends.shortage import in_words
from sglang_pd.protocol.errors import TransferError

ANSWER_S = 8.0
"""Seconds that a peer has to answer: the system repeats its question after 1, 3 and 7."""
MAX_LISTENS = 64
"""Addresses that a blob states. An agent that listens on more of them states none, and is not asked."""

Listens = tuple[str, int]
"""IPv4 or IPv6 address and TCP port."""

_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)


def listening() -> dict[int, Listens]:
    """What this process listens on, by the socket's inode; nothing without /proc. Raises `BackendUnavailable`."""
    try:
        return {one.inode: (one.address, one.port) for one in own_listeners()}
    except (FileNotFoundError, PermissionError):
        return {}
    except OSError as error:
        raise in_words(error, "reading what this process listens on") from error


def stated(before: Iterable[int], after: dict[int, Listens]) -> list[Listens]:
    """What is listened on since, as a blob states it, without sockets that are bound to no address in particular."""
    known = set(before)
    new = {where for inode, where in after.items() if inode not in known and where[0] not in ("0.0.0.0", "::")}
    return sorted(new) if len(new) <= MAX_LISTENS else []


def check_answers(listens: Sequence[Listens], peer: str, within_s: float) -> None:
    """Wait until the system has a connection to one of the addresses; to learn that all refuse takes no longer.

    Raises `TransferError` (`peer_lost`) where none took one and some kept silent: what refuses may be another machine,
    with the same address in a network of its own. Raises `BackendUnavailable` without a descriptor.
    """
    trying: dict[int, socket.socket] = {}
    try:
        for where in listens:
            one = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET, socket.SOCK_STREAM)
            trying[one.fileno()] = one
            one.setblocking(False)
            code = one.connect_ex(where)
            if code == 0:
                return
            if code != errno.EINPROGRESS:  # the library will not wait for that one either
                trying.pop(one.fileno()).close()
        if _taken(trying, time.monotonic() + within_s):
            return
    except OSError as error:
        raise in_words(error, f"connect, peer {peer}") from error
    finally:
        for one in trying.values():
            one.close()
    raise TransferError(
        "nobody answers where the peer listens",
        code="peer_lost",
        where=f"connect, peer {peer}",
        expected=f"a connection within {within_s:g} s",
        actual=", ".join(f"{host} port {port}" for host, port in listens)[:500],
        hint="Is a firewall between the two? The data ports are others than that of the control plane.",
        backend="nixl",
    )


def _taken(trying: Mapping[int, socket.socket], until: float) -> bool:
    """Whether one of them was connected, or all were refused."""
    poller = select.poll()
    for fd in trying:
        poller.register(fd, select.POLLOUT)
    left, silent = len(trying), False
    while left and (wait_s := until - time.monotonic()) > 0:
        for fd, _ in poller.poll(wait_s * 1000):
            error = trying[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error == 0:
                return True
            silent |= error not in _REFUSED
            poller.unregister(fd)
            left -= 1
    return not (left or silent)
