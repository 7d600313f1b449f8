"""Who waits for the thread of the `nixl` backend: nobody that serves others, however long the library takes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_pd.backends.library.lives import lives
from sglang_pd.backends.library.process import own_identity
from sglang_pd.backends.library.sockets import reserve
from sglang_pd.backends.nixl import engine as nixl_engine
from sglang_pd.backends.nixl import library as nixl_library
from sglang_pd.backends.nixl.blob import AgentBlob, agent_name
from sglang_pd.backends.nixl.descriptors import check_free
from sglang_pd.backends.nixl.engine import Engine
from sglang_pd.backends.nixl.options import NixlOptions
from sglang_pd.protocol.errors import BackendUnavailable


class FakeAgent:
    """An agent whose building waits for `may_build`, and fails while `short`."""

    may_build = threading.Event()
    short = False
    heard = 0
    finds: list[int] = []
    """The ports at which the next ones will listen, one each."""

    def __init__(self, library: object, name: str, options: NixlOptions) -> None:
        self.may_build.wait(30.0)
        if self.short:
            raise BackendUnavailable("too few descriptors are free for the library's agent", actual="5 free")
        self.name, self.segments, self.destroyed = name, list[Any](), False
        self.ports = frozenset({self.finds.pop(0)} if self.finds else ())
        self.listens = [("127.0.0.1", port) for port in self.ports] or [("127.0.0.1", 1)]

    def register(self, segments: list[Any]) -> None:
        self.segments += segments

    def metadata(self) -> bytes:
        return bytes(len(self.segments))

    def notifications(self) -> dict[str, list[bytes]]:
        FakeAgent.heard += 1
        return {}

    def destroy(self, handles: object) -> None:
        self.destroyed = True

    def add_peer(self, metadata: bytes, name: str) -> None: ...

    def remove_peer(self, name: str) -> None: ...

    def notify(self, name: str, message: bytes) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(nixl_library, "Agent", FakeAgent)
    monkeypatch.setattr(nixl_engine, "DRAIN_S", 0.01)
    monkeypatch.setattr(nixl_engine, "REBUILD_PAUSE_S", 0.05)
    FakeAgent.may_build.set()
    FakeAgent.short, FakeAgent.heard = False, 0
    made = Engine(None, NixlOptions(), 7)  # type: ignore[arg-type]
    made.call(made.start)
    yield made
    FakeAgent.may_build.set()
    made.stop()


def comes_true(condition: Callable[[], object]) -> bool:
    until = time.monotonic() + 10.0
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def describes(engine: Engine) -> bool:
    try:
        engine.describe()
    except BackendUnavailable:
        return False
    return True


def test_describe_says_what_was_registered_and_lets_peers_come(engine: Engine) -> None:
    assert engine.describe() == (agent_name(7, 0), b"", [("127.0.0.1", 1)])
    assert comes_true(lambda: FakeAgent.heard > 0), "the thread looks for notes from now on"
    engine.call(lambda: engine.register([]))
    engine.call(lambda: engine.register([_cpu(), _cpu()]))
    assert engine.describe() == (agent_name(7, 0), bytes(2), [("127.0.0.1", 1)])


def _cpu() -> Any:
    class Entry:
        device = "cpu"

    return Entry()


def test_describe_does_not_wait_while_the_library_hangs_in_a_rebuild(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_engine, "REBUILD_LATE_S", 0.0)
    FakeAgent.may_build.clear()
    assert not engine.revoke(9)
    with pytest.raises(BackendUnavailable, match="being rebuilt"):
        engine.describe()  # asked for, if not begun
    assert comes_true(lambda: engine._agent is None)
    with pytest.raises(BackendUnavailable, match="being rebuilt"):
        engine.describe()
    assert not engine.revoke(9) and not engine.revoke(9)
    assert [one.message.endswith("the library hangs") for one in caplog.records] == [True], "said, and said once"
    ran = threading.Event()
    engine.order(ran.set)
    assert not ran.is_set(), "and nothing else that is asked for without an answer waits"
    FakeAgent.may_build.set()
    assert comes_true(lambda: engine.revoke(9)) and ran.wait(5.0)
    assert engine.describe() == (agent_name(7, 1), b"", [("127.0.0.1", 1)])


def test_describe_tells_why_and_has_the_rebuild_tried_again(engine: Engine) -> None:
    FakeAgent.short = True
    assert not engine.revoke(9)
    assert comes_true(lambda: engine.not_rebuilt is not None)
    with pytest.raises(BackendUnavailable, match="5 free"):
        engine.describe()
    FakeAgent.short = False
    # Whoever wanted the proof may have been given another one since, and asks no more.
    assert comes_true(lambda: describes(engine)) and engine.not_rebuilt is None


def test_what_raises_unheard_is_a_defect_and_the_thread_goes_on(engine: Engine) -> None:
    engine.order(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    engine.call(lambda: None)
    assert engine._defects == 1


def test_a_peer_that_was_disconnected_is_connected_anew_at_once(engine: Engine) -> None:
    blob = AgentBlob(
        epoch=5, agent=agent_name(5, 0), nixl_version="1.5.1", plugin="UCX", settings=0, process=own_identity(),
        host_paths=[], listens=[], segments=[], metadata=b"",
    )  # fmt: skip
    first = engine.call(lambda: engine.connect(blob))
    hold = threading.Event()
    engine.order(lambda: hold.wait(10.0) and None)
    engine.order(lambda: engine.disconnect(first))
    found: list[Any] = []
    asker = threading.Thread(target=lambda: found.append(engine.call(lambda: engine.connect(blob))))
    asker.start()
    assert comes_true(lambda: len(engine._commands) == 2)
    hold.set()
    asker.join(10.0)
    assert found and found[0] is not first and found[0].lost is None


def test_too_few_free_descriptors_are_refused_by_the_limits_name(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/proc/self/fd")) - 1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (max(map(int, os.listdir("/proc/self/fd"))) + 1, 1 << 20))
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    check_free(highest - used - 1, "here")
    with pytest.raises(BackendUnavailable, match="RLIMIT_NOFILE"):
        check_free(highest - used + 2, "here")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_free(1 << 30, "here")


SHORT = """
import os, resource, time
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.errors import PdError

