"""What a chaos run does, drawn from its seed alone: rooms, and what befalls the processes between them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

PAIRS = 2
"""Processes a role."""
LIVENESS_S = 1.0
STATUS = {"status_interval_s": 0.2, "status_max_s": 0.8, "lease_s": 4.0, "request_wait_s": 4.0, "fence_alarm_s": 5.0}

FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "local": ("local", {}),
    "mooncake": ("mooncake", {}),
    "nixl": ("nixl", {"UCX_TLS": "tcp,self"}),
    "nixl-cma": ("nixl", {}),
}
"""What `--backend` names: a backend, and the environment of its processes. nixl by itself is CMA on one host: there a
writer's death is the only proof against it that decode can find by itself. `nixl` is it as between two hosts."""

Befalls = Literal["kill", "stop", "link", "calm"]


@dataclass(frozen=True)
class RoomStep:
    """One room. legs: which of its two legs arrive, in order. abort: who aborts, and how long after, in seconds."""

    room: int
    prefill: int
    decode: int
    tokens: int
    cuts: list[int]
    pause_s: float
    legs: tuple[str, ...]
    abort: tuple[str, float] | None
    other_prompt: bool
    lie: bool


@dataclass(frozen=True)
class Calamity:
    """What befalls one process. seconds: of a stop. rules: of its link."""

    kind: Befalls
    role: str
    number: int
    seconds: float = 0.0
    rules: tuple[dict[str, Any], ...] = ()


Step = RoomStep | Calamity


def options(draw: random.Random, backend: str) -> dict[str, Any]:
    """A backend that goes wrong now and then, in every way that it may."""
    faults = [
        {"kind": "delay", "seconds": 0.15, "probability": 0.08},
        {"kind": "late", "seconds": 0.4, "probability": 0.05},
        {"kind": "fail", "probability": 0.01},
        {"kind": "partial", "fraction": 0.4, "probability": 0.01},
        {"kind": "drop", "probability": 0.005},
    ]
    return {
        "inner": FORMS[backend][0],
        "inner_options": {"insecure_data_plane": True} if backend == "mooncake" else {},
        "seed": draw.randrange(2**31),
        "faults": [{"at": 1, "every": 1, **fault} for fault in faults],
    }


def worker(draw: random.Random, role: str, number: int, backend: str) -> dict[str, Any]:
    """Configuration of one incarnation of a process."""
    return {
        "id": f"{role}-{number}",
        "backend": "faulty",
        "options": options(draw, backend),
        "pages": draw.choice([40, 60, 90]),
        "rows": 24,
        "slots": 24,
        "seed": draw.randrange(2**31),
        "order": draw.choice(["low", "high", "random"]),
        "liveness_s": LIVENESS_S,
        "deadline_s": 1.0,
        "peer_wait_s": 6.0,
        "limits": STATUS,
        "bad_link": True,
        "verify": "full",
        "env": environment(backend),
    }


def environment(backend: str) -> dict[str, str]:
    """What the transport's library must find; set in the worker's process alone."""
    if backend == "mooncake":
        from sglang_pd.backends.mooncake.backend import environment as of_mooncake

        return dict(of_mooncake({"insecure_data_plane": True}))
    return dict(FORMS[backend][1])


def steps(seed: int, rooms: int) -> Iterator[Step]:
    """The whole run."""
    draw = random.Random(seed)
    for room in range(1, rooms + 1):
        if draw.random() < 1 / 25:
            yield _calamity(draw)
        yield _room(draw, room)


def _calamity(draw: random.Random) -> Calamity:
    kind: Befalls = draw.choices(["kill", "stop", "link", "calm"], [3, 4, 3, 3])[0]
    role, number = draw.choice(["prefill", "decode"]), draw.randrange(PAIRS)
    if kind == "stop":
        return Calamity(kind, role, number, seconds=draw.choice([0.1, 0.4, 1.2 * LIVENESS_S, 1.6 * LIVENESS_S]))
    if kind == "link":
        share = draw.choice([0.02, 0.1, 0.25])
        rule = {"drop": share, "duplicate": share / 2, "delay": share / 2, "seconds": draw.choice([0.02, 0.3])}
        return Calamity(kind, role, number, rules=(rule,))
    return Calamity(kind, role, number)


def _room(draw: random.Random, room: int) -> RoomStep:
    tokens = draw.choice([1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, draw.randint(1, 60), draw.randint(1, 60)])
    cuts = sorted({draw.randrange(1, tokens) for _ in range(draw.choice([0, 0, 1, 3]))}) if tokens > 1 else []
    legs = draw.choices(
        [("prefill", "decode"), ("decode", "prefill"), ("prefill",), ("decode",), ("prefill", "decode", "decode"),
         ("prefill", "prefill", "decode")],
        [45, 40, 2, 2, 3, 3],
    )[0]  # fmt: skip
    abort = (draw.choice(["prefill", "decode"]), draw.choice([0.0, 0.01, 0.05, 0.3])) if draw.random() < 0.2 else None
    return RoomStep(
        room=room,
        prefill=draw.randrange(PAIRS),
        decode=draw.randrange(PAIRS),
        tokens=tokens,
        cuts=cuts,
        pause_s=draw.choice([0.0, 0.0, 0.005, 0.05]),
        legs=legs,
        abort=abort,
        other_prompt=draw.random() < 0.02,
        lie=draw.random() < 0.01,
    )
