"""A chaos run: `python tests/chaos/chaos_run.py --rooms 2000 --seed 7`. The seed decides what is done, not its timing.

At the end, and for every process that was not killed: every admitted room had the right bytes, every handle got exactly
one terminal event and one RELEASABLE, no lease, room or withheld memory is left, canaries are intact, descriptors are
back where they began.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from chaos_plan import FORMS, PAIRS, Calamity, RoomStep, steps, worker
from support.worker_process import TERMINAL, WorkerProcess, free_address

IN_FLIGHT = 12
STUCK_S = 40.0
"""A room that has not ended by then, on a side that lives, is a failure."""
FDS_SLACK = 10 * PAIRS + 6
"""A peer costs a writer ten descriptors over `local`, and a destination four; what leaks adds up past this."""


class Broken(AssertionError):
    """An oracle failed."""


@dataclass
class Leg:
    """One side's call for a room."""

    side: Side
    step: RoomStep
    kind: str
    began_s: float
    handle: int = 0
    refused: str = ""
    ends: list[str] = field(default_factory=list)
    released: int = 0

    @property
    def over(self) -> bool:
        return bool(self.refused) or not self.side.alive or (len(self.ends) >= 1 and self.released >= 1)


class Side:
    """One incarnation of a process, driven without waiting."""

    def __init__(self, role: str, number: int, conf: dict[str, Any]) -> None:
        self.process = WorkerProcess(role, **conf)
        self.role, self.number, self.conf = role, number, conf
        self.alive, self.stopped_until_s = True, 0.0
        self.asked: dict[int, Leg] = {}
        self.by_handle: dict[int, Leg] = {}
        self.codes: Counter[str] = Counter()
        self.fds = 0
        self._number = 1_000_000

    def post(self, cmd: str, leg: Leg | None = None, **arguments: Any) -> None:
        """A command whose answer is taken when it comes."""
        self._number += 1
        if leg is not None:
            self.asked[self._number] = leg
        self.process._write({"cmd": cmd, "n": self._number, **arguments})

    def take(self) -> None:
        """What it said."""
        if not self.process.read(0.0):
            raise Broken(f"{self.conf['id']} ended by itself with {self.process.process.poll()}")
        lines, self.process.lines = self.process.lines, []
        for line in lines:
            if "answer" in line and (leg := self.asked.pop(line.get("n"), None)) is not None:
                leg.refused = line.get("error", "")
                self.codes[leg.refused or "called"] += 1
                if not leg.refused:
                    leg.handle = line["handle"]
                    self.by_handle[leg.handle] = leg
            elif "event" in line:
                self._event(line)

    def _event(self, line: dict[str, Any]) -> None:
        leg = self.by_handle.get(line["handle"])
        self.codes[line.get("code", line["event"])] += 1
        if line.get("bad"):
            raise Broken(f"WRONG BYTES admitted at {self.conf['id']}: {line}")
        if leg is None:
            if line["handle"]:
                raise Broken(f"an event of an unknown handle at {self.conf['id']}: {line}")
            return
        if line["event"] in TERMINAL:
            leg.ends.append(line["event"])
        leg.released += line["event"] == "releasable"
        if len(leg.ends) > 1 or leg.released > 1:
            raise Broken(f"ended or released twice at {self.conf['id']}: {leg.ends} {leg.released} {line}")


