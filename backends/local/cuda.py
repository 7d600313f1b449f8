"""Device memory of the local backend: allocation, adoption, export and import by CUDA IPC.

A backend works with one GPU: its segments lie there and its kernels run there. Peers' segments may lie on any GPU that
it reaches, or on the host.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_pd.backends.base import Segment
from sglang_pd.backends.local.link import SegmentFacts
from sglang_pd.protocol.errors import BackendError, BackendUnavailable

if TYPE_CHECKING:
    from sglang_pd.backends.local.launch import GridAddresses
    from sglang_pd.backends.local.stream import DevicePart, FewRanges, Resolve

EXPORT_BYTES = 2 << 20
"""Allocations are multiples of this: CUDA IPC shares whole blocks of it, hence also what else lay in them."""

_NOT_EXPORTABLE_HINT = (
    "Only memory of cudaMalloc can be exported: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the process "
    "that allocates, or take the memory from this backend's allocate()."
)


@functools.cache
def _cuda() -> tuple[Any, Any, Any]:
    """The modules `cuda.bindings.runtime`, `cuda.bindings.driver` and `torch`. Raises `BackendUnavailable`."""
    try:
        import torch
        import triton  # noqa: F401
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise BackendUnavailable(
            "device memory of the local backend needs torch, triton and cuda-bindings",
            where=str(error.name),
            actual=str(error),
            hint="pip install 'sglang-pd[cuda]', with a CUDA build of torch.",
        ) from error
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "no CUDA device can be used here",
            where="cuda",
            actual=f"torch {torch.__version__}",
            hint="Needs an NVIDIA driver (libcuda.so.1), a visible GPU and a CUDA build of torch.",
        )
    return runtime, driver, torch


def _call(name: str, *arguments: Any, code: str = "memory_refused", hint: str = "") -> Any:
    """Call a CUDA runtime function; its one result, or None. Raises `BackendError` with CUDA's words."""
    runtime, _, _ = _cuda()
    status, *values = getattr(runtime, name)(*arguments)
    if status != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # else the next call reports it once more
        _, words = runtime.cudaGetErrorString(status)
        text = words.decode() if isinstance(words, bytes) else str(words)
        raise BackendError("a CUDA call failed", code=code, where=name, actual=f"{status.name}: {text}", hint=hint)
    return values[0] if values else None


@contextlib.contextmanager
def _on(ordinal: int) -> Iterator[None]:
    """Work with that GPU, for torch's copy of the CUDA runtime and for ours; torch's choice is restored."""
    runtime, _, torch = _cuda()
    with torch.cuda.device(ordinal):
        runtime.cudaSetDevice(ordinal)
        yield


def _attribute(name: str, address: int) -> Any:
    _, driver, _ = _cuda()
    status, value = driver.cuPointerGetAttribute(getattr(driver.CUpointer_attribute, name), address)
    return value if int(status) == 0 else None


@dataclass(eq=False)
class _Allocation:
    """Device memory of ours; freed when the last segment that names it is gone, or by `close`."""

    address: int
    ordinal: int
    freed: bool = False

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        if not self.freed:
            self.freed = True
            runtime, _, _ = _cuda()
            with _on(self.ordinal):
                runtime.cudaFree(self.address)


