"""Decode's transport hears of every writer, with the writer's own words, before anything is exposed to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.local_pair import LocalPair

from sglang_pd.protocol.errors import BackendError


@pytest.fixture
def pair() -> Iterator[LocalPair]:
    both = LocalPair()
    yield both
    both.close()


def test_a_writer_is_admitted_with_its_own_blob_before_its_first_room(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport's proof may need to know a writer that dies before it ever connects."""
    admitted: list[tuple[int, bytes]] = []
    backend = pair.decode.backend
    original = backend.admit

    def admit(epoch: int, blob: bytes) -> None:
        admitted.append((epoch, blob))
        original(epoch, blob)

    monkeypatch.setattr(backend, "admit", admit)
    writer = pair.prefill.backend
    pair.start(1)
    pair.complete(1)
    assert admitted == [(writer.epoch, writer.describe())]


def test_a_writer_that_the_transport_does_not_admit_is_exposed_to_nothing(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admit(epoch: int, blob: bytes) -> Any:
        raise BackendError("a blob that cannot be believed", code="message_malformed", where="connect")

    monkeypatch.setattr(pair.decode.backend, "admit", admit)
    pair.start(1)
    said = pair.decode.released(1)
    assert said[-1] == "releasable" and said[0].startswith("failed:") and pair.prefill.of(1)[:1] != ["done"]
    assert pair.prefill.at.stats()["bytes_written"] == 0
