"""What one `mori` backend tells another so that it can connect: the library's descriptors, and what must agree first.

The library's own descriptors have neither version nor checksum and change between patch releases, so the version of
the peer's library is compared for equality before any of them is unpacked.
"""

from __future__ import annotations

import msgspec

from sglang_pd.backends.library.blob import DEVICE, Envelope, check_epoch, differs, malformed
from sglang_pd.backends.library.process import ProcessIdentity

MAGIC = b"PD-MORI\n"
MAX_SEGMENTS = 4096
MAX_DESCRIPTOR_BYTES = 4096


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One registered segment: length in bytes, `cpu` or `cuda:N`, the library's packed descriptor."""

    nbytes: int
    device: str
    descriptor: bytes


class EngineBlob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body. `key` is the library's name for this engine; `engine` and `door` are its packed descriptors.

    The door is a few bytes of host memory that belong to nobody: first contact and heartbeats write there.
    """

    epoch: int
    mori_version: str
    key: str
    process: ProcessIdentity
    engine: bytes
    door: bytes
    segments: list[SegmentEntry]


ENVELOPE = Envelope(MAGIC, 2, EngineBlob)


def decode_blob(data: bytes, *, epoch: int, mori_version: str) -> EngineBlob:
    """Read a peer's blob and compare what must be equal before the library sees its descriptors.

    Raises `BackendError`: `backend_unsupported` for another backend, format or version of the library,
    `message_malformed` for damage, `epoch_stale` for another incarnation than `epoch`.
    """
    blob = ENVELOPE.open(data)
    if blob.mori_version != mori_version:
        raise differs("the peer runs another amd-mori", "amd-mori version", mori_version, blob.mori_version)
    check_epoch(blob.epoch, epoch)
    _check_body(blob)
    return blob


def _check_body(blob: EngineBlob) -> None:
    if not blob.key.startswith(f"sglang-pd-{blob.epoch:016x}-") or len(blob.key) > 128:
        raise malformed("the engine's key does not carry its epoch", expected=blob.epoch, actual=blob.key[:200])
    if len(blob.segments) > MAX_SEGMENTS:
        raise malformed("too many segments", expected=f"<= {MAX_SEGMENTS}", actual=len(blob.segments))
    packed = [blob.engine, blob.door, *(entry.descriptor for entry in blob.segments)]
    if not all(0 < len(one) <= MAX_DESCRIPTOR_BYTES for one in packed):
        raise malformed("a descriptor is empty or too long", expected=f"1 to {MAX_DESCRIPTOR_BYTES} bytes")
    for number, entry in enumerate(blob.segments):
        if not 0 < entry.nbytes < 1 << 63 or not DEVICE.fullmatch(entry.device):
            raise malformed(f"segment {number} is impossible", actual=f"{entry.nbytes} bytes on {entry.device[:20]}")
