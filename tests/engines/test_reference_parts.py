"""The pieces of the reference model against plain arithmetic: fractions, Python integers and loops."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reference_run import PREFILL, SPARSE, Host, Size, prompt_ids

from sglang_pd.engines.base import HandoffRecord, PrefillChunk, Request, Sampling
from sglang_pd.engines.reference import ReferenceConfig, ReferenceEngine
from sglang_pd.engines.reference.attention import Choice, attend
from sglang_pd.engines.reference.config import state_spec
from sglang_pd.engines.reference.gdn import Inputs, causal_conv, recur
from sglang_pd.engines.reference.grid import F64, Matrix, linear, score_scale, snap
from sglang_pd.engines.reference.links import Links
from sglang_pd.engines.reference.mla import quantise
from sglang_pd.engines.reference.ple import grams, next_history
from sglang_pd.engines.reference.qsa import top
from sglang_pd.engines.sampling import choose, logprobs, uniform
from sglang_pd.memory.index_pool import LeaseError
from sglang_pd.protocol.errors import ConfigError, LocalProtocolError, PdError, RemoteProtocolError, RoomError
from sglang_pd.protocol.indices import prompt_digest


def rounded(x: float, bits: int) -> Fraction:
    return Fraction(round(Fraction(x) * 2**bits), 2**bits)  # Python rounds fractions half to even


@given(st.floats(-1e6, 1e6), st.sampled_from([12, 16, 20]))
def test_snap_rounds_to_the_grid_ties_to_even(x: float, bits: int) -> None:
    assert Fraction(snap(torch.tensor([x], dtype=F64), bits).item()) == rounded(x, bits)


@pytest.mark.parametrize("half", [0.5, 1.5, -0.5, -2.5, 1e5 + 0.5])
def test_snap_at_a_tie(half: float) -> None:
    x = half * 2.0**-20
    assert Fraction(snap(torch.tensor([x], dtype=F64)).item()) == rounded(x, 20)


def grid(*shape: int, bits: int = 20, seed: int = 0) -> torch.Tensor:
    return snap(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64), bits)


def test_a_linear_layer_is_integer_arithmetic() -> None:
    x, w = grid(3, 40), grid(5, 40, bits=10, seed=1)
    got = linear(x, Matrix.of(w))
    for i in range(3):
        for j in range(5):
            want = sum(int(a * 2**20) * int(b * 2**10) for a, b in zip(x[i].tolist(), w[j].tolist(), strict=True))
            assert Fraction(got[i, j].item()) == Fraction(want, 2**30)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.7e5])
def test_a_sum_that_might_not_be_exact_is_refused(value: float) -> None:
    x = grid(2, 40)
    x[1, 7] = value
    with pytest.raises(LocalProtocolError, match="headroom"):
        linear(x, Matrix.of(grid(5, 40, bits=10, seed=1)))


@pytest.mark.parametrize("width", [8, 16, 32, 40])
def test_scores_are_scaled_by_a_power_of_two(width: int) -> None:
    scale = score_scale(width)
    assert np.log2(scale) == round(np.log2(scale))
    assert 0.5 < scale * width**0.5 < 2.0


def test_attention_is_exact_and_its_parts_merge_exactly() -> None:
    """One softmax over all keys, and two ranks with half of them each that share a maximum: the same bits."""
    q, k, v = grid(1, 2, 4, 16), grid(1, 6, 2, 16, seed=1), grid(1, 6, 2, 16, bits=16, seed=2)
    mask = torch.tensor([[[True] * 5 + [False], [True] * 6]])
    whole = attend(q, k, v, Choice(mask), Links())
    for head in range(4):
        scores = [rounded((q[0, 0, head] * k[0, t, head // 2]).sum().item() * 0.25, 16) for t in range(5)]
        weights = [rounded(float(np.exp(float(s - max(scores)))), 20) for s in scores]
        for column in range(16):
            values = [Fraction(v[0, t, head // 2, column].item()) for t in range(5)]
            exact = sum(a * b for a, b in zip(weights, values, strict=True)) / sum(weights)
            assert abs(Fraction(whole[0, 0, head, column].item()) - exact) <= Fraction(1, 2**21)
    halves = [slice(0, 3), slice(3, 6)]
    maxima: list[torch.Tensor] = []
    for part in halves:
        attend(q, k[:, part], v[:, part], Choice(mask[..., part]), Links(dcp_max=lambda x: maxima.append(x) or x))
    most = torch.stack(maxima).amax(0)
    sums: list[list[torch.Tensor]] = [[], []]
    for number, part in enumerate(halves):
        links = Links(dcp_max=lambda x: most, dcp_sum=lambda x, n=number: sums[n].append(x) or x)
        attend(q, k[:, part], v[:, part], Choice(mask[..., part]), links)
    total, values_sum = (sums[0][i] + sums[1][i] for i in range(2))
    merged = snap(values_sum.view(1, 2, 2, 2, 16) / total).permute(0, 3, 1, 2, 4).reshape(whole.shape)
    assert torch.equal(merged, whole)


def test_the_lowest_of_equal_blocks_comes_first() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0, 9.0]], dtype=F64)
    visible = torch.tensor([[True] * 5 + [False]])
    assert top(scores, visible, 2).tolist() == [[False, True, True, False, False, False]]
    assert top(scores, visible, 4).tolist() == [[False, True, True, True, True, False]]
    assert top(torch.zeros(1, 6, dtype=F64), visible, 3).tolist() == [[True] * 3 + [False] * 3]
    few = torch.tensor([[True] + [False] * 5])
    assert top(scores, few, 3).tolist() == few.tolist()


def test_an_eos_in_the_past_ends_its_segment() -> None:
    eos = 2
    got = grams(torch.tensor([[eos, eos]]), torch.tensor([[5, 6, eos, 7, 8, 9]]), eos)[0]
    assert got.tolist() == [[5, eos, eos], [6, 5, eos], [eos, 6, 5], [7, eos, eos], [8, 7, eos], [9, 8, 7]]
    history = torch.tensor([[eos, eos]])
    for token in (5, 6, eos, 7):
        history = next_history(history, torch.tensor([[token]]))
    assert history.tolist() == [[eos, 7]]


def test_a_dilated_convolution_over_any_cut() -> None:
    w, new = grid(3, 4, bits=10), grid(1, 11, 3, seed=1)
    for dilation in (1, 3):
        past = torch.zeros(1, 3, 3 * dilation, dtype=F64)
        want, left = causal_conv(past, new, w, dilation)
        line = torch.cat([past[0].T, new[0]])
        for t in range(11):
            naive = sum(w[:, j] * line[t + j * dilation] for j in range(4))
            assert torch.equal(want[0, t], snap(torch.as_tensor(naive)))
        first, middle = causal_conv(past, new[:, :4], w, dilation)
        second, end = causal_conv(middle, new[:, 4:], w, dilation)
        assert torch.equal(torch.cat([first, second], 1), want)
        assert torch.equal(end, left)


def test_the_delta_rule_in_its_order() -> None:
    """Decay, read, write, output, with every rounding where it is said to be."""
    n, heads, dk, dv = 5, 2, 3, 4
    q, k = grid(1, n, heads, dk, bits=16), grid(1, n, heads, dk, bits=16, seed=1)
    v, state = grid(1, n, heads, dv, seed=2), grid(1, heads, dk, dv, seed=3)
    decay, beta = grid(1, n, heads, bits=16, seed=4).abs(), grid(1, n, heads, seed=5).abs()
    left, out = recur(state.clone(), Inputs(q, k, v, decay, beta))
    s = state[0]
    for t in range(n):
        s = snap(s * decay[0, t, :, None, None])
        read = (s * k[0, t, :, :, None]).sum(1)
        s = snap(s + k[0, t, :, :, None] * snap((v[0, t] - read) * beta[0, t, :, None])[:, None])
        assert torch.equal(out[0, t], snap((s * q[0, t, :, :, None]).sum(1)))
    assert torch.equal(left[0], s)


def test_index_keys_survive_their_quantisation() -> None:
    keys = grid(1, 9, 16)
    keys[0, 3] = 0
    key, scale = quantise(keys)
    assert (key.dtype, scale.dtype, key.abs().max().item()) == (torch.int8, torch.float32, 127)
    error = (key.to(F64) * scale[..., None].to(F64) - keys).abs().amax(-1)
    assert (error <= scale * 0.51).all()


def test_draws_depend_on_seed_and_number_alone() -> None:
    logits = np.array([0.0, 1.0, 2.0, -50.0])
    sampling = Sampling(temperature=1.0, seed=3)
    drawn = [choose(logits, sampling, n)[0] for n in range(4000)]
    share = np.bincount(drawn, minlength=4) / 4000
    assert np.abs(share - np.exp(logprobs(logits))).max() < 0.03
    assert len({uniform(3, n) for n in range(100)} | {uniform(4, n) for n in range(100)}) == 200
    assert choose(np.array([1.0, 5.0, 5.0]), Sampling(), 0)[0] == 1


# --- contracts of the engine ---


def record() -> HandoffRecord:
    return HandoffRecord(
        model="m", prompt_tokens=5, prompt_digest=2**64 - 1, first_token=3, first_logprob=-0.5, sampling=Sampling(),
        position_delta=(1, 2, 3),
    )  # fmt: skip


def test_a_record_survives_the_wire_and_nothing_else_does() -> None:
    assert HandoffRecord.decode(record().encode()) == record()
    good = record().encode()
    for bad in (b"", good[:-1], good + b"x", b"\xff" * 40, b"x" * 70_000, good.replace(b"sampled", b"sampleD")):
        with pytest.raises(RemoteProtocolError):
            HandoffRecord.decode(bad)


def refused(call: object, code: str) -> None:
    with pytest.raises(PdError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.code == code


def test_requests_that_cannot_be_are_refused() -> None:
    host = Host(SPARSE, PREFILL)
    lease = host.allocator.lease(8, window_stop=0)

    def start(ids: list[int], name: str = "a") -> object:
        return lambda: host.engine.start(Request(name, np.array(ids, dtype=np.int64)), lease.tables())

    refused(start([]), "prompt_empty")
    refused(start([251]), "request_rejected")
    refused(start([-1]), "request_rejected")
    refused(start([3] * 9000), "prompt_too_long")
    host.engine.start(Request("a", prompt_ids(8)), lease.tables())
    refused(start([3]), "request_rejected")
    lease.advance(8)
    for chunk in ((1, 4), (0, 9), (0, 0)):
        refused(lambda c=chunk: host.engine.prefill(PrefillChunk("a", *c, lease.tables())), "request_rejected")
    refused(lambda: host.engine.handoff("a"), "request_rejected")
    host.engine.prefill(PrefillChunk("a", 0, 8, lease.tables()))
    refused(lambda: host.engine.prefill(PrefillChunk("b", 0, 8, lease.tables())), "request_rejected")
    host.engine.release("a")
    host.engine.release("a")
    refused(lambda: host.engine.handoff("a"), "request_rejected")


def test_a_foreign_or_forged_record_is_not_admitted() -> None:
    host = Host(SPARSE, PREFILL)
    tables = host.allocator.lease(8).tables()
    good = msgspec.structs.replace(record(), model=SPARSE.fingerprint)
    for forged in (
        record(),
        msgspec.structs.replace(good, first_token=999),
        msgspec.structs.replace(good, position_delta=()),
    ):
        with pytest.raises(RoomError):
            host.engine.admit("x", forged, tables)


def test_a_record_names_the_ids_that_were_computed() -> None:
    """Whoever lent the array may overwrite it; and a prompt that changes under the engine is told as it was read."""
    host, ids, other = Host(SPARSE, PREFILL), prompt_ids(17), prompt_ids(17, 3)
    for number, change in enumerate(("lent", "own")):
        lent, lease = ids.copy(), host.allocator.lease(17, window_stop=0)
        host.engine.start(Request(change, lent), lease.tables())
        lease.advance(17)
        host.engine.prefill(PrefillChunk(change, 0, 6, lease.tables()))
        lent[:] = other
        if number:
            host.engine._sequences[change].prompt = other
        host.engine.prefill(PrefillChunk(change, 6, 17, lease.tables()))
        read = np.concatenate([ids[:6], (other if number else ids)[6:]])
        assert host.engine.handoff(change).prompt_digest == prompt_digest(read)


def test_a_request_that_runs_is_not_replaced_by_one_of_its_name() -> None:
    host = Host(SPARSE, PREFILL)
    run = host.prefill("a", prompt_ids(9))
    facts = host.engine.handoff("a")
    with pytest.raises(RoomError, match="known already"):
        host.engine.admit("a", facts, host.allocator.lease(9).tables())
    host.decode([run], 3)
    alone = Host(SPARSE, PREFILL)
    want = alone.prefill("a", prompt_ids(9))
    alone.decode([want], 3)
    assert run.tokens == want.tokens


def test_a_slot_armed_for_receive_is_not_reset_by_a_new_request() -> None:
    host = Host(SPARSE, PREFILL)
    tables = host.allocator.lease(8, window_stop=0).tables()
    host.pools.arm(tables)
    with pytest.raises(LeaseError, match="armed"):
        host.engine.start(Request("a", prompt_ids(8)), tables)
    host.pools.disarm(tables.generation)
    host.engine.start(Request("a", prompt_ids(8)), tables)


def test_an_engine_without_pools_or_pages_says_so() -> None:
    engine = ReferenceEngine(SPARSE)
    assert engine.describe().page_multiple == SPARSE.qsa_ratio
    host = Host(SPARSE, PREFILL)
    lease = host.allocator.lease(3, window_stop=0)
    host.engine.start(Request("a", prompt_ids(9)), lease.tables())
    lease.advance(3)
    with pytest.raises(LocalProtocolError, match="pages end"):
        host.engine.prefill(PrefillChunk("a", 0, 9, lease.tables()))


@pytest.mark.parametrize(
    "change",
    [
        {"kv_heads": 3},
        {"gdn_key_heads": 5},
        {"qsa_budget": 2},
        {"mla_rope": 4},
        {"ngram_primes": (101, 103, 107)},
        {"ple_layers": (3, 0)},
        {"ple_layers": (9,)},
        {"layers": ()},
        {"eos": 300},
    ],
    ids=str,
)
def test_impossible_models_are_refused_by_field(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        ReferenceConfig(**change)  # type: ignore[arg-type]
    assert caught.value.where == f"engine.{next(iter(change))}"


def test_models_of_fewer_kinds_run_and_have_fewer_components() -> None:
    for layers, kinds in (
        (("full",), {"KV"}),
        (("gdn", "swa"), {"MAMBA", "SWA"}),
        (("mla",), {"MLA", "INDEX_K"}),
        (("qsa", "qsa"), {"KV", "QSA_PENDING", "QSA_COMPRESSED"}),
    ):
        config = ReferenceConfig(layers=layers, ple_layers=(), mla_rope=0)  # type: ignore[arg-type]
        assert {c.kind for c in state_spec(config).components} == kinds
        host = Host(config, Size(pages=8))
        run = host.prefill("a", prompt_ids(13), (4, 9))
        host.decode([run], 3)
        assert len(run.tokens) == 4


def test_the_fingerprint_is_of_everything_that_makes_the_model() -> None:
    changes: list[dict[str, object]] = [{}, {"seed": 1}, {"window": 13}, {"coupling": "soft"}, {"qsa_budget": 12}]
    assert len({ReferenceConfig(**c).fingerprint for c in changes}) == len(changes)  # type: ignore[arg-type]
    assert ReferenceConfig(verify_window=2, ple_offload=True).fingerprint == SPARSE.fingerprint


def test_configuration_layout_and_books_need_no_torch() -> None:
    """`check`, `explain` and the control's process look at states and allocate without a tensor library."""
    program = """
import sys
sys.modules["torch"] = None
from sglang_pd.engines.base import Engine
from sglang_pd.engines.reference import Links, ReferenceConfig
from sglang_pd.engines.reference.config import state_spec
from sglang_pd.memory import adopt, allocator, budget, layout, live, pools, scope
from sglang_pd.protocol.manifest import RankId, Topology
size = layout.Capacity(64, 8, 2, 2, 32)
rank = layout.layout_rank(state_spec(ReferenceConfig()), size, Topology(), RankId(0, 0))
print(len(allocator.Allocator(rank.roots).lease(9).tables().pages))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.strip() == "2", done.stderr
