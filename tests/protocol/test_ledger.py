"""The range ledger against an obvious one: a set of (layer, token) cells."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol import ledger
from sglang_pd.protocol.errors import LocalProtocolError, RemoteProtocolError
from sglang_pd.protocol.ledger import Expected, RangeLedger
from sglang_pd.protocol.messages import Writer, Wrote

W = Writer(0, 0)
LAYERS = (0, 3, 7, 2**32 - 1)
START, STOP = 2, 11
OWED = Expected(W, "KV", LAYERS, START, STOP)


def record(layers: tuple[int, int], tokens: tuple[int, int], *, last: bool = False, component: str = "KV") -> Wrote:
    return Wrote(
        room=1,
        generation=1,
        writer=W,
        component=component,
        layer_start=layers[0],
        layer_stop=layers[1],
        token_start=tokens[0],
        token_stop=tokens[1],
        last=last,
    )


def pairs(cuts: list[int]) -> st.SearchStrategy[tuple[int, int]]:
    return st.sampled_from([(a, b) for a in cuts for b in cuts if a < b])


RECORDS = st.builds(
    lambda layers, tokens, last: record(layers, tokens, last=last),
    pairs([0, 1, 3, 4, 7, 8, 2**32 - 1, 2**32]),
    pairs(list(range(14))),
    st.booleans(),
)


@given(st.lists(RECORDS, max_size=25))
def test_it_agrees_with_a_set_of_cells(records: list[Wrote]) -> None:
    book = RangeLedger([OWED])
    cells: set[tuple[int, int]] = set()
    seen: set[Wrote] = set()
    last = False
    for item in records:
        wanted = {
            (layer, token)
            for layer in LAYERS
            if item.layer_start <= layer < item.layer_stop
            for token in range(item.token_start, item.token_stop)
        }
        fits = bool(wanted) and START <= item.token_start and item.token_stop <= STOP
        allowed = fits and not wanted & cells and not (item.last and last)
        before = (book.records, book.complete, book.missing())
        if item in seen:
            assert book.add(item) is False
        elif allowed:
            assert book.add(item) is True
            seen.add(item)
            cells |= wanted
            last = last or item.last
        else:
            with pytest.raises(RemoteProtocolError) as caught:
                book.add(item)
            assert caught.value.code == "range_conflict"
            assert (book.records, book.complete, book.missing()) == before
        assert book.records == len(seen)
        assert book.complete == (last and len(cells) == len(LAYERS) * (STOP - START))
        assert book.complete == (not book.missing())


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_any_tiling_in_any_order_with_repeats_completes(seed: int, cuts: int) -> None:
    rng = Random(seed)
    edges = sorted({START, STOP, *(rng.randrange(START, STOP) for _ in range(cuts))})
    rows = [(layer, layer + 1) for layer in LAYERS] if rng.random() < 0.5 else [(0, 4), (4, 2**32)]
    tiles = [record(row, (a, b)) for row in rows for a, b in zip(edges, edges[1:], strict=False)]
    final = rng.randrange(len(tiles))
    tiles[final] = msgspec.structs.replace(tiles[final], last=True)
    order = tiles + [rng.choice(tiles) for _ in range(5)]
    rng.shuffle(order)
    book = RangeLedger([OWED])
    taken = Counter(book.add(tile) for tile in order)
    assert taken[True] == len(tiles) and taken[False] == 5 and book.complete and book.writer_complete(W)
    assert all(edges == [START, STOP] for edges in book._pairs[W, "KV"].covered), "neighbours become one"


def test_every_pair_counts_by_itself() -> None:
    other = Writer(1, 3)
    book = RangeLedger([OWED, Expected(W, "MAMBA", (1,), 0, 4), Expected(other, "KV", (), 0, 0)])
    assert book.writers == {W, other}
    book.add(record((0, 2**32), (START, STOP), last=True))
    assert not book.writer_complete(W) and book.missing()[0].startswith("pp0.tp0/MAMBA")
    book.add(record((1, 2), (0, 4), last=True, component="MAMBA"))
    assert book.writer_complete(W) and not book.complete
    assert book.missing() == ["pp1.tp3/KV: the last record"]
    book.add(msgspec.structs.replace(record((0, 0), (0, 0), last=True), writer=other))
    assert book.complete


def test_an_end_mark_may_come_apart_from_the_last_range() -> None:
    book = RangeLedger([OWED])
    mark = record((0, 0), (0, 0), last=True)
    assert book.add(mark) and not book.add(mark) and not book.complete
    book.add(record((0, 2**32), (START, STOP)))
    assert book.complete


def test_what_nobody_owes_is_a_conflict() -> None:
    book = RangeLedger([OWED, Expected(W, "EMPTY", (), 0, 0)])
    for bad in (
        record((0, 1), (START, STOP), component="SWA"),
        msgspec.structs.replace(record((0, 1), (START, STOP)), writer=Writer(9, 9)),
        record((0, 1), (0, 1), component="EMPTY"),
        record((1, 3), (START, STOP)),
        record((0, 1), (START - 1, STOP)),
    ):
        with pytest.raises(RemoteProtocolError):
            book.add(bad)
    assert book.records == 0


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_RECORDS", 3)
    book = RangeLedger([OWED])
    for token in range(START, START + 3):
        book.add(record((0, 1), (token, token + 1)))
    with pytest.raises(RemoteProtocolError, match="more than 3"):
        book.add(record((0, 1), (START + 3, START + 4)))


def test_what_cannot_be_expected() -> None:
    for layers, start, stop in (((3, 3), 0, 1), ((3, 1), 0, 1), ((1,), 2, 1), ((1,), -1, 1)):
        with pytest.raises(LocalProtocolError):
            Expected(W, "KV", layers, start, stop)
    with pytest.raises(LocalProtocolError, match="twice"):
        RangeLedger([OWED, OWED])
