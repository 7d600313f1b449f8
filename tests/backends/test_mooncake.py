"""The mooncake backend over the real library and loopback TCP, two processes: what the conformance suite cannot ask."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.free_ports import free_range

from sglang_pd.backends.mooncake import blob as mooncake_blob
from sglang_pd.backends.mooncake.backend import environment
from sglang_pd.testing.cases_bytes import exact, one_item
from sglang_pd.testing.lab import MIB, BackendSpec, ChildProcess, Lab, Link, canaries, compare
from sglang_pd.testing.pattern import batch_to_wire, canary_images, pages

if importlib.util.find_spec("mooncake") is None:
    pytest.skip("needs the mooncake-transfer-engine-non-cuda package", allow_module_level=True)

OPTIONS = {"insecure_data_plane": True}
SPEC = BackendSpec(name="mooncake", options=OPTIONS, env=environment(OPTIONS))


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab(SPEC)
    yield made
    made.close()


def run(code: str, env: dict[str, str]) -> str:
    """Standard output of a process of its own, which must end well."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    command = [sys.executable, "-c", "import os, sys\n" + code + "\nsys.stdout.flush(); os._exit(0)"]
    done = subprocess.run(command, env={**clean, **env}, capture_output=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode()


CREATE = """
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.errors import PdError
def create(**options):
    try:
        return create_backend("mooncake", epoch=1, options=options)
    except PdError as error:
        print(error.code, "|", error)
"""


def test_ports_on_all_interfaces_are_refused_unless_allowed_and_then_closed() -> None:
    listening = "from sglang_pd.backends.library.sockets import own_listeners\nprint(len(own_listeners()))\n"
    said = run(CREATE + "create()\n" + listening, environment({})).splitlines()
    assert said[0].startswith("insecure_refused") and "0.0.0.0:" in said[0] and "insecure_data_plane" in said[0]
    assert said[1] == "0"
    said = run(
        CREATE + "b = create(insecure_data_plane=True)\nprint(b.report()['listening'])", environment({})
    ).splitlines()
    assert "0.0.0.0" in said[0]


def test_a_transport_that_this_wheel_does_not_have_is_refused() -> None:
    said = run(CREATE + "create(transport='nvlink_intra')", environment({"transport": "nvlink_intra"}))
    assert said.startswith("backend_unavailable") and "SUPPORT_INTRA_NVLINK" in said


def test_the_process_environment_is_left_alone_and_reported() -> None:
    code = CREATE + (
        "before = dict(os.environ)\nb = create(insecure_data_plane=True)\n"
        "print(dict(os.environ) == before, b.report()['environment'] == {k: v for k, v in before.items() "
        "if k.startswith('MC_')})\nb.close()"
    )
    assert run(code, SPEC.env).strip() == "True True"


def test_closing_leaves_no_socket_thread_or_descriptor() -> None:
    code = (
        CREATE
        + """
import gc
def counted():
    gc.collect()
    return [len(os.listdir("/proc/self/" + what)) for what in ("fd", "task")]
create(insecure_data_plane=True).close()
before = counted()
for _ in range(3):
    b = create(insecure_data_plane=True)
    b.register([b.allocate(4096)])
    p = b.connect(b.describe(), 1)
    b.close()
    del b, p
print(before, counted())
"""
    )
    before, after = json.loads("[" + run(code, SPEC.env).strip().replace("] [", "],[") + "]")
    assert after == before


def test_scattered_pages_far_beyond_the_librarys_queue_arrive(lab: Lab) -> None:
    size = 32768 * 16384
    link = lab.fresh((size,), (size,))
    link.writer.call("fill", segment=0, offset=0, nbytes=size, value=7)
    moved = link.move(pages(5, 32768, 16384, (size,), (size,)))
    assert moved["nbytes"] == size
    missing = link.target.call("watch", segment=0, nbytes=size, value=7, for_s=0.0)
    assert missing < 0, f"byte {missing} did not arrive"


DESTINATION = """
import ctypes, select, signal, time
b = create(insecure_data_plane=True)
(segment,) = b.register([b.allocate(4 << 20)])
print(b.describe().hex(), flush=True)
writer = int(sys.stdin.readline())
# One core, and the library's threads behind the main one: what waits in sockets is taken out as late as can be.
for task in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(task, {min(os.sched_getaffinity(0))})
    if task != os.getpid():
        os.setpriority(os.PRIO_PROCESS, task, 19)
print("stopping", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
while not b.revoke(writer):
    select.select([b.wakeup_fd()], [], [], 1.0)
    b.progress()
ctypes.memset(segment.address, 0xA5, segment.nbytes)
time.sleep(1.0)
memory = ctypes.string_at(segment.address, segment.nbytes)
print(segment.nbytes - memory.count(b"\\xa5"), flush=True)
print(b.describe().hex(), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_late_bytes_of_a_dead_writer_stay_out_after_revoke(lab: Lab) -> None:
    """The destination is stopped while the writer fills its sockets and dies; then it must end its own engine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    command = [sys.executable, "-c", "import os, sys\n" + CREATE + DESTINATION]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env={**clean, **SPEC.env}, text=True, **pipes) as target:  # type: ignore[call-overload]
        try:
            blob = bytes.fromhex(target.stdout.readline())
            writer = lab.spawn((4 * MIB,))
            peer = writer.call("connect", blob=blob, epoch=1)["peer"]
            target.stdin.write(f"{writer.epoch}\n")
            target.stdin.flush()
            assert target.stdout.readline() == "stopping\n"
            for seed in range(8):
                batch = batch_to_wire(pages(seed, 1, 4 * MIB, writer.sizes, (4 * MIB,)))
                writer.call("write", peer=peer, batch=batch, deadline_s=30.0)
            time.sleep(0.5)
            writer.kill()
            target.send_signal(signal.SIGCONT)
            assert int(target.stdout.readline()) == 0, "bytes landed after revoke"
            before, after = mooncake_blob.decode(blob), mooncake_blob.decode(bytes.fromhex(target.stdout.readline()))
            assert after.session != before.session and after.generation == before.generation + 1
            again = lab.spawn((4096,))
            again.call("connect", blob=mooncake_blob.ENVELOPE.seal(after), epoch=1)
        finally:
            target.kill()


