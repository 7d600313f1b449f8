"""The libraries under the backends, driven by hand: what a backend's own cost is measured against.

As a program it is the destination: `python transfer_raw.py nixl|mooncake NBYTES` prints one JSON line and lives until
its standard input ends.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def touched(nbytes: int) -> NDArray[np.uint8]:
    """Memory whose pages all exist."""
    return np.full(nbytes, 1, np.uint8)


class RawNixl:
    """A nixl agent with the UCX plugin; peer error mode is the library's default."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._name = f"raw-{uuid.uuid4().hex}"
        self._agent = nixl_agent(self._name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._memory = memory
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], mem_type="DRAM")

    def facts(self) -> dict[str, Any]:
        return {"metadata": self._agent.get_agent_metadata().hex(), "address": self._memory.ctypes.data}

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def connect(self, facts: dict[str, Any]) -> None:
        name = self._agent.add_remote_agent(bytes.fromhex(facts["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._base = facts["address"]

    def write(self, src: NDArray[np.uint64], dst: NDArray[np.uint64], length: NDArray[np.uint64]) -> None:
        """Offsets in this memory and the peer's; returns when the library says DONE."""
        zeros = np.zeros_like(length)
        own = np.ascontiguousarray(np.stack([src + np.uint64(self._memory.ctypes.data), length, zeros], axis=1))
        theirs = np.ascontiguousarray(np.stack([dst + np.uint64(self._base), length, zeros], axis=1))
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(own, mem_type="DRAM"),
            self._agent.get_xfer_descs(theirs, mem_type="DRAM"),
            self._peer,
        )
        state = self._agent.transfer(handle)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("nixl: ERR")
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)


class RawMooncake:
    """A Mooncake engine without a metadata server; the environment chooses its transport."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._memory = memory
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("mooncake: initialize failed")
        if self._engine.register_memory(memory.ctypes.data, memory.nbytes):
            raise RuntimeError("mooncake: register_memory failed")

    def facts(self) -> dict[str, Any]:
        return {"session": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._memory.ctypes.data}

    def progress(self) -> None:
        """Its own threads do."""

    def connect(self, facts: dict[str, Any]) -> None:
        self._session, self._base = facts["session"], facts["address"]

    def write(self, src: NDArray[np.uint64], dst: NDArray[np.uint64], length: NDArray[np.uint64]) -> None:
        """Offsets in this memory and the peer's; returns when the library says so."""
        own = (src + np.uint64(self._memory.ctypes.data)).tolist()
        theirs = (dst + np.uint64(self._base)).tolist()
        code = self._engine.batch_transfer_sync_write(self._session, own, theirs, length.tolist())
        if code:
            raise RuntimeError(f"mooncake: {code}")


RAW = {"nixl": RawNixl, "mooncake": RawMooncake}


class RawPair:
    """A raw library here and in a process of its own."""

    def __init__(self, name: str, nbytes: int) -> None:
        command = [sys.executable, str(Path(__file__)), name, str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.memory = touched(nbytes)
        self.side = RAW[name](self.memory)
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        for line in self._process.stdout:
            if line.startswith("{"):
                self.side.connect(json.loads(line))
                return
        raise RuntimeError(f"the raw {name} destination ended")

    def close(self) -> None:
        """End the other process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(20)


def main() -> None:
    """The destination."""
    side = RAW[sys.argv[1]](touched(int(sys.argv[2])))
    print(json.dumps(side.facts()), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        side.progress()
    os._exit(0)


if __name__ == "__main__":
    main()
