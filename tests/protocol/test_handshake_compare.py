"""The verdict: each mismatch by name with both values, all of them at once, and what may differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sglang_pd.protocol.codec import body_limit, type_number
from sglang_pd.protocol.errors import IncompatiblePeer, ManifestError
from sglang_pd.protocol.handshake import _fitting, compare
from sglang_pd.protocol.manifest import InstanceManifest, RankId, Region, Transport
from sglang_pd.protocol.messages import MAX_MISMATCHES, HelloConfirm, Mismatch, Verdict
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.plan import compile_plan, semantic_digest

from .builders import (
    NGRAM,
    Part,
    Pools,
    Shape,
    Spec,
    build,
    every_kind,
    map_components,
    map_ranks,
    map_regions,
)

POOLS = Pools()
PREFILL = build(Shape(every_kind(POOLS), tp=2, name="prefill"))
DECODE = build(Shape(every_kind(POOLS), tp=2, name="decode"))


def rows(verdict: Verdict) -> list[tuple[str, str, str, str, str]]:
    return [(m.component, m.region, m.field, m.prefill, m.decode) for m in verdict.mismatches]


def respecified(kind: str, change: Callable[[Spec], Spec | None], pools: Pools = POOLS) -> InstanceManifest:
    """Decode with one component's description changed."""
    made = [change(spec) if spec.kind == kind else spec for spec in every_kind(pools)]
    return build(Shape(tuple(spec for spec in made if spec is not None), tp=2, name="decode"))


def repart(kind: str, name: str, **facts: Any) -> InstanceManifest:
    def change(spec: Spec) -> Spec:
        return replace(spec, parts=tuple(replace(p, **facts) if p.name == name else p for p in spec.parts))

    return respecified(kind, change)


def one_row(spec: Spec) -> tuple[Part, ...]:
    return tuple(replace(part, rows_per_item=1) for part in spec.parts)


