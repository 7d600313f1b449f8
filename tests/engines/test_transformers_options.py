"""Options, facts without weights, checkpoints; models that cannot be carried are refused, and told why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.reference_run import DECODE, PREFILL, How, hand_over, same_logits
from support.transformers_run import (
    EOS,
    MODELS,
    NAMED,
    OTHER_CACHES,
    OTHERS,
    STATE_ELSEWHERE,
    VOCAB,
    engine,
    host,
    library_loop,
    options,
    prompt,
)

from sglang_pd.engines.transformers import TransformersEngine, describe_options
from sglang_pd.engines.transformers import model as model_module
from sglang_pd.protocol.errors import BackendUnavailable, ConfigError, ManifestError, PdError
from sglang_pd.protocol.manifest import Topology

QWEN4 = "Qwen4ExpForCausalLM"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(model_module.Source, "model", never)


@pytest.mark.parametrize("name", [QWEN4, "GptOssForCausalLM"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_facts_come_without_weights(name: str, dtype: str, no_weights: None) -> None:
    facts = describe_options(options(name, dtype))
    assert (facts.vocab_size, facts.eos_token, facts.max_tokens, facts.page_multiple) == (VOCAB, EOS, 512, 1)
    assert facts.state.layers == 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMED | OTHERS)
def test_facts_without_weights_are_those_of_the_model(name: str, dtype: str) -> None:
    asked: list[str] = []
    real = model_module.Source.model

    def counted(self: model_module.Source, device: str) -> Any:
        asked.append(device)
        return real(self, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module.Source, "model", counted)
        facts = describe_options(options(name, dtype))
    assert facts == engine(name, dtype).describe()
    assert not asked


def test_facts_are_equal_for_qwen4() -> None:
    assert describe_options(options(QWEN4)) == engine(QWEN4).describe()


def test_a_model_that_needs_values_is_described_with_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> Any:
        raise NotImplementedError("no kernel for meta tensors")

    monkeypatch.setattr(model_module.Source, "meta_model", fails)
    assert describe_options(options("LlamaForCausalLM")) == engine("LlamaForCausalLM").describe()


def test_the_fingerprint_is_of_all_that_matters() -> None:
    def fingerprint(**change: Any) -> str:
        base = options("LlamaForCausalLM")
        base["random"] = base["random"] | change.pop("random", {})
        return describe_options(base | change).fingerprint

    config = MODELS["LlamaForCausalLM"]
    same = fingerprint()
    assert same == fingerprint(decode_batch=4) == fingerprint(self_check=False) == fingerprint(max_tokens=100)
    different = {
        same,
        fingerprint(dtype="bfloat16"),
        fingerprint(random={"seed": 2}),
        fingerprint(random={"config": config | {"rms_norm_eps": 1e-5}}),
        fingerprint(random={"class": "MistralForCausalLM", "config": config | {"sliding_window": 9}}),
    }
    assert len(different) == 5


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    engine(QWEN4).model.save_pretrained(path)
    return path


def test_a_checkpoint_folder_is_the_model_that_was_saved(folder: Path) -> None:
    source = host(TransformersEngine({"path": str(folder)}), PREFILL)
    destination = host(TransformersEngine({"path": str(folder), "dtype": "float32"}), DECODE)
    run = source.prefill("r", prompt(37), (16, 21))
    arrived = hand_over(source, run, destination, How(chunks=(16, 21)))
    destination.decode([arrived], 6)
    want, _ = library_loop(engine(QWEN4).model, prompt(37), (16, 21), 6)
    assert arrived.tokens == want.tokens
    assert same_logits(arrived, want)


def test_a_checkpoint_is_described_without_its_weights(folder: Path, no_weights: None) -> None:
    facts = describe_options({"path": str(folder)})
    assert facts.state == engine(QWEN4).state
    assert facts.fingerprint != engine(QWEN4).describe().fingerprint


def test_other_weights_are_another_model(folder: Path, tmp_path: Path) -> None:
    before = describe_options({"path": str(folder)}).fingerprint
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert describe_options({"path": str(tmp_path)}).fingerprint == before
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert describe_options({"path": str(tmp_path)}).fingerprint != before


def test_large_weight_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "WHOLE_FILE_BYTES", 1 << 17)
    monkeypatch.setattr(model_module, "SAMPLES", 4)
    monkeypatch.setattr(model_module, "SAMPLE_BYTES", 1 << 10)
    data = bytearray(np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8).tobytes())
    data[:8] = (5000).to_bytes(8, "little")
    file = tmp_path / "model.safetensors"

    def digest_after(at: int) -> str:
        changed = bytearray(data)
        changed[at] ^= 1
        file.write_bytes(changed)
        return model_module._weights_digest(tmp_path)

    file.write_bytes(data)
    base = model_module._weights_digest(tmp_path)
    assert all(digest_after(at) != base for at in (3, 4000, 5007, 5500, len(data) - 1))
    assert digest_after(40_000) == base, "a block that is not sampled"


# --- refusals --------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({}, "name one model"),
    "both": ({"path": "/x", "random": {"class": "LlamaForCausalLM"}}, "name one model"),
    "no folder": ({"path": "/nowhere"}, "no checkpoint there"),
    "unknown key": ({"random": {"class": "LlamaForCausalLM"}, "dtyp": "float32"}, "dtype"),
    "no such class": ({"random": {"class": "LlamaForCausalML"}}, "not a language model"),
    "not a name": ({"random": {"class": "__import__('os')"}}, "not a language model"),
    "not a model": ({"random": {"class": "AutoConfig"}}, "not a language model"),
    "no language model": ({"random": {"class": "LlamaModel"}}, "not a language model"),
    "bad configuration": (
        {"random": {"class": "LlamaForCausalLM", "config": {"hidden_size": "wide"}}}, "not a configuration of"),
    "impossible model": (
        {"random": {"class": QWEN4, "config": {**NAMED[QWEN4], "indexer_kv_heads": 2}}}, "indexer_kv_heads=1"),
    "bad device": ({"random": {"class": "LlamaForCausalLM", "config": MODELS["LlamaForCausalLM"]},
                    "device": "tpu"}, "not a device"),
    "absent device": ({"random": {"class": "LlamaForCausalLM", "config": MODELS["LlamaForCausalLM"]},
                       "device": "cuda:99"}, "backend_unavailable"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_impossible_options_name_what_is_wrong(what: str) -> None:
    given, words = BAD[what]
    with pytest.raises((ConfigError, BackendUnavailable)) as error:
        TransformersEngine(given)
    assert words in str(error.value)
    assert error.value.where.startswith("$.engine.options")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"{}", "configuration cannot be read"),
        (b"not json", "configuration cannot be read"),
        (b'{"model_type": "llama"}', "names no model class"),
        (b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', "no weights"),
    ],
    ids=str,
)
def test_broken_checkpoints_name_what_is_wrong(tmp_path: Path, config: bytes, words: str) -> None:
    data = config
    if words == "no weights":
        data = json.dumps(MODELS["LlamaForCausalLM"] | json.loads(config)).encode()
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError) as error:
        describe_options({"path": str(tmp_path)})
    assert words in str(error.value)
    assert error.value.where == "$.engine.options.path"


def test_the_library_must_be_there_and_of_a_known_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.40.0")
    with pytest.raises(ConfigError, match=r"expected >= 5\.24, < 5\.40, got 5\.40\.0"):
        describe_options(options("LlamaForCausalLM"))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match="not installed") as error:
        describe_options(options("LlamaForCausalLM"))
    assert "sglang-pd[transformers]" in error.value.hint


def test_state_of_an_unknown_form_is_refused_with_layer_and_tensor() -> None:
    with pytest.raises(ManifestError) as error:
        TransformersEngine(options("DeepseekV4ForCausalLM"))
    assert error.value.where == "cache layer 0, buffer_kv"


@pytest.mark.parametrize("name", STATE_ELSEWHERE)
def test_state_outside_the_cache_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="outside its caches") as error:
        TransformersEngine(options(name))
    assert error.value.where == name


@pytest.mark.parametrize("name", [name for name in OTHER_CACHES if name != "DeepseekV4ForCausalLM"])
def test_a_cache_of_another_class_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="does not run with the library's DynamicCache"):
        TransformersEngine(options(name))


def test_pools_of_several_ranks_are_refused() -> None:
    from sglang_pd.memory.layout import layout_rank
    from sglang_pd.memory.pools import RankPools
    from sglang_pd.protocol.manifest import RankId

    one = engine("LlamaForCausalLM")
    layout = layout_rank(one.state, PREFILL.capacity(), Topology(tp=2), RankId(0, 1))
    pools = RankPools.__new__(RankPools)
    pools.layout = layout
    with pytest.raises(PdError, match="one rank"):
        one.attach(pools)


def test_no_end_token_is_never_met() -> None:
    given = options("LlamaForCausalLM")
    given["random"]["config"] = {**MODELS["LlamaForCausalLM"], "eos_token_id": None}
    assert describe_options(given).eos_token == -1
    given["random"]["config"] = {**MODELS["LlamaForCausalLM"], "eos_token_id": [5, 7]}
    assert describe_options(given).eos_token == 5
    assert TransformersEngine(given).stop_tokens == (5, 7)


def test_drawn_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(3)
    first = TransformersEngine(options("LlamaForCausalLM")).model.state_dict()
    torch.manual_seed(4)
    assert all(torch.equal(first[key], value) for key, value in engine("LlamaForCausalLM").model.state_dict().items())
    width = first["model.layers.0.self_attn.q_proj.weight"]
    assert 0.8 < float(width.std()) * width.shape[1] ** 0.5 < 1.2
