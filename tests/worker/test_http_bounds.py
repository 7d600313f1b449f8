"""Bounds on request bodies, with a client that is played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_pd.http import bounds as http_bounds
from sglang_pd.http.bounds import FREE_BYTES, Bodies, BodyLate, ClientGone
from sglang_pd.protocol.errors import RoomError


class Client:
    """Sends pieces, then nothing: whoever asks further waits for ever."""

    def __init__(self, *pieces: bytes, length: int | None = None, ends: bool = True) -> None:
        self._left: list[dict[str, Any]] = [{"type": "http.request", "body": p, "more_body": True} for p in pieces]
        if ends:
            self._left[-1]["more_body"] = False
        self.scope = {"headers": [(b"content-length", str(length).encode())] if length is not None else []}
        self.asked = 0

    def leave(self) -> None:
        self._left.append({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        if not self._left:
            await asyncio.Event().wait()
        return self._left.pop(0)


async def read(bodies: Bodies, client: Client) -> tuple[bytes, int]:
    async with bodies.taken(client.scope, client.receive) as body:
        return body, bodies.held_bytes


def code(bodies: Bodies, client: Client) -> str:
    with pytest.raises(RoomError) as caught:
        asyncio.run(read(bodies, client))
    assert bodies.held_bytes == 0
    return caught.value.code


@pytest.mark.parametrize("pieces", [[b""], [b"ab"], [b"a", b"", b"b"], [b"x" * FREE_BYTES, b"yz"]])
def test_a_body_is_its_pieces_and_counts_beyond_what_is_free(pieces: Sequence[bytes]) -> None:
    bodies = Bodies(10**6, 10**6)
    body, held = asyncio.run(read(bodies, Client(*pieces)))
    assert body == b"".join(pieces) and held == max(0, len(body) - FREE_BYTES) and bodies.held_bytes == 0


def test_one_that_is_too_long_is_refused_before_it_is_read() -> None:
    declared = Client(b"a", length=101)
    assert code(Bodies(100, 100), declared) == "request_too_large" and declared.asked == 0
    undeclared = Client(*[b"a" * 30] * 10)
    assert code(Bodies(100, 100), undeclared) == "request_too_large" and undeclared.asked == 4


def test_all_together_are_bounded_but_for_the_small_ones() -> None:
    large = b"a" * (3 * FREE_BYTES)

    async def test() -> None:
        bodies = Bodies(4 * FREE_BYTES, 4 * FREE_BYTES)
        first = Client(large, ends=False)
        reading = asyncio.create_task(read(bodies, first))
        await asyncio.sleep(0.01)
        assert bodies.held_bytes == 2 * FREE_BYTES
        for client in (Client(large + b"a" * FREE_BYTES), Client(b"a", length=4 * FREE_BYTES)):
            with pytest.raises(RoomError) as caught:
                await read(bodies, client)
            assert caught.value.code == "pool_exhausted" and caught.value.http_status == 503
        assert (await read(bodies, Client(b"a" * FREE_BYTES)))[1] == 2 * FREE_BYTES
        reading.cancel()
        await asyncio.wait({reading})
        assert bodies.held_bytes == 0 and len((await read(bodies, Client(large)))[0]) == len(large)

    asyncio.run(test())


@pytest.mark.parametrize("limit", ["IDLE_S", "WHOLE_S"])
def test_one_that_does_not_come_gives_its_place_back(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bounds, limit, 0.05)
    with pytest.raises(BodyLate):
        asyncio.run(read(Bodies(1000, 1000), Client(b"a", ends=False)))


def test_a_client_that_goes_away_gives_its_place_back() -> None:
    bodies, client = Bodies(10**6, 10**6), Client(b"a" * 100_000, ends=False)
    client.leave()
    with pytest.raises(ClientGone):
        asyncio.run(read(bodies, client))
    assert bodies.held_bytes == 0
