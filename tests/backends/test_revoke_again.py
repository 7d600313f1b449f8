"""What a transport's own thread could not do once is tried again, and its cause is told: nobody waits for ever."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pd.backends.library.process import own_identity
from sglang_pd.backends.library.segments import Scope
from sglang_pd.backends.mooncake import inbound as mooncake_inbound
from sglang_pd.backends.mooncake import links as mooncake_links
from sglang_pd.backends.mooncake.blob import Blob
from sglang_pd.backends.mooncake.inbound import Inbound
from sglang_pd.backends.mooncake.library import Library
from sglang_pd.backends.mooncake.links import Links
from sglang_pd.backends.mooncake.options import MooncakeOptions
from sglang_pd.backends.mooncake.transfer import MooncakePeer, Outbound
from sglang_pd.backends.mori import link as mori_link
from sglang_pd.backends.nixl import engine as nixl_engine
from sglang_pd.backends.nixl import library as nixl_library
from sglang_pd.backends.nixl.engine import Engine
from sglang_pd.backends.nixl.options import NixlOptions
from sglang_pd.protocol.errors import PdError

LIBRARY = Library(module=None, version="0.3.13", flags={}, has_tickets=False, has_arrays=False)
SHORTAGE = OSError(errno.EMFILE, "Too many open files")


def comes_true(condition: Callable[[], object]) -> bool:
    until = time.monotonic() + 10.0
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


# mooncake: the engine that peers write through


class InboundEngine:
    """`plan`: what starting, stopping before its end and looking for its sockets raise, one a call."""

    plan: dict[str, list[Exception]] = {}
    made = 0

    def __init__(self, library: Library, options: MooncakeOptions) -> None:
        self.happens("start")
        type(self).made += 1
        self.ports: frozenset[int] = frozenset()
        self.running, self.session = True, f"engine {self.made}"

    def happens(self, what: str) -> None:
        if self.plan.get(what):
            raise self.plan[what].pop(0)

    def register(self, addresses: list[int], sizes: list[int]) -> None:
        self.happens("register")

    def stop(self, within_s: float) -> bool:
        self.happens("stop")
        self.running = False
        self.happens("gone")
        return True


@pytest.fixture
def inbound(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbound]:
    monkeypatch.setattr(mooncake_inbound, "Engine", InboundEngine)
    monkeypatch.setattr(mooncake_inbound, "RETRY_S", 0.2)
    InboundEngine.plan, InboundEngine.made = {}, 0
    made = Inbound(LIBRARY, MooncakeOptions(), 1, Scope("mooncake", 8))
    yield made
    made.close()


def told(inbound: Inbound) -> str:
    return inbound.failed.code if inbound.failed is not None else ""


@pytest.mark.parametrize("error", [SHORTAGE, ValueError("a defect")])
@pytest.mark.parametrize("where", ["stop", "gone", "start", "register"])
def test_mooncake_replaces_its_engine_at_another_attempt(inbound: Inbound, where: str, error: Exception) -> None:
    InboundEngine.plan = {where: [error, error]}
    before = inbound.engine.session
    ended = threading.Event()
    assert not inbound.revoke(7, ended.set)
    code = "backend_unavailable" if error is SHORTAGE else "internal"
    assert comes_true(lambda: told(inbound) == code), "the cause is kept"
    if where == "stop":
        assert inbound.engine.session == before, "nothing has happened to it"
    else:
        with pytest.raises(PdError) as caught:
            _ = inbound.engine
        assert caught.value.code == code, "and told to who asks"
    assert not inbound.revoke(7, ended.set)
    assert comes_true(lambda: inbound.revoke(7, ended.set)) and comes_true(ended.is_set)
    assert inbound.engine.session != before and told(inbound) == ""
    assert inbound.revoke(7, ended.set)


def test_mooncake_says_nothing_is_proven_while_an_engine_has_not_ended(inbound: Inbound) -> None:
    InboundEngine.plan = {"gone": [SHORTAGE] * 1000}
    assert not inbound.revoke(7, lambda: None) and comes_true(lambda: told(inbound))
    assert InboundEngine.made == 1, "no other engine before the end of the one before"
    InboundEngine.plan = {}
    assert comes_true(lambda: inbound.revoke(7, lambda: None))


# mooncake: who is asked who it is


def test_a_mooncake_peer_is_asked_again_whatever_kept_it_from_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(LIBRARY, MooncakeOptions(), lambda: ([], []))
    blob = Blob(
        mooncake_version="0.3.13", transport="tcp", epoch=5, generation=1, session="127.0.0.1:7", identity_address=4096,
        segments=[], process=None,
    )  # fmt: skip
    peer = MooncakePeer(1, blob, Outbound(SimpleNamespace(stop=lambda within_s: True)))  # type: ignore[arg-type]
    monkeypatch.setattr(mooncake_links.Links, "_answers", lambda self, blob: None)

    def no_engine(*given: object) -> Any:
        raise raised[0]

    raised: list[Exception] = [SHORTAGE]
    monkeypatch.setattr(mooncake_links, "Engine", no_engine)
    for _ in range(mooncake_links.VERIFY_FAILURES + 1):
        peer.verify_at = float("inf")
        links.verify(peer, lambda: None)
        assert comes_true(lambda: peer.verify_at < float("inf")) and peer.found_lost is None
    raised[0] = ValueError("a defect")
    for _ in range(mooncake_links.VERIFY_FAILURES):
        assert peer.found_lost is None
        peer.verify_at = float("inf")
        links.verify(peer, lambda: None)
        assert comes_true(lambda: peer.verify_at < float("inf") or peer.found_lost is not None)
    assert peer.found_lost is not None, "a defect that stays does not suspend the peer for ever"
    links.close(1.0)


# nixl: the agent


class FakeAgent:
    """`plan` as above: of building, registering, destroying; `kept`: how many looks a destroyed one is still there."""

    plan: dict[str, list[Exception]] = {}
    kept = 0

    def __init__(self, library: object, name: str, options: NixlOptions) -> None:
        self.happens("build")
        self.name, self.ports = name, frozenset[int]()
        self.listens: list[Any] = []
        self.given_up = False

    def happens(self, what: str) -> None:
        if self.plan.get(what):
            raise self.plan[what].pop(0)

    def register(self, segments: object) -> list[Any]:
        self.happens("register")
        return []

    def notifications(self) -> dict[str, list[bytes]]:
        self.happens("listen")
        return {}

    def metadata(self) -> bytes:
        return b""

    def destroy(self, handles: object) -> bool:
        self.happens("destroy")
        self.given_up = True
        return self.destroyed

    @property
    def destroyed(self) -> bool:
        if self.given_up and FakeAgent.kept > 0:
            FakeAgent.kept -= 1
            return False
        return self.given_up


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(nixl_library, "Agent", FakeAgent)
    monkeypatch.setattr(nixl_engine, "DRAIN_S", 0.01)
    monkeypatch.setattr(nixl_engine, "REBUILD_PAUSE_S", 0.1)
    FakeAgent.plan, FakeAgent.kept = {}, 0
    made = Engine(None, NixlOptions(), 7)  # type: ignore[arg-type]
    made.call(made.start)
    yield made
    made.stop()


@pytest.mark.parametrize("error", [SHORTAGE, ValueError("a defect")])
@pytest.mark.parametrize("where", ["build", "register", "destroy", "listen"])
def test_nixl_rebuilds_its_agent_at_another_attempt(engine: Engine, where: str, error: Exception) -> None:
    before = engine.describe()[0]
    FakeAgent.plan = {where: [error, error]}
    assert not engine.revoke(7)
    code = "backend_unavailable" if error is SHORTAGE else "internal"
    assert comes_true(lambda: engine.not_rebuilt is not None and engine.not_rebuilt.code == code), "the cause is kept"
    assert not engine.revoke(7)
    if where in ("build", "register"):
        with pytest.raises(PdError) as caught:
            engine.describe()
        assert caught.value.code == code, "and told to who asks"
    assert comes_true(lambda: engine.revoke(7)) and engine.not_rebuilt is None
    assert engine.describe()[0] != before and engine.rebuilds == 1


def test_nixl_proves_nothing_while_the_library_keeps_an_agent_and_proves_it_later(engine: Engine) -> None:
    FakeAgent.kept = 1000
    assert not engine.revoke(7)
    assert comes_true(lambda: engine.rebuilds == 1) and not engine.revoke(7), "another serves, and nothing is proven"
    FakeAgent.kept = 0
    assert engine.revoke(7) and engine.rebuilds == 1
    engine.admit(7, own_identity())
    assert not engine.revoke(7), "that one may have written through the agent of now"
    assert comes_true(lambda: engine.revoke(7)) and engine.rebuilds == 2


def test_nixls_thread_outlives_a_defect_of_its_rest(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = threading.Event()

    def rest(pause: int | None) -> list[int]:
        raised.set()
        monkeypatch.undo()
        raise SHORTAGE

    monkeypatch.setattr(engine, "_rest", rest)
    engine.describe()
    assert comes_true(raised.is_set)
    assert engine.describe()


# mori


def test_moris_thread_outlives_a_defect_of_its_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    link: Any = object.__new__(mori_link.Link)
    link.remote, link._stopping = SimpleNamespace(key="peer"), None
    said: list[Any] = [ValueError("a defect"), False]

    def await_something() -> bool:
        one = said.pop(0)
        if isinstance(one, Exception):
            raise one
        return bool(one)

    lost: list[Any] = []
    link._await_something, link._lose, link.give_up = await_something, lost.append, lost.append
    link._run()
    assert [error.code for error in lost] == ["internal", "internal"], "lost, and at the end given up"