def test_a_living_writer_finds_its_old_session_closed_after_revoke(lab: Lab) -> None:
    link = lab.fresh((MIB,), (MIB,))
    link.move(one_item(link, 4096))
    old = link.target.call("describe")
    assert link.target.call("revoke", epoch=link.writer.epoch, within_s=10.0)["proven"]
    assert link.target.call("revoke", epoch=link.writer.epoch, within_s=0.0)["proven"]
    state = link.wait(link.post(one_item(link, 4096), 3.0)["transfer"], 5.0)["state"]
    assert state in ("failed", "unknown")
    assert link.writer.refused("connect", blob=old, epoch=link.target.epoch).code == "peer_lost"
    again = lab.connect(link.writer, link.target)
    exact(again, one_item(again, 4096), 10, "the same writer with the new blob")


def stranger(blob: bytes) -> bytes:
    """The blob of a peer whose process this host's kernel cannot vouch for, as from another host."""
    from msgspec import structs

    return mooncake_blob.ENVELOPE.seal(structs.replace(mooncake_blob.decode(blob), process=None))


def connect_as_stranger(writer: ChildProcess, target: ChildProcess) -> Link:
    facts = writer.call("connect", blob=stranger(target.call("describe")), epoch=target.epoch)
    return Link(writer, target, facts["peer"], facts["transport"])


