"""What one `nixl` backend tells another so that it can connect: the library's metadata, and what must agree first."""

from __future__ import annotations

import ipaddress

import msgspec

from sglang_pd.backends.library.blob import (
    Envelope,
    SegmentEntry,
    check_entries,
    check_epoch,
    differs,
    malformed,
    series,
)
from sglang_pd.backends.library.process import ProcessIdentity
from sglang_pd.backends.nixl.reach import MAX_LISTENS, Listens

MAGIC = b"PD-NIXL\n"
MAX_SEGMENTS = 16_384


class AgentBlob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body. `agent` is the library's name for this incarnation, `metadata` the library's own opaque bytes.

    host_paths: the transports that its UCX uses for writes of host memory between two processes of its host.
    listens: TCP addresses at which its agent is connected to; empty where that is not known.
    """

    epoch: int
    agent: str
    nixl_version: str
    plugin: str
    settings: int
    process: ProcessIdentity
    host_paths: list[str]
    listens: list[tuple[str, int]]
    segments: list[SegmentEntry]
    metadata: bytes


ENVELOPE = Envelope(MAGIC, 4, AgentBlob)


def agent_name(epoch: int, build: int) -> str:
    """Name of the library's agent: the epoch, and how often this incarnation has rebuilt its agent."""
    return f"sglang-pd-{epoch:016x}-{build}"


def decode_blob(data: bytes, *, epoch: int, nixl_version: str, plugin: str) -> AgentBlob:
    """Read a peer's blob and compare what must be equal before the library sees it.

    Raises `BackendError`: `backend_unsupported` for another backend, format, plugin or series of nixl,
    `message_malformed` for damage, `epoch_stale` for another incarnation than `epoch`.
    """
    blob = ENVELOPE.open(data)
    if not blob.agent.startswith(f"sglang-pd-{blob.epoch:016x}-") or len(blob.agent) > 64:
        raise malformed("the agent's name does not carry its epoch", expected=f"{blob.epoch:016x}", actual=blob.agent)
    check_entries(blob.segments, MAX_SEGMENTS)
    if len(blob.listens) > MAX_LISTENS or not all(map(_is_address, blob.listens)):
        raise malformed("the agent listens on impossible addresses", actual=str(blob.listens)[:200])
    if series(blob.nixl_version) != series(nixl_version):
        raise differs("the peer runs another nixl", "nixl version", series(nixl_version), blob.nixl_version)
    if blob.plugin != plugin:
        raise differs("the peer uses another plugin", "plugin", plugin, blob.plugin)
    check_epoch(blob.epoch, epoch)
    return blob


def _is_address(where: Listens) -> bool:
    try:
        ipaddress.ip_address(where[0])
    except ValueError:
        return False
    return 0 < where[1] < 1 << 16 and "%" not in where[0]
