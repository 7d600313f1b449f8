"""Memory a worker exports: what this backend allocated, what it adopted, and the table that peers are given."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from sglang_pd.backends import mooncake_cuda
from sglang_pd.backends.base import Segment
from sglang_pd.backends.mooncake_blob import MAX_SEGMENTS
from sglang_pd.protocol.batch import U64
from sglang_pd.protocol.errors import BackendError

ALIGNMENT_BYTES = 4096


class Memory:
    """The segments of one backend. `host`, `device`: where its transport can read and write."""

    def __init__(self, *, host: bool, device: bool) -> None:
        self._host = host
        self._device = device
        self._known: dict[tuple[int, int, str], object] = {}
        self._owned: list[Segment] = []
        self.segments: tuple[Segment, ...] = ()
        self.base: U64 = np.zeros(0, np.uint64)
        self.bytes: U64 = np.zeros(0, np.uint64)

    def allocate(self, nbytes: int, device: str) -> Segment:
        """See `Backend.allocate`."""
        if nbytes < 1:
            raise _refused("nothing to allocate", where=device, expected="at least 1 byte", actual=nbytes)
        if device == "cpu" and self._host:
            segment = _host_segment(nbytes)
        elif mooncake_cuda.is_device(device) and self._device:
            segment = mooncake_cuda.allocate(nbytes, device)
        else:
            raise _refused("this transport cannot use memory there", where=device, expected=self._places())
        self._owned.append(segment)
        self._remember(segment)
        return segment

    def check_adoptable(self, segment: Segment) -> None:
        """Raise `BackendError` (`memory_refused`) for memory that cannot be exported, naming why."""
        where = f"{segment.nbytes} bytes on {segment.device} at {segment.address:#x}"
        if segment.nbytes < 1 or segment.address < 1 or segment.address + segment.nbytes > 1 << 63:
            raise _refused("this is no range of memory", where=where)
        if segment.device == "cpu" and self._host:
            _check_mapped(segment.address, segment.nbytes, where)
        elif mooncake_cuda.is_device(segment.device) and self._device:
            mooncake_cuda.check_exportable(segment)
        else:
            raise BackendError(
                "this transport adopts no memory there", where=f"mooncake, {where}", expected=self._places()
            )

    def overlaps(self, segment: Segment) -> bool:
        """Whether a registered segment shares bytes with this one (registering it for a probe would be refused)."""
        ends = segment.address + segment.nbytes
        mine = (one for one in self.segments if one.device == segment.device)
        return any(one.address < ends and segment.address < one.address + one.nbytes for one in mine)

    def adopted(self, segment: Segment) -> Segment:
        """Remember memory that passed `check_adoptable` and the library's probe."""
        self._remember(segment)
        return segment

    def number(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """The segments with their numbers, after checking scope and overlap; `commit` makes them the table's."""
        wanted = tuple(segments)
        table = [*self.segments, *wanted]
        if len(table) > MAX_SEGMENTS:
            raise _refused("too many segments", where="register", expected=f"at most {MAX_SEGMENTS}", actual=len(table))
        for segment in wanted:
            if _key(segment) not in self._known:
                where = f"{segment.nbytes} bytes on {segment.device} at {segment.address:#x}"
                raise _refused("memory from outside the scope", where=where, expected="from allocate or adopt")
        ordered = sorted(table, key=lambda one: (one.device, one.address))
        for left, right in zip(ordered, ordered[1:], strict=False):
            if left.device == right.device and left.address + left.nbytes > right.address:
                where = f"{right.nbytes} bytes on {right.device} at {right.address:#x}"
                raise _refused("segments overlap", where=where, expected=f"from {left.address + left.nbytes:#x} on")
        first = len(self.segments)
        return tuple(replace(one, number=first + i) for i, one in enumerate(wanted))

    def commit(self, numbered: tuple[Segment, ...]) -> None:
        """Add registered segments to the table."""
        self.segments += numbered
        self.base = np.array([one.address for one in self.segments], np.uint64)
        self.bytes = np.array([one.nbytes for one in self.segments], np.uint64)

    def release(self) -> None:
        """Give back what was allocated. The caller has proven that no engine uses it. Idempotent."""
        owned, self._owned = self._owned, []
        self._known.clear()
        self.segments = ()
        for segment in owned:
            if segment.device != "cpu":
                mooncake_cuda.free(segment)

    def _remember(self, segment: Segment) -> None:
        self._known[_key(segment)] = segment.keep_alive

    def _places(self) -> str:
        return " or ".join([*["cpu"] * self._host, *["cuda:N"] * self._device])


def _key(segment: Segment) -> tuple[int, int, str]:
    return segment.address, segment.nbytes, segment.device


def _host_segment(nbytes: int) -> Segment:
    """Zeroed pages of their own; the kernel gives them when they are first touched."""
    try:
        pages = mmap.mmap(-1, -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, flags=mmap.MAP_PRIVATE)
    except (OSError, OverflowError, ValueError) as error:
        raise _refused("the host has no such memory", where="cpu", expected=f"{nbytes} bytes", actual=error) from error
    view = np.frombuffer(pages, np.uint8)
    return Segment(address=view.ctypes.data, nbytes=nbytes, device="cpu", keep_alive=view)


def _check_mapped(address: int, nbytes: int, where: str) -> None:
    """Over TCP the library registers anything, and finds out when it writes."""
    end, reached = address + nbytes, address
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, rights = line.split(" ", 2)[:2]
            low, high = (int(text, 16) for text in span.split("-"))
            if low <= reached < high and rights.startswith("rw"):
                reached = high
            if reached >= end:
                return
    raise _refused("this is not mapped for reading and writing", where=where, actual=f"not so at {reached:#x}")


def _refused(why: str, *, where: str, expected: object = "", actual: object = "") -> BackendError:
    return BackendError(why, code="memory_refused", where=f"mooncake, {where}", expected=expected, actual=actual)
