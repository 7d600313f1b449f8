"""The protocol's version, when it changes, and what changed.

Bump rule
- MAJOR: a peer of the old version could misread a byte or a promise: the meaning, type or bound of an existing field
  changes, a field becomes mandatory, a state table loses a transition that the peer relies on, a fence proves less,
  the envelope's hash changes. Majors do not talk to each other. The fixed envelope header never changes, in any major.
- MINOR: something is added that an older peer may ignore without harm: an optional field, a message type marked
  ignorable or sent only to peers that speak it, an optional feature bit. Peers speak the lower of their minors.
- Neither: documentation, tests, speed, error texts.
"""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """A protocol version; it compares as a pair."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


PROTOCOL_VERSION = Version(2, 0)
"""What this code speaks. One entry of `HISTORY` for each value it ever had in a release."""

HISTORY: tuple[tuple[Version, str], ...] = (
    (Version(1, 0), "First version: envelope, handshake, rooms, liveness, tickets."),
    (
        Version(2, 0),
        "The hash covers the envelope, too: a message cannot turn into one of another type. `Hello.lost` and "
        "`HelloReply.fenced`: a writer that lives is its own fence for what was lost. `HelloReply.control`: "
        "another one over the same ranks has replaced it. `RankManifest.term`: a rank that outlives its control "
        "has ended what it wrote for it.",
    ),
)
"""Every version, oldest first, with what changed."""

FEATURES: dict[int, str] = {}
"""Feature bits spoken here: bit number (0 to 63) -> name. None yet; a bit never gets a new meaning."""


def feature_mask(names: tuple[str, ...]) -> int:
    """The feature bits of the given names; an unknown name raises KeyError."""
    bits = {name: bit for bit, name in FEATURES.items()}
    return sum(1 << bits[name] for name in set(names))


def spoken_minor(own: Version, peer: Version) -> int:
    """The minor two peers of one major speak: the lower of the two."""
    return min(own.minor, peer.minor)
