"""Several threads may ask one endpoint for its events: each event is given once, and every caller's are in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from support.local_pair import LocalPair
from support.worker_pair import wait_until

from sglang_pd.worker.events import EventKind, RoomEvent

EVENTS, THREADS = 1_000, 4


class Yielding(deque[RoomEvent]):
    """Lets other threads run between the look whether there is an event and the taking of it."""

    def __bool__(self) -> bool:
        any_left = len(self) > 0
        time.sleep(0.0005)
        return any_left


def test_events_polled_by_several_threads_are_neither_lost_nor_given_twice() -> None:
    pair = LocalPair()
    at: Any = pair.prefill.at
    at._events = Yielding()
    given: list[list[int]] = [[] for _ in range(THREADS)]
    errors: list[BaseException] = []
    over = threading.Event()

    def ask(mine: list[int]) -> None:
        try:
            while not over.is_set():
                mine.extend(event.room for event in at.poll())
        except BaseException as error:
            errors.append(error)

    def emit(first: int) -> None:
        for number in range(first, first + 100):
            at._emit(RoomEvent(EventKind.ALERT, number, 1, handle=1))
            time.sleep(0.0002)  # one at a time: each may wake another thread

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in given]
    try:
        for thread in threads:
            thread.start()
        for first in range(0, EVENTS, 100):
            at._loop.submit(lambda first=first: emit(first))
        wait_until(lambda: errors or sum(map(len, given)) >= EVENTS)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        pair.close()
    assert not errors
    assert sorted(number for mine in given for number in mine) == list(range(EVENTS))
    assert all(mine == sorted(mine) for mine in given)
