"""What a hand-over costs beside the wire: two processes, one rank each, an engine that computes nothing.

    python benchmarks/handoff.py [--backend local nixl mooncake] [--rooms 400] [--rounds 5] [--out DIR]
                                 [--devices cuda:0 cuda:1]

Overhead: from the last prefill token (the engine's call of `send`) to the admit in decode's engine thread, for a prompt
of one page, the room being open on both sides; idle and beside a Python thread that never waits, in both processes.
The wake floor, between each two rooms, is what the same chain of wake-ups takes when nothing is done in them.
Rooms a second: one-page rooms, so many in flight. Sizes: the same time with more bytes. Rounds are interleaved over
backends and cases; figures are medians over rounds. Pools lie in host memory, or on the two devices given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from handoff_child import PAGE_BYTES, PAGE_TOKENS
from stamp import write_result

BACKENDS = ("local", "nixl", "mooncake")

OPTIONS: dict[str, dict[str, Any]] = {"mooncake": {"insecure_data_plane": True}}
SIZES = {"32 KiB": (1, False), "2 MiB": (64, False), "64 MiB": (2048, False), "64 MiB in 2048 pages": (2048, True)}
POOL_PAGES = 2_060


def environment(backend: str) -> dict[str, str]:
    """What the backend's library must find in its environment; set before it is imported, by us alone."""
    if backend != "mooncake":
        return {"UCX_TLS": "tcp,cma,self"} if backend == "nixl" else {}
    from sglang_pd.backends.mooncake.backend import environment as mooncake_environment

    return dict(mooncake_environment(OPTIONS["mooncake"]))


