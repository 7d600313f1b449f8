"""When a rank last got or lost its conversation: what was asked before that is not believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pd.worker.peers import speakers
from sglang_pd.worker.peers.conversation import Conversation
from sglang_pd.worker.peers.link import Called
from sglang_pd.worker.peers.speakers import Speakers


def of(*epochs: int) -> Any:
    """A manifest of these ranks."""
    return SimpleNamespace(ranks=[SimpleNamespace(epoch=epoch, rank=epoch) for epoch in epochs], epoch=epochs[0])


def talk(*epochs: int) -> Conversation:
    return Conversation(Called(1), source=False, manifest=of(*epochs))


def test_an_agreement_and_a_loss_each_void_what_was_asked_before_about_those_ranks() -> None:
    found, one, other = Speakers(), talk(1, 2), talk(3)
    asked = found.changes
    found.add(one)
    assert found.changed(of(2, 9), asked) and not found.changed(of(3, 9), asked)
    asked = found.changes
    found.add(other)
    assert not found.changed(of(1, 2), asked)
    found.remove(one)
    assert found.changed(of(1), asked) and found.same(of(1, 2)) is None


def test_who_never_had_them_changes_nothing() -> None:
    found, one = Speakers(), talk(1)
    found.add(one)
    asked = found.changes
    found.remove(talk(1))
    assert not found.changed(of(1), asked) and found.same(of(1)) is one


def test_of_ranks_that_are_forgotten_the_worst_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speakers, "MAX_CHANGED", 2)
    found = Speakers()
    asked = found.changes
    for epoch in (1, 2, 3, 4):
        found.add(talk(epoch))
    assert found.changed(of(1), asked) and found.changed(of(9), asked)
    assert not found.changed(of(9), found.changes)
