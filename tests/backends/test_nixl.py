"""The `nixl` backend between processes: the conformance suite over CMA and over TCP, and what only it promises."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.free_ports import free_range

from sglang_pd.backends.library.lives import STATE_DIR
from sglang_pd.backends.library.sockets import reserve
from sglang_pd.backends.nixl.blob import ENVELOPE
from sglang_pd.testing import BackendSpec
from sglang_pd.testing.case import Case
from sglang_pd.testing.cases_bytes import exact, one_item
from sglang_pd.testing.cases_fence import stays_clean
from sglang_pd.testing.lab import MIB, ChildProcess, Lab, Link, RemoteRefusal
from sglang_pd.testing.pattern import pages
from sglang_pd.testing.pytest_helper import check, conformance_fixtures

CMA = BackendSpec(name="nixl")
TCP = BackendSpec(name="nixl", env={"UCX_TLS": "tcp,self"})

lab, conformance_case = conformance_fixtures([CMA, TCP], ids=["cma", "tcp"])


def test_conformance(lab: Lab, conformance_case: Case) -> None:
    check(lab, conformance_case)


@pytest.fixture
def cma() -> Iterator[Lab]:
    yield from own_lab(CMA)


@pytest.fixture
def tcp() -> Iterator[Lab]:
    yield from own_lab(TCP)


def own_lab(spec: BackendSpec) -> Iterator[Lab]:
    made = Lab(spec)
    try:
        yield made
    finally:
        made.close()


def refusal(lab: Lab, **options: Any) -> RemoteRefusal:
    with pytest.raises(RemoteRefusal) as caught:
        lab.spawn((4096,), options=options)
    return caught.value


# What is in use is said, and what cannot work is refused


def test_the_transport_is_that_of_this_very_peer(cma: Lab, tcp: Lab) -> None:
    writer, near, far = cma.spawn((MIB,)), cma.spawn((MIB,)), tcp.spawn((MIB,))
    assert cma.connect(writer, near).transport == "cma"
    # This writer could use CMA; the target cannot. UCX was asked about that target, which was not disturbed by it.
    link = cma.connect(writer, far)
    assert link.transport == "tcp"
    exact(link, one_item(link, 65536), 1, "after UCX was asked about the peer")


def test_transports_that_report_no_dead_peer_are_refused() -> None:
    for lab in own_lab(BackendSpec(name="nixl", env={"UCX_TLS": "sm,self"})):
        info = refusal(lab).info
        assert info.code == "config_invalid" and "UCX_TLS" in info.where and info.actual == "sm,self"


def test_a_plugin_without_its_library_names_the_file(cma: Lab) -> None:
    info = refusal(cma, plugin="LIBFABRIC").info
    assert info.code == "backend_unavailable"
    assert ".so" in info.actual and "missing" in info.actual


def test_worker_threads_of_the_library_move_the_same_bytes(tcp: Lab, cma: Lab) -> None:
    for one in (cma, tcp):
        options = {"num_threads": 2, "max_descriptors_per_post": 2048}
        writer, target = one.spawn((32 * MIB,), options=options), one.spawn((32 * MIB,))
        link = one.connect(writer, target)
        exact(link, pages(7, 2000, 8192, writer.sizes, target.sizes), 7, "with worker threads")


def test_a_progress_thread_is_declared(cma: Lab) -> None:
    child = cma.spawn((4096,), options={"progress_thread": True})
    assert child.capabilities["idle_cpu"] == 1.0 and "progress_thread" in child.capabilities["idle_reason"]


# UNKNOWN, and how it ends


def stopped(lab: Lab, deadline_s: float, count: int = 1) -> tuple[Link, list[int]]:
    """Transfers to a stopped peer, past their deadline: the first was handed to the library, the others never were."""
    link = lab.fresh((256 * MIB,), (256 * MIB,))
    link.move(one_item(link, 4096))
    link.target.stop()
    posted = [link.post(one_item(link, 256 * MIB), deadline_s=deadline_s)["transfer"] for _ in range(count)]
    for number, transfer in enumerate(posted):
        ended = link.wait(transfer, deadline_s + 5.0, settle=number > 0)
        assert ended["state"] == ("failed" if number else "unknown") and ended["error"]["code"] == "transfer_timeout"
    assert not link.fence(0.0)["proven"]
    return link, posted


def test_unknown_is_proven_by_the_death_of_the_peer(tcp: Lab) -> None:
    link, (transfer,) = stopped(tcp, 0.5)
    link.target.kill()
    ended = link.wait(transfer, 10.0, settle=True)
    # The first cause stays: the deadline came first.
    assert ended["state"] == "failed" and ended["quiesced"] and ended["error"]["code"] == "transfer_timeout"
    assert link.fence(5.0)["proven"]
    lost = link.writer.call("lost", peer=link.peer, within_s=5.0)
    assert lost["code"] == "peer_lost"


def test_what_was_never_posted_is_dropped_and_what_was_is_polled_to_its_end(tcp: Lab) -> None:
    link, transfers = stopped(tcp, 0.5, count=3)
    link.target.resume()
    ended = link.wait(transfers[0], 30.0, settle=True)
    # All its pieces had been posted before the deadline, or some never were: the library tells which, in the end.
    assert ended["state"] in ("done", "failed") and ended["quiesced"]
    assert link.fence(5.0)["proven"]
    link.move(one_item(link, 65536))


def test_a_source_is_free_while_the_peer_that_closed_its_agent_lives_on(tcp: Lab) -> None:
    """Else one stall past liveness would pin the source's pages until that peer's process exits."""
    link = tcp.fresh((256 * MIB,), (256 * MIB,))
    link.move(one_item(link, 4096))
    link.target.stop()
    transfer = link.post(one_item(link, 256 * MIB), deadline_s=60.0)["transfer"]
    assert link.wait(transfer, 0.3)["state"] == "pending"
    link.target.resume()
    link.target.call("revoke", epoch=link.writer.epoch, within_s=10.0)
    ended = link.wait(transfer, 30.0)
    for _ in range(100):
        if ended["source_free"]:
            break
        ended = link.wait(transfer, 0.1, settle=True)
    # Most often UNKNOWN; DONE where the target's last turns before it closed its agent were enough.
    assert ended["source_free"] and ended["state"] in ("unknown", "done"), ended
    assert link.fence(0.0)["proven"] is (ended["state"] == "done")


# Revocation


def revoke(child: ChildProcess, epoch: int, within_s: float) -> bool:
    return bool(child.call("revoke", epoch=epoch, within_s=within_s)["proven"])


def test_a_living_cma_writer_keeps_its_connection_and_a_dead_one_is_revoked(cma: Lab) -> None:
    """Else what it has in flight would be UNKNOWN for ever, and it could never give its own proof."""
    link = cma.fresh((128 * MIB,), (128 * MIB,))
    link.move(one_item(link, 4096))
    before = link.target.call("describe")
    transfer = link.post(one_item(link, 128 * MIB), deadline_s=60.0)["transfer"]
    assert not revoke(link.target, link.writer.epoch, 1.5)
    assert link.wait(transfer, 30.0)["state"] == "done" and link.fence(5.0)["proven"]
    assert link.target.call("describe") == before
    exact(link, one_item(link, 4096), 1, "after a revoke that proved nothing")
    link.writer.kill()
    assert revoke(link.target, link.writer.epoch, 5.0)
    assert link.target.call("describe") != before, "what waited in sockets is covered only by a close after the death"


def test_a_cma_writer_gives_its_proof_when_the_target_closed_its_agent_under_it(cma: Lab) -> None:
    """Else the death of one writer would part the target from every other that was in mid-transfer."""
    link = cma.fresh((64 * MIB,), (64 * MIB,))
    batch = pages(11, 4000, 16384, link.writer.sizes, link.target.sizes)
    states = set[str]()
    for number in range(4):
        link.move(one_item(link, 4096))
        posted = [link.post(batch, deadline_s=60.0)["transfer"] for _ in range(40)]
        link.target.call("revoke", epoch=12345 + number, within_s=0.0)
        ended = [link.wait(one, 30.0, settle=True) for one in posted]
        assert all(one["quiesced"] and one["source_free"] for one in ended), ended
        assert link.fence(5.0)["proven"]
        stays_clean(link, 0.3, "after the fence of a writer whose target had closed its agent")
        states |= {one["state"] for one in ended}
        link.target.call("admit", epoch=link.writer.epoch, blob=link.writer.call("describe"))
        link = cma.connect(link.writer, link.target)
    exact(link, pages(12, 500, 8192, link.writer.sizes, link.target.sizes), 12, "to the new agent")
    assert "failed" in states, states


def test_an_agent_closed_for_a_stranger_is_closed_again_for_the_writer_it_turned_out_to_be(cma: Lab) -> None:
    writer, target = cma.spawn((MIB,)), cma.spawn((MIB,))
    assert not revoke(target, writer.epoch, 1.5), "nobody said who that is"
    link = cma.connect(writer, target)
    exact(link, one_item(link, 4096), 1, "to the new agent")
    target.call("admit", epoch=writer.epoch, blob=writer.call("describe"))
    before = target.call("describe")
    assert not revoke(target, writer.epoch, 0.5) and target.call("describe") == before
    writer.kill()
    assert revoke(target, writer.epoch, 5.0) and target.call("describe") != before


def test_a_stranger_may_be_anybody_of_this_host_with_cma_and_nobody_over_tcp(cma: Lab, tcp: Lab) -> None:
    assert not revoke(cma.spawn((MIB,)), 12345, 1.5)
    assert revoke(tcp.spawn((MIB,)), 12345, 10.0)


def test_revoke_costs_outgoing_peers_too_and_they_come_back(tcp: Lab) -> None:
    one, other = tcp.spawn((MIB,)), tcp.spawn((MIB,))
    there, back = tcp.connect(one, other), tcp.connect(other, one)
    exact(there, one_item(there, 4096), 1, "there")
    exact(back, one_item(back, 4096), 2, "and back")
    assert revoke(one, 12345, 10.0)
    lost = one.call("lost", peer=there.peer, within_s=5.0)
    assert lost["code"] == "peer_lost" and "closed" in lost["actual"]
    assert one.call("fence", peer=there.peer, within_s=1.0)["proven"]
    again = tcp.connect(one, other)
    exact(again, one_item(again, 4096), 3, "after revoke")
    back = tcp.connect(other, one)
    exact(back, one_item(back, 4096), 4, "to the new agent")


# Others are not disturbed


def test_a_stopped_peer_does_not_hold_up_another(tcp: Lab) -> None:
    link, _ = stopped(tcp, 0.5)
    other = tcp.connect(link.writer, tcp.spawn((MIB,)))
    began = time.monotonic()
    other.move(one_item(other, 4096))
    assert time.monotonic() - began < 20
    link.target.resume()


# What peers know of agents, and of processes, that are no more


def test_who_knows_only_a_revoked_agent_reaches_nobody() -> None:
    """In a narrow range the next agent got its port, and a writer that connected by it wrote 4 MiB that were DONE."""
    low = free_range(8)
    taken = [one for one in map(reserve, range(low + 4, low + 8)) if one is not None]
    env = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_TCP_PORT_RANGE": f"{low}-{low + 7}"}
    for narrow, wide in zip(own_lab(BackendSpec(name="nixl", env=env)), own_lab(TCP), strict=True):
        target, writer = narrow.spawn((MIB,)), wide.spawn((MIB,))
        known = []
        for _ in range(3):
            narrow.admit(writer, target)
            known.append(target.call("describe"))
            assert revoke(target, writer.epoch, 10.0)
        ports = [port for blob in known for _, port in ENVELOPE.open(blob).listens]
        assert len(ports) == len(set(ports)) == 3 and all(low <= port < low + 4 for port in ports)
        for blob in known:
            with pytest.raises(RemoteRefusal) as caught:
                writer.call("connect", blob=blob, epoch=target.epoch)
            assert caught.value.info.code == "peer_lost"
    for one in taken:
        one.close()


TAKEN = """
import os, msgspec, sys, threading
from pathlib import Path
from sglang_pd.backends.library.lives import STATE_DIR, Life
from sglang_pd.backends.library.process import pid_namespace
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.errors import PdError
began, name, whose = threading.Event(), *sys.argv[1:]
other = threading.Thread(target=began.wait, daemon=True)
other.start()
known = {"process": os.getpid(), "thread": other.native_id, "another": 1 << 22}[whose]
life = Life(pids=((pid_namespace(), known),))
Path(os.environ[STATE_DIR], "before.life").write_bytes(msgspec.json.encode(life))
try:
    create_backend(name, epoch=1).close()
except PdError as error:
    print(error.code, error.message)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("backend", "whose"), [("nixl", "process"), ("nixl", "thread"), ("nixl", "another"), ("local", "process")]
)
def test_a_process_with_the_id_of_one_that_ended_is_refused(tmp_path: Path, backend: str, whose: str) -> None:
    """A stopped writer copies by that id, whatever has it now: also a thread, and whatever that transfers by."""
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", TAKEN, backend, whose]
    done = subprocess.run(
        command, env={**os.environ, STATE_DIR: str(tmp_path)}, capture_output=True, timeout=60, check=True
    )
    assert (b"backend_unavailable this process was given the id" in done.stdout) is (whose != "another"), done