class Worker:
    """A worker process."""

    def __init__(self, role: str, backend: str, device: str) -> None:
        self.role, self.backend = role, backend
        conf = {
            "role": role, "backend": backend, "id": role, "pages": POOL_PAGES, "options": OPTIONS.get(backend, {}),
            "device": device,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("handoff_child.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment(backend)},
        )  # fmt: skip
        self.address = self.ask_line(json.dumps(conf))["address"]

    def ask_line(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.hear()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the {self.role} process of {self.backend} ended")

    def order(self, cmd: str, **arguments: Any) -> None:
        self.tell(json.dumps({"cmd": cmd, **arguments}))

    def ask(self, cmd: str, **arguments: Any) -> dict[str, Any]:
        self.order(cmd, **arguments)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Pair:
    """A prefill and a decode process over one backend."""

    def __init__(self, backend: str, devices: Sequence[str]) -> None:
        self.prefill, self.decode = (
            Worker(role, backend, device) for role, device in zip(("prefill", "decode"), devices, strict=True)
        )
        self.handshake_s = self.decode.ask("connect", address=self.prefill.address)["seconds"]
        self._room = 0

    def one(self, pages: int = 1, scattered: bool = False) -> float:
        """Seconds from the last token to the admit."""
        self._room += 1
        room, tokens = self._room, pages * PAGE_TOKENS
        self.prefill.ask("request", room=room, tokens=tokens, scattered=scattered)
        self.decode.ask("open", room=room, tokens=tokens, address=self.prefill.address, scattered=scattered)
        self.decode.order("await", room=room, kind="admitted")
        time.sleep(0.006)  # the room is open on both sides long before the prompt is computed
        began = self.prefill.ask("fire", room=room, tokens=tokens)["at_s"]
        took = float(self.decode.hear()["at_s"]) - float(began)
        self.prefill.ask("await", room=room, kind="done")
        return took

    def floor(self) -> float:
        """Seconds of the bare wake-ups from one engine thread to the other."""
        self.decode.order("floor_await")
        time.sleep(0.006)
        began = self.prefill.ask("floor_fire")["at_s"]
        return float(self.decode.hear()["at_s"]) - float(began)

    def stream(self, rooms: int, in_flight: int) -> float:
        """Rooms a second."""
        first, self._room = self._room + 1, self._room + rooms
        common = {"first": first, "rooms": rooms, "in_flight": in_flight}
        self.prefill.order("stream", **common)
        seconds = self.decode.ask("stream", address=self.prefill.address, **common)["seconds"]
        self.prefill.hear()
        return float(rooms / seconds)

    def abort_drain(self) -> float:
        """Seconds from abort, a large transfer under way, until the memory is releasable."""
        self._room += 1
        room, tokens = self._room, 2048 * PAGE_TOKENS
        self.prefill.ask("request", room=room, tokens=tokens)
        self.decode.ask("open", room=room, tokens=tokens, address=self.prefill.address)
        time.sleep(0.02)
        self.prefill.ask("fire", room=room, tokens=tokens)
        began = self.decode.ask("abort", room=room)["at_s"]
        took = float(self.decode.ask("await", room=room, kind="releasable")["at_s"]) - float(began)
        self.prefill.ask("await", room=room, kind="releasable")
        return took

    def dead_peer(self) -> tuple[float, float]:
        """Seconds from `kill -9` of prefill to the room's failure, and to its memory's release. Ends the pair."""
        self._room += 1
        room = self._room
        self.prefill.ask("request", room=room, tokens=PAGE_TOKENS)
        self.decode.ask("open", room=room, tokens=PAGE_TOKENS, address=self.prefill.address)
        time.sleep(0.1)
        began = time.monotonic()
        self.prefill.kill()
        failed = float(self.decode.ask("await", room=room, kind="failed")["at_s"]) - began
        released = float(self.decode.ask("await", room=room, kind="releasable")["at_s"]) - began
        self.decode.kill()
        return failed, released

    def close(self) -> None:
        for worker in (self.prefill, self.decode):
            if worker.process.poll() is None:
                worker.kill()


def quantiles(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(values)
    pick = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    figures = {name: round(ordered[int(share * (len(ordered) - 1))] * 1e3, 3) for name, share in pick.items()}
    return {**figures, "samples": len(ordered)}


def overhead(rooms: int, rounds: int, devices: Sequence[str]) -> dict[str, Any]:
    """Over `local`: idle and busy, interleaved with their floors; nothing spins while the idle case is measured."""
    pair = Pair("local", devices)
    pair.prefill.ask("floor", address=pair.decode.ask("floor")["address"])
    taken: dict[str, list[float]] = {"idle": [], "busy": []}
    floors: dict[str, list[float]] = {"idle": [], "busy": []}
    [(pair.one(), pair.floor()) for _ in range(20)]

    def measure(name: str, count: int) -> None:
        for _ in range(count):
            taken[name].append(pair.one())
            floors[name].append(pair.floor())

    for _ in range(rounds):
        measure("idle", rooms // rounds)
        for worker in (pair.prefill, pair.decode):
            worker.ask("busy", on=True)
        measure("busy", max(10, rooms // rounds // 4))
        for worker in (pair.prefill, pair.decode):
            worker.ask("busy", on=False)
    pair.close()
    return {
        **{f"overhead_{name}_ms": quantiles(values) for name, values in taken.items()},
        **{f"wake_floor_{name}_ms": quantiles(values) for name, values in floors.items()},
    }


def backend_figures(backends: list[str], rooms: int, rounds: int, devices: Sequence[str]) -> dict[str, Any]:
    """Streams and sizes of every backend, interleaved; then aborts, and deaths."""
    pairs = {backend: Pair(backend, devices) for backend in backends}
    speeds: dict[str, dict[int, list[float]]] = {b: {n: [] for n in (1, 4, 16)} for b in backends}
    sizes: dict[str, dict[str, list[float]]] = {b: {name: [] for name in SIZES} for b in backends}
    aborts: dict[str, list[float]] = {b: [] for b in backends}
    for pair in pairs.values():
        pair.stream(20, 4)
        [pair.one(*case) for case in SIZES.values()]
    for _ in range(rounds):
        for backend, pair in pairs.items():
            for in_flight, values in speeds[backend].items():
                values.append(pair.stream(rooms, in_flight))
            for name, case in SIZES.items():
                sizes[backend][name] += [pair.one(*case) for _ in range(3)]
            aborts[backend].append(pair.abort_drain())
    result: dict[str, Any] = {}
    for backend, pair in pairs.items():
        failed, released = pair.dead_peer()
        per_s = {str(n): round(statistics.median(v), 1) for n, v in speeds[backend].items()}
        result[backend] = {
            "rooms_per_s": per_s,
            "16_over_1": round(per_s["16"] / per_s["1"], 2),
            "last_token_to_admit_ms": {
                name: round(statistics.median(v) * 1e3, 2) for name, v in sizes[backend].items()
            },
            "handshake_ms": round(pair.handshake_s * 1e3, 2),
            "abort_to_releasable_ms": round(statistics.median(aborts[backend]) * 1e3, 2),
            "kill_to_failed_ms": round(failed * 1e3, 1),
            "kill_to_releasable_ms": round(released * 1e3, 1),
        }
        pair.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rooms", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], metavar=("PREFILL", "DECODE"))
    given = parser.parse_args()
    figures = {
        "devices": given.devices,
        "page_bytes": PAGE_BYTES,
        "pages_moved": {name: case[0] for name, case in SIZES.items()},
        **overhead(given.rooms, given.rounds, given.devices),
        "backends": backend_figures(given.backend, given.rooms // 4, given.rounds, given.devices),
    }
    print(json.dumps(figures, indent=2))
    name = "handoff" if given.devices == ["cpu", "cpu"] else "gpu_handoff"
    print(write_result(name, figures, given.out))


if __name__ == "__main__":
    main()
