"""What a watch tells: what callers say of a request, cut, and whose turn it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_pd.observe import Condition, Identity, Recorder, Settings
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.manifest import RankId
from sglang_pd.protocol.messages import Queued, RoomAccepted, Writer, Wrote
from sglang_pd.protocol.room import Role
from sglang_pd.worker.events import EventKind, RoomEvent
from sglang_pd.worker.jobs import Job
from sglang_pd.worker.watch import Watch


def job(room: int, name: str) -> Job:
    return Job(room=room, request_id=name, token_ids=np.zeros(2, np.int64), sink=lambda update: None, traceparent=name)


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
@pytest.mark.parametrize("name", ["r" * 1_000_000, "half a pair: \ud800" + "\udfff" * 600])
def test_names_are_cut_and_can_be_written(role: Role, name: str) -> None:
    """25 requests with names of 32 MiB once cost a gigabyte of memory, and of log, and the dump could not be sent."""
    lines: list[dict[str, Any]] = []
    recorder = Recorder(Identity(role, "me", 1, "local"), Settings(sink=lambda line: lines.append(json.loads(line))))
    watch = Watch(role, recorder)
    one = job(1, name)
    watch.queued(one)
    watch.requested(2, name, name, prompt_tokens=2)
    rooms = json.loads(recorder.answer("dump"))["rooms"]
    assert [len(room["request_id"]) for room in rooms] == [512, 512]
    watch.ended(one, ErrorInfo(code="room_aborted", message="the client went away"))
    assert len(lines[0]["request_id"]) == len(lines[0]["traceparent"]) == 512
    assert len(recorder.answer("dump")) < 10_000


# Whose turn it is. Each step of a room, and the part of the work there that is this worker's own.

WRITERS = [Writer(pp=0, tp=0), Writer(pp=0, tp=1)]
PAIRING: Any = SimpleNamespace(
    prefill=SimpleNamespace(instance_id="p", epoch=1, ranks=[SimpleNamespace(rank=RankId(0, tp)) for tp in (0, 1)]),
    decode=SimpleNamespace(instance_id="d", epoch=2, ranks=[]),
    needed=SimpleNamespace(dst=()),
    owed=lambda rank: {"KV": (0,), "GDN": ()},
)
OPEN: Any = SimpleNamespace(
    room=1, generation=1, request_id="r", traceparent="", prompt_tokens=2, prefix_tokens=0, index_lists=()
)


def record(writer: Writer, component: str, last: bool = True) -> Wrote:
    bounds = {"layer_start": 0, "layer_stop": 1, "token_start": 0, "token_stop": 1 + last}
    return Wrote(room=1, generation=1, writer=writer, component=component, last=last, nbytes=8, **bounds)


class Watched:
    """A worker that is watched, on a clock turned by hand."""

    def __init__(self, role: Role) -> None:
        self.now_ns = 0
        settings = Settings(stall_s=10, clock=lambda: self.now_ns, sink=lambda line: None)
        self.recorder = Recorder(Identity(role, "me", 1, "local"), settings)
        self.recorder.ready()
        self.watch = Watch(role, self.recorder)

    @property
    def stalls(self) -> bool:
        """Whether it would be stalled if nothing happened from now on."""
        self.now_ns += 10 * 10**9
        return self.recorder.health().condition is Condition.STALLED


def prefill_steps(watch: Watch) -> Iterator[tuple[str, bool]]:
    watch.queued(job(1, "r"))
    yield "in the queue", True
    watch.requested(1, "r", "", prompt_tokens=2)
    yield "await_open", True  # it is being computed
    watch.computed(1)
    yield "computed_unclaimed", False
    watch.started(OPEN, PAIRING)
    yield "matched", True
    watch.wrote(record(WRITERS[0], "KV", last=False), 1)
    yield "writing", True
    watch.posted(1)
    yield "posted", True
    *others, final = [record(writer, component) for writer in WRITERS for component in ("KV", "GDN")]
    for one in others:
        watch.wrote(one, 1)
        yield f"written {one.component} of {one.writer}", True
    watch.wrote(final, 1)
    yield "sent", False
    watch.event(RoomEvent(EventKind.DONE, 1, 1))
    yield "done", False


def prefill_that_was_opened_first(watch: Watch) -> Iterator[tuple[str, bool]]:
    yield "await_request", False
    watch.requested(1, "r", "", prompt_tokens=2)
    watch.started(OPEN, PAIRING)
    yield "matched", True
    for writer in WRITERS:
        for component in ("KV", "GDN"):
            watch.wrote(record(writer, component), 1)
    yield "all but the end of its computing", True
    watch.computed(1)
    yield "sent", False
    watch.event(RoomEvent(EventKind.FAILED, 1, 1, error=ErrorInfo(code="peer_lost", message="gone")))
    yield "failed", False


def decode_steps(watch: Watch) -> Iterator[tuple[str, bool]]:
    one = job(1, "r")
    watch.queued(one)
    yield "in the queue", True
    watch.waits_for_memory([one])
    yield "allocating", True  # the engine's requests hold it
    watch.opened(OPEN, PAIRING)
    yield "opening", False
    watch.heard(RoomAccepted(room=1, generation=1, state="matched"))
    yield "accepted", False
    watch.heard(Queued(room=1, generation=1, ahead=3))
    yield "queued", False
    watch.heard(record(WRITERS[0], "KV"))
    yield "receiving", False
    watch.verifying(1, 1)
    yield "verifying", True
    watch.heard(record(WRITERS[0], "GDN"))
    watch.heard(Queued(room=1, generation=1, ahead=3))
    yield "verifying, with what was on its way", True
    watch.event(RoomEvent(EventKind.ADMITTED, 1, 1))
    yield "admitted", True
    watch.event(RoomEvent(EventKind.DONE, 1, 1))
    yield "the engine takes it", True
    watch.ended(one, None)
    yield "done", False


def engine_without_a_runner(watch: Watch) -> Iterator[tuple[str, bool]]:
    watch.opened(OPEN, PAIRING)
    yield "opening", False
    watch.event(RoomEvent(EventKind.ADMITTED, 1, 1))
    yield "admitted", True
    watch.event(RoomEvent(EventKind.DONE, 1, 1))
    yield "done", False


@pytest.mark.parametrize(
    ("role", "steps"),
    [
        (Role.PREFILL, prefill_steps),
        (Role.PREFILL, prefill_that_was_opened_first),
        (Role.DECODE, decode_steps),
        (Role.DECODE, engine_without_a_runner),
    ],
)
def test_only_own_work_stalls(role: Role, steps: Any) -> None:
    """One prefill leg whose decode never came once took a healthy prefill out, and with it the service."""
    watched = Watched(role)
    for name, own in steps(watched.watch):
        assert watched.stalls is own, name
    assert not watched.watch._away and watched.recorder._waiting_for_peers == 0


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_a_wait_for_memory_that_others_hold_is_not_the_engines(role: Role) -> None:
    watched = Watched(role)
    watch, waiting = watched.watch, job(2, "waits")
    watch.queued(job(1, "holds"))
    if role is Role.PREFILL:
        watch.requested(1, "holds", "", prompt_tokens=2)
        watch.computed(1)
    else:
        watch.opened(OPEN, PAIRING)
    watch.queued(waiting)
    watched.recorder.queue(1, 8)
    assert watched.stalls, "it may just not have been begun"
    watch.waits_for_memory([waiting])
    assert not watched.stalls
    watch.event(RoomEvent(EventKind.FAILED, 1, 0, error=ErrorInfo(code="lease_expired", message="unclaimed")))
    watch.waits_for_memory([waiting])
    assert watched.stalls, "nobody else holds any"
    watch.requested(2, "waits", "", prompt_tokens=2)
    watched.recorder.queue(0, 8)
    assert watched.stalls, "it runs"


def test_an_engine_that_computes_is_not_stalled() -> None:
    """Requests wait behind answers of minutes: nothing ends and no bytes move, but tokens come."""
    watched = Watched(Role.DECODE)
    watched.recorder.queue(1, 8)
    watched.watch.worked(10)
    watched.now_ns += 9 * 10**9
    watched.watch.worked(11)
    watched.now_ns += 9 * 10**9
    assert watched.recorder.health().is_ready
    watched.watch.worked(11)
    assert watched.stalls


def test_a_verification_that_goes_on_is_not_stalled() -> None:
    watched = Watched(Role.DECODE)
    watched.watch.opened(OPEN, PAIRING)
    watched.watch.verifying(1, 1)
    for number in range(4):
        watched.now_ns += 9 * 10**9
        watched.watch.verified(record(WRITERS[0], f"K{number}"))
    assert watched.recorder.health().is_ready and watched.stalls
