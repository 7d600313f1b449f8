"""Kinds: what their descriptors say, and that a new one needs nothing but its descriptor."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol.bind import Chunk, bind, live_elements
from sglang_pd.protocol.errors import ManifestError, PlanError
from sglang_pd.protocol.handshake import compare
from sglang_pd.protocol.kinds import (
    KINDS,
    Elements,
    Kind,
    Placement,
    Prompt,
    Validity,
    first_page,
    kind_of,
    list_count,
    live_tokens,
    register_kind,
)
from sglang_pd.protocol.manifest import InstanceManifest
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.spaces import Page, RequestRow, Ring, Scaled, SwaTok, VirtualTok

from . import oracle
from .builders import Part, Pools, Shape, Spec, build, every_kind

VIRTUAL = VirtualTok(capacity_tokens=1024, page_tokens=64, dcp_size=1)


def test_every_kind_of_the_design_exists() -> None:
    assert set(KINDS) == set(oracle.LIVE)
    assert {"QSA_PENDING": 2**32 - 2, "PLE": 2**32 - 1}.items() <= {
        name: layer for name, kind in KINDS.items() for layer in kind.request_wide.values()
    }.items()
    assert {name for name, kind in KINDS.items() if kind.validity is Validity.CHUNK} == oracle.STREAMS


def test_an_unknown_kind_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ManifestError) as caught:
        kind_of("KVV")
    assert caught.value.code == "kind_unknown" and "QSA_PENDING" in str(caught.value)


def test_a_name_is_taken_once() -> None:
    register_kind(KINDS["KV"])
    with pytest.raises(ManifestError) as caught:
        register_kind(Kind("KV", "other", (VirtualTok,), KINDS["KV"].placements, Validity.LAST, live_tokens, ("k",)))
    assert caught.value.code == "kind_unknown"
    assert KINDS["KV"].parts == ("k", "v")


@pytest.mark.parametrize(
    "change",
    [{"name": ""}, {"name": "K" * 65}, {"spaces": ()}, {"parts": ()}, {"request_wide": {"rope": 2**32 - 2}}],
    ids=str,
)
def test_an_impossible_descriptor_is_refused(change: dict[str, object]) -> None:
    facts = {"name": "X", "summary": "", "spaces": (VirtualTok,), "placements": frozenset(Placement)}
    facts |= {"validity": Validity.LAST, "live": live_tokens, "parts": ("k",)}
    with pytest.raises(ManifestError):
        Kind(**(facts | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens,prefix", [(0, 0), (-1, 0), (4, 5), (4, -1)])
def test_an_impossible_prompt_is_refused(tokens: int, prefix: int) -> None:
    with pytest.raises(PlanError):
        Prompt(tokens, prefix)


SPACES = [
    VIRTUAL,
    SwaTok(capacity_tokens=64, page_tokens=4, window_tokens=6),
    Scaled(of=VIRTUAL, ratio=4),
    Scaled(of=SwaTok(capacity_tokens=64, page_tokens=4, window_tokens=6), ratio=2),
    Ring(of=RequestRow(rows=3), width=6, group_tokens=4),
    RequestRow(rows=3),
]


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(st.integers(0, 5), st.integers(1, 300))
def test_live_elements_are_those_of_the_second_opinion(kind: str, pages: int, more: int) -> None:
    prefix = pages * 64
    for space in SPACES:
        if not isinstance(space, KINDS[kind].spaces):
            continue
        got = live_elements(kind, space, Prompt(prefix + more, prefix))
        assert list(range(got.start, got.stop)) == oracle.live(kind, space, oracle.Request(prefix + more, prefix))
        assert len(got) >= 0


@pytest.mark.parametrize("tokens,pending", [(1, 1), (3, 3), (4, 0), (5, 1), (7, 3), (8, 0), (37, 1), (40, 0)])
def test_the_open_group_holds_the_remainder(tokens: int, pending: int) -> None:
    ring = Ring(of=RequestRow(rows=3), width=4, group_tokens=4)
    assert live_elements("QSA_PENDING", ring, Prompt(tokens)) == Elements(tokens - pending, tokens)
    compressed = live_elements("QSA_COMPRESSED", Scaled(of=VIRTUAL, ratio=4), Prompt(tokens))
    assert compressed == Elements(0, tokens // 4)


# ST-14: a count rule of (divisor, page, map, filter) against counting by hand
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 127, 128, 129, 511, 512])
@pytest.mark.parametrize("page,dcp", [(1, 1), (4, 1), (64, 1), (256, 1), (4, 4), (64, 2)])
@pytest.mark.parametrize("window", [None, 1, 128])
def test_st_14_counts_are_those_of_counting(tokens: int, page: int, dcp: int, window: int | None) -> None:
    for prefix in (0, page * dcp):
        if prefix > tokens:
            continue
        of: VirtualTok | SwaTok = VirtualTok(capacity_tokens=1024, page_tokens=page, dcp_size=dcp)
        if window is not None:
            of = SwaTok(capacity_tokens=1024, page_tokens=page, window_tokens=window)
        space, request = Page(of=of), oracle.Request(tokens, prefix)
        assert list_count(space, Prompt(tokens, prefix)) == oracle.pages_needed(of, request)
        assert first_page(space, Prompt(tokens, prefix)) == oracle.first_listed(of, request) // of.page_len
    assert list_count(RequestRow(rows=3), Prompt(tokens)) == 1


# A new kind is one descriptor


@pytest.fixture
def made_up() -> Iterator[Kind]:
    """A kind nobody has heard of: every third token's mark, streamed, and one request-wide vector."""

    def third(prompt: Prompt, space: object) -> Elements:
        ratio = space.ratio if isinstance(space, Scaled) else 1
        return Elements(prompt.prefix_tokens // ratio, prompt.tokens // ratio)

    kind = register_kind(
        Kind(
            "TEST_MARKS",
            "a made-up kind",
            (Scaled,),
            frozenset(Placement),
            Validity.CHUNK,
            third,
            ("mark", "sum"),
        )
    )
    oracle.LIVE[kind.name] = "groups"
    yield kind
    del oracle.LIVE[kind.name]
    del KINDS[kind.name]


def marks(name: str, tp: int, **pools: int) -> InstanceManifest:
    own = Pools(page_tokens=6, capacity_tokens=60, swa_capacity_tokens=36, r=3, **pools)
    spec = Spec(
        "TEST_MARKS", own.scaled, (Part("mark", (4,), 3, outer=2), Part("sum", (5,), 1, replicated=True)), (3, 9)
    )
    return build(Shape((*every_kind(own), spec), tp=tp, name=name))  # fmt: skip


@pytest.mark.usefixtures("made_up")
def test_a_made_up_kind_goes_all_the_way_with_no_other_edit() -> None:
    prefill, decode = marks("p", 4), marks("d", 2, rows=8)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(prefill), type=InstanceManifest)
    assert again == prefill
    assert compare(prefill, decode).accepted
    pairing = Pairing(prefill, decode)
    request, whole = oracle.Request(20, 6), oracle.Request(20)
    src = oracle.Side(prefill, whole, oracle.make_lists(prefill, whole, Random(1)))
    dst = oracle.Side(decode, request, oracle.make_lists(decode, request, Random(2)))
    names = oracle.Names()
    oracle.fill_source(src, names)
    dst.blank(oracle.canary)
    room = pairing.room(Prompt(20, 6), oracle.ingest(src.lists), oracle.ingest(dst.lists))
    for chunk in (Chunk(0, 11, last=False), Chunk(11, 20, last=True)):
        for s, d, plan in pairing.all_plans():
            oracle.execute(bind(plan, room, chunk), src.memory[s], dst.memory[d], dst.written[d])
    for rank in decode.ranks:
        assert oracle.problems(dst, names, rank.rank, set(decode.kinds)) == []
    missing = build(
        Shape(every_kind(Pools(page_tokens=6, capacity_tokens=60, swa_capacity_tokens=36, r=3)), tp=2, name="without")
    )
    verdict = compare(prefill, missing)
    assert [(m.component, m.field, m.decode) for m in verdict.mismatches] == [("TEST_MARKS", "component", "absent")]