def limit(free):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + free if free else hard, hard))

backend = create_backend("nixl", epoch=5, options={})
before = backend.describe()
limit(5)
kept = [os.dup(0) for _ in range(5)]
assert backend.describe() == before, "who this process is, is not asked anew"
for fd in kept:
    os.close(fd)
assert not backend.revoke(9)
until = time.monotonic() + 10
while True:
    try:
        backend.describe()
    except PdError as error:
        if "RLIMIT_NOFILE" in str(error):
            break
    assert time.monotonic() < until, "not refused"
    time.sleep(0.01)
limit(None)
while not backend.revoke(9):
    assert time.monotonic() < until, "not rebuilt"
    time.sleep(0.01)
assert backend.describe() != before
print("sound", flush=True)
os._exit(0)
"""


def test_an_agent_is_rebuilt_once_there_are_descriptors_again() -> None:
    environment = os.environ | {"UCX_TLS": "tcp,self"}
    ran = subprocess.run([sys.executable, "-c", SHORT], env=environment, capture_output=True, text=True, timeout=50.0)
    assert ran.stdout.endswith("sound\n"), ran.stderr[-2000:]


# ports that peers know


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int]]:
    """What is kept for who comes later; 31,001 is known from before."""
    found: list[frozenset[int]] = []
    monkeypatch.setattr(lives, "keep_ports", found.append)
    monkeypatch.setattr(lives, "former_ports", lambda: frozenset({31_001}))
    return found


def test_an_agent_goes_where_no_former_one_was(engine: Engine, kept: list[frozenset[int]]) -> None:
    """A writer with the description of before reached the next agent at the same port, and wrote."""
    engine._exposure.listens(frozenset())
    FakeAgent.finds = [31_001, 31_002]
    assert not engine.revoke(9) and comes_true(lambda: engine.revoke(9))
    assert engine.describe().listens == [("127.0.0.1", 31_002)] and kept == []
    engine.admit(11, own_identity())
    assert kept == [{31_002}], "peers will know it"
    FakeAgent.finds = [31_002, 31_003]
    assert not engine.revoke(11) and comes_true(lambda: engine.revoke(11))
    assert engine.describe().listens == [("127.0.0.1", 31_003)] and kept == [{31_002}, {31_003}]
    assert reserve(31_002) is None, "nobody else of this host has it either"


def test_nobody_is_admitted_whose_port_cannot_be_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(ports: frozenset[int]) -> None:
        raise BackendUnavailable("no space")

    monkeypatch.setattr(lives, "keep_ports", full)
    with pytest.raises(BackendUnavailable, match="no space"):
        engine.admit(11, own_identity())
    assert not engine.writers.live(11, lambda process: True)
