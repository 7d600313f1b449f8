"""The engine that peers write through, over engines that a test commands, and the ports that it leaves behind."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from sglang_pd.backends.library.lives import lives
from sglang_pd.backends.library.ports import former
from sglang_pd.backends.library.segments import Scope
from sglang_pd.backends.library.sockets import reserve
from sglang_pd.backends.mooncake import inbound as mooncake_inbound
from sglang_pd.backends.mooncake.engine import Engine
from sglang_pd.backends.mooncake.inbound import Inbound
from sglang_pd.backends.mooncake.library import Library
from sglang_pd.backends.mooncake.options import MooncakeOptions
from sglang_pd.protocol.errors import BackendUnavailable

LIBRARY = Library(module=None, version="0.3.13", flags={}, has_tickets=False, has_arrays=False)


class PortEngine:
    """It listens on one port."""

    port = 0

    def __init__(self, library: Library, options: MooncakeOptions) -> None:
        self.ports = frozenset({self.port})

    def register(self, addresses: list[int], sizes: list[int]) -> None:
        pass

    def stop(self, within_s: float) -> bool:
        return True


@pytest.mark.parametrize("admitted", [True, False])
def test_a_port_that_peers_know_is_nobodys_after_the_backend(monkeypatch: pytest.MonkeyPatch, admitted: bool) -> None:
    """A stopped writer connects to it again, and writes where another backend of the process may have its memory."""
    monkeypatch.setattr(mooncake_inbound, "Engine", PortEngine)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = PortEngine.port = free.getsockname()[1]
    inbound = Inbound(LIBRARY, MooncakeOptions(), 1, Scope("mooncake", 8))
    if admitted:
        inbound.admit(7)
    inbound.close()
    again = reserve(port)
    assert (again is None) is admitted and (port in former()) is admitted
    if again is not None:
        again.close()


class SlowEngine:
    """It takes its time to end."""

    may_end = threading.Event()

    def __init__(self, library: Library, options: MooncakeOptions) -> None:
        self.ports: frozenset[int] = frozenset()

    def register(self, addresses: list[int], sizes: list[int]) -> None:
        pass

    def stop(self, within_s: float) -> bool:
        return self.may_end.wait(10)


def test_who_is_admitted_while_the_engine_is_replaced_is_not_covered_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_inbound, "Engine", SlowEngine)
    SlowEngine.may_end.clear()
    inbound = Inbound(LIBRARY, MooncakeOptions(), 1, Scope("mooncake", 8))
    ended = threading.Event()
    assert not inbound.revoke(7, ended.set) and not inbound.revoke(8, ended.set)
    inbound.admit(7)
    SlowEngine.may_end.set()
    ends = time.monotonic() + 10
    while not inbound.revoke(8, ended.set) and time.monotonic() < ends:  # the first turn may have begun without it
        time.sleep(0.005)
    assert inbound.revoke(8, ended.set), "that one was not admitted again"
    assert not inbound.revoke(7, ended.set), "it may have written through the new engine"
    inbound.close()


# ports of workers that have ended


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int]]:
    """What was kept."""
    found: list[frozenset[int]] = []
    monkeypatch.setattr(lives, "keep_ports", found.append)
    monkeypatch.setattr(mooncake_inbound, "Engine", PortEngine)
    monkeypatch.setattr(PortEngine, "port", 21_002)
    return found


def test_ports_are_kept_before_anybody_may_write_there(kept: list[frozenset[int]]) -> None:
    inbound = Inbound(LIBRARY, MooncakeOptions(), 1, Scope("mooncake", 8))
    assert kept == []
    inbound.admit(7)
    assert kept == [{21_002}]
    PortEngine.port, ended = 21_003, threading.Event()
    inbound.revoke(7, ended.set)
    assert ended.wait(10)
    assert kept == [{21_002}, {21_003}], "peers are told of the new engine at once"
    inbound.close()


def test_nobody_is_admitted_whose_port_cannot_be_kept(
    kept: list[frozenset[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    inbound = Inbound(LIBRARY, MooncakeOptions(), 1, Scope("mooncake", 8))

    def full(ports: frozenset[int]) -> None:
        raise BackendUnavailable("no space")

    monkeypatch.setattr(lives, "keep_ports", full)
    with pytest.raises(BackendUnavailable, match="no space"):
        inbound.admit(7)
    inbound.close()


class CountingEngine(Engine):
    """It takes the lowest port of its range that is free, as the library takes any."""

    started = 0

    def _start(self) -> None:
        type(self).started += 1
        for port in range(*self._range()):
            with socket.socket() as one:
                try:
                    one.bind(("0.0.0.0", port))
                except OSError:
                    continue
                self.rpc_port, self.ports, self._raw = port, frozenset({port}), object()
                return
        raise BackendUnavailable("a full range")

    def _check_listeners(self) -> None:
        pass

    def stop(self, within_s: float) -> bool:
        self._raw = None
        return True


def test_an_engine_shuns_ports_and_says_when_there_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    low = 23_400
    few, all_of_them = frozenset({low, low + 1, 9}), frozenset({*range(low, low + 4), 9})
    monkeypatch.setenv("MC_MIN_RPC_PORT", str(low))
    monkeypatch.setenv("MC_MAX_RPC_PORT", str(low + 4))
    monkeypatch.setattr(CountingEngine, "started", 0)
    monkeypatch.setattr(lives, "former_ports", lambda: few if CountingEngine.started < 4 else all_of_them)
    engine = CountingEngine(LIBRARY, MooncakeOptions())
    assert engine.ports == {low + 2} and CountingEngine.started == 3
    for port in (low, low + 1):
        again = reserve(port)
        assert again is not None, "a port that it only kept from the library is free again"
        again.close()
    with pytest.raises(BackendUnavailable, match="wider range") as caught:
        CountingEngine(LIBRARY, MooncakeOptions())
    assert "a full range" in str(caught.value) and caught.value.where == "$.network.ports"


def test_a_port_that_was_let_go_while_the_library_started_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that had it was killed after this one had looked who lives, and before it listened."""
    low = 23_400
    monkeypatch.setenv("MC_MIN_RPC_PORT", str(low))
    monkeypatch.setenv("MC_MAX_RPC_PORT", str(low + 4))
    monkeypatch.setattr(CountingEngine, "started", 0)
    monkeypatch.setattr(lives, "former_ports", lambda: frozenset({low} if CountingEngine.started else ()))
    assert CountingEngine(LIBRARY, MooncakeOptions()).ports == {low + 1}
