"""All workers, and the choice of a pair for a request: what is not eligible is never seen by the policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sglang_pd.config.schema import RouterBreaker
from sglang_pd.router.breaker import Breaker
from sglang_pd.router.failures import Leg, RequestFailed, own
from sglang_pd.router.policy import Policy
from sglang_pd.router.resolver import Target
from sglang_pd.router.worker import Incarnation, Worker, verdict

log = logging.getLogger("sglang_pd.router")

MAX_PAIRS_SHOWN: Final = 1024


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers for one room, each pinned to the incarnation that it was chosen in."""

    prefill: Worker
    decode: Worker
    prefill_life: Incarnation
    decode_life: Incarnation


@dataclass(slots=True)
class Wanted:
    """What a request needs. avoided: workers not to ask again. host, port: the prefill that its caller named."""

    avoided: set[Worker] = field(default_factory=set)
    host: str | None = None
    port: int | None = None


class Fleet:
    """Workers by role and URL. Not for threads.

    added, dropped: told of every worker that comes and goes.
    """

    def __init__(self, policies: tuple[Policy, Policy], breaker: RouterBreaker) -> None:
        self._policy_prefill, self._policy_decode = policies
        self._breaker = breaker
        self._workers: dict[tuple[str, str], Worker] = {}
        self.added: Callable[[Worker], None] = lambda worker: None
        self.dropped: Callable[[Worker], None] = lambda worker: None

    @property
    def workers(self) -> list[Worker]:
        """All of both roles, prefill first."""
        return [*self.of("prefill"), *self.of("decode")]

    def of(self, role: str) -> list[Worker]:
        """The workers of one role."""
        return [worker for (of_role, _), worker in self._workers.items() if of_role == role]

    def update(self, targets: Iterable[Target]) -> None:
        """Take the resolver's list: new workers are added; those that are gone get no new rooms."""
        listed = {(target.role, target.url): target for target in targets}
        for key in [key for key in self._workers if key not in listed]:
            worker = self._workers.pop(key)
            worker.removed = True
            log.info("%s %s is no longer listed", worker.role, worker.url)
            self.dropped(worker)
        for key, target in listed.items():
            known = self._workers.get(key)
            if known is None:
                worker = Worker(target, Breaker(self._breaker.failures, self._breaker.open_s))
                self._workers[key] = worker
                self.added(worker)
            elif known.target != target:  # its control is elsewhere now
                known.target, known.bootstrap_port = target, target.bootstrap_port

    def choose(self, wanted: Wanted) -> Pair:
        """A pair for the next room. Raises `RequestFailed`: 503 naming the leg that has nobody and why, 400 when the
        caller named a prefill that is none of several here."""
        prefills = self._named(wanted, self.of("prefill"))
        prefills = self._eligible("prefill", prefills, wanted.avoided)
        decodes = self._eligible("decode", self.of("decode"), wanted.avoided)
        paired = [worker for worker in decodes if _has_partner(worker, prefills)]
        if not paired:
            raise own(
                "worker_unavailable",
                "no eligible prefill and decode accept each other; /workers shows the verdict of each pair",
                hint="`sglang-pd check` names what differs.",
            )
        decode = self._policy_decode.pick(_preferred(paired))
        prefill = self._policy_prefill.pick(_preferred(_partners(decode, prefills)))
        return Pair(prefill, decode, prefill.incarnation, decode.incarnation)

    def ready(self) -> RequestFailed | None:
        """None when a request could be dispatched now; otherwise what it would meet."""
        prefills = [worker for worker in self.of("prefill") if not worker.obstacle]
        decodes = [worker for worker in self.of("decode") if not worker.obstacle]
        if any(_has_partner(worker, prefills) for worker in decodes):
            return None
        for leg, eligible in (("prefill", prefills), ("decode", decodes)):
            if not eligible:
                return _nobody(leg, self.of(leg))  # type: ignore[arg-type]
        return own("worker_unavailable", "no eligible prefill and decode accept each other")

    def pairs(self) -> list[dict[str, Any]]:
        """The verdict of each pair, for `/workers`; the first `MAX_PAIRS_SHOWN`."""
        found: list[dict[str, Any]] = []
        for decode in self.of("decode"):
            for prefill in self.of("prefill"):
                if len(found) == MAX_PAIRS_SHOWN:
                    return found
                found.append({"prefill": prefill.url, "decode": decode.url, "verdict": verdict(decode, prefill)})
        return found

    def _eligible(self, leg: Leg, workers: Sequence[Worker], avoided: Collection[Worker]) -> list[Worker]:
        found = [worker for worker in workers if worker not in avoided and not worker.obstacle]
        if not found:
            raise _nobody(leg, workers)
        return found

    def _named(self, wanted: Wanted, prefills: list[Worker]) -> list[Worker]:
        """The prefills that the caller's bootstrap host and port mean: all when it named none."""
        if wanted.host is None and wanted.port is None:
            return prefills
        meant = [worker for worker in prefills if _matches(worker, wanted)]
        if meant:
            return meant
        if len(prefills) == 1:
            return prefills  # another name for the one there is, which decode may well be able to resolve
        raise own(
            "request_rejected",
            "bootstrap_host and bootstrap_port name no prefill of this router",
            where="$.bootstrap_host",
            expected=", ".join(f"{w.target.bootstrap_host}:{w.bootstrap_port}" for w in prefills[:8]),
            actual=f"{wanted.host}:{wanted.port}"[:120],
        )


def _matches(worker: Worker, wanted: Wanted) -> bool:
    host = wanted.host.strip("[]") if wanted.host is not None else None
    return host in (None, worker.target.bootstrap_host) and wanted.port in (None, worker.bootstrap_port)


def _has_partner(decode: Worker, prefills: Sequence[Worker]) -> bool:
    return any(verdict(decode, prefill) != "refused" for prefill in prefills)


def _partners(decode: Worker, prefills: Sequence[Worker]) -> list[Worker]:
    """The prefills that decode has not refused; those that it has lost only when there is no other."""
    verdicts = [(prefill, verdict(decode, prefill)) for prefill in prefills]
    found = [prefill for prefill, said in verdicts if said in ("accepted", "unknown")]
    return found or [prefill for prefill, said in verdicts if said == "lost"]


def _preferred(workers: list[Worker]) -> list[Worker]:
    """Without those that said they are full, unless all did."""
    return [worker for worker in workers if not worker.saturated] or workers


def _nobody(leg: Leg, workers: Sequence[Worker]) -> RequestFailed:
    reasons = "; ".join(f"{worker.url}: {worker.obstacle or 'failed this request'}" for worker in workers[:4])
    more = f"; and {len(workers) - 4} more" if len(workers) > 4 else ""
    return own(
        "worker_unavailable", f"no {leg} worker takes requests now ({reasons or 'none is listed'}{more})", leg=leg
    )