class CudaSide:
    """The GPU of one backend."""

    def __init__(self, device: str, notify: Callable[[], None]) -> None:
        _, _, torch = _cuda()
        self.device = device
        self.ordinal = _ordinal(device, torch.cuda.device_count())
        self.uuid = _uuid(self.ordinal)
        self._allocations: list[_Allocation] = []
        self._pinned: set[tuple[int, int]] = set()
        from sglang_pd.backends.local.stream import CopyStream

        with _on(self.ordinal):
            self._stream = CopyStream(self.ordinal, notify, self._enqueue)

    def check_device(self, device: str) -> None:
        """Refuse any other device. Raises `BackendError` (`memory_refused`)."""
        if device != self.device:
            raise BackendError(
                "a local backend works with one GPU",
                code="memory_refused",
                expected=self.device,
                actual=device,
                hint="Make one backend for each GPU.",
            )

    def allocate(self, nbytes: int) -> Segment:
        """Zeroed device memory that can be exported. Raises `BackendError` (`memory_refused`)."""
        if nbytes <= 0:
            raise BackendError("device memory of no bytes", code="memory_refused", where=self.device, actual=nbytes)
        whole = -(-nbytes // EXPORT_BYTES) * EXPORT_BYTES
        with _on(self.ordinal):
            address = int(_call("cudaMalloc", whole))
            owner = _Allocation(address, self.ordinal)
            self._allocations.append(owner)
            _call("cudaMemset", address, 0, whole)
            _call("cudaDeviceSynchronize")
        return Segment(address, nbytes, self.device, owner)

    def adopt(self, segment: Segment) -> Segment:
        """Accept foreign device memory if CUDA really exports it. Raises `BackendError` (`memory_refused`)."""
        where = f"{segment.nbytes} bytes at {segment.address:#x} on {segment.device}"
        legacy = _attribute("CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", segment.address)
        if legacy is None:
            raise BackendError("not an address CUDA knows", code="memory_refused", where=where)
        if not legacy:
            found = _why_not_exportable(segment.address)
            raise BackendError(
                f"the memory cannot be exported by CUDA IPC: it is {found}",
                code="memory_refused",
                where=where,
                expected="memory of cudaMalloc",
                actual=found,
                hint=_NOT_EXPORTABLE_HINT,
            )
        self.export(segment)
        return segment

    def export(self, segment: Segment) -> SegmentFacts:
        """What a peer needs to open the segment. Raises `BackendError` (`memory_refused`)."""
        _, driver, _ = _cuda()
        with _on(self.ordinal):
            status, base, size = driver.cuMemGetAddressRange(segment.address)
            if int(status) != 0 or segment.address + segment.nbytes > int(base) + int(size):
                raise BackendError(
                    "the segment is not inside one CUDA allocation",
                    code="memory_refused",
                    where=f"{segment.nbytes} bytes at {segment.address:#x}",
                    actual=str(status) if int(status) else f"{int(size)} bytes at {int(base):#x}",
                    hint=_NOT_EXPORTABLE_HINT,
                )
            handle = _call("cudaIpcGetMemHandle", int(base), hint=_NOT_EXPORTABLE_HINT)
        offset = segment.address - int(base)
        return SegmentFacts(segment.nbytes, "cuda", bytes(handle.reserved), offset, self.uuid)

    def pin(self, address: int, nbytes: int) -> bool:
        """Let the GPU reach host memory; False if it does already. Raises `BackendError` (`memory_refused`)."""
        if (address, nbytes) in self._pinned:
            return False
        runtime, _, _ = _cuda()
        with _on(self.ordinal):
            flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped
            _call("cudaHostRegister", address, nbytes, flags, hint="Host memory must be locked: see ulimit -l.")
            self._pinned.add((address, nbytes))
            seen = int(_call("cudaHostGetDevicePointer", address, 0))
            if seen != address:
                self.unpin(address, nbytes)
                raise BackendError(
                    "this GPU sees host memory at other addresses than the host does",
                    code="memory_refused",
                    expected=f"{address:#x}",
                    actual=f"{seen:#x}",
                )
        return True

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo `pin`. Idempotent."""
        if (address, nbytes) in self._pinned:
            self._pinned.discard((address, nbytes))
            runtime, _, _ = _cuda()
            with _on(self.ordinal):
                runtime.cudaHostUnregister(address)

    def open(self, facts: SegmentFacts) -> int:
        """Map a peer's allocation and return its first byte's address here. Raises `BackendError`."""
        runtime, _, _ = _cuda()
        handle = runtime.cudaIpcMemHandle_t()
        handle.reserved = facts.handle
        with _on(self.ordinal):
            flags = runtime.cudaIpcMemLazyEnablePeerAccess
            hint = "Both GPUs must be visible in both processes (CUDA_VISIBLE_DEVICES) and reach each other."
            return int(_call("cudaIpcOpenMemHandle", handle, flags, hint=hint))

    def close_opened(self, address: int) -> None:
        """Unmap what `open` mapped."""
        runtime, _, _ = _cuda()
        with _on(self.ordinal):
            runtime.cudaIpcCloseMemHandle(address)

    def can_wait_for(self, event: Any) -> bool:
        """Whether the stream itself can be put behind it."""
        return self._stream.can_wait_for(event)

    def copy(self, ranges: int, resolve: Resolve, after: Any) -> DevicePart:
        """Start copying ranges; see `CopyStream.copy`."""
        return self._stream.copy(ranges, resolve, after)

    def copy_each(self, ranges: FewRanges, after: Any) -> DevicePart:
        """Start copying a few ranges; see `CopyStream.copy_each`."""
        return self._stream.copy_each(ranges, after)

    def copy_grids(self, grids: list[GridAddresses], after: Any) -> DevicePart:
        """Start copying grids; see `CopyStream.copy_grids`."""
        return self._stream.copy_grids(grids, after)

    def _enqueue(self, ranges: FewRanges, stream: int) -> None:
        """See `local_stream.Enqueue`. The driver tells from the addresses what memory they are of."""
        runtime, _, _ = _cuda()
        runtime.cudaSetDevice(self.ordinal)
        for src, dst, nbytes in ranges:
            _call("cudaMemcpyAsync", dst, src, nbytes, runtime.cudaMemcpyKind.cudaMemcpyDefault, stream)

    def drain(self) -> None:
        """Wait until nothing runs any more."""
        self._stream.drain()

    def close(self) -> None:
        """Drain, and give back what was allocated and pinned."""
        self._stream.close()
        for address, nbytes in list(self._pinned):
            self.unpin(address, nbytes)
        for allocation in self._allocations:
            allocation.free()


@dataclass
class PeerMemory:
    """A peer's segments as one GPU reaches them. `addresses`: of its device segments in order."""

    side: CudaSide
    addresses: list[int]
    _opened: list[int] = field(default_factory=list)
    _pinned: list[tuple[int, int]] = field(default_factory=list)

    def close(self) -> None:
        """Unmap and unpin what belongs to the peer. Nothing may be under way to it."""
        for address in self._opened:
            self.side.close_opened(address)
        for address, nbytes in self._pinned:
            self.side.unpin(address, nbytes)
        self._opened.clear()
        self._pinned.clear()


def open_peer_memory(
    side: CudaSide, segments: Sequence[SegmentFacts], theirs: Sequence[tuple[int, int]], own: Sequence[Segment]
) -> PeerMemory:
    """Open a peer's device segments, and pin both sides' host segments where copies will cross host and device.

    theirs: address and length of the peer's host segments as mapped here. Raises `BackendError`.
    """
    memory = PeerMemory(side, [])
    opened: dict[bytes, int] = {}
    try:
        for facts in (facts for facts in segments if facts.device != "cpu"):
            if facts.handle not in opened:
                opened[facts.handle] = side.open(facts)
                memory._opened.append(opened[facts.handle])
            memory.addresses.append(opened[facts.handle] + facts.handle_offset)
        if any(segment.device != "cpu" for segment in own):
            memory._pinned += [(address, nbytes) for address, nbytes in theirs if side.pin(address, nbytes)]
        if memory.addresses:
            for segment in own:
                if segment.device == "cpu":
                    side.pin(segment.address, segment.nbytes)
    except BaseException:
        memory.close()
        raise
    return memory


def device_of(uuid: bytes) -> str:
    """The device here that has this UUID. Raises `BackendError` (`backend_unsupported`)."""
    _, _, torch = _cuda()
    for ordinal in range(torch.cuda.device_count()):
        if _uuid(ordinal) == uuid:
            return f"cuda:{ordinal}"
    raise BackendError(
        "the peer's GPU is not visible in this process",
        where="CUDA_VISIBLE_DEVICES",
        expected=uuid.hex(),
        actual=f"{torch.cuda.device_count()} other GPUs",
    )


def _uuid(ordinal: int) -> bytes:
    properties = _call("cudaGetDeviceProperties", ordinal, code="backend_unavailable")
    return bytes(properties.uuid.bytes)[:16]


def _ordinal(device: str, count: int) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdigit() or int(number) >= count:
        expected = f"cuda:0 to cuda:{count - 1}"
        raise BackendError("no such device", code="memory_refused", expected=expected, actual=device)
    return int(number)


def _why_not_exportable(address: int) -> str:
    if _attribute("CU_POINTER_ATTRIBUTE_IS_MANAGED", address):
        return "managed memory (cudaMallocManaged)"
    pool = _attribute("CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE", address)
    if pool is not None and int(pool) != 0:
        return "of a stream-ordered pool (cudaMallocAsync)"
    return "of virtual memory mappings, as PyTorch's expandable segments are"
