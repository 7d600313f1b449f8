"""Looks at every worker again and again: does it answer, does it take rooms, is it still the same one, and what does
each decode think of each prefill."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from sglang_pd.config.schema import RouterTimeouts
from sglang_pd.observe import RateLimited
from sglang_pd.router.fleet import Fleet
from sglang_pd.router.resolver import Resolver
from sglang_pd.router.worker import PeerBook, PeerView, Sight, Worker

log = logging.getLogger("sglang_pd.router")

MAX_BYTES: Final = 4 * 2**20
"""Most bytes of one answer to a look."""
MAX_PEERS: Final = 4096
DRAINING: Final = "draining"
STOP_S: Final = 0.5
"""Seconds for looks that are under way to end when the router stops."""
PATIENCE: Final = 3
"""Looks in a row that time out before a worker counts as down; a refused or broken connection counts at once."""

_ROLE_KEYS: Final = ("role", "disaggregation_mode")
_NAMES: Final = ("instance_id", "instance")
_STATE_KEYS: Final = ("condition", "state", "status")


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer. document: its JSON object, or an empty one."""

    status: int
    document: dict[str, Any]


class Prober:
    """Keeps `fleet` true. `start` waits for a first look at everybody; `poke` asks for a look at once."""

    def __init__(
        self, fleet: Fleet, resolver: Resolver, client: httpx.AsyncClient, timeouts: RouterTimeouts, token: str
    ) -> None:
        self._fleet, self._resolver, self._client, self._timeouts = fleet, resolver, client, timeouts
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._bells: dict[Worker, asyncio.Event] = {}
        self._looked: dict[Worker, asyncio.Event] = {}
        self._missed: dict[Worker, int] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._say = RateLimited(log)
        self.replaced: Callable[[Worker], None] = lambda worker: None

    async def start(self) -> None:
        """Resolve, look at every worker once, and go on doing so."""
        self._fleet.added, self._fleet.dropped = self._added, self._dropped
        self._fleet.update(await self._resolver.resolve())
        self._resolving = asyncio.create_task(self._resolve_again())
        firsts = [self._looked[worker].wait() for worker in self._fleet.workers]
        await asyncio.gather(*firsts)

    async def stop(self) -> None:
        """End all looking. A look that is under way may end by itself: a connection cancelled while it is made leaks
        its socket in the library below."""
        self._stop.set()
        if self._resolving is not None:
            self._resolving.cancel()
        tasks, self._tasks = list(self._tasks.values()), {}
        for bell in self._bells.values():
            bell.set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def poke(self, worker: Worker) -> None:
        """Something happened to that worker."""
        if (bell := self._bells.get(worker)) is not None:
            bell.set()

    async def look(self, worker: Worker) -> None:
        """One look at one worker."""
        answers = await asyncio.gather(
            self._get(worker, "/health"),
            self._get(worker, "/ready"),
            self._get(worker, "/server_info") if self._asks_identity(worker) else _nothing(),
            self._get(worker, "/peers") if worker.role == "decode" else _nothing(),
            return_exceptions=True,
        )
        if (error := next((answer for answer in answers if isinstance(answer, BaseException)), None)) is not None:
            if not isinstance(error, httpx.HTTPError):
                raise error
            self._missing(worker, error)
            return
        health, ready, info, peers = (answer for answer in answers if isinstance(answer, Seen))
        self._missed.pop(worker, None)
        self._learn(worker, health, ready, info)
        if worker.role == "decode" and peers.status == 200:
            worker.peers = PeerBook(peer_views(peers.document))

    def _asks_identity(self, worker: Worker) -> bool:
        """Always, unless it was up and tells no epoch: then it can only be another one after it was down."""
        return bool(worker.incarnation.epoch) or not worker.sight.up

    def _learn(self, worker: Worker, health: Seen, ready: Seen, info: Seen) -> None:
        for seen in (info, ready, health):
            if seen.document.get("epoch") is not None:
                name = next((doc[key] for doc in (seen.document, info.document) for key in _NAMES if doc.get(key)), "")
                if worker.identify(epoch_text(seen.document["epoch"]), str(name)[:128]):
                    log.warning("%s %s was replaced; it is judged anew", worker.role, worker.url)
                    self.replaced(worker)
                break
        stages = info.document.get("cancellable")
        if isinstance(stages, list):
            worker.cancellable = frozenset(str(stage) for stage in stages[:16])
        port = info.document.get("bootstrap_port") or info.document.get("disaggregation_bootstrap_port")
        if worker.role == "prefill" and isinstance(port, int) and port:
            self._learn_port(worker, port)
        worker.sight = sight_of(worker.role, health, ready, info)
        if info.status in (401, 403):
            text = "/server_info asks for a token: give worker_bearer_token, or epochs and pairs are not seen"
            self._say.warning(f"token {worker.url}", "%s %s: %s", worker.role, worker.url, text)
            if self._headers:
                reason = f"it does not accept the router's worker_bearer_token ({info.status})"
                worker.sight = Sight(up=True, reason=reason)

    def _learn_port(self, worker: Worker, port: int) -> None:
        if not worker.target.bootstrap_port:
            worker.bootstrap_port = port
        elif port != worker.target.bootstrap_port:
            text = "prefill %s says that its bootstrap port is %d; the router is configured with %d and uses that"
            self._say.warning(f"port {worker.url}", text, worker.url, port, worker.target.bootstrap_port)

    def _missing(self, worker: Worker, error: httpx.HTTPError) -> None:
        missed = self._missed[worker] = self._missed.get(worker, 0) + 1
        if isinstance(error, httpx.TimeoutException) and missed < PATIENCE and worker.sight.up:
            return
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        if worker.sight.up:
            self._say.warning(worker.url, "%s %s is down: %s", worker.role, worker.url, reason)
        worker.sight = Sight(reason=f"down: {reason}"[:300])

    async def _get(self, worker: Worker, path: str) -> Seen:
        limits = self._timeouts
        timeout = httpx.Timeout(limits.connect_s + limits.probe_s, connect=limits.connect_s)
        headers = {**self._headers, "host": worker.host_header}
        body = bytearray()
        url = worker.base + path
        async with self._client.stream("GET", url, headers=headers, timeout=timeout) as response:
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_BYTES:
                    return Seen(response.status_code, {})
        return Seen(response.status_code, _document(bytes(body)))

    def _added(self, worker: Worker) -> None:
        self._bells[worker], self._looked[worker] = asyncio.Event(), asyncio.Event()
        self._tasks[worker] = asyncio.create_task(self._look_again(worker))

    def _dropped(self, worker: Worker) -> None:
        self._tasks.pop(worker).cancel()
        del self._bells[worker], self._looked[worker]
        self._missed.pop(worker, None)

    async def _look_again(self, worker: Worker) -> None:
        bell, looked = self._bells[worker], self._looked[worker]
        while not self._stop.is_set():
            try:
                await self.look(worker)
            except Exception:
                log.exception("a defect while looking at %s", worker.url)
            looked.set()
            if self._stop.is_set():
                break
            try:
                await asyncio.wait_for(bell.wait(), self._timeouts.probe_s)
                if not self._stop.is_set():
                    await asyncio.sleep(min(0.05, self._timeouts.probe_s))  # many failures at once are one look
            except asyncio.TimeoutError:
                pass
            bell.clear()

    async def _resolve_again(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.probe_s)
            try:
                self._fleet.update(await self._resolver.resolve())
            except Exception:
                log.exception("a defect in the resolver; the workers stay as they were")


