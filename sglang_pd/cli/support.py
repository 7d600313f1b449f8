"""The support matrix as a document: transports, and which kinds of state move."""

from __future__ import annotations

from typing import Any, Final

from sglang_pd.protocol.kinds import KINDS, Kind
from sglang_pd.worker.serving.transports import support

EXTRAS: Final[dict[str, str]] = {
    "local": "nothing (GPU: sglang-pd[cuda])",
    "nixl": "sglang-pd[nixl]",
    "mooncake": "sglang-pd[mooncake], [mooncake-cuda13] or [mooncake-cpu]",
    "mori": "sglang-pd[mori]",
}


KIND_COLUMNS: Final = ("kind", "what", "parts", "index spaces", "held by ranks", "sent after")


def kind_rows() -> list[tuple[str, ...]]:
    """Kind, what it is, the parts of its regions, its index spaces, how ranks hold it, when it is sent."""
    return [
        (k.name, k.summary, " ".join(k.parts), _spaces(k), _placements(k), k.validity.value) for k in KINDS.values()
    ]


def _spaces(kind: Kind) -> str:
    return " ".join(space.__name__ for space in kind.spaces)


def _placements(kind: Kind) -> str:
    return " or ".join(sorted(placement.value for placement in kind.placements))


HEAD: Final = """# What works with what

<!-- Generated: `sglang-pd capabilities --write docs/support.md`. A test fails when it is out of date. -->

A backend moves byte ranges and knows no kind of state, so every kind below moves over every transport; what limits a
pair is memory (host or device), the host, and what can be proven after a death. *Proof* is the evidence with which
memory is reused after a writer died without a word (host memory): `pidfd` its process is gone, `engine_closed` this
side's engine is closed and joined; `none`: such memory stays in quarantine until the worker restarts.
CURVE authenticates the control plane only, never a data plane.
"""


def markdown() -> str:
    """The whole document."""
    lines = [HEAD, "## Transports", ""]
    head = ("backend", "transport", "install", "host memory", "device memory", "one host only", "adopts", "proof",
            "last run on")  # fmt: skip
    rows = [
        (
            f"`{s.backend}`", f"`{s.transport}`", EXTRAS[s.backend], _yes(s.host_memory), _yes(s.device_memory),
            _yes(s.same_host_only), s.adopts, s.proof, s.last_run,
        )
        for s in support()
    ]  # fmt: skip
    lines += _markdown_table(head, rows)
    lines += ["", "## Kinds of state", ""]
    lines += _markdown_table(KIND_COLUMNS, kind_rows())
    return "\n".join(lines) + "\n"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _markdown_table(head: tuple[str, ...], rows: list[Any]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]
