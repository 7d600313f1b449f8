"""What callers say of a request, as far as it is kept."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sglang_pd.observe import Identity, Recorder, Settings
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.room import Role
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
