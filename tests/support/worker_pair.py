"""Two worker processes, a room between them, and the three oracles at the end of a test."""

from __future__ import annotations

import time
from typing import Any

from support.worker_process import TERMINAL, WorkerProcess, settled


def start_pair(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> tuple[WorkerProcess, WorkerProcess]:
    """A prefill and a decode process that know each other. Close both.

    Patient with each other unless told otherwise: a busy machine is not a defect.
    """
    source = WorkerProcess("prefill", **{"pages": 24, "liveness_s": 10.0, **(prefill or {})})
    try:
        target = WorkerProcess("decode", **{"pages": 30, "liveness_s": 10.0, **(decode or {})})
    except BaseException:
        source.close()
        raise
    target.ask("connect", address=source.address)
    return source, target


def start_room(prefill: WorkerProcess, decode: WorkerProcess, room: int, tokens: int, **serve: Any) -> tuple[int, int]:
    """Both legs of a room; gives prefill's handle and decode's."""
    p = prefill.ask("serve", room=room, tokens=tokens, seed=room, **serve)
    d = decode.ask("open", room=room, tokens=tokens, seed=room, address=prefill.address)
    assert "handle" in p and "handle" in d, (p, d)
    return p["handle"], d["handle"]


def hand_over(prefill: WorkerProcess, decode: WorkerProcess, room: int, tokens: int, **serve: Any) -> dict[str, Any]:
    """One room that must succeed; gives decode's admitted line."""
    p, d = start_room(prefill, decode, room, tokens, **serve)
    return finished(prefill, decode, p, d)


def finished(prefill: WorkerProcess, decode: WorkerProcess, p: int, d: int) -> dict[str, Any]:
    """Waits for a room that must succeed; gives decode's admitted line."""
    end = decode.end_of(d)
    assert end["event"] == "done", end
    admitted = decode.wait(lambda line: line.get("handle") == d and line.get("event") == "admitted")
    assert admitted["bad"] == [], admitted
    decode.released(d)
    prefill.released(p)
    assert prefill.end_of(p)["event"] == "done"
    return admitted


def wait_until(condition: Any, *, timeout_s: float = 20.0) -> None:
    """Until it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come true in time"
        time.sleep(0.03)


def terminal_oracle(worker: WorkerProcess) -> None:
    """Every handle that this process gave has exactly one terminal event and exactly one RELEASABLE."""
    worker.ask("stats")  # what was said before it is here now
    handles = {line["handle"] for line in worker.lines if "answer" in line and "handle" in line}
    for handle in handles:
        events = worker.events(handle)
        ends = [event for event in events if event in TERMINAL]
        assert len(ends) == 1 and events.count("releasable") == 1, f"{worker.conf['id']} handle {handle}: {events}"


def oracles(*workers: WorkerProcess, timeout_s: float = 20.0) -> None:
    """Bytes, ends and conservation, of processes with nothing left to do."""
    for worker in workers:
        answer = settled(worker, timeout_s=timeout_s)
        assert (answer["dirty"], answer["wrong"]) == (0, 0), f"{worker.conf['id']}: {answer}"
        assert worker.ask("integrity")["problem"] == ""
        stats = worker.ask("stats")
        assert stats["ready"] or stats["drained"], stats
        assert stats["stats"]["loop_faults"] == 0, stats["last_fault"]
        terminal_oracle(worker)