# One test a kind of mismatch: (decode, the rows of the verdict)
MISMATCHES: dict[str, tuple[InstanceManifest, list[tuple[str, str, str, str, str]]]] = {
    "missing component": (
        respecified("PLE", lambda spec: None),
        [("PLE", "", "component", "2 regions", "absent")],
    ),
    "dtype, with equal lengths": (
        repart("KV", "k", dtype="fp16"),
        [("KV", "0/k", "dtype", "u8", "fp16")],
    ),
    "layout": (
        respecified("INDEX_K", lambda spec: replace(spec, layout="interleaved")),
        [("INDEX_K", "", "layout", "keys_then_scales", "interleaved")],
    ),
    "bytes a row, by unit": (
        repart("KV", "k", unit_bytes=6),
        [("KV", "0/k", "row_bytes", "12", "24"), ("KV", "0/k", "unit_bytes", "3", "6")],
    ),
    "units, with equal bytes": (
        repart("KV", "k", groups=(2,), unit_bytes=6),
        [
            ("KV", "0/k", "units_total", "4", "2"),
            ("KV", "0/k", "unit_bytes", "3", "6"),
            ("KV", "0/k", "shard_groups", "(4,)", "(2,)"),
        ],
    ),
    "groups, with equal totals": (
        repart("MAMBA", "conv", groups=(4, 8, 4)),
        [("MAMBA", "0/conv", "shard_groups", "(4, 4, 8)", "(4, 8, 4)")],
    ),
    "groups against none": (
        repart("MAMBA", "conv", groups=(16,)),
        [("MAMBA", "0/conv", "shard_groups", "(4, 4, 8)", "(16,)")],
    ),
    "outer count": (
        repart("MAMBA", "conv", outer=1, unit_bytes=6),
        [("MAMBA", "0/conv", "unit_bytes", "2", "6"), ("MAMBA", "0/conv", "outer_count", "3", "1")],
    ),
    "replicated against sharded": (
        repart("KV", "v", replicated=True),
        [("KV", "0/v", "dim", "sharded", "0 (replicated)")],
    ),
    "layers": (
        respecified("KV", lambda spec: replace(spec, layers=(0, 2))),
        [
            ("KV", "k", "layer_ids", "2 layers, only here: 1", "2 layers, only here: 2"),
            ("KV", "v", "layer_ids", "2 layers, only here: 1", "2 layers, only here: 2"),
        ],
    ),
    "a missing part, TP-08": (
        respecified("PLE", lambda spec: replace(spec, parts=spec.parts[:1])),
        [("PLE", "ngram", "layer_ids", f"1 layers, only here: sentinel {NGRAM}", "0 layers, only here: none")],
    ),
    "space": (
        respecified("INDEX_K", lambda spec: replace(spec, space=POOLS.scaled, parts=one_row(spec))),
        [("INDEX_K", "", "space", "VirtualTok", "Scaled")],
    ),
    "group of compressed keys": (
        respecified("QSA_COMPRESSED", lambda spec: replace(spec, space=replace(POOLS, r=4).scaled, parts=(
            Part("key", (3,), 2, replicated=True),))),
        [("QSA_COMPRESSED", "", "group_tokens", "2", "4")],
    ),
    "group of a ring": (
        respecified("QSA_PENDING", lambda spec: replace(spec, space=replace(POOLS, r=4).ring)),
        [("QSA_PENDING", "", "group_tokens", "2", "4")],
    ),
    "window": (
        respecified("SWA", lambda spec: replace(spec, space=replace(POOLS, window=7).swa)),
        [("SWA", "", "window_tokens", "6", "7")],
    ),
    "page tokens": (
        respecified("QSA_RAW_K", lambda spec: replace(spec, space=replace(POOLS, page_tokens=8).virtual)),
        [("QSA_RAW_K", "", "page_tokens", "4", "8")],
    ),
    "model": (msgspec.structs.replace(DECODE, model="model-b"), [("", "", "model", "model-a", "model-b")]),
    "revision": (msgspec.structs.replace(DECODE, revision="r2"), [("", "", "revision", "", "r2")]),
    "protocol": (msgspec.structs.replace(DECODE, protocol=(2, 0)), [("", "", "protocol_major", "1", "2")]),
    "direction, HS-04": (
        map_ranks(
            msgspec.structs.replace(DECODE, direction="read"),
            lambda r: msgspec.structs.replace(r, transport=Transport(backend="local", directions=("read", "write"))),
        ),
        [("", "", "direction", "write", "read")],
    ),
    "backend": (
        map_ranks(DECODE, lambda r: msgspec.structs.replace(r, transport=Transport(backend="nixl"))),
        [("", "", "backend", "local", "nixl")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_named_with_both_values(name: str) -> None:
    decode, want = MISMATCHES[name]
    verdict = compare(PREFILL, decode)
    assert rows(verdict) == want and not verdict.accepted
    # and the same seen from the other side
    turned = [(c, r, f, d, p) for c, r, f, p, d in want]
    assert sorted(rows(compare(decode, PREFILL))) == sorted(turned)


def test_hs_01_unequal_pages_name_the_field_and_both_values_on_every_component() -> None:
    decode = build(Shape(every_kind(replace(POOLS, page_tokens=8)), tp=2))
    verdict = compare(PREFILL, decode)
    found = {m.component: (m.field, m.prefill, m.decode) for m in verdict.mismatches}
    paged = {"KV", "MLA", "INDEX_K", "QSA_COMPRESSED", "QSA_RAW_K", "QSA_POSITIONS", "DRAFT_KV", "BLOCK_SCALE", "SWA"}
    assert found == dict.fromkeys(paged, ("page_tokens", "4", "8"))
    with pytest.raises(IncompatiblePeer) as caught:
        Pairing(PREFILL, decode)
    assert "page_tokens" in str(caught.value) and "prefill 4" in str(caught.value) and "decode 8" in str(caught.value)


@pytest.mark.parametrize("pages", [(64, 16), (48, 64), (3, 2)], ids=str)
def test_hs_10_page_ratios_whole_or_not_are_refused_for_now(pages: tuple[int, int]) -> None:
    kv = [
        build(Shape((Spec("KV", Pools(capacity_tokens=960, page_tokens=page, r=1).virtual, (Part("k"),)),)))
        for page in pages
    ]
    assert rows(compare(*kv)) == [("KV", "", "page_tokens", str(pages[0]), str(pages[1]))]


def test_every_mismatch_is_listed_at_once() -> None:
    everything = [spec for spec in every_kind(POOLS) if spec.kind != "MAMBA"]
    changed = [
        replace(spec, layout="HND", parts=(replace(spec.parts[0], dtype="bf16"), replace(spec.parts[1], unit_bytes=5)))
        if spec.kind == "KV"
        else replace(spec, layers=(1,))
        if spec.kind == "PLE"
        else spec
        for spec in everything
    ]
    decode = build(Shape(tuple(changed), tp=2), model="other")
    assert rows(compare(PREFILL, decode)) == [
        ("", "", "model", "model-a", "other"),
        ("KV", "", "layout", "NHD", "HND"),
        ("KV", "0/k", "dtype", "u8", "bf16"),
        ("KV", "0/v", "row_bytes", "8", "20"),
        ("KV", "0/v", "unit_bytes", "2", "5"),
        ("MAMBA", "", "component", "4 regions", "absent"),
        ("PLE", "conv", "layer_ids", "1 layers, only here: 0", "1 layers, only here: 1"),
    ]


def test_hs_13_a_component_that_one_side_lacks_is_named_with_both_counts() -> None:
    without = respecified("PLE", lambda spec: None)
    assert rows(compare(PREFILL, without)) == [("PLE", "", "component", "2 regions", "absent")]
    assert rows(compare(without, PREFILL)) == [("PLE", "", "component", "absent", "2 regions")]
    with pytest.raises(ManifestError, match="never empty"):
        map_components(PREFILL, lambda c: msgspec.structs.replace(c, regions=()) if c.kind == "PLE" else c)


def test_hs_04_a_draft_that_one_side_lacks_must_be_marked_optional() -> None:
    without = respecified("DRAFT_KV", lambda spec: None)
    assert compare(PREFILL, without).accepted and compare(without, PREFILL).accepted
    strict = respecified("DRAFT_KV", lambda spec: replace(spec, optional=False))
    assert rows(compare(without, strict)) == [("DRAFT_KV", "", "component", "absent", "2 regions")]


def test_hs_05_instances_without_state_components_or_without_any() -> None:
    only_kv = [build(Shape(every_kind(POOLS)[:1], tp=tp)) for tp in (1, 2)]
    assert compare(*only_kv).accepted
    empty = [build(Shape((), tp=tp)) for tp in (1, 2)]
    assert compare(*empty).accepted
    assert Pairing(*empty).kinds == () and Pairing(*empty).owed(RankId(0, 0)) == {}
    assert not compare(only_kv[0], empty[1]).accepted


# What may differ


def accepted(decode: InstanceManifest, prefill: InstanceManifest = PREFILL) -> None:
    for pair in ((prefill, decode), (decode, prefill)):
        assert rows(compare(*pair)) == []
        Pairing(*pair).digest  # noqa: B018  compiles and proves all plans


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tp_may_differ(tp: int) -> None:
    accepted(build(Shape(every_kind(POOLS), tp=tp)))


def test_pp_may_differ() -> None:
    accepted(build(Shape(every_kind(POOLS), pp=3, tp=2, stages={1: 1, 100: 2})))


def test_dcp_may_differ() -> None:
    specs = tuple(spec for spec in every_kind(POOLS) if spec.kind != "SWA")
    sharded = every_kind(replace(POOLS, dcp=2, interleave=2))
    accepted(build(Shape(sharded, tp=4, dcp=2)), build(Shape(specs, tp=2)))


def test_pool_sizes_rows_slots_and_ring_widths_may_differ() -> None:
    accepted(build(Shape(every_kind(Pools(capacity_tokens=8, swa_capacity_tokens=80, rows=50, slots=2, ring_width=9)))))


def test_addresses_segments_paddings_and_item_shapes_may_differ() -> None:
    specs = [
        replace(spec, parts=tuple(replace(part, pad_bytes=part.pad_bytes + 3) for part in spec.parts))
        for spec in every_kind(POOLS)
    ]
    accepted(build(Shape(tuple(specs), tp=2, segments=3, gap_bytes=100, lead_bytes=77)))
    rowwise = tuple(
        replace(s, parts=tuple(replace(p, rows_per_item=1) for p in s.parts), shared_page=False)
        for s in every_kind(POOLS)
    )
    accepted(build(Shape(rowwise, tp=2)))


def test_minor_versions_and_longest_prompts_may_differ() -> None:
    accepted(msgspec.structs.replace(DECODE, protocol=(1, 7)))
    # HS-08: a decode that holds shorter prompts refuses a room, not the pair
    accepted(msgspec.structs.replace(DECODE, max_tokens=8192))


def test_hs_14_the_order_of_components_changes_nothing() -> None:
    backwards = map_ranks(DECODE, lambda r: msgspec.structs.replace(r, components=r.components[::-1]))
    regions = map_components(DECODE, lambda c: msgspec.structs.replace(c, regions=c.regions[::-1]))
    for other in (backwards, regions):
        accepted(other)
        digests = {
            semantic_digest((compile_plan(src, s.rank, dst, d.rank), s) for s in src.ranks for d in dst.ranks)
            for src, dst in ((PREFILL, DECODE), (PREFILL, other), (other, DECODE), (other, other))
        }
        assert len(digests) == 1


def test_the_semantic_digest_sees_every_change_of_meaning_and_no_change_of_place() -> None:
    def digest(*sides: InstanceManifest) -> int:
        return Pairing(*sides).digest

    base = digest(PREFILL, DECODE)
    moved = build(Shape(every_kind(Pools(capacity_tokens=8, rows=9)), tp=2, segments=2, lead_bytes=640))
    assert digest(PREFILL, moved) == base
    for other in (Shape(every_kind(POOLS), tp=4), Shape(every_kind(POOLS, layers=(0, 2)), tp=2)):
        prefill = PREFILL if other.tp == 4 else build(other)
        assert digest(prefill, build(other)) != base


# Transports and memory


def test_transports_that_cannot_meet_are_refused_here() -> None:
    def on(instance: InstanceManifest, device: str = "cpu", **facts: Any) -> InstanceManifest:
        def change(rank: Any) -> Any:
            segments = tuple(msgspec.structs.replace(s, device=device) for s in rank.segments)
            return msgspec.structs.replace(rank, segments=segments, transport=Transport(backend="local", **facts))

        return map_ranks(instance, change)

    here, there = ({"same_host_only": True, "host_id": host} for host in ("a", "b"))
    assert [m.field for m in compare(on(PREFILL, **here), on(DECODE, **there)).mismatches] == ["host_id"]
    assert compare(on(PREFILL, **here), on(DECODE, **here)).accepted
    unknown = compare(on(PREFILL, same_host_only=True), on(DECODE, same_host_only=True))
    assert [m.field for m in unknown.mismatches] == ["host_id"]
    gpu = compare(on(PREFILL), on(DECODE, "cuda:1"))
    assert [(m.field, m.prefill) for m in gpu.mismatches] == [("memory", "any")]
    assert "cuda" in gpu.mismatches[0].decode
    assert compare(on(PREFILL), on(DECODE, "cuda:1", device_memory=True)).accepted
    assert not compare(on(PREFILL, host_memory=False), on(DECODE)).accepted
    one = msgspec.structs.replace(PREFILL.ranks[1], transport=Transport(backend="local", directions=("read",)))
    half = msgspec.structs.replace(PREFILL, ranks=(PREFILL.ranks[0], one))
    assert [(m.field, "pp0/tp1" in m.prefill) for m in compare(half, DECODE).mismatches] == [
        ("transport.directions", True)
    ]


def test_ranks_of_one_instance_have_one_backend() -> None:
    """Else a rank meets a peer of the other backend, though the sets of both sides are equal."""

    def mixed(instance: InstanceManifest, *names: str) -> InstanceManifest:
        ranks = [
            msgspec.structs.replace(rank, transport=Transport(backend=names[number % 2]))
            for number, rank in enumerate(instance.ranks)
        ]
        return msgspec.structs.replace(instance, ranks=tuple(ranks))

    for prefill, decode in ((("local", "nixl"), ("nixl", "local")), (("local", "nixl"), ("local", "nixl"))):
        verdict = compare(mixed(PREFILL, *prefill), mixed(DECODE, *decode))
        assert [(m.field, m.prefill, m.decode) for m in verdict.mismatches] == [("backend", "local nixl", "local nixl")]
    assert compare(mixed(PREFILL, "nixl", "nixl"), mixed(DECODE, "nixl", "nixl")).accepted


def test_decode_regions_that_share_bytes_are_refused_and_a_prefills_are_not() -> None:
    def pull(region: Region) -> list[Region]:
        # layer 1 starts one byte before the end of layer 0
        return [msgspec.structs.replace(region, offset=region.offset - (region.layer_id == 1 and region.part == "k"))]

    close = map_regions(DECODE, "KV", pull)
    verdict = compare(PREFILL, close)
    assert [m.field for m in verdict.mismatches] == ["overlap"]
    assert "KV[" in verdict.mismatches[0].region
    assert compare(close, DECODE).accepted


def test_views_of_one_page_share_a_stride_without_sharing_bytes() -> None:
    # keys then scales, K beside V: equal strides, disjoint places
    assert compare(PREFILL, DECODE).accepted
    late = map_regions(
        DECODE, "INDEX_K", lambda r: [msgspec.structs.replace(r, offset=r.offset - (r.part == "scale"))]
    )  # fmt: skip
    assert [m.field for m in compare(PREFILL, late).mismatches] == ["overlap"]


# Context parallelism that leaves tokens without a place


@pytest.mark.parametrize("heads,tp,dcp,legal", [(4, 4, 2, False), (2, 4, 2, True), (2, 8, 4, True), (4, 8, 4, False)])
def test_context_shards_need_a_copy_of_each_head_in_each_class(heads: int, tp: int, dcp: int, legal: bool) -> None:
    parts = (Part("k", (heads,), 2),)
    cut = build(Shape((Spec("KV", Pools(dcp=dcp).virtual, parts, local=True),), tp=tp, dcp=dcp))
    whole = build(Shape((Spec("KV", POOLS.virtual, parts),), tp=2))
    for pair in ((cut, whole), (whole, cut)):
        verdict = compare(*pair)
        assert verdict.accepted == legal
        if not legal:
            assert [(m.component, m.region, m.field) for m in verdict.mismatches] == [("KV", "0/k", "tp")]
            text = verdict.mismatches[0].prefill + verdict.mismatches[0].decode
            assert f"tp {tp} with dcp {dcp}" in text


# Pairings


def test_a_long_list_of_mismatches_stays_within_what_a_message_holds() -> None:
    layers = tuple(range(300))
    many = [
        build(Shape((Spec("KV", POOLS.virtual, (Part("k", dtype=d),), ls),)))
        for d, ls in (("a", layers), ("b", layers[:1]))
    ]
    verdict = compare(*many)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict
    assert "299 in all" in verdict.mismatches[0].prefill


@pytest.mark.parametrize("text", ["x" * 256, "\x00\n"])
def test_a_verdict_of_the_longest_texts_decodes(text: str) -> None:
    verdict = compare(PREFILL, msgspec.structs.replace(DECODE, model=text, revision=text))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict


def test_pairs_of_more_ranks_than_can_be_planned_in_time_are_refused() -> None:
    """Plans are compiled by a thread that other peers wait for: nobody takes it for minutes by what they declare."""
    wide, wider = (build(Shape((Spec("KV", POOLS.virtual, (Part("k", (512,)),), (0,)),), tp=tp)) for tp in (128, 512))
    assert compare(wide, wide).accepted
    (mismatch,) = compare(wide, wider).mismatches
    assert mismatch.field == "region_pairs" and "128 ranks" in mismatch.prefill and "512 ranks" in mismatch.decode


def test_the_longest_verdict_fits_its_message() -> None:
    one = Mismatch(component="c" * 128, region="r" * 200, field="f" * 64, prefill="\u00e9" * 500, decode="\u00e9" * 500)
    verdict = Verdict(accepted=False, mismatches=tuple(_fitting([one] * MAX_MISMATCHES)))
    assert (
        len(msgspec.msgpack.encode(verdict)) < body_limit(type_number(HelloConfirm)) * 0.9
        and len(verdict.mismatches) > 1_000
    )
