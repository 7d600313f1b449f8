"""Pairings by the manifests they follow from, as these travel: each is made once, and shared while anybody uses it.

Nothing is kept for its own sake: conversations that stand, and ranks that serve them, hold what they need. Keys are the
manifests themselves, not digests, which somebody could make collide.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

import msgspec

from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.pairing import Pairing

_lock = threading.Lock()
_used: WeakValueDictionary[tuple[bytes, bytes], Pairing] = WeakValueDictionary()


def used_pairing(prefill: bytes, decode: bytes) -> Pairing | None:
    """The pairing of two encoded manifests, if somebody uses it."""
    with _lock:
        return _used.get((prefill, decode))


def share_pairing(prefill: bytes, decode: bytes, made: Pairing) -> Pairing:
    """Give one that was made to others; theirs, where they were first."""
    with _lock:
        return _used.setdefault((prefill, decode), made)


def pairing_of(prefill: bytes, decode: bytes) -> Pairing:
    """The pairing of two encoded manifests. Raises as `Pairing`, and `msgspec.MsgspecError`, `ManifestError`."""
    found = used_pairing(prefill, decode)
    if found is None:
        src, dst = (msgspec.msgpack.decode(encoded, type=InstanceManifest) for encoded in (prefill, decode))
        found = share_pairing(prefill, decode, Pairing(src, dst))
    return found
