"""Instances of several processes: TP2 x PP2 prefill to TP2 decode, ranks that die, a control that is replaced."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.worker_pair import oracles, wait_until
from support.worker_process import WorkerProcess, free_address

PREFILL = {"pp": 2, "tp": 2}
DECODE = {"pp": 1, "tp": 2}


@dataclass
class Instance:
    """A control with rank (0, 0), and the processes of the other ranks."""

    control: WorkerProcess
    ranks: list[WorkerProcess]

    def all_ready(self) -> bool:
        return bool(self.control.ask("stats")["ready"])


@contextlib.contextmanager
def instance(role: str, topology: dict[str, int], pages: int, **conf: Any) -> Iterator[Instance]:
    """All processes of an instance, joined."""
    with contextlib.ExitStack() as stack:
        common = {"topology": topology, "pages": pages, "bind": free_address(), **conf}
        control = stack.enter_context(WorkerProcess(role, ranks_bind=free_address(), **common))
        ranks = [
            stack.enter_context(rank_process(control, (p, t), side=role, **common))
            for p in range(topology["pp"])
            for t in range(topology["tp"])
            if (p, t) != (0, 0)
        ]
        found = Instance(control, ranks)
        wait_until(found.all_ready)
        yield found


def rank_process(control: WorkerProcess, rank: tuple[int, int], **common: Any) -> WorkerProcess:
    return WorkerProcess(
        "rank", id=f"{control.conf['id']}-rank{rank}", rank=rank, control=control.ranks_address, **common
    )


@pytest.fixture
def pair() -> Iterator[tuple[Instance, Instance]]:
    with instance("prefill", PREFILL, 24) as prefill, instance("decode", DECODE, 30) as decode:
        decode.control.ask("connect", address=prefill.control.address)
        yield prefill, decode


def start(prefill: Instance, decode: Instance, room: int, tokens: int, **serve: Any) -> tuple[dict, dict]:
    """A room; every rank of prefill computes its share."""
    p = prefill.control.ask("serve", room=room, tokens=tokens, seed=room, **serve)
    for rank in prefill.ranks:
        rank.ask("fill", handle=p["handle"], tokens=tokens, seed=room, lists=p["lists"], **serve)
    d = decode.control.ask("open", room=room, tokens=tokens, seed=room, address=prefill.control.address)
    return p, d


def judge(prefill: Instance, decode: Instance, room: int, tokens: int, p: dict, d: dict) -> None:
    """It ended well: every decode rank has the right bytes. Their memory is wiped."""
    end = decode.control.end_of(d["handle"])
    assert end["event"] == "done", end
    bad = decode.control.wait(lambda line: line.get("handle") == d["handle"] and line.get("event") == "admitted")["bad"]
    assert bad == []
    for rank in decode.ranks:
        assert rank.ask("judge", room=room, tokens=tokens, seed=room, lists=d["lists"])["bad"] == []
    decode.control.released(d["handle"])
    prefill.control.released(p["handle"])
    clear(prefill, tokens, p)
    clear(decode, tokens, d)


def clear(side: Instance, tokens: int, answer: dict) -> None:
    for rank in side.ranks:
        rank.ask("clear", tokens=tokens, lists=answer["lists"])


def test_all_ranks_have_their_bytes_and_a_dead_rank_fails_every_room_by_its_name(
    pair: tuple[Instance, Instance],
) -> None:
    prefill, decode = pair
    for room, tokens in ((1, 1), (2, 33), (3, 60)):
        cuts = list(range(7, tokens, 7))
        judge(prefill, decode, room, tokens, *start(prefill, decode, room, tokens, chunks=cuts))
    for rank in (*prefill.ranks, *decode.ranks):
        assert rank.ask("check")["dirty"] == 0
    p, d = start(prefill, decode, 4, 60, chunks=[10], pause_s=30)
    prefill.ranks[1].kill()  # rank (1, 0): last stage
    for control, answer in ((prefill.control, p), (decode.control, d)):
        end = control.end_of(answer["handle"])
        assert end["event"] == "failed"
        assert "pp1/tp0" in end["message"] or "pp1" in end["message"] + end["where"], end
    assert not prefill.control.ask("stats")["ready"]
    late = prefill.control.ask("serve", room=5, tokens=8, seed=5)
    assert prefill.control.end_of(late["handle"])["code"] == "peer_lost"
    late = decode.control.ask("open", room=5, tokens=8, seed=5, address=prefill.control.address)
    assert decode.control.end_of(late["handle"])["code"] in ("draining", "peer_lost")
    # Its successor at the same address is welcome.
    for process in (prefill.control, *prefill.ranks):
        process.kill()
    decode.control.released(d["handle"])
    clear(decode, 60, d)
    with instance("prefill", PREFILL, 20, bind=prefill.control.address) as successor:
        judge(successor, decode, 6, 40, *start(successor, decode, 6, 40, chunks=[10]))
        oracles(successor.control, decode.control)


@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_silent_ranks_memory_comes_back_by_its_word_or_its_death(what: signal.Signals) -> None:
    """Silence proves nothing: a stopped rank goes on reading the pages once it runs again."""
    patience = {"rank_liveness_s": 1.5, "liveness_s": 10.0}
    with (
        instance("prefill", {"pp": 1, "tp": 2}, 24, **patience) as prefill,
        instance("decode", {"pp": 1, "tp": 2}, 30, liveness_s=10.0, rank_liveness_s=10.0) as decode,
    ):
        decode.control.ask("connect", address=prefill.control.address)
        judge(prefill, decode, 1, 40, *start(prefill, decode, 1, 40))
        p, d = start(prefill, decode, 2, 60, chunks=[10], pause_s=60)
        (rank,) = prefill.ranks
        rank.signal(what)
        for control, answer in ((prefill.control, p), (decode.control, d)):
            assert control.end_of(answer["handle"])["event"] == "failed"
        if what is signal.SIGSTOP:
            time.sleep(1.0)
            prefill.control.ask("stats")
            decode.control.ask("stats")
            assert "releasable" not in prefill.control.events(p["handle"]) + decode.control.events(d["handle"])
            rank.signal(signal.SIGCONT)
            decode.control.released(d["handle"])
        prefill.control.released(p["handle"])


def test_control_restarted_its_ranks_rejoin_and_a_peer_that_stayed_serves(pair: tuple[Instance, Instance]) -> None:
    """The ranks outlive their control, prove that nothing of before lands, and join the new one; decode never stops."""
    prefill, decode = pair
    judge(prefill, decode, 1, 40, *start(prefill, decode, 1, 40, chunks=[10]))
    p, d = start(prefill, decode, 2, 60, chunks=[10, 20], pause_s=30)
    old = prefill.control
    old.kill()
    end = decode.control.end_of(d["handle"])
    assert (end["event"], end["code"]) == ("failed", "peer_lost")
    conf = {"topology": PREFILL, "pages": 24, "bind": old.address, "seed": 2}
    with WorkerProcess("prefill", ranks_bind=old.ranks_address, **conf) as control:
        decode.control.released(d["handle"])
        prefill.control = control
        wait_until(prefill.all_ready)
        clear(prefill, 60, p)
        clear(decode, 60, d)
        judge(prefill, decode, 3, 50, *start(prefill, decode, 3, 50, chunks=[10]))
        oracles(control, decode.control)
        for rank in (*prefill.ranks, *decode.ranks):
            assert rank.ask("check")["dirty"] == 0


def test_ranks_that_do_not_fit_together_say_so_until_they_do() -> None:
    """Pools of two sizes: rooms fail with what differs, not with ranks that are missing; nobody joins over and over."""
    common: dict[str, Any] = {"topology": {"pp": 1, "tp": 2}, "liveness_s": 10.0, "rank_liveness_s": 1.0}
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(WorkerProcess("prefill", ranks_bind=free_address(), pages=24, **common))
        other = {"rank": (0, 1), "control": control.ranks_address, "side": "prefill", **common}
        wrong = stack.enter_context(WorkerProcess("rank", id="prefill-0-r1", pages=40, **other))
        room = iter(range(1, 1_000))

        def said() -> dict[str, Any]:
            handle = control.ask("serve", room=next(room), tokens=60, seed=7)["handle"]
            return control.end_of(handle)

        wait_until(lambda: said()["code"] == "manifest_invalid")
        assert "disagree" in (end := said())["message"] and "pp0/tp1" in end["where"]
        stats = control.ask("stats")
        assert not stats["ready"] and stats["stats"].get("count_malformed_reports", 0) == 0
        wrong.kill()
        stack.enter_context(WorkerProcess("rank", id="prefill-0-r1", pages=24, **other))
        wait_until(lambda: control.ask("stats")["ready"])
