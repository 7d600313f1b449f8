"""Who drives the library of the `nixl` backend: its thread, or for a small write to an idle peer the caller."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from sglang_pd.backends.library.process import ProcessIdentity, own_identity
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.nixl.engine import Engine
from sglang_pd.backends.nixl.options import NixlOptions
from sglang_pd.protocol.errors import PdError


class ScriptedLink:
    """A link that writes down which thread drives it; `steps_needed`: how many steps a transfer takes."""

    def __init__(self, name: str, *, reached: bool = True, steps_needed: int = 1) -> None:
        self.name, self.reached, self.steps_needed = name, reached, steps_needed
        self.users, self.lost, self.open = 1, None, set[Any]()
        self.left: list[int] = []
        self.threads: list[int] = []
        self.defective = False

    def submit(self, work: Any) -> None:
        self.left.append(self.steps_needed)

    def step(self, agent: Any, now: float) -> bool:
        if self.defective:
            raise ZeroDivisionError("on purpose")
        if not self.left:
            return False
        self.threads.append(threading.get_ident())
        self.left[0] -= 1
        if not self.left[0]:
            self.left.pop(0)
        return True

    def waiting(self) -> bool:
        return bool(self.left)

    def urgent(self) -> bool:
        return True

    def lose(self, error: PdError) -> None:
        self.lost = error  # type: ignore[assignment]
        self.left.clear()

    def idle(self) -> bool:
        return False


class OneWork:
    def __init__(self) -> None:
        self.transfer = LibraryTransfer("nixl", "peer", 64, 5.0)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(None, NixlOptions(), 7)  # type: ignore[arg-type]
    yield made
    made._links.clear()
    made._ghosts.clear()
    made.stop()


def add(engine: Engine, link: ScriptedLink) -> ScriptedLink:
    engine._links[link.name] = link  # type: ignore[assignment]
    return link


def write(engine: Engine, link: ScriptedLink, *, small: bool = True) -> None:
    engine.submit(link, OneWork(), small=small)  # type: ignore[arg-type]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def free(engine: Engine) -> None:
    """Wait until the thread rests without a peer, so that it cannot be in the middle of a turn."""
    wait_for(lambda: engine._sleeping and not engine._driving.locked())


def test_a_small_write_to_an_idle_peer_is_posted_by_its_caller(engine: Engine) -> None:
    free(engine)
    link = add(engine, ScriptedLink("near"))
    write(engine, link)
    assert link.threads == [threading.get_ident()]


@pytest.mark.parametrize("case", ["large", "first", "busy peer", "busy library", "calls before it"])
def test_every_other_write_is_the_threads(engine: Engine, case: str) -> None:
    free(engine)
    link = add(engine, ScriptedLink("near", reached=case != "first"))
    if case == "busy peer":
        link.left.append(1)
    if case == "calls before it":
        engine._commands.append((ScriptedLink("other"), OneWork()))  # type: ignore[arg-type]
    if case == "busy library":
        with engine._driving:
            write(engine, link)
            assert not link.threads
    else:
        write(engine, link, small=case != "large")
    wait_for(lambda: len(link.threads) == (2 if case == "busy peer" else 1))
    assert threading.get_ident() not in link.threads


def test_what_is_not_finished_at_once_is_finished_by_the_thread(engine: Engine) -> None:
    free(engine)
    link = add(engine, ScriptedLink("near", steps_needed=3))
    write(engine, link)
    wait_for(lambda: len(link.threads) == 3)
    assert [one == threading.get_ident() for one in link.threads] == [True, False, False]


def test_a_defect_ends_the_link_and_neither_the_call_nor_the_thread(engine: Engine) -> None:
    free(engine)
    bad, good = add(engine, ScriptedLink("bad")), add(engine, ScriptedLink("good"))
    bad.defective = True
    write(engine, bad)
    assert bad.lost is not None and bad.lost.code == "internal"
    write(engine, good, small=False)
    wait_for(lambda: bool(good.threads))
    assert good.lost is None


def child_that_exited() -> ProcessIdentity:
    code = "from sglang_pd.backends.library.process import own_identity as own; import msgspec as m; import sys"
    code += "; sys.stdout.buffer.write(m.msgpack.encode(own()))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return msgspec.msgpack.decode(said, type=ProcessIdentity)


def test_a_writer_that_was_admitted_needs_no_greeting_to_be_proven_gone(engine: Engine) -> None:
    def anywhere(process: ProcessIdentity) -> bool:
        return True

    def nowhere(process: ProcessIdentity) -> bool:
        return False

    writers = engine.writers
    assert not writers.gone(7, anywhere) and not writers.live(7, anywhere), "nobody said who that is"
    engine.admit(7, child_that_exited())
    assert writers.gone(7, anywhere) and not writers.live(7, anywhere)
    engine.admit(7, own_identity())
    assert not writers.gone(7, anywhere), "a second process goes by that epoch, and lives"
    assert writers.live(7, anywhere) and not writers.live(7, nowhere)
