"""How a router that stops ends what still runs: each request with an error of ours, not with a cancelled task."""

from __future__ import annotations

from types import TracebackType

import anyio

from sglang_pd.router.failures import RequestFailed, own


class CutOff:
    """Scopes of the requests that run. Once `cut`, they end, and so does whatever comes later."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self.done = False

    def scope(self) -> CutOffScope:
        """A block that a cut ends. Whoever goes on behind it was cancelled, and asks `done` for the reason."""
        return CutOffScope(self._scopes, self)

    def cut(self) -> None:
        """End everything that runs."""
        self.done = True
        for scope in list(self._scopes):
            scope.cancel()

    @staticmethod
    def failure() -> RequestFailed:
        """What a request that was cut off is told: retryable, since another router may take it."""
        return own("draining", "the router is stopping and has cut the request off")


class CutOffScope:
    """anyio's cancel scope, known to a `CutOff` while it is open."""

    def __init__(self, scopes: set[anyio.CancelScope], owner: CutOff) -> None:
        self._scopes, self._owner, self._scope = scopes, owner, anyio.CancelScope()

    def __enter__(self) -> anyio.CancelScope:
        self._scopes.add(self._scope)
        if self._owner.done:
            self._scope.cancel()
        return self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._scopes.discard(self._scope)
        return self._scope.__exit__(kind, error, trace)
