"""One engine of the library: started, checked, asked, and ended for certain.

Measured on 0.3.13.post1 and 0.3.14 over TCP: dropping the last reference to the Python object runs the C++ destructor,
which stops and joins the library's I/O threads and then closes every socket. A socket of the engine that is gone from
/proc therefore proves that none of its threads can store another byte into memory here. Two traps: the destructor
holds the interpreter's lock (about a second, unless the accept loop's wait was shortened first), and
`get_first_buffer_address` holds it for a minute when the peer hangs, so it is never called.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from sglang_pd.backends.library import ports, sockets
from sglang_pd.backends.library.options import PATH
from sglang_pd.backends.mooncake import cuda as mooncake_cuda
from sglang_pd.backends.mooncake.library import Library
from sglang_pd.backends.mooncake.options import MooncakeOptions
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, ConfigError

LISTENERS = {"tcp": 2, "rdma": 1, "nvlink_intra": 1}
"""Ports an engine listens on: one for handshakes, and for TCP one for data. The only trace of the transport chosen."""

DEFAULT_PORTS = (15_000, 17_000)

_START = threading.Lock()

_REGISTER_CODES: dict[int | str, str] = {
    -1: "invalid argument",
    -3: "not registered",
    -7: "overlaps a registration",
    -200: "the metadata was refused",
    -202: "no memory region: see the device's limits",
    -302: "out of memory",
}


class Engine:
    """A started engine. Its calls may be made from any thread; `stop` ends it and is True when that is proven."""

    def __init__(self, library: Library, options: MooncakeOptions) -> None:
        """Start one that listens on no port at which a former one did, of this process or of another worker.

        Raises `BackendUnavailable` where the library cannot start, finds no other port, or runs another transport than
        asked for, `ConfigError` (`insecure_refused`) where it listens on all interfaces and that was not allowed.
        """
        self.options = options
        self.ports: frozenset[int] = frozenset()
        self._inodes: frozenset[int] = frozenset()
        self._library = library
        self._raw: Any = None
        ports.start_elsewhere(self._start_once, lambda _: self.ports, lambda _: self.stop(5.0))
        try:
            self._check_listeners()
        except Exception:
            self.stop(5.0)
            raise

    @property
    def raw(self) -> Any:
        """The library's object. Raises `BackendError` once stopped. Do not keep it: it would keep the engine."""
        if self._raw is None:
            raise BackendError("the engine is closed", where="mooncake")
        if self.options.transport == "nvlink_intra":
            mooncake_cuda.bind_thread()
        return self._raw

    @property
    def running(self) -> bool:
        """False once `stop` has let go of the library's object, whether or not its end was proven since."""
        return self._raw is not None

    @property
    def session(self) -> str:
        """`host:rpc_port`, by which peers name this engine."""
        return f"{self.options.host}:{self.rpc_port}"

    def _start_once(self) -> Engine:
        with _START:
            self._start()
        return self

    def _start(self) -> None:
        before = {one.inode for one in sockets.own_listeners()}
        raw = self._library.module.TransferEngine()
        options = self.options
        try:
            code = raw.initialize(f"{options.host}:0", "P2PHANDSHAKE", options.transport, ",".join(options.devices))
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
        if code != 0:
            low, high = self._range()
            raise BackendUnavailable(
                "Mooncake's engine does not start; the cause is on standard error",
                where=f"transport {options.transport}, ports {low} to {high}, devices {options.devices or 'all'}",
                expected=0,
                actual=code,
                hint="A full port range and a missing device are the usual causes",
            )
        self._raw = raw
        self.rpc_port = int(raw.get_rpc_port())
        low, high = self._range()
        new = [one for one in sockets.own_listeners() if one.inode not in before]
        self._listeners = [one for one in new if low <= one.port <= high or one.port == self.rpc_port]
        self.ports = frozenset(one.port for one in self._listeners)
        self._inodes = frozenset(one.inode for one in self._listeners)

    @staticmethod
    def _range() -> tuple[int, int]:
        low, high = (os.environ.get(name, "") for name in ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"))
        return (int(low) if low.isdigit() else DEFAULT_PORTS[0], int(high) if high.isdigit() else DEFAULT_PORTS[1])

    def _check_listeners(self) -> None:
        transport = self.options.transport
        if self.rpc_port not in self.ports or len(self.ports) != LISTENERS[transport]:
            raise BackendUnavailable(
                "Mooncake runs another transport than the one asked for, to judge by its ports",
                where=f"transport {transport}",
                expected=f"{LISTENERS[transport]} listening ports",
                actual=sorted(self.ports),
            )
        loose = [one for one in self._listeners if one.address != self.options.bind]
        if loose and not self.options.insecure_data_plane:
            raise ConfigError(
                "Mooncake's ports, which ask nobody for a password, listen elsewhere than at the configured address",
                code="insecure_refused",
                where=f"{PATH}.insecure_data_plane",
                expected=self.options.bind,
                actual=", ".join(f"{one.address}:{one.port}" for one in loose),
                hint="Close these ports to strangers by other means, then set insecure_data_plane: true",
            )

    def listening(self) -> tuple[str, ...]:
        """`address:port` of each socket the engine listens on."""
        return tuple(f"{one.address}:{one.port}" for one in self._listeners)

    def register(self, addresses: Sequence[int], sizes: Sequence[int], *, remote: bool = True) -> None:
        """Register memory; `remote` False keeps peers out of it where the version can. All or nothing.

        Raises `BackendError` (`memory_refused`) with the library's code.
        """
        if not addresses:
            return
        raw = self.raw
        code: int | str
        try:
            if self.options.transport == "nvlink_intra":
                code = self._register_on_device(raw, addresses, sizes)
            elif remote or not self._library.has_tickets:
                code = raw.batch_register_memory(list(addresses), list(sizes))
            else:
                codes = (raw.register_memory(a, n, "*", False) for a, n in zip(addresses, sizes, strict=True))
                code = next((found for found in codes if found), 0)
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
        if code != 0:
            raise BackendError(
                "Mooncake does not register this memory",
                code="memory_refused",
                where=f"{len(addresses)} segments, the first of {sizes[0]} bytes at {addresses[0]:#x}",
                expected=0,
                actual=f"{code} ({_REGISTER_CODES.get(code, 'see standard error')})",
            )

    @staticmethod
    def _register_on_device(raw: Any, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        """One by one, each with its device current; what was registered before a refusal is taken back."""
        for done, (address, nbytes) in enumerate(zip(addresses, sizes, strict=True)):
            mooncake_cuda.bind_thread(address)
            code = int(raw.register_memory(address, nbytes, "*"))
            if code:
                if done:
                    raw.batch_unregister_memory(list(addresses[:done]))
                return code
        mooncake_cuda.bind_thread()
        return 0

    def unregister(self, addresses: Sequence[int]) -> None:
        """Take back a registration made for a probe."""
        self.raw.batch_unregister_memory(list(addresses))

    def probe(self, session: str) -> int:
        """0 when the library at `session` answers. Can take a minute when that process hangs; other calls go on."""
        try:
            return int(self.raw.send_probe(session))
        except BackendError:
            raise
        except Exception:
            return -1

    def read(self, session: str, local: int, remote: int, nbytes: int) -> bool:
        """Read from a peer's registered memory into ours; False when the library says that it failed."""
        try:
            return int(self.raw.transfer_sync_read(session, local, remote, nbytes)) == 0
        except BackendError:
            raise
        except Exception:
            return False

    def stop(self, within_s: float) -> bool:
        """End the engine and wait until its sockets are gone: then its threads are joined. Idempotent.

        The caller sees to it that nobody is in a call. False when a socket is still there after `within_s` seconds.
        Raises `OSError` where this process has no descriptor to look with; the engine may have ended, or run on.
        """
        if self._raw is not None:
            sockets.quicken_accept(self.rpc_port)
            time.sleep(0.02)
            self._raw = None
        ends = time.monotonic() + within_s
        while not self.gone():
            if time.monotonic() > ends:
                return False
            time.sleep(0.005)
        return True

    def gone(self) -> bool:
        """Whether no socket of the engine is left in this process, accepted connections included."""
        if self._raw is not None:
            return False
        return not any(one.inode in self._inodes or one.port in self.ports for one in sockets.own_sockets())