def test_a_dead_peer_of_another_host_leaves_no_fence(lab: Lab) -> None:
    writer, target = lab.spawn_many([((64 * MIB,), "cpu")] * 2)
    link = connect_as_stranger(writer, target)
    batch = pages(210, 2048, 16384, writer.sizes, target.sizes)
    link.move(batch)
    posted = [link.post(batch, 5.0)["transfer"] for _ in range(4)]
    target.kill()
    states = [link.wait(one, 10.0)["state"] for one in posted]
    assert "unknown" in states and "pending" not in states
    assert link.wait(link.post(one_item(link, 64), 5.0)["transfer"], 10.0)["state"] == "failed"
    assert not link.fence(1.0)["proven"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_peer_restarted_on_the_same_port_is_a_new_peer(lab: Lab) -> None:
    """Its session has the same name; the library would write to the ports and addresses of the dead one for ever."""
    low = free_range(8)
    options: dict[str, Any] = {**OPTIONS, "ports": [low, low + 7]}
    elsewhere = Lab(replace_spec(options))
    try:
        writer = lab.spawn((MIB,))
        old = elsewhere.spawn((MIB,))
        session = mooncake_blob.decode(old.call("describe")).session
        link = connect_as_stranger(writer, old)
        exact(link, one_item(link, 4096), 1, "before the restart")
        old.kill()
        time.sleep(62)  # the library takes no port that is still in TIME_WAIT
        for _ in range(60):
            new = elsewhere.spawn((MIB, MIB))
            if mooncake_blob.decode(new.call("describe")).session == session:
                break
            new.kill()
        else:
            pytest.fail(f"no process got {session} again")
        error = writer.refused("connect", blob=stranger(new.call("describe")), epoch=old.epoch)
        assert error.code == "epoch_stale"
        after = connect_as_stranger(writer, new)
        exact(after, one_item(after, 4096), 2, "after the restart")
        canaries(new)
        assert link.wait(link.post(one_item(link, 4096), 5.0)["transfer"], 8.0)["state"] != "done"
        compare(new, canary_images(new.sizes), "a write to the old incarnation")
        exact(after, one_item(after, 8192), 3, "after a write to the old incarnation")
    finally:
        elsewhere.close()


def replace_spec(options: dict[str, Any]) -> BackendSpec:
    return BackendSpec(name="mooncake", options=options, env=environment(options))


def test_a_batch_is_refused_whole_for_one_bad_descriptor(lab: Lab) -> None:
    link = lab.fresh((MIB,), (MIB,))
    batch = pages(3, 16, 4096, link.writer.sizes, link.target.sizes)
    offset = batch.src_offset.copy()
    offset[7] = np.uint64(MIB)  # the library itself never looks at the local side
    bad = batch_to_wire(replace(batch, src_offset=offset))
    assert link.writer.refused("write", peer=link.peer, batch=bad, deadline_s=5.0).code == "segment_invalid"


def test_one_failing_write_to_a_living_peer_replaces_the_engine_and_goes_on() -> None:
    """The destination takes a registration back unseen: -1, UNKNOWN, a fresh engine, and the peer is the same."""
    code = (
        CREATE
        + """
import time
import numpy as np
from sglang_pd.backends.base import TransferState
from sglang_pd.protocol.batch import RegionTable, WriteBatch
b = create(insecure_data_plane=True)
src, dst = b.register([b.allocate(4096), b.allocate(4096)])
peer = b.connect(b.describe(), 1)
table = RegionTable(np.array([0, 1], np.uint32), np.zeros(2, np.uint64), np.full(2, 4096, np.uint64))
zero = np.zeros(1, np.uint64)
batch = WriteBatch(table, table, np.array([0], np.uint32), zero, np.array([1], np.uint32), zero, zero + np.uint64(64))
def move():
    one = b.write(peer, batch, deadline_s=10.0)
    while one.poll() is TransferState.PENDING: time.sleep(0.001)
    return one
assert move().poll() is TransferState.DONE
engine = b._inbound.engine
engine.unregister([dst.address])
lost = move()
assert lost.poll() is TransferState.UNKNOWN and lost.error.code == "transfer_unknown", lost.error
engine.register([dst.address], [4096])
assert move().poll() is TransferState.DONE
assert lost.poll() is TransferState.UNKNOWN and not b.fence(peer) and peer.lost is None
print(b.report()["engine_rebuilds"], b.report()["chunks_lost"])
b.close()
"""
    )
    assert run(code, SPEC.env).split() == ["1", "1"]


def test_what_is_written_over_a_freed_source_arrives_nowhere() -> None:
    """A peer that is gone hangs with a write under way: its engine ends, and a healthy peer beside it goes on."""
    code = (
        CREATE
        + """
import time
import numpy as np
from sglang_pd.backends.mooncake import pump
from sglang_pd.testing import memory
from sglang_pd.testing.lab import BackendSpec, Lab
from sglang_pd.testing.pattern import pages
pump._ABANDON_S = 0.3
size = 64 << 20
lab = Lab(BackendSpec(name="mooncake", options={"insecure_data_plane": True}))
gone, healthy = lab.spawn((size,)), lab.spawn((1 << 20,))
b = create(insecure_data_plane=True)
(own,) = b.register([b.allocate(size)])
memory.fill(own, 0, size, 1)
gone_peer, healthy_peer = (b.connect(one.call("describe"), one.epoch) for one in (gone, healthy))
def becomes(condition):
    ends = time.monotonic() + 20
    while not condition() and time.monotonic() < ends: time.sleep(0.01)
    return condition()
gone.stop()
hangs = b.write(gone_peer, pages(1, 1000, 65536, (size,), (size,)), deadline_s=0.5)
time.sleep(1.0)
assert hangs.poll().value == "unknown" and not hangs.source_free, "the peer may go on"
b.disconnect(gone_peer)
assert becomes(lambda: hangs.source_free) and hangs.poll().value == "unknown" and not b.fence(gone_peer)
memory.fill(own, 0, size, 0xEE)
gone.resume()
time.sleep(1.0)
arrived = np.frombuffer(gone.call("read", segment=0, offset=0, nbytes=size), np.uint8)
after = b.write(healthy_peer, pages(2, 16, 4096, (size,), (1 << 20,)))
assert becomes(lambda: after.poll().value == "done") and healthy_peer.lost is None
print(int((arrived == 0xEE).sum()), b.report()["engine_rebuilds"])
lab.close()
"""
    )
    assert run(code, SPEC.env).split() == ["0", "0"]