def test_the_made_up_kind_is_gone_again() -> None:
    assert "TEST_MARKS" not in KINDS
    with pytest.raises(ManifestError):
        marks("p", 2)


@pytest.mark.usefixtures("made_up")
def test_a_descriptor_that_reaches_beyond_its_list_is_refused_not_wrapped() -> None:
    # live_tokens over a sliding window asks for tokens whose pages are not listed; numpy would take them from the end.
    KINDS.pop("TEST_MARKS")
    register_kind(
        Kind("TEST_MARKS", "wrong", (SwaTok,), frozenset(Placement), Validity.LAST, live_tokens, ("mark",))
    )  # fmt: skip
    own = Pools()
    spec = Spec("TEST_MARKS", own.swa, (Part("mark", (4,), 1),))
    prefill, decode = (build(Shape((spec,), name=name)) for name in "pd")
    request = oracle.Request(20)
    lists = [oracle.ingest(oracle.make_lists(side, request, Random(1))) for side in (prefill, decode)]
    pairing = Pairing(prefill, decode)
    room = pairing.room(Prompt(20), *lists)
    with pytest.raises(PlanError, match="outside the index list"):
        bind(pairing.plan(prefill.ranks[0].rank, decode.ranks[0].rank), room, Chunk(0, 20, last=True))