class Run:
    """The whole run."""

    def __init__(self, seed: int, rooms: int, backend: str) -> None:
        self.seed, self.rooms, self.backend = seed, rooms, backend
        self._draw = random.Random(seed ^ 0x5EED)
        self._open: list[Leg] = []
        self._aborts: list[tuple[float, Side, int]] = []
        self.counts: Counter[str] = Counter()
        self.sides: dict[tuple[str, int], Side] = {}
        self._ports: dict[tuple[str, int], str] = {}

    def start(self, role: str, number: int) -> Side:
        """A new incarnation, at the address of the one before."""
        conf = worker(self._draw, role, number, self.backend)
        key = (role, number)
        conf["bind"] = self._ports.setdefault(key, free_address())
        side = self.sides[key] = Side(role, number, conf)
        side.fds = side.process.ask("check")["fds"]
        return side

    def go(self) -> dict[str, Any]:
        """Run; gives what happened. Raises `Broken`."""
        began_s = time.monotonic()
        try:
            for role in ("prefill", "decode"):
                for number in range(PAIRS):
                    self.start(role, number)
            for step in steps(self.seed, self.rooms):
                self._until(lambda: len(self._open) < IN_FLIGHT)
                self._room(step) if isinstance(step, RoomStep) else self._befall(step)
            self._until(lambda: not self._open and not self._aborts)
            self._settle()
        except Broken as error:
            replay = f"make chaos SEED={self.seed} ROOMS={self.rooms} BACKEND={self.backend}"
            raise Broken(f"{error}\nReplay: {replay}") from error
        finally:
            for side in self.sides.values():
                if side.alive:
                    side.process.kill()
        return {
            "seed": self.seed, "rooms": self.rooms, "seconds": round(time.monotonic() - began_s, 1),
            **dict(sorted(self.counts.items())),
        }  # fmt: skip

    def _room(self, step: RoomStep) -> None:
        self.counts["rooms"] += 1
        now_s = time.monotonic()
        for leg in step.legs:
            side = self.sides[leg, step.prefill if leg == "prefill" else step.decode]
            entry = Leg(side, step, leg, now_s)
            common = {"room": step.room, "tokens": step.tokens, "seed": step.room}
            if leg == "prefill":
                covered = step.tokens + 1 if step.lie else None
                side.post("serve", entry, chunks=step.cuts, pause_s=step.pause_s, record_tokens=covered, **common)
            else:
                wrong = step.room + 1 if step.other_prompt else None
                address = self.sides["prefill", step.prefill].process.address
                side.post("open", entry, address=address, prompt_seed=wrong, **common)
            self._open.append(entry)
        if step.abort is not None:
            role, after_s = step.abort
            side = self.sides[role, step.prefill if role == "prefill" else step.decode]
            self._aborts.append((now_s + after_s, side, step.room))

    def _befall(self, step: Calamity) -> None:
        self.counts[step.kind] += 1
        side = self.sides[step.role, step.number]
        if step.kind == "kill":
            side.take()
            side.alive = False
            side.process.signal(signal.SIGCONT)
            side.process.kill()
            self.counts.update(side.codes)
            self.start(step.role, step.number)
        elif step.kind == "stop" and not side.stopped_until_s:
            side.process.signal(signal.SIGSTOP)
            side.stopped_until_s = time.monotonic() + step.seconds
        elif step.kind == "link":
            side.post("frames", rules=list(step.rules))
        elif step.kind == "calm":
            side.post("frames", rules=[])

    def _until(self, true: Any) -> None:
        while True:
            self._turn()
            if true():
                return

    def _turn(self) -> None:
        alive = [side for side in self.sides.values() if side.alive]
        select.select([side.process.process.stdout for side in alive], [], [], 0.01)
        now_s = time.monotonic()
        for side in alive:
            if side.stopped_until_s and now_s >= side.stopped_until_s:
                side.process.signal(signal.SIGCONT)
                side.stopped_until_s = 0.0
            side.take()
        for due in [abort for abort in self._aborts if abort[0] <= now_s]:
            self._aborts.remove(due)
            if due[1].alive:
                due[1].post("abort", room=due[2])
        self._open = [leg for leg in self._open if not leg.over]
        for leg in self._open:
            if now_s - leg.began_s > STUCK_S:
                raise Broken(
                    f"stuck at {leg.side.conf['id']}: {leg.step} ends {leg.ends} released {leg.released}; "
                    f"peers {leg.side.process.ask('stats')}"
                )

    def _settle(self) -> None:
        for side in self.sides.values():
            if side.stopped_until_s:
                side.process.signal(signal.SIGCONT)
            side.process.ask("frames", rules=[])
        for side in self.sides.values():
            name, deadline_s = side.conf["id"], time.monotonic() + 30
            while True:
                side.take()
                found = side.process.ask("check")
                left = {key: found[key] for key in ("leases", "quarantined", "rooms", "source_rooms", "dirty", "wrong")}
                if not any(left.values()) and found["fds"] <= side.fds + FDS_SLACK:
                    break
                if time.monotonic() > deadline_s:
                    places = side.process.ask("dirty")["places"] if found["dirty"] else ""
                    raise Broken(f"not conserved at {name}: {found} {places}, fds began at {side.fds}")
                time.sleep(0.05)
            stats = side.process.ask("stats")
            problem = side.process.ask("integrity")["problem"]
            if problem or stats["stats"]["loop_faults"]:
                raise Broken(f"{name}: {problem} faults {stats['stats']['loop_faults']} {stats['last_fault']}")
            side.take()
            for leg in side.by_handle.values():
                if (len(leg.ends), leg.released) != (1, 1):
                    raise Broken(f"{name}: handle {leg.handle} of {leg.step} ends {leg.ends}, released {leg.released}")
            self.counts.update(side.codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--backend", default="local", choices=FORMS)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with further seeds for so long")
    given = parser.parse_args()
    end_s, seed = time.monotonic() + 60 * given.minutes, given.seed
    while True:
        seed = secrets.randbits(31) if seed is None else seed
        print(f"seed {seed}", file=sys.stderr, flush=True)
        print(json.dumps(Run(seed, given.rooms, given.backend).go()), flush=True)
        if time.monotonic() >= end_s:
            return
        seed += 1


if __name__ == "__main__":
    main()
