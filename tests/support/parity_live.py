"""What hand-overs are judged by: the model run whole, and digests of logits and live rows that fit on a line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from support.reference_run import PAGE, SOFT, SPARSE, Host, Live, Size, prompt_ids

from sglang_pd.memory.lease import Lease
from sglang_pd.memory.live import live_rows
from sglang_pd.memory.pools import RankPools
from sglang_pd.protocol.kinds import Prompt

CONFIGS = {"sparse": SPARSE, "soft": SOFT}
K, R, P = SPARSE.gdn_kernel, SPARSE.qsa_ratio, PAGE
LENGTHS = sorted({1, 2, K - 1, R - 1, R, R + 1, P - 1, P, P + 1, 3 * P, 4 * P + 5, 12 * P + 5})
STEPS = 2 * R + 1
"""Decode steps: every phase of a group, and over a page's end."""

Digests = dict[str, str]
"""Of a request's live rows, by region."""


def digest(data: NDArray[Any]) -> str:
    """Of an array's bytes; equal for equal bytes alone, for all practical purposes."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).tobytes())


def live_digests(live: Live) -> Digests:
    """Element numbers and bytes of every region."""
    return {"/".join(map(str, key)): digest(numbers) + digest(rows) for key, (numbers, rows) in live.items()}


def lease_digests(pools: RankPools, lease: Lease, tokens: int) -> Digests:
    """Of the live rows of a request whose state stands for `tokens` tokens."""
    prompt = Prompt(tokens)
    lists = lease.lists(prompt)
    return live_digests({key: live_rows(pools, key, lists, prompt) for key in pools.keys})


@dataclass
class Outcome:
    """A request's run: tokens, logits of each, live state before the first decode step and after the last one."""

    tokens: list[int]
    logits: list[str]
    before: Digests
    after: Digests
    source: Digests = field(default_factory=dict)
    """Live state at prefill, when it was sent."""
    error: dict[str, str] | None = None
    """The cause at decode, if the room failed there."""
    prefill_error: dict[str, str] | None = None

    def noticed(self, want: Outcome) -> set[str]:
        """By which oracles this differs from the model run whole; `failed` where it did not come that far."""
        found = {"failed"} if self.error is not None else set()
        for name in ("tokens", "logits", "before", "after"):
            if getattr(self, name) != getattr(want, name):
                found.add(name)
        return found

    def explain(self, want: Outcome) -> str:
        """How this differs."""
        if self.error is not None or self.prefill_error is not None:
            return f"failed: decode {self.error}, prefill {self.prefill_error}"
        lines = []
        if self.tokens != want.tokens:
            lines.append(f"tokens {self.tokens}, whole {want.tokens}")
        steps = [n for n, (a, b) in enumerate(zip(self.logits, want.logits, strict=False)) if a != b]
        if steps or len(self.logits) != len(want.logits):
            lines.append(f"logits of steps {steps}; {len(self.logits)} of {len(want.logits)}")
        for name, mine, whole in (
            ("sent", self.source, want.before),
            ("admitted", self.before, want.before),
            ("decoded", self.after, want.after),
        ):
            lines += [f"live {name}: {key}" for key in _differing(mine, whole)]
        return "; ".join(lines)


def _differing(a: Digests, b: Digests) -> Iterable[str]:
    return sorted(key for key in {*a, *b} if a.get(key) != b.get(key))


@cache
def whole(mode: str, length: int, seed: int = 7) -> Outcome:
    """The model run whole, in one process, one step after the other."""
    host = Host(CONFIGS[mode], Size(pages=24))
    run = host.prefill("whole", prompt_ids(length, seed))
    before = live_digests(host.live(run))
    host.decode([run], STEPS)
    logits = [digest(row) for row in run.logits]
    return Outcome(run.tokens, logits, before, live_digests(host.live(run)), before)