async def _nothing() -> Seen:
    return Seen(0, {})


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if isinstance(found, list):
        return {"peers": found}
    return found if isinstance(found, dict) else {}


def epoch_text(value: Any) -> str:
    """An epoch as one text, whether it came as a number or in hexadecimal digits."""
    if isinstance(value, int):
        return f"{value:016x}"
    return str(value)[:64].lower().removeprefix("0x")


def sight_of(role: str, health: Seen, ready: Seen, info: Seen) -> Sight:
    """What answers to `/health`, `/ready` and `/server_info` mean. A worker without `/ready` is ready when healthy."""
    own = next((str(info.document[key]) for key in _ROLE_KEYS if info.document.get(key)), role)
    if own in ("prefill", "decode") and own != role:
        return Sight(up=True, reason=f"it is a {own} worker, and is listed as {role}")
    states = {_state(seen.document) for seen in (health, ready)}
    if DRAINING in states or True in (health.document.get(DRAINING), ready.document.get(DRAINING)):
        return Sight(up=True, draining=True, reason=DRAINING)
    if health.status != 200:
        return Sight(reason=f"/health answers {health.status}{_why(health)}")
    if ready.status in (200, 404, 405):
        return Sight(up=True, ready=True, reason="")
    return Sight(up=True, reason=f"not ready{_why(ready) or f': /ready answers {ready.status}'}")


def _state(document: dict[str, Any]) -> str:
    return next((str(document[key]).lower() for key in _STATE_KEYS if document.get(key)), "")


def _why(seen: Seen) -> str:
    error = seen.document.get("error")
    error = error.get("message") if isinstance(error, dict) else error
    text = seen.document.get("reason") or error or _state(seen.document)
    return f": {str(text)[:200]}" if text else ""


def peer_views(document: dict[str, Any]) -> list[PeerView]:
    """The prefills in an answer to `/peers`."""
    entries = document.get("peers")
    found = []
    for entry in entries[:MAX_PEERS] if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("role", "prefill") == "prefill":
            address = str(entry.get("address") or "").removeprefix("tcp://")
            name = str(entry.get("instance") or entry.get("instance_id") or "")
            stage = str(entry.get("stage") or entry.get("state") or "")
            found.append(PeerView(name[:128], epoch_text(entry.get("epoch") or ""), address[:300], stage.lower()))
    return found
