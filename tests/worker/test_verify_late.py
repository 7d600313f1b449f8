"""`verify: full` judges what memory holds when a room is admitted, not what it held when a chunk came."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.local_pair import IDS, LocalPair
from support.worker_pair import wait_until

ROOM = 3
"""In the pages of `LocalPair`'s lists: 1, 2 and 3."""


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    yield both
    both.close()


def arrived(pair: LocalPair, tokens: int) -> bool:
    """Whether records of so many tokens are with decode."""
    desk = pair.decode.at.control.desk
    room = desk.decode.rooms.get(ROOM) if desk else None
    return room is not None and any(record.token_stop == tokens for record in room._ledger.held())


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("token", [0, 15, 16, 31, 32, 39])
def test_a_row_that_is_written_over_after_its_chunk_is_not_admitted(pair: LocalPair, layer: int, token: int) -> None:
    pair.start(ROOM)
    pair.prefill.at.send(pair.handles[ROOM], 0, 32, last=False)
    wait_until(lambda: arrived(pair, 32))
    pair.prefill.at.send(pair.handles[ROOM], 32, len(IDS), last=True)
    wait_until(lambda: arrived(pair, len(IDS)))
    row = pair.decode.pools.array("KV", layer, "k")[1 + token // 16, token % 16]
    row.view(np.uint8).flat[5] ^= 1
    pair.prefill.at.finish(pair.handles[ROOM], len(IDS), b"record")
    assert pair.decode.released(ROOM) == ["failed:digest_mismatch", "releasable"]
    assert pair.prefill.released(ROOM)[-1] == "failed:digest_mismatch"
    detail = next(event.error for event in pair.decode.events if event.error is not None)
    assert f"layers [{layer}]" in (detail.where or "")


def test_what_lies_beside_the_prompt_is_not_judged(pair: LocalPair) -> None:
    pair.start(ROOM)
    pair.decode.pools.array("KV", 0, "k")[3, 15] = 7.0  # after the last token, in the prompt's last page
    pair.complete(ROOM)
