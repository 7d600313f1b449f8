"""Memory a worker exports over Mooncake: what this backend allocated, what it adopted, and where it may lie."""

from __future__ import annotations

from sglang_pd.backends.base import Segment
from sglang_pd.backends.library.segments import Scope, allocate_host, check_mapped, check_range, check_size, refused
from sglang_pd.backends.mooncake import cuda as mooncake_cuda
from sglang_pd.backends.mooncake.blob import MAX_SEGMENTS
from sglang_pd.protocol.errors import BackendError


class Memory:
    """The memory of one backend. `host`, `device`: where its transport can read and write."""

    def __init__(self, *, host: bool, device: bool) -> None:
        self._host = host
        self._device = device
        self._owned: list[Segment] = []
        self.scope = Scope("mooncake", MAX_SEGMENTS)

    def allocate(self, nbytes: int, device: str) -> Segment:
        """See `Backend.allocate`."""
        check_size("mooncake", nbytes, device)
        if not self._usable(device):
            wanted = Segment(address=0, nbytes=nbytes, device=device)
            raise refused("mooncake", "this transport cannot use memory there", wanted, expected=self._places())
        segment = allocate_host("mooncake", nbytes) if device == "cpu" else mooncake_cuda.allocate(nbytes, device)
        self._owned.append(segment)
        return self.scope.admit(segment)

    def check_adoptable(self, segment: Segment) -> None:
        """Raise `BackendError` (`memory_refused`) for memory that cannot be exported, naming why."""
        check_range("mooncake", segment)
        if not self._usable(segment.device):
            raise BackendError(
                "this transport adopts no memory there",
                where=f"mooncake, {segment.nbytes} bytes on {segment.device}",
                expected=self._places(),
            )
        if segment.device == "cpu":
            check_mapped("mooncake", segment)
        else:
            mooncake_cuda.check_exportable(segment)

    def release(self) -> None:
        """Give back what was allocated. The caller has proven that no engine uses it. Idempotent."""
        owned, self._owned = self._owned, []
        self.scope.clear()
        for segment in owned:
            if segment.device != "cpu":
                mooncake_cuda.free(segment)

    def _usable(self, device: str) -> bool:
        return self._host if device == "cpu" else self._device

    def _places(self) -> str:
        return " or ".join([*["cpu"] * self._host, *["cuda:N"] * self._device])
