"""A bad link between two controls, for tests: frames that leave are dropped, doubled or held back, by rule."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sglang_pd.protocol.codec import read_header
from sglang_pd.protocol.errors import PdError
from sglang_pd.protocol.messages import MESSAGES
from sglang_pd.worker.peers.link import Caller, Link, Party

HANDSHAKE = {"Hello", "HelloReply", "HelloConfirm", "Refusal", "Heartbeat"}


@dataclass
class Rule:
    """What happens to frames that leave. types: names of messages, empty: all room messages. Shares are of 1.

    first: strike the first so many frames (then shares do not count), -1: by shares.
    """

    types: tuple[str, ...] = ()
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    seconds: float = 0.05
    first: int = -1


class BadLink:
    """Sits around a link's `send` and `receive`. Delayed frames leave when the control thread next turns."""

    def __init__(self, link: Link, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._send, self._receive = link.send, link.receive
        self._held: list[tuple[float, Party, bytes]] = []
        self.rules: list[Rule] = []
        self.counts: Counter[str] = Counter()
        link.send = self.send  # type: ignore[method-assign]
        link.receive = self.receive  # type: ignore[method-assign]

    def set(self, rules: list[dict[str, Any]]) -> None:
        """Replace all rules."""
        self.rules = [Rule(**{**rule, "types": tuple(rule.get("types", ()))}) for rule in rules]

    def _rule(self, name: str) -> Rule | None:
        for rule in self.rules:
            if name in rule.types or (not rule.types and name not in HANDSHAKE):
                return rule
        return None

    def send(self, party: Party, frame: bytes) -> bool:
        """Instead of `Link.send`."""
        self._flush()
        name = _name(frame) if not (isinstance(party, Caller) and party.socket == "ranks") else ""
        rule = self._rule(name) if name and self.rules else None
        if rule is None or rule.first == 0:
            return self._send(party, frame)
        draw = self._draw.random() if rule.first < 0 else 0.0
        rule.first -= rule.first > 0
        if draw < rule.drop:
            self.counts[f"dropped {name}"] += 1
            return True
        if draw < rule.drop + rule.duplicate:
            self.counts[f"doubled {name}"] += 1
            return self._send(party, frame) and self._send(party, frame)
        if draw < rule.drop + rule.duplicate + rule.delay:
            self.counts[f"delayed {name}"] += 1
            self._held.append((time.monotonic() + rule.seconds, party, frame))
            return True
        return self._send(party, frame)

    def _flush(self) -> None:
        now = time.monotonic()
        due = [item for item in self._held if item[0] <= now]
        self._held = [item for item in self._held if item[0] > now]
        for _, party, frame in due:
            self._send(party, frame)

    def receive(self, *arguments: Any) -> Any:
        """Instead of `Link.receive`."""
        self._flush()
        return self._receive(*arguments)


def _name(frame: bytes) -> str:
    try:
        return MESSAGES[read_header(frame).type].__name__
    except (PdError, KeyError):
        return ""
