"""Nobody can tell how a worker will number the next peer: who states that number in advance aborts the process."""

from __future__ import annotations

import subprocess
import sys

NUMBER = """
import ctypes, sys, time, zmq
from sglang_pd.worker.peers.link import Link
libc = ctypes.CDLL(None)
libc.srandom(7)
link = Link()
address = link.listen("peers", "tcp://127.0.0.1:0")
after = libc.random()
libc.srandom(7)
assert after == libc.random(), "the process's own sequence was disturbed"
dealer = zmq.Context().socket(zmq.DEALER)
dealer.connect(address)
dealer.send(b"x")
until_s = time.monotonic() + 10
while time.monotonic() < until_s:
    for party, frame in link.receive():
        print(party.identity.hex())
        sys.stdout.flush()
        import os
        os._exit(0)
    time.sleep(0.005)
"""


def first_number() -> str:
    done = subprocess.run([sys.executable, "-c", NUMBER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and len(done.stdout.strip()) == 10, done.stdout + done.stderr
    return done.stdout.strip()


def test_two_processes_number_their_peers_from_different_starts() -> None:
    one, other = first_number(), first_number()
    assert one[:2] == other[:2] == "00"
    assert abs(int(one, 16) - int(other, 16)) > 64, "64 planted identities and one connection would end the process"
