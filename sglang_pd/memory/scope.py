"""A worker's scope: the only way to memory that a peer may read or write.

Everything comes from the backend's `allocate`, or is adopted through its probe. A region on memory from anywhere else
is an error that names it: a transport would find out much later, or never.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from sglang_pd.backends.base import Backend, Segment
from sglang_pd.backends.home import Home
from sglang_pd.memory import holding
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.memory.layout import RankLayout
from sglang_pd.protocol.errors import BackendError


class ScopeState(Enum):
    """Life of a scope."""

    OPEN = "open"
    """Memory is being collected; nothing is registered."""
    REGISTERED = "registered"
    """The segment table is fixed and exported."""
    SUSPENDED = "suspended"
    """Sleep mode or weight update: no transferable memory exists."""


class Scope:
    """Segments of one worker incarnation over one backend. Owned by the backend's owner thread.

    `suspend` closes the backend and with it all memory; `resume` takes a new backend, whose epoch is another. Both are
    refused while rooms hold the scope, since a peer's right to write ends with a fence, not with our wish.
    """

    def __init__(self, backend: Backend) -> None:
        self._home = Home("the scope", "scope")
        self._backend: Backend | None = backend
        self._epochs = {backend.epoch}
        self._segments: list[Segment] = []
        self._names: list[str] = []
        self.state = ScopeState.OPEN

    @property
    def backend(self) -> Backend:
        """The backend. Raises `BackendError` while suspended."""
        if self._backend is None:
            raise BackendError("the scope is suspended: there is no transferable memory", where="scope")
        return self._backend

    @property
    def epoch(self) -> int:
        """Identity of this incarnation of the memory."""
        return self.backend.epoch

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments; numbered once registered."""
        return tuple(self._segments)

    def allocate(self, nbytes: int, device: str = "cpu", name: str = "") -> Segment:
        """Memory the backend can export, zeroed. Raises `BackendError` as `Backend.allocate`, with `name` in it."""
        self._require_open("allocate", name)
        segment = self.backend.allocate(nbytes, device)
        self._segments.append(segment)
        self._names.append(name)
        return segment

    def allocate_layout(self, layout: RankLayout) -> tuple[Segment, ...]:
        """Allocate and register every segment of a layout, in its order."""
        for plan in layout.segments:
            self.allocate(plan.nbytes, plan.device, plan.name)
        return self.register()

    def adopt(self, segment: Segment, name: str = "") -> Segment:
        """Take memory someone else allocated, after the backend's probe.

        Raises `BackendError`: `backend_unsupported` where the backend adopts no memory of that device,
        `memory_refused` where its probe fails or the memory overlaps what the scope has.
        """
        self._require_open("adopt", name)
        can = self.backend.capabilities
        host = segment.device == "cpu"
        if not (can.adopts_host if host else can.adopts_device):
            raise BackendError(
                f"the backend {can.name} adopts no {'host' if host else 'device'} memory",
                code="backend_unsupported", where=name or "adopt", expected="memory from its own allocate",
                actual=f"{segment.nbytes} bytes on {segment.device}",
                hint="Let the engine build its tensors on Scope.allocate, or choose a backend that adopts.",
            )  # fmt: skip
        for other, other_name in zip(self._segments, self._names, strict=True):
            apart = segment.address + segment.nbytes <= other.address or other.address + other.nbytes <= segment.address
            if segment.device == other.device and not apart:
                raise BackendError(
                    "the memory overlaps what the scope has", code="memory_refused", where=name, actual=other_name
                )
        holding.adopt(self.backend, segment, name or "adopt")
        adopted = self.backend.adopt(segment)
        self._segments.append(adopted)
        self._names.append(name)
        return adopted

    def register(self) -> tuple[Segment, ...]:
        """Number and export everything, once. Returns the numbered segments."""
        self._require_open("register", "")
        self._segments = list(self.backend.register(self._segments))
        holding.register(self.backend, self._segments)
        self.state = ScopeState.REGISTERED
        return self.segments

    def locate(self, address: int, nbytes: int, what: str, device: str = "cpu") -> tuple[int, int]:
        """Segment number and byte offset of a range. Raises `BackendError` (`memory_refused`) naming `what`."""
        for number, segment in enumerate(self._segments):
            inside = segment.address <= address and address + nbytes <= segment.address + segment.nbytes
            if segment.device == device and inside:
                return number, address - segment.address
        raise BackendError(
            "a region lies on memory from outside the scope",
            code="memory_refused",
            where=what,
            expected=f"inside one of {len(self._segments)} segments of the scope on {device}",
            actual=f"{nbytes} bytes at {address:#x}",
            hint="Transferable memory comes from Scope.allocate, or goes through Scope.adopt.",
        )

    def check_layout(self, layout: RankLayout) -> None:
        """Raise `BackendError` unless each segment of the layout is there, on its device, and long enough."""
        plans: Iterable[tuple[int, str, int, str]] = (
            (number, plan.device, plan.nbytes, plan.name) for number, plan in enumerate(layout.segments)
        )
        for number, device, nbytes, name in plans:
            have = self._segments[number] if number < len(self._segments) else None
            if have is None or have.device != device or have.nbytes < nbytes:
                raise BackendError(
                    "a layout does not lie on the scope's memory", code="memory_refused", where=f"segment {name}",
                    expected=f"number {number}: {nbytes} bytes on {device}",
                    actual=f"{have.nbytes} bytes on {have.device}" if have else f"{len(self._segments)} segments",
                )  # fmt: skip

    def suspend(self) -> None:
        """Give all memory back. Views on it are void. Raises `LeaseError` while anything holds the scope."""
        self._home.check()
        if holding.held(self.backend):
            raise LeaseError(
                "the scope cannot be suspended", where="scope", expected="no endpoint, no room, nothing in quarantine",
                actual="an endpoint serves its memory", hint="Drain and close it first: a peer may still write here.",
            )  # fmt: skip
        self.backend.close()
        holding.forget(self.backend)
        self._backend = None
        self._segments, self._names = [], []
        self.state = ScopeState.SUSPENDED

    def resume(self, backend: Backend) -> None:
        """Start again, empty, over a new backend. Raises `BackendError` for an epoch that was used before."""
        if self.state is not ScopeState.SUSPENDED:
            raise LeaseError("only a suspended scope is resumed", where="scope", actual=self.state.value)
        if backend.epoch in self._epochs:
            raise BackendError("a resumed scope needs a new epoch", code="epoch_stale", where="scope.resume")
        self._epochs.add(backend.epoch)
        self._backend = backend
        self.state = ScopeState.OPEN

    def _require_open(self, what: str, name: str) -> None:
        self._home.check()
        if self.state is not ScopeState.OPEN:
            raise BackendError(
                f"the scope cannot {what} any more", code="memory_refused", where=name or "scope",
                expected=ScopeState.OPEN.value, actual=self.state.value,
                hint="All memory is collected before it is registered, once.",
            )  # fmt: skip
