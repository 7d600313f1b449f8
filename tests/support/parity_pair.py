"""A prefill and a decode process of the reference engine over one backend, and hand-overs between them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.parity_live import STEPS, Outcome
from support.reference_run import POISON, prompt_ids
from support.worker_process import WorkerProcess

CHILD = Path(__file__).with_name("parity_child.py")
STAND_IN = CHILD.with_name("fake_mori")


@dataclass(frozen=True)
class Transport:
    """A backend and how its processes are made."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    package: str = ""
    """Without it the tests are skipped."""

    def require(self) -> None:
        """Skip the test where the library is not installed."""
        if self.package and importlib.util.find_spec(self.package) is None:
            pytest.skip(f"needs {self.package}")


def _mooncake() -> Transport:
    from sglang_pd.backends.mooncake.backend import environment

    options = {"insecure_data_plane": True}
    return Transport("mooncake", options, environment(options), "mooncake")


TRANSPORTS = {
    "local": Transport("local"),
    "nixl": Transport("nixl", package="nixl"),
    "mooncake": _mooncake(),
    "mori": Transport("mori", env={"PYTHONPATH": str(STAND_IN)}),
}

LANES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sparse": (
        {"mode": "sparse", "size": {"pages": 72, "rows": 14, "slots": 15, "window_pages": 30, "order": "random"}},
        {"mode": "sparse", "size": {"pages": 91, "rows": 17, "slots": 16, "window_pages": 61, "order": "high"}},
    ),
    "soft": (
        {"mode": "soft", "size": {"pages": 83, "rows": 15, "slots": 14, "window_pages": 33, "order": "high"}},
        {"mode": "soft", "size": {"pages": 75, "rows": 16, "slots": 19, "window_pages": 55, "order": "random"}},
    ),
}
"""By name: prefill's and decode's. Sizes and orders differ, so that no index means the same on both sides."""

UNVERIFIED = {"unverified": tuple({**side, "verify": "off"} for side in LANES["soft"])}


class ParityProcess(WorkerProcess):
    """One process; its lanes' addresses are in `addresses`."""

    def __init__(self, role: str, transport: Transport, lanes: dict[str, dict[str, Any]]) -> None:
        self.conf = {
            "role": role, "backend": transport.name, "options": transport.options, "id": f"{role}-{transport.name}",
            "lanes": lanes,
        }  # fmt: skip
        path = [str(CHILD.parent.parent), transport.env.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **transport.env, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.lines: list[dict[str, Any]] = []
        self._buffer = b""
        self._numbers = 0
        self.pid = self.process.pid
        self._write(self.conf)

    def started(self) -> None:
        """Wait until it serves."""
        self.addresses = self.wait(lambda line: line.get("answer") == "start", timeout_s=60)["addresses"]

    def tell(self, cmd: str, **arguments: Any) -> dict[str, Any]:
        """A command that must not fail, and its answer."""
        answer = self.ask(cmd, timeout_s=60, **arguments)
        if "error" in answer:
            raise AssertionError(f"{self.conf['id']}: {cmd} {json.dumps(arguments)[:200]}: {answer['error']}")
        return answer

    def ended(self, name: str) -> dict[str, Any]:
        """The end of a request."""
        return self.wait(lambda line: line.get("ended") == name, timeout_s=50)


@dataclass(frozen=True)
class Case:
    """One hand-over. chunk: of prefill, in tokens, 0 for the whole prompt at once. fault: where, way, region."""

    length: int
    chunk: int = 0
    seed: int = 7
    fault: tuple[Any, ...] = ()


class Pair:
    """Both processes, shared by many tests; after a failure that may have left something behind, `broken`."""

    def __init__(self, transport: Transport, lanes: dict[str, Any]) -> None:
        sides = [{name: sides[n] for name, sides in lanes.items()} for n in (0, 1)]
        self.prefill = ParityProcess("prefill", transport, sides[0])
        self.decode = ParityProcess("decode", transport, sides[1])
        self.broken = False
        self._rooms = itertools.count(1)
        self._both = ThreadPoolExecutor(2)
        try:
            for worker in (self.prefill, self.decode):
                worker.started()
            for name in lanes:
                self.decode.tell("connect", lane=name, address=self.prefill.addresses[name])
        except BaseException:
            self.close()
            raise

    def ready(self, lane: str, *, prefill: float | None = POISON, decode: float | None = POISON) -> int:
        """Nothing is held on either side, all memory is accounted for, and pools are full of this. Writes of prefill
        that a fault changed so far."""
        self.broken = True
        fillers = ((self.prefill, prefill), (self.decode, decode))
        answers = list(self._both.map(lambda side: side[0].tell("ready", lane=lane, filler=side[1]), fillers))
        for worker in (self.prefill, self.decode):
            worker.lines.clear()
        self.broken = False
        return int(answers[0]["changed"])

    def run(self, lane: str, cases: Sequence[Case]) -> list[Outcome]:
        """Hand these over, all in flight together."""
        self.broken = True
        names = []
        for case in cases:
            room = next(self._rooms)
            names.append(f"r{room}")
            common = {"lane": lane, "name": names[-1], "room": room, "steps": STEPS}
            common["ids"] = prompt_ids(case.length, case.seed).tolist()
            asks = [
                (self.prefill, {"chunk": case.chunk, "fault": list(case.fault)}),
                (self.decode, {"address": self.prefill.addresses[lane]}),
            ]
            for worker, more in asks if room % 2 else reversed(asks):
                worker.tell("run", **common, **more)
        outcomes = [self._outcome(name) for name in names]
        self.broken = False
        return outcomes

    def _outcome(self, name: str) -> Outcome:
        sent, got = self.prefill.ended(name), self.decode.ended(name)
        before, after = (got["live"] + [{}, {}])[:2]
        source = sent["live"][0] if sent["live"] else {}
        return Outcome(
            sent["tokens"][:1] if not got["tokens"] else got["tokens"], sent["logits"] + got["logits"], before, after,
            source, got.get("error"), sent.get("error"),
        )  # fmt: skip

    def hand_over(self, lane: str, case: Case) -> Outcome:
        """One hand-over into pools full of poison."""
        self.ready(lane)
        return self.run(lane, [case])[0]

    def close(self) -> None:
        """End both processes."""
        self._both.shutdown()
        for worker in (self.prefill, self.decode):
            worker.close()


class Pairs:
    """A pair for each transport and set of lanes, made when first asked for, and again after one broke."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], Pair] = {}

    def get(self, transport: str, lanes: dict[str, Any]) -> Pair:
        """The pair over a transport."""
        TRANSPORTS[transport].require()
        key = transport, ",".join(lanes)
        if key in self._pairs and self._pairs[key].broken:
            self._pairs.pop(key).close()
        if key not in self._pairs:
            self._pairs[key] = Pair(TRANSPORTS[transport], lanes)
        return self._pairs[key]

    def close(self) -> None:
        """End all."""
        for pair in self._pairs.values():
            pair.close()
